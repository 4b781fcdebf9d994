"""The effect of stale gradients on training, and of the policies against it: digits, 8 workers, asynchronous.

    python benchmarks/bench_staleness.py

The learning rate is tuned for synchronous training, on a grid, and shared by all: the smallest whose mean accuracy is
within one percent of the best, on digits that are neither trained on nor tested. (N synchronous workers are one process
on the whole batch, so the grid runs in one.) Then 8 workers, threads of this process, train at that rate through a
parameter server: synchronously, and asynchronously with each policy. The data, its order, the initial weights and the
number of samples are the same for all. Asynchronous workers step in turn, as workers of the same speed do: so every
push is 7 updates late, and the same command gives the same figures. (Without turns, threads that share an interpreter
are less late.)

A worker's batch is not small: each asynchronous update is of one batch, at the full rate unless the policy lowers it.
No policy for stale gradients helps where a few samples are too noisy for a rate that 8 times as many allow.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import gradsync  # noqa: E402
from benchmarks.support.reporting import describe_machine  # noqa: E402
from gradsync.comm import Communicator  # noqa: E402
from gradsync.strategies.parameter_server.server.server import Server  # noqa: E402
from gradsync.testing import run_ranks  # noqa: E402

RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
CLOSE = 0.01  # of accuracy, 3 of the digits for tuning: a smaller difference between rates is ignored
TURN_TIMEOUT_S = 60.0
WITHIN_PERCENT = 2.0  # of synchronous accuracy: what "comes close" means here
NUM_TRAINED, NUM_TUNED = 1150, 287  # of 1797 digits; the others are for testing
MODES = {
    "synchronous": "staleness=0",
    "asynchronous, plain": "staleness=None",
    "asynchronous, scale": "staleness=None, staleness_policy=scale",
    "asynchronous, compensate": "staleness=None, staleness_policy=compensate",
    "asynchronous, compensate as published": (
        "staleness=None, staleness_policy=compensate(strength=2.0, bounded=False)"
    ),
}

Data = tuple[Tensor, Tensor]


def load() -> tuple[Data, Data, Data]:
    """The digits for training, for tuning and for testing, shuffled once."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    sizes = [NUM_TRAINED, NUM_TUNED, len(x) - NUM_TRAINED - NUM_TUNED]
    train, tuning, test = zip(x.split(sizes), y.split(sizes), strict=True)
    return train, tuning, test


