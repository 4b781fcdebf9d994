"""``gradsync profile``: run a script unchanged, and show where its steps' time goes and what would help."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gradsync.cli.environment import advice_for, read_environment
from gradsync.cli.profile_view import show
from gradsync.cli.run import RunCommand, run
from gradsync.cli.terminal import check_outputs, file_option, make_console, report_write_errors
from gradsync.profiling.report import write_report
from gradsync.profiling.run import Run, load
from gradsync.profiling.summary import summarize, verdict
from gradsync.profiling.trace import write_trace


@click.command(
    cls=RunCommand,
    params=run.own_options,
    context_settings=run.context_settings,
    epilog="Everything after SCRIPT is the script's own. Other options are those of `gradsync run`.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=60,
    show_default=True,
    help="End the script after this many steps; more => steadier figures.",
)
@click.option("--to-the-end", is_flag=True, help="Let the script run to its own end, however many steps that takes.")
@file_option("--report", default="report.html", help="Where the report goes: one page that needs nothing else.")
@file_option(
    "--trace", default="trace.json", help="Where the trace goes, for https://ui.perfetto.dev or chrome://tracing."
)
@click.option(
    "--record-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep what the workers recorded here. On several nodes: a folder that all of them share.",
)
@click.option(
    "--network-s",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="How long to measure the network afterwards, for the what-if table; 0: not at all.",
)
@click.option("--elastic", is_flag=True, hidden=True)
@click.argument("script")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    script: str,
    arguments: tuple[str, ...],
    steps: int,
    to_the_end: bool,
    report: Path,
    trace: Path,
    record_dir: Path | None,
    network_s: float,
    elastic: bool,
    **given: Any,
) -> None:
    """Run SCRIPT with its ARGS in several workers, and show where the time of its steps goes.

    `gradsync profile -n 2 train.py` runs the script as `gradsync run` does, unchanged, for some steps; then it shows
    how much of a step is compute, waiting for the slowest worker, and waiting for the wire, and what would help. A run
    that fails or is stopped is reported as far as it came.
    """
    if elastic:
        raise click.UsageError(
            "gradsync profile measures workers that stay the same; got --elastic. Leave it out to profile the script. "
            "To record an elastic run, call gradsync.profiling.set_recording(folder=...) in the script and start it by "
            "`gradsync run --elastic`; write_report and write_trace make the report and the trace of that folder."
        )
    check_outputs(report, trace)
    with _folder(record_dir) as folder:
        settings = {"DIR": str(folder.absolute()), "STEPS": None if to_the_end else str(steps)}
        settings["NETWORK"] = str(network_s) if network_s > 0 else None
        with _environment({f"GRADSYNC_RECORD_{name}": value for name, value in settings.items()}):
            code = _run(ctx, script, arguments, given)
        _write_results(folder, report, trace, code, measured=network_s > 0)
    ctx.exit(code)


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="gradsync_profile_") as made:
            yield Path(made)
        return
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{given} can't be made: {error.strerror}. Name another folder.") from error
    check_outputs(given / "rank-0.jsonl")
    if any(given.glob("rank-*.jsonl")):
        raise click.UsageError(f"{given} holds what another run has recorded. Name an empty folder.")
    yield given


@contextlib.contextmanager
def _environment(settings: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    _set(settings)
    try:
        yield
    finally:
        _set(before)


def _set(settings: dict[str, str | None]) -> None:
    for name, value in settings.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _run(ctx: click.Context, script: str, arguments: tuple[str, ...], given: dict[str, Any]) -> int:
    """Run the script by ``gradsync run``; returns its exit code."""
    try:
        ctx.invoke(run, script=script, arguments=arguments, **given)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return 0


def _write_results(folder: Path, report: Path, trace: Path, code: int, *, measured: bool) -> None:
    """Print the profile, and write the report and the trace."""
    try:
        recorded = load(folder)
        summary = summarize(recorded)
    except ValueError as error:
        click.secho(f"nothing to report: {error}", err=True, fg="yellow")
        return
    advice = _advice(recorded, folder, measured=measured)
    sentence = verdict(summary, advice if "rows" in advice else None)
    note = "" if code == 0 else f"The run ended with code {code}; this is what there was until then."
    console = make_console(log_width=100)
    show(console, summary, sentence, advice, note=note)
    with report_write_errors():
        write_report(recorded, report, advice=advice, environment=read_environment(folder), note=note)
        write_trace(recorded, trace)
    console.print(f"[dim]report[/] {report}   [dim]trace[/] {trace}", highlight=False, soft_wrap=True)


def _advice(recorded: Run, folder: Path, *, measured: bool) -> dict[str, Any]:
    if recorded.world_size == 1:
        return {"problem": "one worker has no peers: there is nothing to choose"}
    if not measured:
        return {"problem": "the network was not measured, as --network-s 0 asks: so nothing is predicted"}
    return advice_for(recorded, read_environment(folder))
