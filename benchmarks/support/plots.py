"""The style of the benchmarks' plots: transparent, in greys and colours that are visible on light and dark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # only a plot that is saved needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#808080"
# Of medium lightness: visible on white and on black.
COLOURS = ("#8c8c8c", "#2f80ed", "#22a06b", "#e8710a", "#c2468f", "#9b5de5", "#c79a00", "#14a3b8", "#d64545")


@contextlib.contextmanager
def figure_for(path: Path, *, width: float, height: float) -> Iterator[Figure]:
    """An empty figure of this size in inches; it is saved as an SVG at the end of the block."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    grey_parts = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style: Any = {**dict.fromkeys(grey_parts, GREY), "axes.spines.top": False, "axes.spines.right": False}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "gradsync", "font.size": 11}
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, transparent=True, metadata={"Date": None})


def look_of(number: int, label: str) -> dict[str, Any]:
    """A line's colour and stroke: the first, with which the others are compared, is grey, dashed and thick."""
    first = number == 0
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linewidth": 2.4 if first else 1.6,
        "linestyle": "--" if first else "-",
        "label": label,
    }


def add_grid(axes: Axes) -> None:
    """Add faint horizontal grid lines."""
    axes.grid(visible=True, axis="y", color=GREY, alpha=0.25, linewidth=0.6)
