"""One worker of bench_versions: times blocks of training steps with the gradsync on its PYTHONPATH.

Each version has a group of workers of its own. They take turns by a counter in a file, and sleep meanwhile.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import gradsync
from benchmarks.workers.step_model import MODELS
from benchmarks.workers.step_timing import order_of_round, step_of, time_block

POLL_S = 0.002


def wait_for_turn(counter: Path, turn: int, *, timeout_s: float) -> None:
    """Sleep until the counter has reached this turn."""
    deadline = time.monotonic() + timeout_s
    while int(counter.read_text()) != turn:
        if time.monotonic() > deadline:
            raise TimeoutError(f"turn {turn} had not come after {timeout_s} s; the counter is {counter.read_text()}.")
        time.sleep(POLL_S)


def main() -> None:
    """Take part in every round, and on rank 0 write the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--transport", required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--counter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = gradsync.connect(options.transport)
    workload = MODELS[options.model]
    model = workload.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1 + comm.rank)
    batch = workload.make_batch(data)
    turns = [group for number in range(options.rounds + 1) for group in order_of_round(["0", "1"], number)]
    blocks = []
    with gradsync.synchronize(model, optimizer, options.strategy, comm=comm):
        step = step_of(model, optimizer, batch)
        for turn, group in enumerate(turns):
            if int(group) != options.group:
                continue
            wait_for_turn(options.counter, turn, timeout_s=options.timeout_s)
            blocks.append(time_block(step, comm, steps=options.steps))
            comm.barrier()
            if comm.rank == 0:
                written = options.counter.with_suffix(f".{options.group}")
                written.write_text(str(turn + 1))
                written.replace(options.counter)
    if comm.rank == 0:
        # The first round plans buckets and compiles kernels: it is not counted.
        options.out.write_text(
            json.dumps({"blocks": blocks[1:], "parameter_sums": [float(p.detach().sum()) for p in model.parameters()]})
        )


if __name__ == "__main__":
    main()
