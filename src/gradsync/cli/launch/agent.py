"""torchelastic's agent, which starts and supervises the workers, with its own handling of failures.

torchelastic ends the survivors as soon as it sees a failure, and prints the failure that it saw first. Here the root
cause is printed at once, the survivors get the time to raise ``PeerLost`` themselves, and their errors follow.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import click
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from gradsync.cli.launch.failures import Attempt, Failure, format_ranks, group_by_outcome, root_cause
from gradsync.cli.launch.worker_signals import LOSS_NEWS_S

ENDING_S = 2.0  # the time for a process to end once it has begun to
SURVIVORS_NOTICE_S = 3.0  # if survivors take longer to end, a notice is printed
POLL_S = 0.05


class Agent(LocalElasticAgent):
    """Runs one node's workers; ``run()`` blocks until they have ended, and leaves no process of theirs behind.

    ``keep_going``: a failed worker is reported, and the others go on.
    """

    def __init__(
        self, config: LaunchConfig, command: str, arguments: list[str], errors_dir: Path, *, keep_going: bool = False
    ) -> None:
        assert config.logs_specs is not None, "LaunchConfig fills it in"
        assert config.shutdown_timeout is not None, "LaunchConfig fills it in"
        super().__init__(
            spec=_worker_spec(config, command, arguments),
            logs_specs=config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,
        )
        self._errors_dir = errors_dir
        self._attempt = Attempt(errors_dir, 0)
        self._keep_going = keep_going
        self._reported: dict[int, Failure] = {}  # with keep_going: the failures so far, by rank, in their order
        self.cause: Failure | None = None  # of the last attempt, if it failed
        self.has_started = False  # the rendezvous is complete, and the workers are being started

    # -- called by torchelastic ----------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # torchelastic keeps one store for all attempts. The workers would find stale addresses in it.
        handler = worker_group.spec.rdzv_handler
        for name in ("_shared_tcp_store_server", "_bootstrap_store_info"):
            if hasattr(handler, name):
                setattr(handler, name, None)
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        restart_count = worker_group.spec.max_restarts - self._remaining_restarts  # as in the workers' environment
        self._attempt = Attempt(self._errors_dir, restart_count)
        self._attempt.open()
        self.cause = None
        self.has_started = True
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = list(self._exit_codes().values())
        if any(code not in (None, 0) for code in codes):
            if self._keep_going:
                self._report_new_failures()
                if any(code is None for code in codes):
                    return RunResult(state=WorkerState.HEALTHY)
                self._print_failed_ranks()
            else:
                self._wait_for_survivors()
            self.kill_leftover_children()
            if self._remaining_restarts > 0:
                click.secho(f"starting all workers again ({self._remaining_restarts} more times at most)", err=True)
        elif any(code is None for code in codes):
            # Do not ask torchelastic: it would poll again, and end the others if one has failed since.
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    # -- going on after a failure --------------------------------------------------------------------------------

    def _report_new_failures(self) -> None:
        """Print the failures since the last call, and kill the processes that the failed workers have left behind."""
        consequences = []
        for rank, code in self._exit_codes().items():
            if code in (None, 0) or rank in self._reported:
                continue
            failure = self._reported[rank] = self._attempt.read_failure(rank, code, was_told_to_end=False)
            if failure.is_consequence:
                consequences.append(failure)
            else:
                click.secho(f"{failure.headline()}; the others go on", err=True, fg="red", bold=True)
                if failure.traceback:
                    click.echo(failure.traceback.rstrip("\n"), err=True)
            _kill_group(self._processes()[rank].pid)
        for line in group_by_outcome(consequences):
            click.secho(line, err=True)

    def _print_failed_ranks(self) -> None:
        """Once all workers have ended, print the failed ranks in one line."""
        self.cause = root_cause(self._reported.values()) or next(iter(self._reported.values()))
        ranks = format_ranks(self._reported)
        click.secho(
            f"{len(self._reported)} of {len(self._exit_codes())} workers failed: rank {ranks}", err=True, bold=True
        )

    # -- after a failure -----------------------------------------------------------------------------------------

    def _wait_for_survivors(self) -> None:
        """Print the cause, ask the survivors to end, and wait while they may still report an error."""
        survivors = {rank for rank, code in self._exit_codes().items() if code is None}
        self._show_cause(survivors)
        self._attempt.mark_failed()
        for rank in survivors:
            # Only the worker itself, not its children: a DataLoader whose workers die raises an error of its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes()[rank].pid, signal.SIGTERM)
        asked_at, has_printed_notice = time.monotonic(), False
        while waited_for := self._ranks_worth_waiting_for(time.monotonic() - asked_at):
            time.sleep(POLL_S)
            self._show_cause(survivors)
            if not has_printed_notice and time.monotonic() - asked_at > SURVIVORS_NOTICE_S:
                has_printed_notice = True
                grace_s = max(self._attempt.read_grace_s(rank) for rank in waited_for)
                ranks = format_ranks(waited_for)
                click.secho(f"waiting for rank {ranks}, at most {grace_s:.0f} s (Ctrl-C ends it)", err=True, dim=True)
        self._show_cause(survivors, final=True)
        cause = self.cause
        for line in group_by_outcome(
            failure for failure in self._failures(survivors) if cause and failure.rank != cause.rank
        ):
            click.secho(line, err=True)

    def _ranks_worth_waiting_for(self, waited_s: float) -> list[int]:
        running = [rank for rank, code in self._exit_codes().items() if code is None]
        grace_s = {rank: max(LOSS_NEWS_S, self._attempt.read_grace_s(rank)) for rank in running}
        return [rank for rank in running if waited_s < grace_s[rank] + ENDING_S]

    def _show_cause(self, survivors: set[int], *, final: bool = False) -> None:
        """Print the root cause once it is known. ``final``: if it is not known, print the best candidate."""
        if self.cause is not None:
            return
        failures = self._failures(survivors)
        self.cause = root_cause(failures)
        if self.cause is None and final:  # the cause is on another node: here are only its consequences
            self.cause = min((f for f in failures if f.exit_code != 0), key=lambda f: (not f.is_consequence, f.at_s))
        if self.cause is not None:
            click.secho(self.cause.headline(), err=True, fg="red", bold=True)
            if self.cause.traceback:
                click.echo(self.cause.traceback.rstrip("\n"), err=True)

    def _failures(self, survivors: set[int]) -> list[Failure]:
        """How each rank that has ended, or reported a failure, did so."""
        failures = []
        for rank, code in self._exit_codes().items():
            if code is None and self._attempt.has_failure_report(rank):
                code = 1  # it has failed, and is still ending
            if code is not None:
                failures.append(self._attempt.read_failure(rank, code, was_told_to_end=rank in survivors))
        return failures

    def kill_leftover_children(self) -> None:
        """Kill the child processes that ended workers have left. Each worker leads a process group of its own."""
        for process in self._processes().values():
            if process.poll() is not None:
                _kill_group(process.pid)

    def kill(self) -> None:
        """Kill every worker now."""
        for process in self._processes().values():
            _kill_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: not even SIGKILL helps
                process.wait(ENDING_S)

    def close(self) -> None:
        """Close the rendezvous; the other nodes then know that this run has ended."""
        self._rdzv_handler.shutdown()

    # -- the processes -------------------------------------------------------------------------------------------

    def _processes(self) -> dict[int, subprocess.Popen[Any]]:
        """The processes by global rank; empty before they are started."""
        if self._pcontext is None:
            return {}
        assert isinstance(self._pcontext, SubprocessContext), "the entry point is a command"
        handlers = self._pcontext.subprocess_handlers
        return {w.global_rank: handlers[w.local_rank].proc for w in self._worker_group.workers if handlers}

    def _exit_codes(self) -> dict[int, int | None]:
        return {rank: process.poll() for rank, process in self._processes().items()}


def _kill_group(leader_pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader_pid, signal.SIGKILL)


def _worker_spec(config: LaunchConfig, command: str, arguments: list[str]) -> WorkerSpec:
    """The worker spec that torchrun's ``launch_agent`` makes from a config: that function accepts no other agent."""
    rendezvous = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    master_addr, master_port = None, None
    if config.rdzv_backend == "static":
        master_addr, master_port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=29500)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=command,
        args=tuple(arguments),
        rdzv_handler=registry.get_rendezvous_handler(rendezvous),
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master_addr,
        master_port=master_port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
