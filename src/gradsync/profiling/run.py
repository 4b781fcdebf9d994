"""Recorded runs: written to files while training (:class:`Writer`), and loaded from them (:func:`load`, :class:`Run`).

Every rank appends one line a step to its own file, ``rank-<r>.jsonl``, so that the steps so far survive however a run
ends. The first line of a file describes the rank (:class:`RankMeta`). A line ``{"layout": ...}`` follows whenever
buckets are planned. All other lines are raw steps. A :class:`Run` compares the raw steps of all ranks to build their
step records.
"""

from __future__ import annotations

import json
import os
import platform
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from gradsync.comm.base import Communicator
from gradsync.profiling.clocks import ClockOffsets, narrow_offsets
from gradsync.profiling.parts import build_record
from gradsync.profiling.raw import RawStep, RecordedPlan
from gradsync.profiling.record import Change, StepRecord
from gradsync.profiling.recorder import typical

if TYPE_CHECKING:
    from gradsync.profiling.recorder import Recorder


FORMAT = 1
NAME = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class RankMeta:
    """The description of a rank, in the first line of its file."""

    rank: int
    world_size: int
    host: str
    strategy: str  # its spec
    transport: str
    why: str
    threads: int
    cores: int  # that this process may run on
    bucket_bytes: int | None  # as the script set it; None: the strategy's default
    offset_ns: int  # to rank 0's clock
    error_ns: int
    params: dict[str, tuple[tuple[int, ...], str]]  # by name: shape and dtype
    versions: dict[str, str]


class Writer:
    """Appends one rank's raw steps to its file. The file is flushed at every step: a killed process loses nothing."""

    def __init__(
        self,
        folder: Path,
        recorder: Recorder,
        comm: Communicator,
        params: Mapping[str, Parameter],
        *,
        strategy: str,
        sent: Callable[[], int] = lambda: 0,
        bucket_bytes: int | None = None,
        number: int = 0,
        slot: int | None = None,
    ) -> None:
        # The first synchronizer is that of the script's main model; a second one (a GAN's) gets a folder of its own.
        folder = folder if number == 0 else folder / f"synchronizer-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        self._recorder = recorder
        self._num_plans = 0
        self._sent = sent
        # In an elastic run ranks change and a worker's slot does not. Those that were started in one slot, one after
        # the other, share a file.
        place = comm.rank if slot is None else slot
        self._file = (folder / f"rank-{place}.jsonl").open("w" if slot is None else "a", buffering=1 << 16)
        weakref.finalize(self, self._file.close)  # with the synchronizer, or at the end of the process
        if slot is not None and self._file.tell():
            self._write("")  # the last line may be truncated
        meta = RankMeta(
            rank=place,
            world_size=comm.world_size,
            host=platform.node(),
            strategy=strategy,
            transport=comm.transport,
            why=comm.why,
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)),
            bucket_bytes=bucket_bytes,
            offset_ns=recorder.clocks.offset_ns(comm.rank),
            error_ns=recorder.clocks.error_ns,
            params={
                name: (tuple(param.shape), str(param.dtype).removeprefix("torch."))
                for name, param in params.items()
                if param.requires_grad
            },
            versions={"torch": torch.__version__, "python": platform.python_version()},
        )
        self._write(json.dumps({"format": FORMAT, "meta": asdict(meta)}))

    def __call__(self, raw: RawStep) -> None:
        for plan in self._recorder.plans[self._num_plans :]:
            self._write(json.dumps({"layout": plan}))
        self._num_plans = len(self._recorder.plans)
        if not raw.ops:  # messages outside the communicator, or exchanges between steps: only the strategy counts them
            raw.sent = self._sent()
        self._write(raw.to_json())

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


@dataclass
class RawRecords:
    """The contents of one rank's file."""

    meta: RankMeta
    plans: list[RecordedPlan] = field(default_factory=list)
    steps: dict[int, RawStep] = field(default_factory=dict)  # by number
    discarded: list[RawStep] = field(default_factory=list)  # in an elastic run: rolled back, and done again


