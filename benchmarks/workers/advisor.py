"""One worker of bench_advisor: records unthrottled steps, measures each link, and times every choice on every link.

Started by bench_advisor.py on each host of a lab. It sets the rate of its own end of the link as it goes, so that links
alternate within one run: other load on the machine then affects the recorded steps and all links alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradsync
from benchmarks.workers.step_model import BATCH, TOKENS, VOCABULARY, Transformer
from benchmarks.workers.step_timing import order_of_round
from examples.char_lm import GPT, loss_of
from gradsync.advisor import Choice, Measurement, measure_costs, measure_network
from gradsync.advisor.comm_pattern import comm_pattern_of
from gradsync.advisor.measurement import gradients_of
from gradsync.testing.network import INTERFACE

UNLIMITED = "unlimited"
RECORDED_STEPS = 6  # at least this many before each link in each round, for the typical step
MIN_TIMED_S, MAX_STEPS = 2.5, 6  # a choice is timed on a link in a round for this long, with at most this many steps
LIMIT = ("burst", "256kb", "latency", "100ms")  # as the lab's own links


@dataclass
class Run:
    """One choice's own model in training, and the times of its steps."""

    choice: Choice
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module], Tensor]
    sync: gradsync.Synchronizer
    ready: dict[str, float] = field(default_factory=dict)
    recorded: list[dict[str, Any]] = field(default_factory=list)

    def step(self) -> None:
        self.ready.clear()
        start_s = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss(self.model)
        backward_s = time.perf_counter()
        loss.backward()
        synced_s = time.perf_counter()
        self.optimizer.step()
        times = {name: when - start_s for name, when in self.ready.items()}
        parts = {"backward": backward_s, "synced": synced_s, "end": time.perf_counter()}
        self.recorded.append({"ready": times, **{name: when - start_s for name, when in parts.items()}})


def make_run(choice: Choice, task: str, comm: gradsync.Communicator) -> Run:
    """Build a choice's own model from the seed, with hooks that record when each gradient is ready."""
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1 + comm.rank)
    if task == "transformer":
        model: nn.Module = Transformer()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=data)
    else:  # the model and the batch of bench_convergence, whose steps to a loss are known
        model = GPT(layers=2, width=128, heads=4, context=128)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tokens = torch.randint(256, (8, 129), generator=data)

    def loss(module: nn.Module) -> Tensor:
        if task == "transformer":
            logits = module(tokens[:, :-1])
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss_of(module, tokens)

    ready: dict[str, float] = {}
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: ready.__setitem__(name, time.perf_counter()))
    sync = gradsync.synchronize(model, optimizer, choice.strategy, comm=comm, bucket_bytes=choice.bucket_bytes)
    return Run(choice, model, optimizer, loss, sync, ready)


def limit(rate: str) -> None:
    """Set the rate of this host's end of the link."""
    subprocess.run(["tc", "qdisc", "del", "dev", INTERFACE, "root"], capture_output=True, timeout=10)
    if rate != UNLIMITED:
        command = ["tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", rate, *LIMIT]
        subprocess.run(command, check=True, capture_output=True, timeout=10)


def time_block(run: Run, comm: gradsync.Communicator, *, steps: int) -> list[float]:
    """Time some steps, after one that warms caches and connections: the mean over the ranks of each.

    For a strategy that exchanges every n steps, n steps are timed, and their mean is returned.
    """
    pattern = comm_pattern_of(run.choice.strategy)
    if pattern.kind == "periodic":
        return [statistics.mean(_time_steps(run, comm, pattern.every))]
    return _time_steps(run, comm, steps, min_s=MIN_TIMED_S)


def _time_steps(run: Run, comm: gradsync.Communicator, steps: int, *, min_s: float = 0.0) -> list[float]:
    gc.collect()
    comm.barrier()
    run.step()
    first = torch.tensor([run.recorded[-1]["end"]])
    comm.all_reduce(first, op="max").wait()
    if min_s:  # of short steps more are timed
        steps = max(steps, min(MAX_STEPS, int(min_s / first.item())))
    comm.barrier()
    run.recorded.clear()
    for _ in range(steps):
        run.step()
    taken = torch.tensor([each["end"] for each in run.recorded], dtype=torch.float64)
    comm.all_reduce(taken).wait()
    return [float(seconds) / comm.world_size for seconds in taken]


