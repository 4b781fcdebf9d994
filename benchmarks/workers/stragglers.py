"""One worker of bench_stragglers: trains a small char_lm for some seconds, at a speed of its own.

Started by bench_stragglers.py through ``gradsync run``. It does one run after the other, as ``--plan`` says; rank 0
writes the measurements of each to a file in the folder ``--out``, numbered as in the plan. A worker's compute is
simulated by sleeping, a given time for each sample, and its real compute is kept small: so several workers do not
disturb one another on few cores. A slow worker, or a slow step, takes a multiple of that time, real compute included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm.objects import all_gather_object

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "char_lm.py"
NUM_CALIBRATIONS = 12
NUM_SNAPSHOTS = 24
EVAL_WINDOWS = 128


def load_example() -> Any:
    """The example as a module: its model, data and loss."""
    found = importlib.util.spec_from_file_location("char_lm", EXAMPLE)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class SimulatedPace:
    """How long this worker sleeps before each step, to simulate compute."""

    def __init__(self, args: argparse.Namespace, rank: int, world_size: int, compute_s: float) -> None:
        self._args = args
        self._always_slow = args.case == "permanent" and rank == world_size - 1
        self._random = random.Random(f"{args.seed} {rank}")
        self._compute_s = compute_s

    def sleep_s(self, num_samples: int) -> float:
        """The sleep for a step of this many samples. In the random case every call decides again, alike in all runs."""
        slow = self._always_slow
        if self._args.case == "random":
            slow = self._random.random() < self._args.chance
        sleep_s = self._args.sample_ms / 1000 * num_samples
        return sleep_s if not slow else self._args.factor * (sleep_s + self._compute_s) - self._compute_s


def calibrate(example: Any, model: nn.Module, batch: Tensor) -> float:
    """The seconds of one step's real compute: the least of several, since the machine may have other load."""
    seconds = []
    for _ in range(NUM_CALIBRATIONS):
        start_s = time.perf_counter()
        example.loss_of(model, batch).backward()
        seconds.append(time.perf_counter() - start_s)
    model.zero_grad()
    return min(seconds)


def endless(loader: Iterable[Tensor]) -> Iterator[Tensor]:
    """One epoch after the other."""
    while True:
        yield from loader


def is_over(comm: gradsync.Communicator, own: bool, *, together: bool) -> bool:
    """Whether this rank leaves the loop. Ranks of a balanced loader must leave it ``together``, at the same step."""
    if not together:
        return own
    flag = torch.tensor([float(own)])
    comm.all_reduce(flag, op="max").wait()
    return bool(flag.item())


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train until the time is up; returns what all ranks have measured."""
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    comm = gradsync.connect()
    example = load_example()
    text = example.read_text(Path(args.data) if args.data else None)
    held_out = example.HELD_OUT_BYTES
    windows = example.Windows(text[:-held_out], args.context)
    model = example.GPT(layers=1, width=args.width, heads=2, context=args.context)
    batch = torch.stack([windows[index] for index in range(args.batch)])
    compute_s = calibrate(example, model, batch)
    pace = SimulatedPace(args, comm.rank, comm.world_size, compute_s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = gradsync.shard(windows, batch_size=args.batch, seed=args.seed, drop_last=True, balance=args.balance)

    steps: list[tuple[float, int, float]] = []  # when it was over, samples, loss
    snapshots: list[tuple[float, list[Tensor]]] = []
    with gradsync.synchronize(model, optimizer, args.strategy) as sync:
        comm.barrier()
        start_s = time.perf_counter()
        with sync.join():
            for tokens in endless(loader):
                seconds = time.perf_counter() - start_s
                if comm.rank == 0 and seconds >= len(snapshots) * args.seconds / NUM_SNAPSHOTS:
                    snapshots.append((seconds, [param.detach().clone() for param in model.parameters()]))
                if is_over(comm, seconds >= args.seconds, together=args.balance):
                    break
                time.sleep(pace.sleep_s(len(tokens)))
                optimizer.zero_grad()
                loss = example.loss_of(model, tokens)
                loss.backward()
                optimizer.step()
                steps.append((time.perf_counter() - start_s, len(tokens), float(loss.detach())))
        stats = sync.stats()
    everyone = all_gather_object(comm, [list(step) for step in steps])
    return {
        "compute_s": all_gather_object(comm, compute_s),
        "steps": everyone,
        "parts": list(loader.parts),
        "staleness": all_gather_object(comm, json.dumps(stats.get("staleness"))),
        "evals": evaluate(example, model, text[-held_out:], snapshots, args) if comm.rank == 0 else [],
    }


@torch.no_grad()
def evaluate(
    example: Any, model: nn.Module, text: bytes, snapshots: list[tuple[float, list[Tensor]]], args: argparse.Namespace
) -> list[tuple[float, float]]:
    """The eval loss of each snapshot: computed afterwards, so that it costs the training no time."""
    windows = example.Windows(text, args.context)
    batch = torch.stack([windows[index] for index in range(min(EVAL_WINDOWS, len(windows)))])
    losses = []
    for seconds, values in snapshots:
        for param, value in zip(model.parameters(), values, strict=True):
            param.copy_(value)
        losses.append((seconds, float(example.loss_of(model, batch))))
    return losses


def main() -> None:
    """Do the runs of a plan, and write their measurements."""
    parser = argparse.ArgumentParser(description="A worker of bench_stragglers.")
    parser.add_argument("--plan", type=Path, required=True, help="a JSON list: strategy, balance, case, factor, ...")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for number, run in enumerate(json.loads(args.plan.read_text())):
        measured = train(argparse.Namespace(**run))
        if gradsync.connect().rank == 0:
            (args.out / f"{number}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
