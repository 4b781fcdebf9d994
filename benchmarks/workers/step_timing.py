"""One training step and how it is timed.

It imports nothing of gradsync, so bench_versions can use it with any version.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.workers.step_model import Batch


def step_of(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], None]:
    """One whole training step on one batch: the classes of the last dimension are compared with the targets."""

    def step() -> None:
        optimizer.zero_grad()
        batch.loss(module).backward()
        optimizer.step()

    return step


def time_block(step: Callable[[], None], comm: Any, *, steps: int) -> list[float]:
    """Time `steps` steps, after an untimed one that warms caches and connections: each on its slowest rank."""
    gc.collect()
    comm.barrier()
    step()
    comm.barrier()
    taken_s = torch.zeros(steps, dtype=torch.float64)
    for index in range(steps):
        start = time.perf_counter()
        step()
        taken_s[index] = time.perf_counter() - start
    comm.all_reduce(taken_s, op="max").wait()
    return [float(seconds) for seconds in taken_s]


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """Rotate, and reverse every other round: each variant comes as often before another as after it."""
    turn = number // 2 % len(names)
    rotated = [*names[turn:], *names[:turn]]
    return rotated if number % 2 == 0 else rotated[::-1]
