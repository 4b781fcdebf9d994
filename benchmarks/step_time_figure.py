"""Draws docs/assets/step_time.svg, the figure of the README, from the results that the README's table links.

python benchmarks/step_time_figure.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

PROJECT = Path(__file__).resolve().parent.parent
FIGURE = PROJECT / "docs" / "assets" / "step_time.svg"

WIDTH, LEFT, RIGHT, TOP = 760, 290, 70, 64
BAR, GAP, GROUP_GAP = 20, 6, 24
LONGEST = 2.5  # what the axis ends at, in units of the bare compute
DDP, GRADSYNC = "#9aa0a6", "#3f51b5"


@dataclass(frozen=True)
class Bar:
    """One bar: a variant of ``bench_step.py`` in one of its result files."""

    label: str
    file: str
    link: str  # as bench_step.py calls it
    variant: str

    @property
    def ratio(self) -> float:
        """Its step time over that of the bare compute in the same run."""
        found = json.loads((PROJECT / "benchmarks" / "results" / self.file).read_text())
        return float(found["summary"][self.link][self.variant]["ratio_to_compute"]["ratio"])

    @property
    def color(self) -> str:
        return DDP if self.variant.startswith("ddp") else GRADSYNC


ONE_HOST, GBIT, GBIT_INT8, MBIT = (
    "2026-11-16-0851-step.json",
    "2026-11-16-1546-step.json",
    "2026-11-17-0146-step.json",
    "2026-11-17-0142-step.json",
)
GROUPS = {
    "one host": (
        Bar("DDP", ONE_HOST, "same", "ddp"),
        Bar("gradsync, allreduce on Gloo", ONE_HOST, "same", "gradsync"),
        Bar("gradsync, allreduce in shared memory", ONE_HOST, "same", "gradsync_shm"),
    ),
    "1 Gbit/s": (
        Bar("DDP", GBIT, "1gbit", "ddp"),
        Bar("DDP, fp16 hook", GBIT, "1gbit", "ddp_fp16"),
        Bar("gradsync, allreduce(codec=int8)", GBIT_INT8, "1gbit", "int8"),
    ),
    "100 Mbit/s": (
        Bar("DDP, PowerSGD hook", MBIT, "100mbit", "ddp_powersgd"),
        Bar("gradsync, onebit_adam", MBIT, "100mbit", "onebit_adam"),
    ),
}


def draw() -> str:
    """The figure as SVG: a group of bars for each link, and a line where communication costs nothing."""
    scale = (WIDTH - LEFT - RIGHT) / LONGEST
    parts: list[str] = []
    y = TOP
    for link, bars in GROUPS.items():
        parts.append(f'<text x="16" y="{y + BAR - 5}" font-weight="600">{escape(link)}</text>')
        for bar in bars:
            length = bar.ratio * scale
            middle = y + BAR - 5
            parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{escape(bar.label)}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="2" fill="{bar.color}"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{middle}">{bar.ratio:.2f}</text>')
            y += BAR + GAP
        y += GROUP_GAP - GAP
    height = y + 4
    one = LEFT + scale
    ends = f'x1="{one:.1f}" y1="{TOP - 8}" x2="{one:.1f}" y2="{height - 18}"'
    title = "Time of a training step, in units of the bare compute (two workers; shorter is better)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="system-ui, sans-serif" font-size="13" fill="#202124" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>',
            f'<text x="16" y="26" font-size="14" font-weight="600">{title}</text>',
            f'<text x="{one:.1f}" y="{TOP - 14}" text-anchor="middle" fill="#5f6368">compute alone</text>',
            f'<line {ends} stroke="#202124" stroke-dasharray="3 3"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Write the figure."""
    FIGURE.write_text(draw())


if __name__ == "__main__":
    main()
