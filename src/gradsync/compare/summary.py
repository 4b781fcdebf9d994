"""Curves of runs, and what they come to: how fast, how many bytes, and how soon at the same loss.

[Note: reached] Batches differ, so a loss goes up and down, and even its average dips with one lucky batch. So a loss
counts as reached in the first stretch of a tenth of the run in which the smoothed loss is as low at more than half of
the steps: at the first of these. One batch takes part in the averages of fewer than half of the steps of a stretch:
none decides it alone, however low its loss.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 3  # buckets are laid out and kernels compiled in them: no part of the median
SMOOTHED = 0.05  # of the steps: over how many losses are averaged, as every batch has its own


@dataclass(frozen=True)
class Curve:
    """A run, step by step: the mean loss over the ranks, the seconds of the slowest, the bytes that one rank sent."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    loss: tuple[float | None, ...]

    @property
    def has_loss(self) -> bool:
        return any(loss is not None for loss in self.loss)

    @property
    def _width(self) -> int:
        """How many steps are averaged."""
        return max(1, round(SMOOTHED * len(self.steps)))

    def smoothed(self) -> tuple[float | None, ...]:
        """The loss at each step, averaged over it and those before it: what a noisy curve shows."""
        smooth = []
        for at in range(len(self.loss)):
            near = [loss for loss in self.loss[max(0, at + 1 - self._width) : at + 1] if loss is not None]
            smooth.append(sum(near) / len(near) if near else None)
        return tuple(smooth)

    def lowest_reached(self) -> float | None:
        """The lowest loss that was reached; None if none was, or it was no number. See [Note: reached]."""
        low = min(self._medians(), default=math.inf)
        return None if math.isinf(low) else low

    def first_at(self, target: float) -> int | None:
        """Where in the curve a loss as low as this was first reached. See [Note: reached]."""
        stretch = next((at for at, median in enumerate(self._medians()) if median <= target), None)
        return None if stretch is None else next(at for at, loss in self._known()[stretch:] if loss <= target)

    def _known(self) -> list[tuple[int, float]]:
        """Places in the curve and the smoothed loss there, where there is one; one that is no number is the worst."""
        losses = [(at, loss) for at, loss in enumerate(self.smoothed()) if loss is not None]
        return [(at, loss if math.isfinite(loss) else math.inf) for at, loss in losses]

    def _medians(self) -> list[float]:
        """The median of each stretch of the known smoothed losses."""
        losses = [loss for _, loss in self._known()]
        length = min(2 * self._width + 1, len(losses))
        stretch = sorted(losses[:length])
        medians = stretch[length // 2 : length // 2 + 1]  # none of none
        for leaves, enters in zip(losses, losses[length:], strict=False):
            del stretch[bisect_left(stretch, leaves)]
            insort(stretch, enters)
            medians.append(stretch[length // 2])
        return medians


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What one run comes to."""

    strategy: str
    failure: str = ""  # why there is nothing else, if so
    steps: int = 0
    seconds: float = 0.0
    median_step_s: float | None = None
    bytes_per_step: float | None = None
    wire_bytes_per_step: float | None = None  # counted at the link, where there was one
    final_loss: float | None = None
    seconds_to_loss: float | None = None  # until the loss that all runs have reached: see [Note: reached]
    bytes_to_loss: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def load_curve(folder: Path) -> Curve:
    """The curve of a run from the files of all its ranks; as far as all of them have come.

    Raises ValueError if some rank has written no step.
    """
    ranks = [_lines(path) for path in sorted(folder.glob("rank-*.jsonl"))]
    world_size = ranks[0][0]["world_size"] if ranks and ranks[0] else 0
    if not ranks or len(ranks) < world_size or any(len(lines) < 2 for lines in ranks):
        raise ValueError("no step was seen on some rank: does the script call synchronize(), backward() and step()?")
    together = list(zip(*(lines[1:] for lines in ranks), strict=False))
    losses = [[line["loss"] for line in step if line["loss"] is not None] for step in together]
    return Curve(
        steps=tuple(step[0]["step"] for step in together),
        seconds=tuple(max(line["seconds"] for line in step) for step in together),
        bytes=tuple(step[0]["bytes"] for step in together),
        loss=tuple(sum(each) / len(each) if each else None for each in losses),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # the last line of a rank that was killed in the middle of it
            break
    return found


def common_loss(curves: Sequence[Curve]) -> float | None:
    """The lowest loss that all runs have reached. See [Note: reached]."""
    lows = [curve.lowest_reached() for curve in curves]
    known = [low for low in lows if low is not None]
    return max(known) if known and len(known) == len(lows) else None


def summarize(strategy: str, curve: Curve, *, target: float | None, wire_bytes: float | None = None) -> Summary:
    """Reduce a curve to a row of the table. ``target``: the loss for which time and bytes are told.

    >>> from gradsync.compare import Curve, summarize
    >>> curve = Curve((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0), (5.0, 10.0, 15.0, 20.0), (4.0, 3.0, 2.0, 1.0))
    >>> row = summarize("allreduce", curve, target=2.0)
    >>> row.seconds_to_loss, row.bytes_to_loss, row.median_step_s
    (3.0, 15.0, 1.0)
    """
    gaps = [late - early for early, late in zip(curve.seconds, curve.seconds[1:], strict=False)]
    timed = gaps[WARM_UP_STEPS - 1 :] or gaps
    at = None if target is None else curve.first_at(target)
    return Summary(
        strategy=strategy,
        steps=len(curve.steps),
        seconds=curve.seconds[-1],
        median_step_s=statistics.median(timed) if timed else None,
        bytes_per_step=curve.bytes[-1] / len(curve.steps),
        wire_bytes_per_step=None if wire_bytes is None else wire_bytes / len(curve.steps),
        final_loss=curve.smoothed()[-1],
        seconds_to_loss=None if at is None else curve.seconds[at],
        bytes_to_loss=None if at is None else curve.bytes[at],
    )
