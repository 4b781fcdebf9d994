"""``gradsync compare``: one script under several strategies, for the same steps or seconds; a table and a report."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradsync import spec
from gradsync.advisor.network import rate_of
from gradsync.cli.options import file_option
from gradsync.cli.terminal import make_console
from gradsync.compare import Curve, Limits, Plan, RunFailed, Summary, run_one, summarize
from gradsync.compare.page import REACHED, render
from gradsync.compare.summary import common_loss
from gradsync.lab import Lab, LabError, why_unavailable

DEFAULT_STEPS = 100
LOG_WIDTH = 130  # of output that is no terminal's


def _read_specs(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
    """Refuse a bad spec here, before any run."""
    texts = [each.strip() for each in text.split(";") if each.strip()]
    if not texts:
        raise click.BadParameter('expected strategies with ";" between them: "allreduce; allreduce(codec=int8)".')
    if len(set(texts)) < len(texts):
        raise click.BadParameter(f"expected strategies that differ; got {'; '.join(texts)}.")
    for each in texts:
        try:
            spec.parse(each, kind="strategy")
        except spec.SpecError as error:
            raise click.BadParameter(str(error)) from error
    return texts


def _read_link(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    if text is not None:
        try:
            rate_of(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return text


class CompareCommand(click.Command):
    """A command whose options may also stand behind the script, which then has its own behind a "--".

    As `gradsync compare -n 2 train.py --sync "a; b" --link 1gbit -- --lr 0.1`. Where --sync stands before the script,
    all that is behind it is the script's.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, rest = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        front, script, behind = self._split(ctx, own)
        said = [word for word in front if word.partition("=")[0] == "--sync"]
        if script and not said and any(word.partition("=")[0] == "--sync" for word in behind):
            args = [*front, *behind, *script, *rest]
        return super().parse_args(ctx, args)

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str], list[str]]:
        """What stands before the script, the script, and what stands behind it."""
        takes_value = {name for param in self.params if not getattr(param, "is_flag", False) for name in param.opts}
        at = 0
        while at < len(args) and args[at].startswith("-"):
            at += 2 if args[at] in takes_value else 1
        return args[:at], args[at : at + 1], args[at + 1 :]


@click.command(cls=CompareCommand, context_settings={"allow_interspersed_args": False})
@click.option("-n", "--nproc-per-node", "workers", type=click.IntRange(min=1), required=True, help="How many workers.")
@click.option("--sync", "specs", metavar="SPECS", required=True, callback=_read_specs, help='Strategies, ";" between.')
@click.option("--steps", type=click.IntRange(min=2), help=f"Steps of each run; {DEFAULT_STEPS} unless said.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of each run, from the end of its first step.",
)
@click.option(
    "--link", metavar="RATE", callback=_read_link, help="Each worker on a host of a lab, on links of this rate."
)
@file_option("--output", default="compare.html", help="The report; the figures go beside it, as .json.")
@click.option("--timeout-s", type=click.FloatRange(min=1), default=3600.0, show_default=True, help="For each run.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.argument("script")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def compare(
    ctx: click.Context,
    workers: int,
    specs: list[str],
    steps: int | None,
    seconds: float | None,
    link: str | None,
    output: Path,
    timeout_s: float,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT under each strategy, for the same steps or seconds; write one table and one report.

    `gradsync compare -n 2 --sync "allreduce; allreduce(codec=int8)" --link 1gbit train.py --lr 0.1`. The script is
    unchanged: its loss is what it calls backward() on. A lab's link needs root on Linux.
    """
    if not module and not Path(script).exists():
        raise click.UsageError(
            f"expected a script to run; there is no file {script!r}. For a module: -m package.module"
        )
    if link is not None and workers < 2:
        raise click.UsageError(f"a link joins at least 2 workers; got -n {workers}.")
    lack = why_unavailable() if link is not None else None
    if lack is not None:
        raise click.ClickException(lack)
    if not output.parent.is_dir():
        raise click.ClickException(f"{output} can't be written: there is no folder {output.parent}.")
    limits = Limits(steps=DEFAULT_STEPS if steps is None and seconds is None else steps, seconds=seconds)
    command = [*(["-m"] if module else []), script, *arguments]
    plan = Plan(script=command, workers=workers, limits=limits, link=link, timeout_s=timeout_s)
    curves, failures, wires = _run_all(plan, specs)
    target = common_loss(list(curves.values())) if curves else None
    rows = [
        summarize(text, curves[text], target=target, wire_bytes=wires[text])
        if text in curves
        else Summary(strategy=text, failure=failures[text])
        for text in specs
    ]
    console = make_console(log_width=LOG_WIDTH)
    where = f"{workers} workers" + (f" on links of {link}" if link else " on this machine")
    title = f"{' '.join(command)}: {where}"
    console.print(_table(rows, title=title, target=target))
    for text, failure in failures.items():
        console.print(f"[bold red]failed[/] {text}:", highlight=False)
        console.print(failure, highlight=False, markup=False)
    _write(output, title, rows, curves, target)
    console.print(f"Written to {output} and {output.with_suffix('.json').name}", highlight=False)
    if failures:
        ctx.exit(1)


def _run_all(plan: Plan, specs: Sequence[str]) -> tuple[dict[str, Curve], dict[str, str], dict[str, float | None]]:
    curves: dict[str, Curve] = {}
    failures: dict[str, str] = {}
    wires: dict[str, float | None] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync_compare_")))
        try:
            lab = None if plan.link is None else stack.enter_context(Lab(hosts=plan.workers, rate=plan.link))
        except LabError as error:
            raise click.ClickException(str(error)) from error
        bar = stack.enter_context(Progress(*columns, console=console, transient=not console.is_terminal))
        for at, text in enumerate(specs):
            task = bar.add_task(text, total=plan.limits.steps)
            try:
                curves[text], wires[text] = run_one(
                    plan,
                    text,
                    folder / str(at),
                    lab=lab,
                    on_progress=lambda done, t=task: bar.update(t, completed=done),  # type: ignore[misc]
                )
            except RunFailed as error:
                failures[text] = str(error)
                bar.update(task, description=f"[red]{text}: failed[/]")
    return curves, failures, wires


def _table(rows: Sequence[Summary], *, title: str, target: float | None) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("strategy")
    names = ["steps", "step, ms", "sent, MB a step", "loss at the end"]
    if target is not None:
        names += [f"to loss {target:.4g}: s", "MB"]
        table.caption = REACHED
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        if row.failure:
            table.add_row(row.strategy, "[red]failed[/]")
            continue
        sent = row.bytes_per_step if row.wire_bytes_per_step is None else row.wire_bytes_per_step
        cells = [str(row.steps), _number(row.median_step_s, 1e3), _number(sent, 1e-6), _number(row.final_loss, 1.0, 4)]
        if target is not None:
            cells += [_number(row.seconds_to_loss, 1.0), _number(row.bytes_to_loss, 1e-6)]
        table.add_row(row.strategy, *cells)
    return table


def _number(value: float | None, unit: float, digits: int = 3) -> str:
    return "" if value is None else f"{value * unit:.{digits}g}" if value * unit < 1000 else f"{value * unit:,.0f}"


def _write(output: Path, title: str, rows: Sequence[Summary], curves: dict[str, Curve], target: float | None) -> None:
    figures = {
        "title": title,
        "target_loss": target,
        "runs": [row.as_dict() for row in rows],
        "curves": {text: {**vars(curve), "smoothed": curve.smoothed()} for text, curve in curves.items()},
    }
    output.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    output.write_text(render(figures))
