"""``gradsync tune-comm``: measure which all-reduce algorithm is the fastest here, for each size, and save the result.

The command starts its own workers, each of which runs this command again. Under a launcher it is a worker itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table as Grid

from gradsync.cli.launch.relaunch import connect_worker, is_worker, relaunch
from gradsync.cli.terminal import make_console, show_size, transport_option, why_unwritable
from gradsync.comm.allreduce.autotune import SMALLEST_BYTES, hosts_of, measure, rules_from, sizes_up_to, winner
from gradsync.comm.allreduce.selector import SelectedAllReduce
from gradsync.comm.allreduce.table import (
    CHOICES,
    NATIVE,
    Rule,
    Table,
    load_if_there,
    save_table,
    table_file,
    this_machine,
)
from gradsync.comm.objects import broadcast_object

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _read_bytes(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """65536, 64K, 16M or 1G as a number."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    num_bytes = int(match[1]) * UNITS[match[2].upper()] if match is not None else 0
    if num_bytes < SMALLEST_BYTES:
        raise click.BadParameter(f"expected a number of bytes of at least {SMALLEST_BYTES}, such as 64K; got {text!r}.")
    return num_bytes


@click.command("tune-comm")
@click.option("-n", "--nproc-per-node", "workers", type=int, help="How many workers to start on this machine.")
@transport_option
@click.option(
    "--max-bytes",
    metavar="SIZE",
    default="64M",
    callback=_read_bytes,
    show_default=True,
    help="The largest size to measure: 65536, 64K, 16M, 1G.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="How often each algorithm is measured at each size; more => steadier figures, longer runs.",
)
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="Where to save; default: the user's own file."
)
@click.option("--dry-run", is_flag=True, help="Measure and show, but save nothing.")
@click.pass_context
def tune(
    ctx: click.Context,
    workers: int | None,
    transport: str,
    max_bytes: int,
    rounds: int,
    output: Path | None,
    dry_run: bool,
) -> None:
    """Measure the all-reduce algorithms on this machine; later runs use the fastest for each size.

    `gradsync tune-comm -n 4` measures four workers here. Between machines, start it as the training is started:
    `gradsync run --nnodes 2 ... -n 4 -m gradsync.cli.main tune-comm` or with torchrun or mpirun.
    """
    path = (output or table_file(os.environ).path).absolute()
    os.environ.pop("GRADSYNC_COLLECTIVES", None)  # connecting would need the file, which does not exist yet
    if is_worker():
        if workers is not None:
            raise click.UsageError("-n starts workers, but a launcher has started this one already. Leave it out.")
        _run_worker(transport, sizes_up_to(max_bytes), rounds, path, dry_run=dry_run)
        return
    if workers is None:
        raise click.UsageError("expected -n, the number of workers: gradsync tune-comm -n 4")
    if workers < 2:
        raise click.BadParameter(
            f"expected at least 2 workers, since one has no peers; got {workers}.", param_hint="-n"
        )
    if problem := _problem_with(path, dry_run=dry_run):
        raise click.ClickException(problem)
    again = ["tune-comm", f"--transport={transport}", f"--max-bytes={max_bytes}", f"--rounds={rounds}"]
    again += [f"--output={path}", *(["--dry-run"] if dry_run else [])]
    relaunch(ctx, again, workers=workers)


def _problem_with(path: Path, *, dry_run: bool) -> str:
    """Why the result could not be saved: checked before measuring. Empty if it can be."""
    try:
        load_if_there(path)
    except ValueError as error:
        return str(error)
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    if not dry_run and not folder.is_dir():
        return f"{path} can't be written: {folder} is not a folder. Name a file by --output."
    return "" if dry_run else why_unwritable(path if folder == path.parent else folder / path.name)


def _run_worker(transport: str, sizes: list[int], rounds: int, path: Path, *, dry_run: bool) -> None:
    """Measure with the other workers; rank 0 prints and saves."""
    comm = connect_worker(transport).unchecked()
    plain = comm.inner if isinstance(comm, SelectedAllReduce) else comm
    problem = broadcast_object(plain, _problem_with(path, dry_run=dry_run) if plain.rank == 0 else None, src=0)
    if problem:
        raise click.ClickException(problem)
    hosts = hosts_of(plain)
    candidate = SelectedAllReduce(plain, [], hosts)
    console = Console(stderr=True, quiet=plain.rank != 0)
    columns = TextColumn("measuring {task.description}"), BarColumn(), MofNCompleteColumn()
    measured = {}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(sizes) * (rounds + 1))
        for size in sizes:
            progress.update(task, description=show_size(size))
            measured[size] = measure(candidate, size, rounds=rounds, on_round=lambda: progress.advance(task))
    if plain.rank == 0:
        table = Table(
            transport=plain.transport,
            world_size=plain.world_size,
            num_hosts=len(set(hosts)),
            machine=this_machine(),
            rules=rules_from(measured),
        )
        _show(table, measured)
        _save(table, path, dry_run=dry_run)
    plain.barrier()  # no worker exits before all have received their data


def _show(table: Table, measured: dict[int, dict[str, float]]) -> None:
    hosts = "one host" if table.num_hosts == 1 else f"{table.num_hosts} hosts"
    grid = Grid(title=f"all-reduce over {table.transport}, {table.world_size} workers on {hosts}, in µs")
    grid.add_column("size", justify="right")
    for name in CHOICES:
        grid.add_column(name, justify="right")
    grid.add_column("taken")
    grid.add_column("GB/s", justify="right")
    grid.add_column("native is", justify="right")
    for size, seconds in measured.items():
        taken = winner(seconds)
        cells = [f"{1e6 * seconds[name]:.0f}" for name in CHOICES]
        marked = [
            f"[bold green]{cell} ◂[/]" if name == taken else cell for name, cell in zip(CHOICES, cells, strict=True)
        ]
        rate = f"{size / seconds[taken] / 1e9:.3f}"
        slower = "" if taken == NATIVE else f"{seconds[NATIVE] / seconds[taken]:.1f}x slower"
        grid.add_row(show_size(size), *marked, taken, rate, slower)
    make_console().print(grid)


def _save(table: Table, path: Path, *, dry_run: bool) -> None:
    before = next((other.rules for other in load_if_there(path) if table.replaces(other)), None)
    now = _describe(table.rules)
    if dry_run:
        click.echo(f"{now}. Nothing is saved: this was a dry run.")
        return
    save_table(path, table)
    if before is None:
        change = f"{now}; until now: native everywhere, as nothing was measured"
    elif before == table.rules:
        change = f"{now}, as before"
    else:
        change = f"{now}; until now: {_describe(before)}"
    click.echo(f"{change}.\nSaved to {path}.")
    if path == table_file(os.environ).path:
        click.echo(f"Runs of {table.world_size} workers on {table.machine.host} take it from now on.")
    else:
        click.echo(f"Runs use it if they are started with GRADSYNC_COLLECTIVES={path}")


def _describe(rules: tuple[Rule, ...]) -> str:
    """Rules as text: "tree up to 2 MiB, native above"."""
    if len(rules) == 1:
        return f"{rules[0][1]} everywhere"
    steps = [f"{name} up to {show_size(up_to)}" for up_to, name in rules if up_to is not None]
    return ", ".join([*steps, f"{rules[-1][1]} above"])