def measurement_of(run: Run, recorded: Sequence[dict[str, Any]], comm: gradsync.Communicator) -> Measurement:
    """The typical step: medians of when each thing happened."""
    ready = {name: statistics.median(each["ready"][name] for each in recorded) for name in recorded[0]["ready"]}
    backward, synced, end = (
        statistics.median(each[part] for each in recorded) for part in ("backward", "synced", "end")
    )
    order = sorted(ready, key=lambda name: ready[name])
    params = dict(run.model.named_parameters())
    last = ready[order[-1]]
    return Measurement(
        gradients=gradients_of([(name, params[name]) for name in order], ready),
        forward_s=backward,
        backward_s=last - backward,
        exposed_s=synced - last,
        after_s=end - synced,
        choice=run.choice,
        world_size=comm.world_size,
        ranks_per_host=comm.world_size,  # they are namespaces of one machine, and share its cores
        cores_per_host=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
    )


@dataclass
class Found:
    """The measurements of all rounds so far, by link, and by choice."""

    costs: list[dict[str, Any]]
    networks: dict[str, list[dict[str, Any]]]
    step_s: dict[str, dict[str, list[list[float]]]]
    recorded: list[dict[str, Any]] = field(default_factory=list)  # steps of the first choice on the unlimited link
    unlimited_step_s: list[float] = field(default_factory=list)
    rounds: int = 0


def measure(choices: Sequence[Choice], comm: gradsync.Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Warm up, then measure in rounds over all links and choices; returns plain data. Every rank calls it."""
    began_s = time.monotonic()
    runs = {str(choice): make_run(choice, options.task, comm) for choice in choices}
    for run in runs.values():
        for _ in range(3):
            run.step()
    first = runs[str(choices[0])]
    time_block(first, comm, steps=2)
    gradients = measurement_of(first, first.recorded, comm).gradients
    links = options.links.split(",") if options.links else []
    found = Found([], {link: [] for link in [UNLIMITED, *links]}, {link: {name: [] for name in runs} for link in links})
    while found.rounds < options.rounds:
        late = torch.tensor([float(time.monotonic() - began_s > options.seconds)])
        comm.all_reduce(late, op="max").wait()
        if found.rounds and late.item():
            break
        found.costs.append(measure_costs(gradients, choices, comm=comm).as_dict())
        measure_round(runs, found, comm, options)
        found.rounds += 1
    measured = {name: value for name, value in vars(found).items() if name != "recorded"}
    return {"measurement": measurement_of(first, found.recorded, comm).as_dict(), **measured}


def measure_round(runs: dict[str, Run], found: Found, comm: gradsync.Communicator, options: argparse.Namespace) -> None:
    """Measure each link in turn, and time every choice on it.

    Before each link some steps of the first choice are recorded on the unlimited link, so that a machine that is slow
    for half a minute is slow for both.
    """
    first = next(iter(runs.values()))
    for link in [*found.step_s] or [UNLIMITED]:
        use_link(UNLIMITED, found, comm, options)
        found.unlimited_step_s += time_block(first, comm, steps=max(RECORDED_STEPS, options.steps))
        found.recorded += first.recorded[:]
        if link != UNLIMITED:
            use_link(link, found, comm, options)
            for name in order_of_round(list(runs), found.rounds):
                found.step_s[link][name].append(time_block(runs[name], comm, steps=options.steps))


def use_link(link: str, found: Found, comm: gradsync.Communicator, options: argparse.Namespace) -> None:
    """Switch all ranks to a link, and measure it."""
    comm.barrier()
    if options.links:
        limit(link)
    comm.barrier()
    found.networks[link].append(measure_network(comm, seconds=options.network_s, name=link).as_dict())


def main() -> None:
    """Measure; rank 0 writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="transformer")
    parser.add_argument(
        "--choices", required=True, help="JSON: [[spec, bucket_bytes or null], ...]; the first is recorded"
    )
    parser.add_argument("--links", default="", help="rates; none: no link, and whatever transport one host has")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--network-s", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, required=True, help="start no round after this time")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = gradsync.connect("c10d" if options.links else "auto")
    found = measure([Choice(text, size) for text, size in json.loads(options.choices)], comm, options)
    if comm.rank == 0:
        options.out.write_text(json.dumps(found))
    comm.barrier()


if __name__ == "__main__":
    main()
