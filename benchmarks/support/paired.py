"""Ratios of times measured in pairs: a drift of the machine that affects both cancels in the ratio."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class PairedRatio:
    """The geometric mean of paired ratios and its 95 % interval, from Student's t over their logarithms."""

    ratio: float
    low: float
    high: float
    num_pairs: int

    def as_dict(self) -> dict[str, float | int]:
        """The fields, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> PairedRatio:
    """Compare `above[i]` with `below[i]`, pair by pair."""
    logs = [math.log(a / b) for a, b in zip(above, below, strict=True)]
    if len(logs) < 3:
        raise ValueError(f"an interval needs 3 pairs or more; got {len(logs)}. Measure more rounds.")
    middle = statistics.fmean(logs)
    reach = t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return PairedRatio(
        ratio=math.exp(middle), low=math.exp(middle - reach), high=math.exp(middle + reach), num_pairs=len(logs)
    )


@functools.cache
def t_quantile(probability: float, degrees: int) -> float:
    """Find Student's t by bisection on its distribution, integrated by Simpson's rule (no SciPy for one number)."""
    norm = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def density(t: float) -> float:
        return norm * math.pow(1 + t * t / degrees, -(degrees + 1) / 2)

    def below(t: float) -> float:
        pieces = 1000
        width = t / pieces
        inner = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, pieces))
        return 0.5 + width / 3 * (density(0) + inner + density(t))

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < probability else (low, middle)
    return (low + high) / 2
