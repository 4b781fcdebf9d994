"""Runs in each worker: writes a line for every step of an unchanged script, with its loss, and ends it at its limit.

[Note: which loss] A script's loss is the scalar that it calls ``backward()`` on: autograd's own root. So
``torch.autograd.backward`` is wrapped, which every ``loss.backward()`` calls. Of several backwards in one step
(accumulation) the mean counts; the scale of a ``GradScaler`` is divided out. A loss that the script divides itself, or
a sum instead of a mean, is written as it is: curves of one script are still comparable.

[Note: the same last step] All ranks must stop after the same step, or those that go on would wait for those that have
left. A limit in steps needs no agreement, since all ranks count steps. For a limit in seconds, rank 0 reads its clock,
and the step counts of all ranks from a small shared file, and sets a last step that no rank has reached yet.

[Note: which bytes] On a lab's link each worker is a host: the kernel counts what its interface has sent, with all
headers. Elsewhere bytes are those that the strategy counts. All runs of one comparison are counted the same way.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from gradsync.engine.observers import observe
from gradsync.strategies.onebit_adam import OneBitAdam
from gradsync.strategies.periodic.base import Periodic
from gradsync.strategies.periodic.local_sgd import LocalSGD

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine
    from gradsync.synchronize import Synchronizer

FOLDER, STEPS, SECONDS = "GRADSYNC_CURVE_DIR", "GRADSYNC_CURVE_STEPS", "GRADSYNC_CURVE_SECONDS"
INTERFACE = "GRADSYNC_CURVE_INTERFACE"  # the interface whose bytes are counted: only this worker uses it
AHEAD = 4  # steps by which the last step is set ahead of the rank that has done the most
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run ends: after a number of steps, or of seconds from the end of its first step; whichever comes first."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"expected at least 1 step; got {self.steps}.")
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"expected more than 0 seconds; got {self.seconds}.")

    def as_environment(self) -> dict[str, str]:
        """The environment variables that pass the limits to the workers."""
        values = {STEPS: self.steps, SECONDS: self.seconds}
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Limits:
        """The limits that the launcher has set in the environment."""
        steps, seconds = environ.get(STEPS), environ.get(SECONDS)
        return cls(steps=int(steps) if steps else None, seconds=float(seconds) if seconds else None)


class LimitReached(SystemExit):
    """Raised when a run reaches its limit of steps or seconds: the script ends, with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


class CurveWriter:
    """Writes ``rank-<r>.jsonl`` to a folder: one line for each step of the first synchronizer of this process.

    Installed once in a worker, before the script runs; ``remove()`` uninstalls it, for tests.
    """

    def __init__(self, folder: Path, limits: Limits, *, interface: str | None = None) -> None:
        self._folder = folder
        self._counter = None if interface is None else Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self._limits = limits
        self._losses: list[Tensor] = []
        self._sync: Synchronizer | None = None
        self._undo: list[Callable[[], None]] = [observe(self._on_synchronize), self._patch_backward()]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> CurveWriter | None:
        """The writer that the launcher has asked for in the environment, if it has."""
        folder = environ.get(FOLDER)
        limits = Limits.from_environment(environ)
        return None if folder is None else cls(Path(folder), limits, interface=environ.get(INTERFACE))

    def remove(self) -> None:
        """Undo every patch and hook."""
        while self._undo:
            self._undo.pop()()
        if self._sync is not None:
            self._file.close()

    def _patch_backward(self) -> Callable[[], None]:
        plain = torch.autograd.backward

        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if roots and isinstance(roots[0], Tensor) and roots[0].numel() == 1:  # [Note: which loss]
                self._losses.append(roots[0].detach())
            return plain(tensors, *args, **kwargs)

        torch.autograd.backward = backward

        def undo() -> None:
            torch.autograd.backward = plain

        return undo

    def _on_synchronize(self, sync: Synchronizer) -> None:
        if self._sync is not None:  # a script's second model (a GAN's) is not compared
            return
        self._sync = sync
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / f"rank-{sync.rank}.jsonl").open("w", buffering=1)
        self._counts = _shared_counts(self._folder / "counts", sync.world_size)
        engine = sync._engine
        self._done, self._at, self._sent, self._start_s = 0, engine.step, 0.0, time.monotonic()
        self._sent_before = self._count()
        self._undo.append(
            engine.training.optimizer.register_step_post_hook(lambda *_: self._on_step(sync, engine)).remove
        )
        self._losses.clear()
        self._write_line({"rank": sync.rank, "world_size": sync.world_size, "strategy": sync.stats()["strategy"]})

    def _on_step(self, sync: Synchronizer, engine: Engine) -> None:
        if engine.step == self._at:  # within an accumulation: nothing was synchronized, nothing is applied
            return
        self._at = engine.step
        if not self._done:  # kernels are compiled and buckets planned in the first step: the clock starts after it
            self._start_s = time.monotonic()
        self._done += 1
        if self._counter is None:  # [Note: which bytes]
            self._sent += engine.strategy.bytes_per_step()
        else:
            self._sent = self._count() - self._sent_before
        losses = [float(loss) / engine.training.loss_scale for loss in self._losses]
        self._losses.clear()
        self._write_line(
            {
                "step": self._done,
                "seconds": time.monotonic() - self._start_s,
                "bytes": self._sent,
                "loss": sum(losses) / len(losses) if losses else None,
                "not_yet": _not_yet(engine.strategy, self._done),
            }
        )
        if self._done >= self._last_step(sync):
            self._file.close()
            raise LimitReached

    def _count(self) -> float:
        return 0.0 if self._counter is None else float(self._counter.read_text())

    def _last_step(self, sync: Synchronizer) -> int:
        """The step after which all ranks stop, as far as it is known. See [Note: the same last step]."""
        counts = self._counts
        counts[1 + sync.rank] = self._done
        late = self._limits.seconds is not None and time.monotonic() - self._start_s > self._limits.seconds
        if late and sync.rank == 0 and counts[0] == NEVER:
            counts[0] = counts[1:].max() + AHEAD
        return int(min(counts[0], NEVER if self._limits.steps is None else self._limits.steps))

    def _write_line(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _not_yet(strategy: Any, done: int) -> str:
    """Why a strategy has not done what distinguishes it after ``done`` steps, such as a warm-up; empty once it has."""
    if isinstance(strategy, OneBitAdam) and done <= strategy.warmup_steps:
        return f"still in its warm-up of {strategy.warmup_steps} steps, which are exact"
    if isinstance(strategy, LocalSGD) and strategy.in_exact_phase:
        return "still in its exact steps"
    if isinstance(strategy, Periodic) and done < strategy.every_now():
        return f"no exchange yet, as every={strategy.every_now()}"
    return ""


def _shared_counts(path: Path, world_size: int) -> Any:
    """The last step, and the number of steps that each rank has done: one small file that all ranks map."""
    with path.open("ab+") as file:  # the first rank writes it; opening must not truncate it
        if file.seek(0, os.SEEK_END) == 0:
            file.write(np.array([NEVER, *[0] * world_size], np.int64).tobytes())
    return np.memmap(path, np.int64, "r+", shape=(1 + world_size,))
