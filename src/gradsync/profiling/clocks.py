"""What the clocks of the ranks are apart, so that times of different hosts can be compared.

Processes of one host read the same clock. Between hosts the distance is measured once, before the first step, by a few
tiny exchanges; afterwards the steps' own collectives narrow it down: nobody can be done with a collective before
everybody has come to it. That bounds the distance of two clocks from both sides, at the price of no message.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gradsync.comm.base import Communicator
from gradsync.profiling.raw import RawStep

ROUNDS = 8  # exchanges between hosts: the quickest of them counts
WINDOW_STEPS = 100  # clocks drift, by some microseconds a second: bounds hold for so many steps


@dataclass(frozen=True)
class Clocks:
    """What to add to each rank's time to have rank 0's, and how wrong that may be."""

    offsets_ns: tuple[int, ...]
    error_ns: int = 0

    def offset_ns(self, rank: int) -> int:
        return self.offsets_ns[rank]


def same_clock(world_size: int) -> Clocks:
    """Clocks that are one."""
    return Clocks((0,) * world_size)


def clock_identity() -> str:
    """What two processes have in common that read the same clock: the kernel, and its view of time."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    parts = [boot.read_text().strip() if boot.exists() else os.uname().nodename]
    return "/".join([*parts, os.readlink(space) if space.exists() else ""])


def meet(comm: Communicator, *, identity: str | None = None, now: Callable[[], int] = time.perf_counter_ns) -> Clocks:
    """Compare the clocks of all ranks. Blocks: every rank calls it. One small exchange where all read the same one."""
    if comm.world_size == 1:
        return same_clock(1)
    digest = hashlib.sha256((clock_identity() if identity is None else identity).encode()).digest()
    identities = _gather(comm, [int.from_bytes(digest[:7], "big")])
    if len({row[0] for row in identities}) == 1:
        return same_clock(comm.world_size)
    sent, received = [], []
    for _ in range(ROUNDS):
        sent.append([row[0] for row in _gather(comm, [now()])])
        received.append(now())
    ends = _gather(comm, received)
    bounds = []
    for rank in range(comm.world_size):
        low = max(begins[0] - ends[rank][number] for number, begins in enumerate(sent))
        high = min(ends[0][number] - begins[rank] for number, begins in enumerate(sent))
        bounds.append((0, 0) if rank == 0 else (low, high))
    error_ns = max((high - low) // 2 for low, high in bounds)
    return Clocks(tuple((low + high) // 2 for low, high in bounds), error_ns)


def _gather(comm: Communicator, values: Sequence[int]) -> list[list[int]]:
    own = torch.tensor(values, dtype=torch.int64)
    out = torch.empty(comm.world_size, len(values), dtype=torch.int64)
    comm.all_gather(own, out=out).wait()
    rows: list[list[int]] = out.tolist()
    return rows


def narrowed(clocks: Clocks, steps: Mapping[int, Mapping[int, RawStep]]) -> dict[int, Clocks]:
    """The clocks at each step, within what its collectives and those of the steps around it allow.

    ``steps``: by rank, then by number, what each rank has noted. Ranks that read one clock stay together.
    """
    numbers = sorted(steps.get(0, {}))
    if not clocks.error_ns or not numbers:
        return dict.fromkeys(numbers, clocks)
    found: dict[int, Clocks] = {}
    for at in range(0, len(numbers), WINDOW_STEPS):
        window = numbers[at : at + WINDOW_STEPS]
        offsets = [0]
        for rank in range(1, len(clocks.offsets_ns)):
            low, high = _bounds(steps[0], steps.get(rank, {}), window)
            guess = clocks.offsets_ns[rank]
            offsets.append((low + high) // 2 if low > high else min(max(guess, low), high))
        found |= dict.fromkeys(window, Clocks(tuple(offsets), clocks.error_ns))
    return found


def _bounds(first: Mapping[int, RawStep], other: Mapping[int, RawStep], window: Sequence[int]) -> tuple[int, int]:
    """From and to what may be added to the other's time: each is done after the other has come."""
    low, high = -(1 << 62), 1 << 62
    for number in window:
        if number in other:
            for a, b in zip(first[number].ops, other[number].ops, strict=False):
                if a.done and b.done:
                    low, high = max(low, a.called - b.done), min(high, a.done - b.called)
    return low, high
