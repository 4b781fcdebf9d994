"""The options of ``gradsync run --elastic``: their help, their checks, and the settings that they make."""

from __future__ import annotations

import os
import secrets
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch.distributed.run as torchrun

from gradsync.cli.launch.chaos import Rate, cut_unavailable_reason, parse_chaos
from gradsync.comm.base import DEFAULT_TIMEOUT_S
from gradsync.comm.tcp.handshake import plain_address
from gradsync.elastic.membership import ON_PARTITION, MembershipSettings, OnPartition

DEFAULT_PORT = 29500  # torchrun's
DEFAULT_MAX_RESTARTS = 100
DEFAULT_RESTART_DELAY_S = 0.1
DEFAULT_GRACE_S = 30.0
DEFAULT_PARTITION_TIMEOUT_S = MembershipSettings.partition_timeout_s
CHAOS_TIMEOUTS = 2.0  # a stop or a cut lasts at most so many timeouts: some are noticed, some are over before

# The parameters of the options below, but for the flag itself.
ELASTIC_PARAMS = (
    "min_workers",
    "max_workers",
    "restart_delay_s",
    "grace_s",
    "resume",
    "save_every_s",
    "on_partition",
    "partition_timeout_s",
    "store",
    "chaos",
    "chaos_seed",
)

# torchrun's options that mean nothing without its agent and its rendezvous, each with what to do instead.
_REFUSED = {
    "rdzv_backend": "the launcher of node 0 holds the store. Give --master-addr and --master-port",
    "rdzv_endpoint": "the launcher of node 0 holds the store. Give --master-addr and --master-port",
    "rdzv_conf": "the launcher of node 0 holds the store, and there is nothing to configure",
    "monitor_interval": "the end of a worker is noticed at once",
    "start_method": "each worker is a process that is started anew",
    "event_log_handler": "there is no torchelastic agent that would log events",
    "role": "all workers have the same role",
    "no_python": "the workers agree on their members in Python",
    "run_path": "a worker runs its script by runpy anyway",
    "log_dir": "the workers' output goes where the launcher's goes. Use --prefix, and redirect the launcher's output",
    "redirects": "the workers' output goes where the launcher's goes. Use --prefix, and redirect the launcher's output",
    "tee": "the workers' output goes where the launcher's goes. Use --prefix, and redirect the launcher's output",
    "local_ranks_filter": "the output of all workers is shown. Use --prefix, and filter the lines",
    "duplicate_stdout_filters": "the output of all workers is shown. Use --prefix, and filter the lines",
    "duplicate_stderr_filters": "the output of all workers is shown. Use --prefix, and filter the lines",
    "local_addr": "the workers find each other by the interface that leads to node 0",
    "logs_specs": "the workers' output goes where the launcher's goes. Use --prefix",
    "numa_binding": "workers come and go. Bind the launcher itself, as with numactl",
    "signals_to_handle": "SIGTERM, SIGINT, SIGHUP and SIGQUIT end the run in order",
    "shutdown_timeout": "workers may take --grace-s to leave. Give that",
    "virtual_local_rank": "LOCAL_RANK is the place of a worker on its node",
}


class ElasticOption(click.Option):
    """An option of elastic runs only: a section of its own in the help, refused without --elastic."""


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """What the options of an elastic run ask for."""

    workers: int  # on this node
    min_workers: int  # in all; with fewer training does not go on
    max_workers: int
    min_nodes: int  # with which the run begins
    max_nodes: int
    node_rank: int | None  # None: the store gives the next number
    address: tuple[str, int] | None  # of the store, for several nodes; None: on this node's loopback
    run_id: str
    max_restarts: int  # of all workers of this node together
    restart_delay_s: float  # the first one; it doubles while workers die soon after their start
    grace_s: float  # from SIGTERM to SIGKILL
    resume: Path | None  # the folder with the saved state of the run
    save_every_s: float | None  # None: the run is saved only when it ends in order
    on_partition: OnPartition | None  # None: what the script says
    partition_timeout_s: float  # for how long workers that may not go on wait
    patience_s: float  # for how long workers may wait for the store of node 0: the time above, and one timeout
    faults: tuple[Rate, ...]
    chaos_seed: int
    longest_fault_s: float
    prefix: bool
    verbose: bool


_Command = TypeVar("_Command", bound=Callable[..., Any])


