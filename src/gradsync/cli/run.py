"""``gradsync run``: start the workers of a training script, on torchrun's own launch API.

Every option of torchrun's is an option here, read from its own parser, so that what works there works here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig

from gradsync import spec
from gradsync.cli.launch.agent import Agent
from gradsync.cli.launch.capacity import capacity_warnings, free_bytes
from gradsync.cli.launch.elastic_agent import run_elastic
from gradsync.cli.launch.elastic_options import (
    ELASTIC_PARAMS,
    ElasticOption,
    check_not_elastic,
    elastic_options,
    read_settings,
)
from gradsync.cli.launch.worker import end_with_launcher
from gradsync.comm.connect import TRANSPORTS
from gradsync.compare.runs import OWNER

LOOPBACK = "127.0.0.1"
LAUNCHED_TRANSPORTS = tuple(name for name in TRANSPORTS if name not in ("solo", "mpi"))
NODES_NOTICE_S = 5.0  # if the other nodes are missing for longer, a notice is printed


class RunCommand(click.Command):
    """A command that has torchrun's options in addition to its own, in a section of their own in the help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own = list(self.params)
        self.params[:0] = _torchrun_options()

    @property
    def own_options(self) -> list[click.Parameter]:
        """The options that torchrun does not have, and that any run may have."""
        return [
            param for param in self._own if isinstance(param, click.Option) and not isinstance(param, ElasticOption)
        ]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        def section(title: str, params: Sequence[click.Parameter]) -> None:
            records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)

        first = [param for param in self.params if param.name in ("nproc_per_node", "module")]
        shown = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        own = [*first, *(param for param in shown if param in self._own or param.name == "help")]
        elastic = [param for param in own if isinstance(param, ElasticOption)]
        section("Options", [param for param in own if param not in elastic])
        if elastic:
            section("Elastic runs", elastic)
        section("torchrun's options", [param for param in shown if param not in own])


def _torchrun_options() -> list[click.Option]:
    """Torchrun's options as click's. None gets a default here: torchrun has them, from PET_* variables too."""
    options = []
    for action in torchrun.get_args_parser()._actions:
        names = [name for name in action.option_strings if "_" not in name]  # `token_normalize_func` maps _ to -
        if action.dest == "nproc_per_node":
            names.insert(0, "-n")
        if not names or action.dest == "help":
            continue
        if action.nargs == 0:
            options.append(click.Option([*names, action.dest], is_flag=True, default=None, help=action.help))
            continue
        kind: type | click.Choice[str] = action.type if action.type in (int, float) else str
        if action.choices:
            kind = click.Choice([str(choice) for choice in action.choices])
        options.append(click.Option([*names, action.dest], type=kind, default=None, help=_help_of(action)))
    return options


def _help_of(action: argparse.Action) -> str:
    """Torchrun's help of an option, with its default, which click does not know."""
    text = action.help or ""
    missing = action.default not in (None, "", []) and "default" not in text.lower()
    return f"{text}  [default: {action.default}]" if missing else text