def read_raw_records(path: Path) -> RawRecords | None:
    """Read a rank's file; None if the process ended before its first line. A truncated line is ignored."""
    found: RawRecords | None = None
    base = 0  # plans of the workers before this one, in the same file
    for line in filter(None, path.read_text().splitlines()):
        try:
            data: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "meta" in data:
            if data.get("format") != FORMAT:
                raise ValueError(f"{path} has format {data.get('format')!r}; expected {FORMAT}. Record it again.")
            params = {name: (tuple(shape), dtype) for name, (shape, dtype) in data["meta"].pop("params").items()}
            meta = RankMeta(**data["meta"], params=params)
            if found is None:
                found = RawRecords(meta)
            else:  # of the worker that was started in place of one that had died
                found.meta, base = meta, len(found.plans)
        elif found is None:
            raise ValueError(f"{path} does not begin as the records of a rank do. Is it another file?")
        elif "layout" in data:
            found.plans.append([(num_bytes, list(names)) for num_bytes, names in data["layout"]])
        else:
            step = RawStep.from_json(data)
            step.plan += base
            if step.discarded:
                found.discarded.append(step)
            else:
                found.steps[step.step] = step
    return found


def read_folder(folder: Path) -> dict[int, RawRecords]:
    """Read the files of all ranks in a folder, by rank."""
    paths = {int(match[1]): path for path in sorted(folder.glob("rank-*.jsonl")) if (match := NAME.match(path.name))}
    found = {rank: read_raw_records(path) for rank, path in sorted(paths.items())}
    return {rank: raw for rank, raw in found.items() if raw is not None}


def clock_offsets_of(raw: Mapping[int, RawRecords], world_size: int) -> ClockOffsets:
    """The offsets of the ranks' clocks, as measured before the first step."""
    offsets = [raw[rank].meta.offset_ns if rank in raw else 0 for rank in range(world_size)]
    return ClockOffsets(tuple(offsets), max((each.meta.error_ns for each in raw.values()), default=0))


class Run:
    """A recorded run, whether or not it came to its end. Made by :func:`load`."""

    def __init__(self, raw: Mapping[int, RawRecords]) -> None:
        if not raw:
            raise ValueError("expected the records of at least one rank; got none.")
        self.raw = dict(sorted(raw.items()))
        self.ranks: dict[int, RankMeta] = {rank: each.meta for rank, each in self.raw.items()}
        self.meta = next(iter(self.ranks.values()))
        self.world_size = self.meta.world_size
        raw_steps = {rank: each.steps for rank, each in self.raw.items()}
        self.clocks = clock_offsets_of(self.raw, self.world_size)
        self._offsets_at = narrow_offsets(self.clocks, raw_steps)

    @cached_property
    def records(self) -> dict[int, list[StepRecord]]:
        """The completed steps of each rank."""
        return {
            rank: [self._build(rank, step) for _, step in sorted(each.steps.items())] for rank, each in self.raw.items()
        }

    def steps(self, rank: int) -> list[StepRecord]:
        return self.records[rank]

    def typical(self, rank: int) -> list[StepRecord]:
        """The typical steps of a rank: without warm-up and outliers."""
        return typical(self.records[rank])

    @cached_property
    def discarded(self) -> dict[int, list[StepRecord]]:
        """In an elastic run: each rank's records of steps that were rolled back and done again."""
        return {rank: [self._build(rank, step) for step in each.discarded] for rank, each in self.raw.items()}

    @property
    def changes(self) -> list[Change]:
        """The changes of the members of an elastic run, each as the first rank saw it that was there before."""
        seen: dict[int, Change] = {}
        for each in self.raw.values():
            for step in (*each.steps.values(), *each.discarded):
                for change in step.changes:
                    if change.epoch not in seen or (change.before and not seen[change.epoch].before):
                        seen[change.epoch] = change
        return [seen[epoch] for epoch in sorted(seen)]

    @property
    def num_steps(self) -> int:
        """How many steps every rank has completed."""
        return min(len(each.steps) for each in self.raw.values())

    def _build(self, rank: int, raw: RawStep) -> StepRecord:
        clocks = self._offsets_at.get(raw.step, self.clocks)
        here = clocks.offset_ns(rank)
        called = [op.called + here for op in raw.ops]
        for other, each in self.raw.items():
            theirs = each.steps.get(raw.step)
            if theirs is None or raw.discarded or len(theirs.ops) != len(raw.ops):
                continue  # that rank ended before, or the strategy lets each rank communicate on its own
            there = clocks.offset_ns(other)
            called = [max(mine, op.called + there) for mine, op in zip(called, theirs.ops, strict=True)]
        starts = [when - here for when in called]
        return build_record(raw, starts, self.raw[rank].plans, rank=rank, offset_ns=here)


def load(folder: Path | str) -> Run:
    """Load the run that its workers have recorded into a folder (``gradsync profile --record-dir``)."""
    raw = read_folder(Path(folder))
    if not raw:
        raise ValueError(
            f"{folder} holds no records of any rank: no worker came as far as gradsync.synchronize(). "
            "Does the script call it?"
        )
    return Run(raw)
