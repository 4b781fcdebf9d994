"""The speeds that an all-reduce of two ranks on one host is to reach, and whether it does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.support.paired import PairedRatio
from benchmarks.support.sizes import MB, show_size

SpeedSummary = dict[int, dict[str, Any]]  # by size, by variant


def digits(value: float) -> str:
    """A value with about three digits.

    >>> [digits(value) for value in (0.00024, 0.0841, 0.841, 8.412, 84.12, 8412.3)]
    ['0.00024', '0.084', '0.84', '8.41', '84.1', '8412']
    """
    return f"{value:.2g}" if value < 0.1 else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """A speed that two ranks on one host are to reach at every size in its range."""

    says: str
    ours: str
    peer: str
    times: float  # as fast as the peer
    or_gb_per_s: float = float("inf")  # this speed is enough, too
    smallest: int = 0
    largest: int = sys.maxsize

    def judge(self, summary: SpeedSummary) -> tuple[str, str]:
        """The verdict ("met", "missed", "not measured") and its reasons: the ratio counts, not its interval."""
        met: list[tuple[float, str]] = []
        missed: list[str] = []
        for size, row in summary.items():
            ratios = row.get(self.ours, {}).get("times_as_fast_as", {})
            if not self.smallest <= size <= self.largest or self.peer not in ratios:
                continue
            ratio, speed = PairedRatio(**ratios[self.peer]), row[self.ours]["gb_per_s"]
            shown = f"{show_size(size)}: {digits(ratio.ratio)} ({digits(ratio.low)} to {digits(ratio.high)})"
            if self.or_gb_per_s < float("inf"):
                shown += f", {speed:.1f} GB/s"
            if ratio.ratio >= self.times or speed >= self.or_gb_per_s:
                met.append((max(ratio.ratio / self.times, speed / self.or_gb_per_s), shown))
            else:
                missed.append(shown)
        if missed:
            return "missed", f"{len(missed)} of {len(met) + len(missed)} sizes: {'; '.join(missed)}"
        return ("met", f"closest of {len(met)} sizes: {min(met)[1]}") if met else ("not measured", "")


YARDSTICKS = (
    Yardstick(
        says="buckets: 8 GB/s, or 0.75 of memcpy, from 1 MB up",
        ours="bucket",
        peer="memcpy",
        times=0.75,
        or_gb_per_s=8.0,
        smallest=MB,
    ),
    Yardstick(says="tensors: as fast as Open MPI up to 100 MB", ours="tensor", peer="mpi", times=1, largest=100 * MB),
    Yardstick(says="tensors: 2 times Open MPI from 16 MB up", ours="tensor", peer="mpi", times=2, smallest=16 * MB),
    Yardstick(says="buckets: 4 times Gloo", ours="bucket", peer="gloo", times=4),
    Yardstick(says="tensors: 4 times Gloo", ours="tensor", peer="gloo", times=4),
)


def verdicts_of(verdicts: Sequence[tuple[str, str, str]]) -> Table:
    """The table of yardsticks, one line each."""
    table = Table(title="Yardsticks, 2 ranks", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for wraps in (False, False, True):
        table.add_column(no_wrap=not wraps)
    for says, verdict, why in verdicts:
        table.add_row(f"[{ {'met': 'green', 'missed': 'red'}.get(verdict, 'yellow') }]{verdict}[/]", says, why)
    return table