def build(seed: int) -> nn.Sequential:
    """A small network, seeded by a generator of its own: workers that are threads share torch's."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            bound = 1 / 8  # 1/√64, as in nn.Linear
            param.copy_(torch.rand(param.shape, generator=generator) * 2 * bound - bound)
    return model


def batches(data: Data, options: argparse.Namespace, seed: int, rank: int) -> Iterator[Data]:
    """A worker's batches of the whole run: its own part of the digits, in an order of its own in every epoch."""
    own = torch.arange(rank, len(data[0]), options.workers)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(options.epochs):
        order = own[torch.randperm(len(own), generator=generator)]
        for chosen in order.split(options.batch)[: NUM_TRAINED // options.workers // options.batch]:
            yield data[0][chosen], data[1][chosen]


def accuracy(model: nn.Module, unseen: Data) -> float:
    """The share of digits that it gets right."""
    with torch.no_grad():
        return float((model(unseen[0]).argmax(1) == unseen[1]).float().mean())


def train_alone(options: argparse.Namespace, rate: float, seed: int) -> nn.Module:
    """Synchronous training in one process, on the batches of all workers at once."""
    train = load()[0]
    model = build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for parts in zip(*(batches(train, options, seed, rank) for rank in range(options.workers)), strict=True):
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


class RoundRobin:
    """Lets workers step one after the other, in the order of their ranks, round after round."""

    def __init__(self, num_workers: int) -> None:
        self._gates = [threading.Semaphore(int(rank == 0)) for rank in range(num_workers)]

    @contextlib.contextmanager
    def take(self, rank: int) -> Iterator[None]:
        """Wait for this rank's turn, and pass it on at the end."""
        if not self._gates[rank].acquire(timeout=TURN_TIMEOUT_S):
            raise TimeoutError(f"rank {rank} has waited {TURN_TIMEOUT_S:.0f} s for its turn; has another failed?")
        try:
            yield
        finally:
            self._gates[(rank + 1) % len(self._gates)].release()


def train_served(options: argparse.Namespace, mode: str, rate: float, seed: int) -> dict[str, Any]:
    """Train through a parameter server, with workers that are threads; returns accuracy and the histogram of τ."""
    train, _, test = load()
    server = Server().start()
    strategy = f"parameter_server({mode}, servers=[{server.address!r}], open=True)"
    turns = RoundRobin(options.workers)
    in_turn = "staleness=None" in mode  # synchronous workers wait for each other anyhow

    def work(comm: Communicator) -> dict[str, Any]:
        model = build(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync:
            for x, y in batches(train, options, seed, comm.rank):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                with turns.take(comm.rank) if in_turn else contextlib.nullcontext():
                    optimizer.step()
            sync.settle()
            return {"accuracy": accuracy(model, test), "staleness": sync.stats()["staleness"]}

    try:
        outcome = run_ranks(options.workers, work)[0]
    finally:
        server.close()
    return outcome


def tune(options: argparse.Namespace, show: Callable[[str], None]) -> tuple[float, dict[float, list[float]]]:
    """The rate for synchronous training, and the accuracy of each that was tried, seed by seed."""
    tuning = load()[1]
    tried: dict[float, list[float]] = {}
    for rate in options.rates:
        tried[rate] = [accuracy(train_alone(options, rate, seed), tuning) for seed in options.seeds]
        show(f"tuning: learning rate {rate}, accuracy {statistics.fmean(tried[rate]):.3f}")
    best = max(statistics.fmean(values) for values in tried.values())
    return min(rate for rate, values in tried.items() if statistics.fmean(values) >= best - CLOSE), tried


def measure(options: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Tune, then train in every mode with every seed."""
    rate, tried = tune(options, show)
    modes: dict[str, Any] = {}
    for name, mode in MODES.items():
        runs = [train_served(options, mode, rate, seed) for seed in options.seeds]
        taus: Counter[int] = Counter()
        for run in runs:
            taus.update({int(tau): count for tau, count in run["staleness"].items()})
        modes[name] = {
            "strategy": f"parameter_server({mode})",
            "accuracies": [run["accuracy"] for run in runs],
            "accuracy": statistics.fmean(run["accuracy"] for run in runs),
            "mean_staleness": sum(tau * n for tau, n in taus.items()) / max(1, taus.total()),
            "staleness": dict(sorted(taus.items())),
        }
        show(f"{name}: accuracy {modes[name]['accuracy']:.3f}, mean staleness {modes[name]['mean_staleness']:.1f}")
    exact = modes["synchronous"]["accuracy"]
    for entry in modes.values():
        entry["percent_below_synchronous"] = 100 * (1 - entry["accuracy"] / exact)
        entry["close"] = entry["percent_below_synchronous"] <= WITHIN_PERCENT
    return {"rate": rate, "tried": {str(rate): values for rate, values in tried.items()}, "modes": modes}


def table(found: dict[str, Any]) -> Table:
    """The table of results."""
    shown = Table(title=f"digits, test accuracy at the learning rate {found['rate']} tuned for synchronous training")
    for column in ("mode", "accuracy", "below synchronous", "each seed", "mean τ"):
        shown.add_column(column, justify="left" if column == "mode" else "right")
    for name, entry in found["modes"].items():
        below = f"{entry['percent_below_synchronous']:.1f} %"
        each = " ".join(f"{value:.3f}" for value in entry["accuracies"])
        shown.add_row(name, f"{entry['accuracy']:.3f}", below, each, f"{entry['mean_staleness']:.1f}")
    return shown


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="samples of a worker's step")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=list(RATES))
    parser.add_argument("--out", type=Path, default=PROJECT / "benchmarks" / "results", help="folder of the json file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] = ()) -> None:
    """Measure, show a table, write a file."""
    options = parse(arguments)
    torch.set_num_threads(1)
    console = Console()
    found = measure(options, lambda text: console.print(text, style="dim"))
    console.print(table(found))
    now = datetime.now(UTC)
    record = {
        "date": now.isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/bench_staleness.py", *arguments]),
        "machine": describe_machine(),
        **found,
    }
    path = options.out / f"{now:%Y-%m-%d-%H%M}-staleness.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {path}", style="dim")


if __name__ == "__main__":
    main(sys.argv[1:])