def _check_sync(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    """Refuse a bad spec here, before any worker starts."""
    if text is not None:
        try:
            spec.parse(text, kind="strategy")
        except spec.SpecError as error:
            raise click.BadParameter(str(error)) from error
    return text


def _check_transport(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    if name == "mpi":
        raise click.BadParameter(
            "mpi is for ranks that MPI itself starts: GRADSYNC_TRANSPORT=mpi mpirun -n 4 python train.py"
        )
    if name is not None and name not in TRANSPORTS:
        raise click.BadParameter(f"expected one of {', '.join(TRANSPORTS)}; got {name!r}.")
    return name


@click.command(
    cls=RunCommand,
    context_settings={
        "allow_interspersed_args": False,  # arguments after the script are the script's
        "token_normalize_func": lambda token: token.replace("_", "-"),
    },
    epilog="Two nodes: gradsync run --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 -n 4 train.py",
)
@click.option(
    "--sync",
    metavar="SPEC",
    envvar="GRADSYNC_SYNC",
    callback=_check_sync,
    help=f"Override the script's strategy: {', '.join(spec.names('strategy'))}; with its arguments as in "
    "'allreduce(codec=int8)' or 'diloco(every=50)'.",
)
@click.option(
    "--timeout-s",
    envvar="GRADSYNC_TIMEOUT_S",
    type=click.FloatRange(min=0, min_open=True),
    help="Override the script's timeout: a peer that is silent for longer counts as lost.",
)
@click.option(
    "--transport",
    metavar="NAME",
    envvar="GRADSYNC_TRANSPORT",
    callback=_check_transport,
    help=f"What moves the tensors, where the script leaves it open: {', '.join(LAUNCHED_TRANSPORTS)}.",
)
@click.option(
    "--servers",
    type=click.IntRange(min=1),
    help="Also start this many parameter servers, for parameter_server(). If a worker fails, the others then go on.",
)
@click.option(
    "--keys",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="With --servers: only holders of these keys may connect (see `gradsync keys`). Default: new keys for the run.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="If a worker fails, let the others go on, for strategies that tolerate it: gossip, parameter_server.",
)
@click.option("--prefix", is_flag=True, help="Begin every line that a worker prints with its [rank].")
@click.option(
    "--verbose",
    is_flag=True,
    help="Show torchelastic's own log and its summary of a failure; in an elastic run, each start of a worker.",
)
@elastic_options
@click.argument("script")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    script: str,
    arguments: tuple[str, ...],
    sync: str | None,
    timeout_s: float | None,
    transport: str | None,
    servers: int | None,
    keys: str | None,
    keep_going: bool,
    prefix: bool,
    verbose: bool,
    elastic: bool,
    **given: Any,
) -> None:
    """Start SCRIPT with its ARGS in several workers that train in step.

    `gradsync run -n 4 train.py --lr 0.1` runs it four times on this machine. If a worker fails, its rank and its
    traceback are shown first, the others are ended, and the exit code is that worker's: 1 after an exception, 3 after
    sys.exit(3), 128 + n after signal n. (With --keep-going they are not ended, and the last line names the failed
    ranks.) Ctrl-C ends all.
    """
    if owner := os.environ.pop(OWNER, None):
        end_with_launcher(int(owner))  # of a command that runs several scripts, one after the other
    elastic_params = {name: given.pop(name) for name in ELASTIC_PARAMS}
    if not elastic:
        check_not_elastic(elastic_params)
    options = torchrun.parse_args([*_as_arguments(given, ctx.command), script])
    options.training_script_args = list(arguments)
    _check_script(options)
    if options.no_python and (sync or timeout_s):
        raise click.UsageError("--sync and --timeout-s reach Python scripts only; got --no-python too.")
    if elastic and (keep_going or servers is not None):
        name = "--keep-going" if keep_going else "--servers"
        raise click.UsageError(
            f"in an elastic run the other workers go on anyway, and a new one is started; got {name} too. Choose one."
        )
    _check_servers(options, servers, keys)
    keep_going = keep_going or servers is not None
    if keep_going and options.max_restarts:
        raise click.UsageError("--keep-going (or --servers) restarts no worker; got --max-restarts too. Choose one.")
    try:
        workers = torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise click.BadParameter(f"{error}; expected a number, auto, cpu, gpu or xpu.", param_hint="-n") from error
    if workers < 1:
        raise click.BadParameter(f"expected at least 1 worker; got {workers}.", param_hint="-n")
    if elastic:
        settings = read_settings(
            options, given, elastic_params, workers=workers, timeout_s=timeout_s, prefix=prefix, verbose=verbose
        )
    else:
        has_address = given.get("master_addr") is not None or "PET_MASTER_ADDR" in os.environ
        _check_rendezvous(options, has_address=has_address)
    for line in capacity_warnings(workers, cores=len(os.sched_getaffinity(0)), free_bytes=free_bytes()):
        click.secho(f"warning: {line}", err=True, fg="yellow")
    # torchrun would set 1: cores would idle whenever there are fewer workers than cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    overrides = {"GRADSYNC_SYNC": sync, "GRADSYNC_TIMEOUT_S": timeout_s, "GRADSYNC_TRANSPORT": transport}
    for name, value in overrides.items():
        if value is not None:
            os.environ[name] = str(value)
    if elastic:
        with tempfile.TemporaryDirectory(prefix="gradsync_", ignore_cleanup_errors=True) as folder:
            ctx.exit(run_elastic(settings, [sys.executable, *_worker_arguments(options)], Path(folder)))
    if prefix:
        options.tee = "3"
        os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
    with (
        tempfile.TemporaryDirectory(prefix="gradsync_", ignore_cleanup_errors=True) as folder,
        _serving(servers, Path(folder) / "snapshots", keys),
    ):
        ctx.exit(_launch(options, Path(folder), verbose=verbose, keep_going=keep_going))


def _as_arguments(given: dict[str, Any], command: click.Command) -> list[str]:
    """The given options of torchrun, as arguments for torchrun's own parser."""
    names = {param.name: max(param.opts, key=len) for param in command.params}
    flags = [names[name] for name, value in given.items() if value is True]
    values = {name: value for name, value in given.items() if value is not None and not isinstance(value, bool)}
    return flags + [f"{names[name]}={value}" for name, value in values.items()]


def _worker_arguments(options: Any) -> list[str]:
    """The arguments with which Python runs a worker."""
    which = "-m" if options.module else "--"
    worker = ["-u", "-m", "gradsync.cli.launch.worker", which, options.training_script]
    return worker + list(options.training_script_args)


def _check_script(options: Any) -> None:
    if not options.module and not options.no_python and not Path(options.training_script).exists():
        raise click.UsageError(
            f"expected a script to run; there is no file {options.training_script!r}. "
            "For a module: gradsync run -m package.module"
        )


def _check_rendezvous(options: Any, *, has_address: bool) -> None:
    """Refuse several nodes without a rendezvous address: each would silently wait for the others on itself."""
    try:
        min_nodes, max_nodes = torchrun.parse_min_max_nnodes(options.nnodes)
    except (ValueError, RuntimeError):
        return  # torchrun itself reports it
    static = options.rdzv_backend == "static" and not options.rdzv_endpoint and not options.standalone
    if 1 < min_nodes <= max_nodes and static and not has_address:
        raise click.UsageError(
            f"expected the address of node 0 for --nnodes {options.nnodes}; got none. Give it on every node: "
            "--master-addr HOST --master-port 29500, and --node-rank 0, 1, ..."
        )


def _check_servers(options: Any, servers: int | None, keys: str | None) -> None:
    if servers is None:
        if keys is not None:
            raise click.UsageError("--keys is for the servers that --servers starts; got no --servers.")
        return
    if options.no_python:
        raise click.UsageError("--servers reaches Python scripts only; got --no-python too.")
    if torchrun.parse_min_max_nnodes(options.nnodes)[1] > 1:
        raise click.UsageError(
            "--servers starts servers on this machine, for workers of this machine. With several nodes start them "
            "yourself, `gradsync serve`, and name them: parameter_server(servers=[...])."
        )


@contextlib.contextmanager
def _serving(servers: int | None, folder: Path, keys: str | None) -> Iterator[None]:
    """Run parameter servers for as long as the workers run."""
    if servers is None:
        yield
        return
    from gradsync.cli.launch.servers import LocalServers
    from gradsync.messaging.key_folder import make_key_folder

    if keys is None:
        keys = str(folder.parent / "keys")  # deleted after the run, and readable by this user only
        make_key_folder(keys)
    processes = LocalServers(servers, folder, keys)
    os.environ["GRADSYNC_SERVERS"] = json.dumps({"addresses": processes.addresses, "keys": keys})
    try:
        yield
    finally:
        processes.close()


def _launch(options: Any, folder: Path, *, verbose: bool, keep_going: bool) -> int:
    """Run the workers until they end; returns the exit code."""
    os.environ["GRADSYNC_ERROR_DIR"] = str(folder)
    os.environ["GRADSYNC_LAUNCHER_PID"] = str(os.getpid())
    if options.redirects != "0":
        os.environ["GRADSYNC_KEEP_STDERR"] = "1"  # a log file must hold the traceback too
    elif options.log_dir is None:
        options.log_dir = str(folder / "logs")
    options.run_path = False  # a worker runs its script by runpy anyway
    with _quiet_torchelastic(verbose=verbose):
        try:
            _set_rendezvous(options)
            config, command, arguments = torchrun.config_from_args(options)
        except (ValueError, AssertionError, RuntimeError) as error:  # torchrun's checks of its options
            raise click.UsageError(str(error)) from error
        assert isinstance(command, str), "run_path is off"
        if not options.no_python:
            arguments = _worker_arguments(options)
        if options.redirects != "0" and config.logs_specs is not None:
            click.secho(f"the workers' output goes to {config.logs_specs.root_log_dir}", err=True, dim=True)
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _signals_to_handle(config.signals_to_handle)
        with _handlers_restored():  # torchelastic leaves its own installed, which would raise in later code
            return _run(config, command, arguments, folder, verbose=verbose, keep_going=keep_going)


def _run(
    config: LaunchConfig, command: str, arguments: list[str], folder: Path, *, verbose: bool, keep_going: bool
) -> int:
    agent: Agent | None = None
    try:
        agent = Agent(config, command, arguments, folder, keep_going=keep_going)
        with _notice_if_nodes_are_late(config, agent):
            result = agent.run()
    except SignalException as ended:
        if agent is not None:
            agent.kill()  # workers that have not ended in time, or a second Ctrl-C
        click.secho(f"ended by {ended.sigval.name}", err=True)
        return 128 + ended.sigval  # the rendezvous stays open: other nodes may go on
    except RendezvousError as error:
        raise click.ClickException(f"the rendezvous at {config.rdzv_endpoint!r} has failed: {error}") from error
    agent.close()
    if result is None or not result.is_failed():
        return 0
    if verbose:
        click.echo(str(ChildFailedError("gradsync run", result.failures)), err=True)
    return 1 if agent.cause is None else agent.cause.launcher_code


@contextlib.contextmanager
def _notice_if_nodes_are_late(config: LaunchConfig, agent: Agent) -> Iterator[None]:
    """Print one notice if the other nodes do not arrive in time: the main thread waits in C and can't print."""

    def print_notice() -> None:
        if not agent.has_started:
            click.secho(
                f"waiting for the other nodes at {config.rdzv_endpoint}: {config.min_nodes} must come (Ctrl-C ends it)",
                err=True,
                dim=True,
            )

    timer = threading.Timer(NODES_NOTICE_S, print_notice)
    timer.daemon = True
    if config.min_nodes > 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _set_rendezvous(options: Any) -> None:
    """Set the rendezvous as torchrun does: a single node takes a free port, so that two runs on it don't collide."""
    is_given = options.rdzv_backend != "static" or options.rdzv_endpoint or options.master_port is not None
    _, max_nodes = torchrun.parse_min_max_nnodes(options.nnodes)
    if options.standalone or (max_nodes == 1 and not is_given):
        options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
        options.local_addr = options.local_addr or LOOPBACK  # the host's own name need not resolve
    if options.master_port is None:
        options.master_port = 29500


def _signals_to_handle(names: str) -> str:
    """The signals that torchelastic shall catch once workers run; a signal that nohup ignores stays ignored.

    Until then none is caught: during the rendezvous the main thread waits in C, and would run a handler too late.
    """
    caught = [name for name in names.split(",") if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    for name in caught:
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    return ",".join(caught)


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Restore Python's default signal handlers once the workers have ended."""
    numbers = [signal.Signals[name] for name in os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"].split(",") if name]
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextlib.contextmanager
def _quiet_torchelastic(*, verbose: bool) -> Iterator[None]:
    """Silence torchelastic's log: this command prints what a user needs. ``verbose``: show all of it."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch.")]
    if verbose:
        logging.basicConfig(stream=sys.stderr)
        for logger in loggers:
            if logger.name.startswith("torch.distributed"):
                logger.setLevel(logging.INFO)
    before = logging.root.manager.disable
    logging.disable(logging.NOTSET if verbose else logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
