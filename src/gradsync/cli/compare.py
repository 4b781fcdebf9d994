"""``gradsync compare``: one script under several strategies, for the same steps or seconds; a table and a report."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradsync import spec
from gradsync.advisor.network import rate_of
from gradsync.cli.interrupt import EndedBySignal, deferred_signals
from gradsync.cli.terminal import check_outputs, file_option, make_console, report_write_errors
from gradsync.compare import ComparisonPlan, ComparisonSummary, Curve, Limits, RunFailed, run_one, summarize
from gradsync.compare.page import REACHED, SENT, headline, render
from gradsync.compare.summary import base_of, common_loss
from gradsync.testing import Lab, LabError, lab_unavailable_reason

DEFAULT_STEPS = 100
LOG_WIDTH = 130  # columns of output that is not a terminal


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
    """A command whose options may also follow the script; the script's own options then follow a "--".

    For example `gradsync compare -n 2 train.py --sync "a; b" --link 1gbit -- --lr 0.1`. Where --sync precedes the
    script, everything after the script is the script's.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, rest = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        before, script, after = self._split(ctx, own)
        has_sync = any(word.partition("=")[0] == "--sync" for word in before)
        if script and not has_sync and any(word.partition("=")[0] == "--sync" for word in after):
            args = [*before, *after, *script, *rest]
        return super().parse_args(ctx, args)

    def _split(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str], list[str]]:
        """The arguments before the script, the script, and those after it."""
        takes_value = {name for param in self.params if not getattr(param, "is_flag", False) for name in param.opts}
        at = 0
        while at < len(args) and args[at].startswith("-"):
            at += 2 if args[at] in takes_value else 1
        return args[:at], args[at : at + 1], args[at + 1 :]


@click.command(cls=CompareCommand, context_settings={"allow_interspersed_args": False})
@click.option("-n", "--nproc-per-node", "workers", type=click.IntRange(min=1), required=True, help="How many workers.")
@click.option("--sync", "specs", metavar="SPECS", required=True, callback=_read_specs, help='Strategies, ";" between.')
@click.option("--steps", type=click.IntRange(min=2), help=f"Steps of each run; default: {DEFAULT_STEPS}.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of each run, from the end of its first step.",
)
@click.option(
    "--link", metavar="RATE", callback=_read_link, help="Run each worker on an emulated host, on links of this rate."
)
@file_option("--output", default="compare.html", help="The report; the figures go next to it, as .json.")
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
    unchanged: its loss is what it calls backward() on. --link needs root on Linux.
    """
    if not module and not Path(script).exists():
        raise click.UsageError(
            f"expected a script to run; there is no file {script!r}. For a module: -m package.module"
        )
    if link is not None and workers < 2:
        raise click.UsageError(f"a link joins at least 2 workers; got -n {workers}.")
    lack = lab_unavailable_reason() if link is not None else None
    if lack is not None:
        raise click.ClickException(lack)
    check_outputs(output, output.with_suffix(".json"))
    limits = Limits(steps=DEFAULT_STEPS if steps is None and seconds is None else steps, seconds=seconds)
    command = [*(["-m"] if module else []), script, *arguments]
    plan = ComparisonPlan(script=command, workers=workers, limits=limits, link=link, timeout_s=timeout_s)
    curves, failures, ended = _run_all(plan, specs)
    target = common_loss(list(curves.values())) if curves else None
    base = base_of(curves) if curves else None
    rows = [
        summarize(text, curves[text], target=target, base=base)
        if text in curves
        else ComparisonSummary(strategy=text, failure=failures[text])
        for text in specs
        if text in curves or text in failures
    ]
    if rows:
        where = f"{workers} workers" + (f" on links of {link}" if link else " on this machine")
        figures = _figures(f"{' '.join(command)}: {where}", rows, curves, target, on_link=link is not None)
        _show(figures, rows, failures)
        with report_write_errors():
            output.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
            output.write_text(render(figures))
        click.echo(f"Written to {output} and {output.with_suffix('.json').name}")
    if ended is not None:
        click.secho(str(ended), err=True)
        ctx.exit(ended.exit_code)
    if failures:
        ctx.exit(1)


def _run_all(
    plan: ComparisonPlan, specs: Sequence[str]
) -> tuple[dict[str, Curve], dict[str, str], EndedBySignal | None]:
    """Run each strategy. Returns the curves, the failures with their reasons, and the signal that ended it, if any."""
    curves: dict[str, Curve] = {}
    failures: dict[str, str] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        check = stack.enter_context(deferred_signals())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradsync_compare_")))
        try:
            lab = None if plan.link is None else stack.enter_context(Lab(hosts=plan.workers, rate=plan.link))
        except LabError as error:
            raise click.ClickException(str(error)) from error
        bar = stack.enter_context(Progress(*columns, console=console, transient=not console.is_terminal))

        def look(task: TaskID, done: int) -> None:
            check()
            bar.update(task, completed=done)

        for at, text in enumerate(specs):
            task = bar.add_task(text, total=plan.limits.steps)
            try:
                check()
                curves[text] = run_one(plan, text, folder / str(at), lab=lab, on_progress=functools.partial(look, task))
            except RunFailed as error:
                failures[text] = str(error)
                bar.update(task, description=f"[red]{text}: failed[/]")
            except EndedBySignal as ended:
                return curves, failures, ended
    return curves, failures, None


def _show(figures: Mapping[str, Any], rows: Sequence[ComparisonSummary], failures: Mapping[str, str]) -> None:
    console = make_console(log_width=LOG_WIDTH)
    console.print(_table(rows, title=figures["title"], target=figures["target_loss"], sent=figures["sent"]))
    for text, failure in failures.items():
        console.print(f"[bold red]failed[/] {text}:", highlight=False)
        console.print(failure, highlight=False, markup=False)
    if len(rows) > 1:
        console.print(headline(figures["runs"], figures["target_loss"]), style="bold", highlight=False)


def _table(rows: Sequence[ComparisonSummary], *, title: str, target: float | None, sent: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("strategy")
    names = ["steps", "step, ms", "sent, MB a step", "loss at the end"]
    if target is not None:
        names += [f"to loss {target:.4g}: s", "MB"]
    table.caption = sent if target is None else f"{sent} {REACHED}"
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("convergence")
    for row in rows:
        if row.failure:
            table.add_row(row.strategy, "[red]failed[/]")
            continue
        cells = [str(row.steps), _number(row.median_step_s, 1e3), _number(row.bytes_per_step, 1e-6)]
        cells.append(_number(row.final_loss, 1.0, 4))
        if target is not None:
            cells += [_number(row.seconds_to_loss, 1.0), _number(row.bytes_to_loss, 1e-6)]
        table.add_row(row.strategy, *cells, row.convergence)
    return table


def _number(value: float | None, unit: float, digits: int = 3) -> str:
    return "" if value is None else f"{value * unit:.{digits}g}" if value * unit < 1000 else f"{value * unit:,.0f}"


def _figures(
    title: str, rows: Sequence[ComparisonSummary], curves: Mapping[str, Curve], target: float | None, *, on_link: bool
) -> dict[str, Any]:
    """The contents of the page, and of the .json file."""
    return {
        "title": title,
        "sent": SENT[on_link],
        "target_loss": target,
        "runs": [row.as_dict() for row in rows],
        "curves": {text: {**vars(curve), "smoothed": curve.smoothed()} for text, curve in curves.items()},
    }
