"""The offsets between the ranks' clocks, so that times of different hosts can be compared.

Processes of one host read the same clock. Between hosts the offset is measured once, before the first step, by a few
tiny exchanges (:func:`compare_clocks`). Afterwards the steps' own collectives narrow it down (:func:`narrow_offsets`):
no rank can finish a collective before every rank has entered it. That bounds the offset of two clocks from both sides,
without a message.
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
WINDOW_STEPS = 100  # clocks drift by some microseconds a second: bounds hold for this many steps


@dataclass(frozen=True)
class ClockOffsets:
    """What to add to each rank's time to get rank 0's time, and by how much that may be wrong."""

    offsets_ns: tuple[int, ...]
    error_ns: int = 0

    def offset_ns(self, rank: int) -> int:
        return self.offsets_ns[rank]


def same_clock(world_size: int) -> ClockOffsets:
    """The offsets of ranks that read one clock: all zero."""
    return ClockOffsets((0,) * world_size)


def clock_identity() -> str:
    """An identity that two processes share exactly if they read the same clock: the kernel and its time namespace."""
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/time")
    parts = [boot.read_text().strip() if boot.exists() else os.uname().nodename]
    return "/".join([*parts, os.readlink(space) if space.exists() else ""])


def compare_clocks(
    comm: Communicator, *, identity: str | None = None, now: Callable[[], int] = time.perf_counter_ns
) -> ClockOffsets:
    """Measure the clock offsets of all ranks. Blocks: every rank calls it.

    It takes one small exchange where all ranks read the same clock, and ``ROUNDS`` + 2 otherwise.
    """
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
    return ClockOffsets(tuple((low + high) // 2 for low, high in bounds), error_ns)


def _gather(comm: Communicator, values: Sequence[int]) -> list[list[int]]:
    own = torch.tensor(values, dtype=torch.int64)
    out = torch.empty(comm.world_size, len(values), dtype=torch.int64)
    comm.all_gather(own, out=out).wait()
    rows: list[list[int]] = out.tolist()
    return rows


def narrow_offsets(clocks: ClockOffsets, steps: Mapping[int, Mapping[int, RawStep]]) -> dict[int, ClockOffsets]:
    """The offsets at each step, moved into the bounds that its collectives and those of the steps around it set.

    ``steps``: each rank's raw steps, by rank and then by step number. Ranks that read one clock keep equal offsets.
    """
    numbers = sorted(steps.get(0, {}))
    if not clocks.error_ns or not numbers:
        return dict.fromkeys(numbers, clocks)
    found: dict[int, ClockOffsets] = {}
    for at in range(0, len(numbers), WINDOW_STEPS):
        window = numbers[at : at + WINDOW_STEPS]
        offsets = [0]
        for rank in range(1, len(clocks.offsets_ns)):
            low, high = _bounds(steps[0], steps.get(rank, {}), window)
            guess = clocks.offsets_ns[rank]
            offsets.append((low + high) // 2 if low > high else min(max(guess, low), high))
        found |= dict.fromkeys(window, ClockOffsets(tuple(offsets), clocks.error_ns))
    return found


def _bounds(first: Mapping[int, RawStep], other: Mapping[int, RawStep], window: Sequence[int]) -> tuple[int, int]:
    """The least and the most that may be added to the other's time: each finishes after the other has entered."""
    low, high = -(1 << 62), 1 << 62
    for number in window:
        if number in other:
            for a, b in zip(first[number].ops, other[number].ops, strict=False):
                if a.done and b.done:
                    low, high = max(low, a.called - b.done), min(high, a.done - b.called)
    return low, high
