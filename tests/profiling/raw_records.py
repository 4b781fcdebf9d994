"""Made-up raw records of steps with known times: in milliseconds, on one clock unless a rank's clock is ahead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gradsync.profiling.raw import CALL, DECODE, ENCODE, WAIT, Op, RawStep, RecordedPlan
from gradsync.profiling.run import FORMAT, RankMeta

MS = 1_000_000
PLAN: RecordedPlan = [(4_000_000, ["head.weight", "head.bias"]), (8_000_000, ["body.weight"])]


def a_step(
    step: int, rank: int, *, late_ms: int = 0, wire_ms: int = 30, ahead_ms: int = 0, codec: bool = False
) -> RawStep:
    """A step of one of two ranks; rank 1 ends its backward ``late_ms`` later than rank 0.

    Compute takes 60 ms, and ``late_ms`` more on rank 1; a hook takes 2 ms, encoding 3 and decoding 4. Both buckets
    start one after the other at the end; the second is waited for. ``ahead_ms``: how far this rank's clock is ahead.
    """
    length_ms = 60 + late_ms + 2 + wire_ms + (7 if codec else 0)
    start = (step * length_ms + ahead_ms) * MS
    own_ms = 60 + (late_ms if rank == 1 else 0)
    raw = RawStep(start)
    at = lambda ms: start + int(ms * MS)  # noqa: E731
    raw.step = step
    raw.optimizer = (at(1), at(6))
    raw.opened = at(30)
    raw.ready = [(0, at(own_ms - 10)), (1, at(own_ms))]
    raw.hook_ns = 2 * MS
    raw.gradients = [("head.bias", at(own_ms - 20)), ("head.weight", at(own_ms - 10)), ("body.weight", at(own_ms))]
    begin = own_ms + 2
    raw.backward = at(begin)
    if codec:
        raw.spans.append((ENCODE, 0, at(begin), at(begin + 3), True))
        begin += 3
    first = 62 + late_ms + (3 if codec else 0)  # when the last rank enters
    moved = first + wire_ms
    raw.ops = [
        Op(0, -1, "all_gather", 104, raw.opened, done=at(31)),
        Op(1, 0, "all_reduce", 4_000_000, at(begin), done=at(first + wire_ms / 3), seen=True),
        Op(2, 1, "all_reduce", 8_000_000, at(begin), done=at(moved), seen=True),
    ]
    raw.spans += [
        (CALL, 1, at(begin), at(begin), True),
        (WAIT, 1, at(begin), at(first + wire_ms / 3), True),
        (WAIT, 2, at(first + wire_ms / 3), at(moved), True),
    ]
    if codec:
        raw.spans.append((DECODE, 0, at(moved), at(moved + 4), True))
        moved += 4
    raw.end = at(moved)
    raw.plan = 0
    return raw


def meta(rank: int, world_size: int = 2, *, offset_ms: int = 0, error_ms: int = 0) -> RankMeta:
    return RankMeta(
        rank=rank,
        world_size=world_size,
        host=f"node{rank}",
        strategy="allreduce",
        transport="c10d",
        why="a test",
        threads=1,
        cores=2,
        bucket_bytes=None,
        offset_ns=offset_ms * MS,
        error_ns=error_ms * MS,
        params={"head.weight": ((1000, 900), "float32"), "head.bias": ((100,), "float32")}
        | {"body.weight": ((2000, 1000), "float32")},
        versions={"torch": "2.13.0", "python": "3.11"},
    )


def write_rank(folder: Path, rank: int, steps: Sequence[RawStep], **about: int) -> Path:
    """Write a rank's file as its Writer would."""
    lines = [json.dumps({"format": FORMAT, "meta": asdict(meta(rank, **about))}), json.dumps({"layout": PLAN})]
    path = folder / f"rank-{rank}.jsonl"
    path.write_text("\n".join([*lines, *(raw.to_json() for raw in steps)]) + "\n")
    return path


def write_run(folder: Path, *, steps: int = 12, late_ms: int = 0, wire_ms: int = 30, codec: bool = False) -> Path:
    """Write the files of both ranks."""
    for rank in range(2):
        write_rank(folder, rank, [a_step(n, rank, late_ms=late_ms, wire_ms=wire_ms, codec=codec) for n in range(steps)])
    return folder
