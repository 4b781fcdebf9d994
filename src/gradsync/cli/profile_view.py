"""The terminal output of ``gradsync profile``: tables and bars from a run's summary and the advisor's answer."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradsync.profiling.record import PARTS, Breakdown
from gradsync.profiling.summary import RunSummary

STYLES = {
    "compute": "#4e79a7",
    "pack": "#b07aa1",
    "encode": "#edc948",
    "decode": "#f28e2b",
    "waiting": "#e15759",
    "wire": "#59a14f",
}
DESCRIPTIONS = {
    "compute": "the script's own work",
    "pack": "gradients into buckets and back",
    "encode": "codec, before sending",
    "decode": "codec, after receiving",
    "waiting": "for the slowest rank",
    "wire": "data on its way",
}
MAX_BUCKETS = 12
MAX_ROWS = 8


def show(console: Console, summary: RunSummary, sentence: str, advice: dict[str, Any], *, note: str = "") -> None:
    """Print the step as a bar, the ranks, the buckets, the predicted alternatives, and the verdict."""
    workers = "1 worker" if summary.world_size == 1 else f"{summary.world_size} workers"
    hosts = "1 host" if summary.num_hosts == 1 else f"{summary.num_hosts} hosts"
    console.print()
    console.print(
        f"[bold]{summary.strategy}[/] over {summary.transport}, {workers} on {hosts}; "
        f"means of {summary.num_typical} of {summary.num_steps} steps",
        highlight=False,
    )
    if note:
        console.print(f"[yellow]{note}[/]")
    console.print()
    console.print(_bar(summary.parts, width=min(78, console.width - 4)))
    console.print(_legend(summary))
    if summary.world_size > 1:
        console.print(_ranks(summary))
        console.print(_buckets(summary))
    if summary.changes:
        console.print(_members(summary))
    if "rows" in advice:
        console.print(_what_if(advice))
    elif summary.world_size > 1:
        console.print(f"[dim]{advice['problem']}[/]")
    console.print()
    console.print(Padding(Text(sentence, style="bold"), (0, 0, 1, 0)))


def _bar(parts: Breakdown, *, width: int) -> Text:
    """The step, each part as long as its share."""
    bar, drawn, upto = Text(), 0, 0.0
    for part in PARTS:
        upto += parts.share(part)
        cells = round(upto * width) - drawn
        bar.append("█" * cells, style=STYLES[part])
        drawn += cells
    return bar


def _legend(summary: RunSummary) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(justify="right")
    grid.add_column(style="dim")
    for part in PARTS:
        value_s = getattr(summary.parts, f"{part}_s")
        name = Text("■ ", style=STYLES[part]).append(part, style="default")
        grid.add_row(name, duration(value_s), f"{100 * summary.parts.share(part):.1f} %", DESCRIPTIONS[part])
    grid.add_row(Text("  step", style="bold"), Text(duration(summary.step_s), style="bold"), "", "")
    grid.add_row("  scaling efficiency", "", f"{100 * summary.efficiency:.1f} %", "of all ranks' time is compute")
    grid.add_row("  sent by a rank in a step", size(summary.sent_bytes), "", _rate(summary))
    if summary.staleness is not None:
        grid.add_row("  staleness", f"{summary.staleness:.2f}", "", "steps, on average")
    return grid


def _rate(summary: RunSummary) -> str:
    rate = "" if summary.bytes_per_s is None else f"at {summary.bytes_per_s * 8 / 1e9:.2f} Gbit/s while it moved"
    if summary.header_bytes < 0.01 * summary.sent_bytes:
        return rate
    return f"{size(summary.header_bytes)} of it is the step's header" + (f"; {rate}" if rate else "")


def _ranks(summary: RunSummary) -> Table:
    table = Table(title="ranks", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("rank", "busy", "slower by", "waiting", "wire"):
        table.add_column(name, justify="right")
    table.add_column("")
    for rank in summary.ranks:
        mark = "[bold red]the straggler[/]" if rank.rank == summary.straggler else ""
        table.add_row(
            str(rank.rank),
            duration(rank.busy_s),
            f"{100 * rank.slower:.0f} %",
            duration(rank.parts.waiting_s),
            duration(rank.parts.wire_s),
            mark,
        )
    return table


def _buckets(summary: RunSummary) -> Table:
    table = Table(title="buckets", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("", "gradients", "sent", "ready at", "encode", "waiting", "wire", "decode", "exposed"):
        table.add_column(name, justify="right")
    shown = sorted(summary.buckets, key=lambda bucket: -bucket.exposed_s)[:MAX_BUCKETS]
    for bucket in sorted(shown, key=lambda bucket: bucket.index):
        times = (bucket.ready_s, bucket.encode_s, bucket.waiting_s, bucket.wire_s, bucket.decode_s, bucket.exposed_s)
        table.add_row(
            str(bucket.index), size(bucket.num_bytes), size(bucket.sent_bytes), *(duration(time_s) for time_s in times)
        )
    if len(summary.buckets) > MAX_BUCKETS:
        table.caption = f"of {len(summary.buckets)} buckets those that are exposed the longest"
    return table


def _members(summary: RunSummary) -> Table:
    """The changes of the members of an elastic run, one line each."""
    table = Table(title="members", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("step", justify="right")
    table.add_column("what happened, and what it cost")
    for change in summary.changes:
        table.add_row(str(change.step), Text(change.describe()))
    return table


def _what_if(advice: dict[str, Any]) -> Table:
    table = Table(
        title=f"what if, on {advice['network']['name']}, predicted",
        title_justify="left",
        title_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("choice")
    for name in ("step", "synchronization", "sent"):
        table.add_column(name, justify="right")
    table.add_column("risk to convergence")
    now, *others = advice["rows"]
    rows = [now, *sorted(others, key=lambda row: row["step_s"])[: MAX_ROWS - 1]]
    for row in rows:
        style = "bold green" if advice["change"] and row["choice"] == advice["best"] else ""
        table.add_row(
            row["choice"] + (" (what ran)" if row is now else ""),
            duration(row["step_s"]),
            f"{100 * row['share']:.0f} %",
            size(row["bytes_per_step"]),
            "none: exact" if row["exact"] else row["risk"],
            style=style,
        )
    return table


def duration(seconds: float) -> str:
    """A time with three digits, in a suitable unit."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds / unit < 100 else f"{seconds / unit:.0f} {name}"
    return f"{seconds * 1e6:.0f} µs"


def size(num_bytes: float) -> str:
    """A number of bytes with three digits, in a suitable unit."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} B"
