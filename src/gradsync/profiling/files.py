"""Notes in files: every rank appends a line a step, so that whatever ends a run, what there was is there.

The first line of ``rank-0.jsonl`` says what runs, a line ``{"layout": ...}`` comes whenever buckets are laid out, all
others are steps.
"""

from __future__ import annotations

import json
import os
import platform
import re
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from gradsync.comm.base import Communicator
from gradsync.profiling.clocks import Clocks
from gradsync.profiling.raw import Plan, RawStep

if TYPE_CHECKING:
    from gradsync.profiling.recorder import Recorder

FORMAT = 1
NAME = re.compile(r"rank-(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class RankMeta:
    """What a rank says of itself before its first step."""

    rank: int
    world_size: int
    host: str
    strategy: str  # its spec
    transport: str
    why: str
    threads: int
    cores: int  # that this process may run on
    bucket_bytes: int | None  # as the script set it; None: as the strategy likes it
    offset_ns: int  # to rank 0's clock
    error_ns: int
    params: dict[str, tuple[tuple[int, ...], str]]  # by name: shape and dtype
    versions: dict[str, str]


class Writer:
    """Appends one rank's notes to its file. The file is flushed at every step: a killed process loses nothing."""

    def __init__(
        self,
        folder: Path,
        recorder: Recorder,
        comm: Communicator,
        params: Mapping[str, Parameter],
        *,
        strategy: str,
        bucket_bytes: int | None = None,
        number: int = 0,
    ) -> None:
        # The first synchronizer is the script's own model; those of a second one (a GAN's) go into a folder of theirs.
        folder = folder if number == 0 else folder / f"synchronizer-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        self._recorder = recorder
        self._num_plans = 0
        self._file = (folder / f"rank-{comm.rank}.jsonl").open("w", buffering=1 << 16)
        weakref.finalize(self, self._file.close)  # with the synchronizer, or at the end of the process
        meta = RankMeta(
            rank=comm.rank,
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
        self._write(raw.to_json())

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


@dataclass
class Notes:
    """What one rank's file holds."""

    meta: RankMeta
    plans: list[Plan] = field(default_factory=list)
    steps: dict[int, RawStep] = field(default_factory=dict)  # by number


def read_notes(path: Path) -> Notes | None:
    """A rank's notes; None if it was ended before it had said who it is. A last line that was cut off is left out."""
    notes: Notes | None = None
    for line in path.read_text().splitlines():
        try:
            said: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            break
        if "meta" in said:
            if said.get("format") != FORMAT:
                raise ValueError(f"{path} has format {said.get('format')!r}; expected {FORMAT}. Record it again.")
            params = {name: (tuple(shape), dtype) for name, (shape, dtype) in said["meta"].pop("params").items()}
            notes = Notes(RankMeta(**said["meta"], params=params))
        elif notes is None:
            raise ValueError(f"{path} does not begin as the notes of a rank do. Is it another file?")
        elif "layout" in said:
            notes.plans.append([(num_bytes, list(names)) for num_bytes, names in said["layout"]])
        else:
            raw = RawStep.from_json(said)
            notes.steps[raw.step] = raw
    return notes


def read_folder(folder: Path) -> dict[int, Notes]:
    """The notes of all ranks that have left any."""
    paths = {int(match[1]): path for path in sorted(folder.glob("rank-*.jsonl")) if (match := NAME.match(path.name))}
    found = {rank: read_notes(path) for rank, path in sorted(paths.items())}
    return {rank: notes for rank, notes in found.items() if notes is not None}


def clocks_of(notes: Mapping[int, Notes], world_size: int) -> Clocks:
    """The distances of the ranks' clocks, as they measured them before their first step."""
    offsets = [notes[rank].meta.offset_ns if rank in notes else 0 for rank in range(world_size)]
    return Clocks(tuple(offsets), max((each.meta.error_ns for each in notes.values()), default=0))
