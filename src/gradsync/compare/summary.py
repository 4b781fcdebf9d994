"""Curves of runs and their summaries: how fast, how many bytes, and how soon at the same loss.

[Note: reached] Batches differ, so a loss goes up and down, and even its average dips with one lucky batch. So a loss
counts as reached in the first window of a tenth of the run in which the smoothed loss is as low at more than half of
the steps: at the first of these. One batch takes part in the averages of fewer than half of the steps of a window:
none decides it alone, however low its loss.

[Note: within noise] Two runs are compared after the same number of steps, by their losses averaged over a twentieth of
the steps. The standard error of these averages is estimated from the batches in them. A difference of less than twice
that error is noise.
"""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradsync.advisor.comm_pattern import comm_pattern_of

WARM_UP_STEPS = 3  # buckets are planned and kernels compiled in them: they are left out of the median
SMOOTHED = 0.05  # of the steps: the window over which losses are averaged, as batches differ


@dataclass(frozen=True)
class Curve:
    """A run, step by step: the ranks' mean loss, the seconds of the slowest, the mean of the bytes they sent."""

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    bytes: tuple[float, ...]
    loss: tuple[float | None, ...]
    not_yet: str = ""  # why the strategy had not done what distinguishes it by the end; empty: it had

    @property
    def has_loss(self) -> bool:
        return any(loss is not None for loss in self.loss)

    @property
    def _width(self) -> int:
        """How many steps are averaged."""
        return max(1, round(SMOOTHED * len(self.steps)))

    def smoothed(self) -> tuple[float | None, ...]:
        """The loss at each step, averaged over it and the steps before it."""
        smooth = []
        for at in range(len(self.loss)):
            near = [loss for loss in self.loss[max(0, at + 1 - self._width) : at + 1] if loss is not None]
            smooth.append(sum(near) / len(near) if near else None)
        return tuple(smooth)

    def average_before(self, at: int) -> tuple[float, float] | None:
        """The loss averaged up to an index of the curve, and its standard error; None where it is NaN or infinite."""
        near = [loss for loss in self.loss[max(0, at + 1 - max(2, self._width)) : at + 1] if loss is not None]
        if not near or not all(math.isfinite(loss) for loss in near):
            return None
        spread = statistics.stdev(near) / math.sqrt(len(near)) if len(near) > 1 else 0.0
        return sum(near) / len(near), spread

    def lowest_reached(self) -> float | None:
        """The lowest loss that was reached; None if there is none that is finite. See [Note: reached]."""
        low = min(self._medians(), default=math.inf)
        return None if math.isinf(low) else low

    def first_at(self, target: float) -> int | None:
        """The index in the curve where a loss as low as ``target`` was first reached. See [Note: reached]."""
        window = next((at for at, median in enumerate(self._medians()) if median <= target), None)
        return None if window is None else next(at for at, loss in self._known()[window:] if loss <= target)

    def _known(self) -> list[tuple[int, float]]:
        """The indices that have a loss, and the smoothed loss there. NaN counts as infinite."""
        losses = [(at, loss) for at, loss in enumerate(self.smoothed()) if loss is not None]
        return [(at, loss if math.isfinite(loss) else math.inf) for at, loss in losses]

    def _medians(self) -> list[float]:
        """The median of each window of the known smoothed losses."""
        losses = [loss for _, loss in self._known()]
        length = min(2 * self._width + 1, len(losses))
        window = sorted(losses[:length])
        medians = window[length // 2 : length // 2 + 1]  # empty if there is no loss
        for leaves, enters in zip(losses, losses[length:], strict=False):
            del window[bisect_left(window, leaves)]
            insort(window, enters)
            medians.append(window[length // 2])
        return medians


@dataclass(frozen=True, kw_only=True)
class ComparisonSummary:
    """The figures of one run of a comparison: a row of its table."""

    strategy: str
    failure: str = ""  # why the run failed; all other fields are then empty
    steps: int = 0
    seconds: float = 0.0
    median_step_s: float | None = None
    bytes_per_step: float | None = None  # sent by a worker: the mean over all
    final_loss: float | None = None
    seconds_to_loss: float | None = None  # until the lowest loss that all runs have reached: see [Note: reached]
    bytes_to_loss: float | None = None
    convergence: str = ""  # "exact", "same within noise", or what it does to the loss
    not_yet: str = ""  # why it had not done what distinguishes it, so that its figures do not represent it

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def load_curve(folder: Path) -> Curve:
    """The curve of a run from the files of all its ranks, up to the last step that all of them have done.

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
        bytes=tuple(sum(line["bytes"] for line in step) / len(step) for step in together),
        loss=tuple(sum(each) / len(each) if each else None for each in losses),
        not_yet=str(together[-1][0].get("not_yet", "")),
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


def convergence_word(strategy: str, curve: Curve, base: tuple[str, Curve]) -> str:
    """The effect of a strategy on the training, in a few words: "exact" by its maths, or else judged by the losses.

    ``base``: the name and the curve of the run that it is compared with. See [Note: within noise].
    """
    if comm_pattern_of(strategy).exact:
        return "exact"
    name, other = base
    if curve.not_yet:
        return "not seen: " + curve.not_yet
    at = min(len(curve.steps), len(other.steps)) - 1
    mine, theirs = curve.average_before(at), other.average_before(at)
    if not curve.has_loss or theirs is None:
        return "changes the training; no loss to judge by"
    if curve is other:
        return "changes the training; nothing to compare it with"
    if mine is None:
        return "changes the training: its loss is no number"
    difference = mine[0] - theirs[0]
    if abs(difference) <= 2 * math.hypot(mine[1], theirs[1]):
        return "same loss within noise"
    share = abs(difference / theirs[0]) if theirs[0] else math.inf
    return f"changes the training: loss {100 * share:.2g} % {'above' if difference > 0 else 'below'} {name}'s"


def base_of(curves: Mapping[str, Curve]) -> tuple[str, Curve]:
    """The run that the others' losses are compared with: the first exact one, or else the first."""
    exact = [text for text in curves if comm_pattern_of(text).exact]
    name = (exact or list(curves))[0]
    return name, curves[name]


def summarize(
    strategy: str, curve: Curve, *, target: float | None, base: tuple[str, Curve] | None = None
) -> ComparisonSummary:
    """Reduce a curve to a row of the table.

    Args:
        strategy: its spec.
        curve: of its run.
        target: the loss to which time and bytes are counted.
        base: the name and curve that its loss is compared with; without it ``convergence`` stays empty.

    >>> from gradsync.compare import Curve, summarize
    >>> curve = Curve((1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0), (5.0, 10.0, 15.0, 20.0), (4.0, 3.0, 2.0, 1.0))
    >>> row = summarize("allreduce", curve, target=2.0)
    >>> row.seconds_to_loss, row.bytes_to_loss, row.median_step_s
    (3.0, 15.0, 1.0)
    """
    gaps = [late - early for early, late in zip(curve.seconds, curve.seconds[1:], strict=False)]
    timed = gaps[WARM_UP_STEPS - 1 :] or gaps
    at = None if target is None else curve.first_at(target)
    return ComparisonSummary(
        strategy=strategy,
        steps=len(curve.steps),
        seconds=curve.seconds[-1],
        median_step_s=statistics.median(timed) if timed else None,
        bytes_per_step=curve.bytes[-1] / len(curve.steps),
        final_loss=curve.smoothed()[-1],
        seconds_to_loss=None if at is None else curve.seconds[at],
        bytes_to_loss=None if at is None else curve.bytes[at],
        convergence="" if base is None else convergence_word(strategy, curve, base),
        not_yet=curve.not_yet,
    )
