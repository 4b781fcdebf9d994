"""In a worker: a line for every step of an unchanged script, with its loss; and the end of the script when told so.

[Note: whose loss] A script's loss is the scalar that it calls ``backward()`` on: autograd's own root. So
``torch.autograd.backward`` is watched, which every ``loss.backward()`` comes through. Of several backwards in one step
(accumulation) the mean counts; what a ``GradScaler`` has multiplied is divided again. A loss that the script divides
itself, or a sum instead of a mean, is shown as it is: curves of one script still compare.

[Note: the same last step] All ranks must stop after the same step, or those that go on would wait for those that have
left. Steps are counted, so for a number of steps there is nothing to agree on. For a number of seconds, rank 0 looks at
the clock, and at the counts of all ranks in a small shared file, and names a step that nobody has reached yet.
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

from gradsync.observers import observe

if TYPE_CHECKING:
    from gradsync.engine import Engine
    from gradsync.synchronize import Synchronizer

FOLDER, STEPS, SECONDS = "GRADSYNC_CURVE_DIR", "GRADSYNC_CURVE_STEPS", "GRADSYNC_CURVE_SECONDS"
AHEAD = 4  # steps: the last one is named so far ahead of the rank that has done the most
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run ends: after so many steps, or so many seconds from the end of its first; whichever comes first."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"expected at least 1 step; got {self.steps}.")
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"expected more than 0 seconds; got {self.seconds}.")

    def as_environment(self) -> dict[str, str]:
        """For the workers."""
        said = {STEPS: self.steps, SECONDS: self.seconds}
        return {name: str(value) for name, value in said.items() if value is not None}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Limits:
        """What the launcher said."""
        steps, seconds = environ.get(STEPS), environ.get(SECONDS)
        return cls(steps=int(steps) if steps else None, seconds=float(seconds) if seconds else None)


class EnoughSteps(SystemExit):
    """The run has its steps or seconds: the script ends here, in order."""

    def __init__(self) -> None:
        super().__init__(0)


class CurveWriter:
    """Writes ``rank-<r>.jsonl`` to a folder: a line a step of the first synchronizer of this process.

    Installed once in a worker, before the script runs; ``remove()`` takes it out again, for tests.
    """

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._losses: list[Tensor] = []
        self._sync: Synchronizer | None = None
        self._undo: list[Callable[[], None]] = [observe(self._watch), self._watch_backward()]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> CurveWriter | None:
        """The writer that the launcher has asked for, if it has."""
        folder = environ.get(FOLDER)
        return None if folder is None else cls(Path(folder), Limits.from_environment(environ))

    def remove(self) -> None:
        """Let go of torch and of the script."""
        while self._undo:
            self._undo.pop()()
        if self._sync is not None:
            self._file.close()

    def _watch_backward(self) -> Callable[[], None]:
        plain = torch.autograd.backward

        @functools.wraps(plain)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if roots and isinstance(roots[0], Tensor) and roots[0].numel() == 1:  # [Note: whose loss]
                self._losses.append(roots[0].detach())
            return plain(tensors, *args, **kwargs)

        torch.autograd.backward = backward

        def undo() -> None:
            torch.autograd.backward = plain

        return undo

    def _watch(self, sync: Synchronizer) -> None:
        if self._sync is not None:  # a script's second model (a GAN's) is not what it is compared by
            return
        self._sync = sync
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = (self._folder / f"rank-{sync.rank}.jsonl").open("w", buffering=1)
        self._counts = _shared_counts(self._folder / "counts", sync.world_size)
        engine = sync._engine
        self._done, self._at, self._sent, self._start_s = 0, engine.step, 0.0, time.monotonic()
        self._undo.append(
            engine.training.optimizer.register_step_post_hook(lambda *_: self._on_step(sync, engine)).remove
        )
        self._losses.clear()
        self._say({"rank": sync.rank, "world_size": sync.world_size, "strategy": sync.stats()["strategy"]})

    def _on_step(self, sync: Synchronizer, engine: Engine) -> None:
        if engine.step == self._at:  # within an accumulation: nothing was synchronized, nothing is applied
            return
        self._at = engine.step
        if not self._done:  # kernels are compiled and buckets laid out in the first step: the clock starts after it
            self._start_s = time.monotonic()
        self._done += 1
        self._sent += engine.strategy.bytes_per_step()
        losses = [float(loss) / engine.training.loss_scale for loss in self._losses]
        self._losses.clear()
        self._say(
            {
                "step": self._done,
                "seconds": time.monotonic() - self._start_s,
                "bytes": self._sent,
                "loss": sum(losses) / len(losses) if losses else None,
            }
        )
        if self._done >= self._last_step(sync):
            self._file.close()
            raise EnoughSteps

    def _last_step(self, sync: Synchronizer) -> int:
        """The step after which all ranks stop, as far as it is known. See [Note: the same last step]."""
        counts = self._counts
        counts[1 + sync.rank] = self._done
        late = self._limits.seconds is not None and time.monotonic() - self._start_s > self._limits.seconds
        if late and sync.rank == 0 and counts[0] == NEVER:
            counts[0] = counts[1:].max() + AHEAD
        return int(min(counts[0], NEVER if self._limits.steps is None else self._limits.steps))

    def _say(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


def _shared_counts(path: Path, world_size: int) -> Any:
    """The step to stop after, and how many each rank has done: one small file that all ranks map."""
    with path.open("ab+") as file:  # whoever comes first makes it; none may empty it
        if file.seek(0, os.SEEK_END) == 0:
            file.write(np.array([NEVER, *[0] * world_size], np.int64).tobytes())
    return np.memmap(path, np.int64, "r+", shape=(1 + world_size,))
