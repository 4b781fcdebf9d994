"""``gradsync doctor``: measures this machine, or several and the links between them; prints problems and remedies."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from gradsync.cli.launch.relaunch import connect_worker, is_worker, relaunch
from gradsync.cli.terminal import make_console, show_size, transport_option
from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.doctor import Finding, LinkReport, MachineReport, clock_offsets, diagnose, examine, measure_links


@click.command()
@click.option("-n", "--nproc-per-node", "workers", type=click.IntRange(min=1), help="How many workers to start here.")
@click.option("--nnodes", type=click.IntRange(min=1), help="How many machines take part; start it on each of them.")
@click.option("--node-rank", type=click.IntRange(min=0), help="Which of them this is, from 0.")
@click.option("--master-addr", help="The address of machine 0.")
@click.option("--master-port", type=int, help="A free port there.")
@transport_option
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.2),
    default=3.0,
    show_default=True,
    help="How long to measure the links between the workers; longer => steadier.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.pass_context
def doctor(
    ctx: click.Context,
    workers: int | None,
    nnodes: int | None,
    node_rank: int | None,
    master_addr: str | None,
    master_port: int | None,
    transport: str,
    seconds: float,
    as_json: bool,
) -> None:
    """Measure this machine, and with several workers the links between them; say what is wrong and what to do.

    `gradsync doctor` looks at this machine alone, `gradsync doctor -n 2` also at two workers on it. Between machines,
    on each: `gradsync doctor --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 -n 1`, or start it as the
    training is started: `torchrun ... -m gradsync.cli.main doctor`.
    """
    rendezvous = {"nnodes": nnodes, "node-rank": node_rank, "master-addr": master_addr, "master-port": master_port}
    given = {name: value for name, value in rendezvous.items() if value is not None}
    if is_worker():
        if workers is not None or given:
            raise click.UsageError("a launcher has started this worker already: leave -n and --nnodes out.")
        _run_worker(transport, seconds, as_json=as_json)
        return
    if workers is None and not given:
        machine = examine()
        _show([machine], None, diagnose([machine]), as_json=as_json)
        return
    if nnodes is not None and nnodes > 1 and (master_addr is None or node_rank is None):
        missing = [name for name in ("--master-addr", "--node-rank") if rendezvous[name.removeprefix("--")] is None]
        raise click.UsageError(
            f"expected --master-addr and --node-rank with --nnodes {nnodes}; got no {' and no '.join(missing)}. On "
            "each machine: gradsync doctor --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500"
        )
    again = ["doctor", f"--transport={transport}", f"--seconds={seconds}", *(["--json"] if as_json else [])]
    relaunch(ctx, again, workers=workers or 1, rendezvous=[f"--{name}={value}" for name, value in given.items()])


def _run_worker(transport: str, seconds: float, *, as_json: bool) -> None:
    """Measure with the other workers; rank 0 prints."""
    comm = connect_worker(transport)
    console = Console(stderr=True, quiet=comm.rank != 0)
    with console.status(f"measuring {comm.world_size} workers, about {seconds + 2:.0f} s"):
        machines, links = examine_all(comm, seconds=seconds)
    if comm.rank == 0:
        _show(machines, links, diagnose(machines, links), as_json=as_json)
    comm.barrier()  # no worker exits before all have received their data


def examine_all(comm: Communicator, *, seconds: float) -> tuple[list[MachineReport], LinkReport]:
    """The reports of every rank's machine and of the links between them, on every rank. Blocks."""
    comm.barrier()  # all compute and copy at the same time, as they will in training
    own = examine(rank=comm.rank, environ=os.environ)
    offsets = clock_offsets(comm)
    machines = [MachineReport.from_dict(each) for each in all_gather_object(comm, _plain(own.as_dict()))]
    machines = [dataclasses.replace(each, clock_offset_s=offsets[each.rank]) for each in machines]
    return machines, measure_links(comm, seconds=seconds)


def _plain(data: dict[str, Any]) -> Any:
    """The same data as JSON represents it: with lists for tuples."""
    return json.loads(json.dumps(data))


def _show(
    machines: Sequence[MachineReport], links: LinkReport | None, findings: Sequence[Finding], *, as_json: bool
) -> None:
    if as_json:
        found = {
            "machines": [machine.as_dict() for machine in machines],
            "links": None if links is None else links.as_dict(),
            "findings": [finding.as_dict() for finding in findings],
        }
        click.echo(json.dumps(found, indent=2))
        return
    console = make_console()
    console.print(_machine_table(machines))
    if links is not None:
        console.print(_link_table(links))
        console.print(_all_reduce_table(links))
    _show_findings(console, findings)


def _machine_table(machines: Sequence[MachineReport]) -> Table:
    table = Table(title="machines", title_justify="left")
    for column in ("rank", "host", "cores", "threads", "GFLOP/s", "copy, GB/s", "interface", "clock, ms"):
        table.add_column(column, justify="left" if column in ("host", "interface") else "right")
    for machine in machines:
        used = machine.used_link
        rate = f" {used.mbit_per_s} Mbit/s" if used is not None and used.mbit_per_s else ""
        cores = f"{machine.cores}" + (f" of {machine.total_cores}" if machine.cores != machine.total_cores else "")
        table.add_row(
            str(machine.rank),
            machine.host + (f" ({', '.join(machine.gpus)})" if machine.gpus else ""),
            cores,
            f"{machine.threads}" + (f" (OMP {machine.omp})" if machine.omp else ""),
            f"{machine.gflops:.0f}",
            f"{machine.copy_gb_per_s:.1f}",
            (machine.used_interface or "") + rate,
            f"{machine.clock_offset_s * 1e3:+.1f}",
        )
    return table


def _link_table(links: LinkReport) -> Table:
    network = links.network
    table = Table(title="between the workers", title_justify="left", show_header=False)
    hosts = "one host" if links.num_hosts == 1 else f"{links.num_hosts} hosts"
    table.add_row("transport", f"{links.transport}, {links.world_size} workers on {hosts} ({links.why})")
    table.add_row(
        "rate", f"{network.gbit_per_s:.3g} Gbit/s ({network.bytes_per_s / 1e6:.4g} MB/s) while no worker computes"
    )
    busy = network.busy_bytes_per_s
    table.add_row("", f"{busy * 8 / 1e9:.3g} Gbit/s ({busy / 1e6:.4g} MB/s) while the workers compute")
    table.add_row("latency", f"{network.latency_s * 1e6:.0f} µs from one worker to another")
    table.add_row(
        "a small all-reduce", f"{network.call_s * 1e6:.0f} µs, {network.busy_call_s * 1e6:.0f} while computing"
    )
    table.add_row("takes from compute", f"{network.cpu_s_per_byte * 1e9:.2g} ms of a core for each MB sent")
    return table


def _all_reduce_table(links: LinkReport) -> Table:
    table = Table(title="all-reduce", title_justify="left")
    for column in ("size", "time, ms", "moves, GB/s"):
        table.add_column(column, justify="right")
    for size, seconds in links.all_reduce:
        table.add_row(show_size(size), f"{seconds * 1e3:.3g}", f"{size / seconds / 1e9:.3g}")
    return table


def _show_findings(console: Console, findings: Sequence[Finding]) -> None:
    if not findings:
        console.print("[bold green]Nothing is wrong here.[/]")
    for finding in findings:
        mark = "[bold red]wrong[/] " if finding.severity == "wrong" else "[yellow]advice[/]"
        console.print(f"{mark} {finding.what}.", highlight=False)
        console.print(f"       {finding.do}", highlight=False)
