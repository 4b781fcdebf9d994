"""A recorded run: the notes of all its ranks, read together, so that each knows what it waited for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from gradsync.profiling.clocks import narrowed
from gradsync.profiling.files import Notes, RankMeta, clocks_of, read_folder
from gradsync.profiling.parts import build
from gradsync.profiling.raw import RawStep
from gradsync.profiling.record import StepRecord
from gradsync.profiling.recorder import typical


class Run:
    """What was recorded of a run, however it ended. Made by :func:`load`."""

    def __init__(self, notes: Mapping[int, Notes]) -> None:
        if not notes:
            raise ValueError("expected the notes of at least one rank; got none.")
        self.notes = dict(sorted(notes.items()))
        self.ranks: dict[int, RankMeta] = {rank: each.meta for rank, each in self.notes.items()}
        self.meta = next(iter(self.ranks.values()))
        self.world_size = self.meta.world_size
        raws = {rank: each.steps for rank, each in self.notes.items()}
        self.clocks = clocks_of(self.notes, self.world_size)
        self._clocks_at = narrowed(self.clocks, raws)

    @cached_property
    def records(self) -> dict[int, list[StepRecord]]:
        """By rank, the steps that it has completed."""
        return {
            rank: [self._build(rank, raw) for _, raw in sorted(notes.steps.items())]
            for rank, notes in self.notes.items()
        }

    def steps(self, rank: int) -> list[StepRecord]:
        return self.records[rank]

    def typical(self, rank: int) -> list[StepRecord]:
        """The steps of a rank that tell what a step costs."""
        return typical(self.records[rank])

    @property
    def num_steps(self) -> int:
        """How many steps every rank has completed."""
        return min(len(notes.steps) for notes in self.notes.values())

    def _build(self, rank: int, raw: RawStep) -> StepRecord:
        clocks = self._clocks_at.get(raw.step, self.clocks)
        here = clocks.offset_ns(rank)
        called = [op.called + here for op in raw.ops]
        for other, notes in self.notes.items():
            theirs = notes.steps.get(raw.step)
            if theirs is None or len(theirs.ops) != len(raw.ops):
                continue  # it was ended before, or its strategy has each rank go its own way
            there = clocks.offset_ns(other)
            called = [max(mine, op.called + there) for mine, op in zip(called, theirs.ops, strict=True)]
        starts = [when - here for when in called]
        return build(raw, starts, self.notes[rank].plans, rank=rank, offset_ns=here)


def load(folder: Path | str) -> Run:
    """Read what the workers of a run have recorded into a folder (``gradsync profile`` says where)."""
    notes = read_folder(Path(folder))
    if not notes:
        raise ValueError(
            f"{folder} holds no notes of any rank: no worker came as far as gradsync.synchronize(). "
            "Does the script call it?"
        )
    return Run(notes)
