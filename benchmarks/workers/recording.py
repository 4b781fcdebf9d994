"""One worker of bench_recording: steps with planted times, or steps with and without recording in turn."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import gradsync
from benchmarks.workers.step_model import next_token_batch
from benchmarks.workers.step_timing import order_of_round, step_of
from gradsync.profiling import set_recording

WIDTH, LAYERS, VOCABULARY, BATCH, TOKENS = 256, 4, 2048, 2, 64


class Weights(nn.Module):
    """A model that computes next to nothing: the time of a step is planted."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A value that depends on every weight."""
        return (self.weight * x).sum()


def plant(options: argparse.Namespace) -> None:
    """Train with planted sleeps, timing each step by a stopwatch; the records go to files."""
    set_recording(folder=options.out)
    comm = gradsync.connect(options.transport)
    model = Weights(options.numel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradsync.synchronize(model, optimizer, comm=comm)
    pause_s = options.compute_ms / 1e3 + (options.late_ms / 1e3 if comm.rank == comm.world_size - 1 else 0.0)
    sent, taken_s, paused_s = [], [], []
    for _ in range(options.steps):
        start, before = time.perf_counter(), bytes_sent()
        optimizer.zero_grad()
        slept_from = time.perf_counter()
        time.sleep(pause_s)
        paused_s.append(time.perf_counter() - slept_from)  # on a busy machine a sleep takes longer
        model(torch.tensor(1.0 + comm.rank)).backward()
        optimizer.step()
        taken_s.append(time.perf_counter() - start)
        sent.append(bytes_sent() - before)
    place = Path(options.out) / f"stopwatch-{comm.rank}.json"
    place.write_text(json.dumps({"step_s": taken_s, "sent_bytes": sent, "paused_s": paused_s}))
    comm.barrier()


def bytes_sent() -> int:
    """Read this host's counter of the interface that Gloo uses."""
    path = Path(f"/sys/class/net/{os.environ.get('GLOO_SOCKET_IFNAME', 'lo')}/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() else 0


def make_step(comm: gradsync.Communicator, *, recorded: bool, folder: Path | None) -> Callable[[], None]:
    """Build a transformer, synchronized with or without recording; returns one training step of it."""
    set_recording(enabled=recorded, folder=folder if recorded else None)
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), blocks, nn.Linear(WIDTH, VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradsync.synchronize(model, optimizer, comm=comm)
    data = torch.Generator().manual_seed(1 + comm.rank)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=data)
    return step_of(model, optimizer, next_token_batch(tokens))


def overhead(options: argparse.Namespace) -> None:
    """Time blocks of steps with and without recording, in turn; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    comm = gradsync.connect(options.transport)
    folder = Path(options.out) / "records" if options.files else None
    steps = {name: make_step(comm, recorded=name == "recorded", folder=folder) for name in ("silent", "recorded")}
    for step in steps.values():
        for _ in range(3):
            step()
    wall: dict[str, list[list[float]]] = {name: [] for name in steps}
    cpu: dict[str, list[list[float]]] = {name: [] for name in steps}
    for number in range(options.rounds):
        for name in order_of_round(list(steps), number):
            comm.barrier()
            steps[name]()
            walls, cpus = [], []
            for _ in range(options.steps):
                start, begun = time.perf_counter(), time.process_time()
                steps[name]()
                walls.append(time.perf_counter() - start)
                cpus.append(time.process_time() - begun)
            wall[name].append(walls)
            cpu[name].append(cpus)
    if comm.rank == 0:
        (Path(options.out) / "overhead.json").write_text(json.dumps({"wall_s": wall, "cpu_s": cpu}))
    comm.barrier()


def main() -> None:
    """Read the command line, and run the measurement that it names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("plant", "overhead"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--numel", type=int, default=1000)
    parser.add_argument("--compute-ms", type=float, default=0.0)
    parser.add_argument("--late-ms", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--files", action="store_true")
    options = parser.parse_args()
    {"plant": plant, "overhead": overhead}[options.what](options)


if __name__ == "__main__":
    main()