def elastic_options(command: _Command) -> _Command:
    """Add the options of elastic runs to a command."""
    options = (
        click.option(
            "--elastic",
            cls=ElasticOption,
            is_flag=True,
            help="Workers may die, join and leave: the others go on, and one that has died is started again, "
            f"--max-restarts times in all on this node (default here: {DEFAULT_MAX_RESTARTS}).",
        ),
        click.option(
            "--min",
            "min_workers",
            cls=ElasticOption,
            metavar="N",
            type=click.IntRange(min=1),
            help="The fewest workers, of all nodes, with which training goes on.  [default: 1]",
        ),
        click.option(
            "--max",
            "max_workers",
            cls=ElasticOption,
            metavar="N",
            type=click.IntRange(min=1),
            help="The most workers, of all nodes.  [default: those of --nnodes nodes with -n each]",
        ),
        click.option(
            "--restart-delay-s",
            cls=ElasticOption,
            type=click.FloatRange(min=0),
            help="How long to wait before a worker is started again. The delay doubles, up to 30 s, while the slot's "
            f"workers die within a minute of their start.  [default: {DEFAULT_RESTART_DELAY_S}]",
        ),
        click.option(
            "--grace-s",
            cls=ElasticOption,
            type=click.FloatRange(min=0),
            help="How long a worker that was told to end may take to leave in order; it is killed then.  "
            f"[default: {DEFAULT_GRACE_S:.0f}]",
        ),
        click.option(
            "--resume",
            cls=ElasticOption,
            metavar="DIR",
            type=click.Path(file_okay=False, path_type=Path),
            help="Save the run into this folder when all workers are told to end (SIGTERM, Ctrl-C, the end of the "
            "launcher), and go on from there when it is started again, with as many workers or others. The folder is "
            "made if it is not there. With several nodes it must be on a file system that all of them share.",
        ),
        click.option(
            "--save-every-s",
            cls=ElasticOption,
            metavar="S",
            type=click.FloatRange(min=0, min_open=True),
            help="With --resume: also save the run after so many seconds, again and again, in the background. If all "
            "workers are killed at once, no more than that is lost.  [default: only when the run ends in order]",
        ),
        click.option(
            "--on-partition",
            cls=ElasticOption,
            type=click.Choice(ON_PARTITION),
            help="What happens when the network splits, whatever the script says. pause: only the side with a majority "
            "of the workers goes on. diverge: every side goes on by itself, and they are merged when they meet "
            "again; only for strategies whose replicas may differ.  [default: the script's; pause]",
        ),
        click.option(
            "--partition-timeout-s",
            cls=ElasticOption,
            type=click.FloatRange(min=0),
            help="How long workers that are cut off, and may not go on, wait for the others before they fail. It "
            f"begins when --timeout-s is over.  [default: {DEFAULT_PARTITION_TIMEOUT_S:.0f}]",
        ),
        click.option(
            "--store",
            cls=ElasticOption,
            metavar="HOST:PORT",
            help="With several nodes: where the launcher of node 0 holds the run's store. The same as --master-addr "
            "HOST --master-port PORT.",
        ),
        click.option(
            "--chaos",
            cls=ElasticOption,
            metavar="FAULTS",
            help="Inject faults into this node's workers, each kind at a mean rate, as in 'kill 1/30s; stop 1/60s; "
            "cut 1/120s'. kill: SIGKILL. stop: SIGSTOP, and SIGCONT within two timeouts. cut: this node sends nothing "
            "to the other nodes for up to two timeouts (needs root).",
        ),
        click.option(
            "--chaos-seed",
            cls=ElasticOption,
            metavar="N",
            type=int,
            help="Draw the faults from this seed, to repeat their schedule.  [default: a new one, which is printed]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_not_elastic(params: dict[str, Any]) -> None:
    """Refuse the options of elastic runs in a run that is not one."""
    for name in ELASTIC_PARAMS:
        if params[name] is not None:
            option = "--" + name.removesuffix("_workers").replace("_", "-")
            raise click.UsageError(f"{option} is for elastic runs; got no --elastic. Give --elastic too.")


def read_settings(
    options: Any,
    given: dict[str, Any],
    params: dict[str, Any],
    *,
    workers: int,
    timeout_s: float | None,
    prefix: bool,
    verbose: bool,
) -> ElasticSettings:
    """Check the options of an elastic run, and make its settings.

    Args:
        options: what torchrun's parser has read.
        given: torchrun's options as the user gave them; None for those that were not given.
        params: the options of elastic runs.
        workers: how many of them on this node.
        timeout_s: what --timeout-s says.
        prefix: as the option of that name.
        verbose: as the option of that name.
    """

    def is_given(name: str) -> bool:
        return given.get(name) is not None or f"PET_{name.upper()}" in os.environ

    for name, instead in _REFUSED.items():
        if is_given(name):
            raise click.UsageError(f"--{name.replace('_', '-')} has no place in an elastic run: {instead}.")
    try:
        min_nodes, max_nodes = torchrun.parse_min_max_nnodes(options.nnodes)
    except (ValueError, RuntimeError) as error:
        raise click.BadParameter(f"{error}; expected N or MIN:MAX.", param_hint="--nnodes") from error
    if not 1 <= min_nodes <= max_nodes:
        raise click.BadParameter(f"expected 1 <= MIN <= MAX; got {options.nnodes}.", param_hint="--nnodes")
    if options.standalone and max_nodes > 1:
        raise click.UsageError(f"--standalone is for one node; got --nnodes {options.nnodes}. Choose one.")
    min_workers, max_workers = _limits(params, workers * min_nodes, workers * max_nodes)
    node_rank = options.node_rank if is_given("node_rank") else None
    if node_rank is not None and node_rank < 0:
        raise click.BadParameter(f"expected 0, 1, ...; got {node_rank}.", param_hint="--node-rank")
    has_address = is_given("master_addr") or is_given("master_port")
    default_delay_s, default_grace_s = DEFAULT_RESTART_DELAY_S, DEFAULT_GRACE_S
    partition_timeout_s = params["partition_timeout_s"]
    if partition_timeout_s is None:
        partition_timeout_s = DEFAULT_PARTITION_TIMEOUT_S
    return ElasticSettings(
        workers=workers,
        min_workers=min_workers,
        max_workers=max_workers,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank,
        address=_address(options, params["store"], max_nodes=max_nodes, has_address=has_address),
        run_id=options.rdzv_id if is_given("rdzv_id") else str(uuid.uuid4()),
        max_restarts=options.max_restarts if is_given("max_restarts") else DEFAULT_MAX_RESTARTS,
        restart_delay_s=default_delay_s if params["restart_delay_s"] is None else params["restart_delay_s"],
        grace_s=default_grace_s if params["grace_s"] is None else params["grace_s"],
        resume=_resume_folder(params),
        save_every_s=params["save_every_s"],
        on_partition=params["on_partition"],
        partition_timeout_s=partition_timeout_s,
        patience_s=partition_timeout_s + (timeout_s or DEFAULT_TIMEOUT_S),
        faults=_faults(params, max_nodes),
        chaos_seed=secrets.randbelow(1 << 31) if params["chaos_seed"] is None else params["chaos_seed"],
        longest_fault_s=CHAOS_TIMEOUTS * (timeout_s or DEFAULT_TIMEOUT_S),
        prefix=prefix,
        verbose=verbose,
    )


def _limits(params: dict[str, Any], started: int, default_max: int) -> tuple[int, int]:
    least = 1 if params["min_workers"] is None else params["min_workers"]
    most = default_max if params["max_workers"] is None else params["max_workers"]
    if most < started:
        raise click.UsageError(
            f"expected --max of at least {started}, the workers with which the run begins; got --max {most}. "
            f"Give --max {started}, or a smaller -n."
        )
    if least > min(most, default_max):
        raise click.UsageError(
            f"expected --min of at most {min(most, default_max)}, the most workers that can come; got --min {least}. "
            "Lower it, or start more workers."
        )
    return least, most


def _address(options: Any, store: str | None, *, max_nodes: int, has_address: bool) -> tuple[str, int] | None:
    if max_nodes == 1:
        if store is not None or has_address:
            name = "--store" if store is not None else "--master-addr and --master-port"
            raise click.UsageError(
                f"{name} is for several nodes: on one node the store is on the loopback, at a free port; got one "
                "node. Give --nnodes too, or leave it out."
            )
        return None
    if store is not None:
        if has_address:
            raise click.UsageError("--store is short for --master-addr and --master-port; got both. Choose one.")
        host, _, port = store.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise click.BadParameter(f"expected HOST:PORT, as in node0:29500; got {store!r}.", param_hint="--store")
        return plain_address(host), int(port)
    if not has_address:
        raise click.UsageError(
            f"expected the address of node 0 for --nnodes {options.nnodes}; got none. Give it on every node: "
            "--master-addr HOST --master-port 29500, and --node-rank 0, 1, ..."
        )
    return plain_address(options.master_addr), DEFAULT_PORT if options.master_port is None else options.master_port


def _resume_folder(params: dict[str, Any]) -> Path | None:
    """The folder of --resume, which is made if it is not there."""
    folder: Path | None = params["resume"]
    if folder is None:
        if params["save_every_s"] is not None:
            raise click.UsageError(
                "--save-every-s needs a folder to save into; got no --resume. Give --resume DIR too."
            )
        return None
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.BadParameter(
            f"expected a folder that can be written to; got {folder}: {error.strerror}.", param_hint="--resume"
        ) from error
    return folder


def _faults(params: dict[str, Any], max_nodes: int) -> tuple[Rate, ...]:
    if params["chaos"] is None:
        if params["chaos_seed"] is not None:
            raise click.UsageError("--chaos-seed is for the faults of --chaos; got no --chaos. Give --chaos too.")
        return ()
    try:
        faults = parse_chaos(params["chaos"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--chaos") from error
    if any(rate.kind == "cut" for rate in faults) and (lack := cut_unavailable_reason(max_nodes)):
        raise click.UsageError(f"--chaos 'cut' is not possible here: {lack}")
    return faults
