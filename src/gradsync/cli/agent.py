"""torchelastic's agent, which starts and watches the workers, with better manners when one of them fails.

torchelastic ends the survivors as soon as it sees a failure, and prints a box with whatever it saw first. Here the
cause is shown at once, the survivors get the time to raise ``PeerLost`` themselves, and what they say follows.
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

from gradsync.cli.failures import Attempt, Failure, root_cause
from gradsync.cli.signals import NEWS_PATIENCE_S

ENDING_S = 2.0  # what a process may take to end once it has decided to
QUIET_S = 3.0  # after so long without a word, a person is told what is being waited for
POLL_S = 0.05


class Agent(LocalElasticAgent):
    """Runs one node's workers; ``run()`` blocks until they have ended, and leaves no process of theirs behind.

    ``keep_going``: a worker that fails is told of, and the others are left alone.
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
        self._told: dict[int, Failure] = {}  # with keep_going: who has failed so far, in this order
        self.cause: Failure | None = None  # of the last attempt, if it failed

    # -- what torchelastic calls ---------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        restart_count = worker_group.spec.max_restarts - self._remaining_restarts  # as the workers will be told
        self._attempt = Attempt(self._errors_dir, restart_count)
        self._attempt.open()
        self.cause = None
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = list(self._exit_codes().values())
        if any(code not in (None, 0) for code in codes):
            if self._keep_going:
                self._tell_of_failures()
                if any(code is None for code in codes):
                    return RunResult(state=WorkerState.HEALTHY)
                self._sum_up()
            else:
                self._hear_the_others_out()
            self.end_what_is_left()
            if self._remaining_restarts > 0:
                click.secho(f"starting all workers again ({self._remaining_restarts} more times at most)", err=True)
        elif any(code is None for code in codes):
            # Not torchelastic's to say: it would look again, and end the others if one has failed since.
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    # -- going on after a failure --------------------------------------------------------------------------------

    def _tell_of_failures(self) -> None:
        """Show how each worker failed that has since the last time, and end what it has left behind."""
        for rank, code in self._exit_codes().items():
            if code in (None, 0) or rank in self._told:
                continue
            failure = self._told[rank] = self._attempt.read_failure(rank, code, was_told_to_end=False)
            if failure.is_consequence:
                click.secho(failure.line(), err=True)
            else:
                click.secho(f"{failure.headline()}; the others go on", err=True, fg="red", bold=True)
                if failure.traceback:
                    click.echo(failure.traceback.rstrip("\n"), err=True)
            _kill_group(self._processes()[rank].pid)

    def _sum_up(self) -> None:
        """All have ended: say in one line who failed."""
        self.cause = root_cause(self._told.values()) or next(iter(self._told.values()))
        ranks = ", ".join(str(rank) for rank in sorted(self._told))
        click.secho(f"{len(self._told)} of {len(self._exit_codes())} workers failed: rank {ranks}", err=True, bold=True)

    # -- after a failure -----------------------------------------------------------------------------------------

    def _hear_the_others_out(self) -> None:
        """Show the cause, tell the survivors to end, and wait while they have something to say."""
        survivors = {rank for rank, code in self._exit_codes().items() if code is None}
        self._show_cause(survivors)
        self._attempt.say_failed()
        for rank in survivors:
            # Only the worker itself, not its children: a DataLoader whose workers die raises an error of its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes()[rank].pid, signal.SIGTERM)
        told_at, said_what_for = time.monotonic(), False
        while waited_for := self._ranks_worth_waiting_for(time.monotonic() - told_at):
            time.sleep(POLL_S)
            self._show_cause(survivors)
            if not said_what_for and time.monotonic() - told_at > QUIET_S:
                said_what_for = True
                patience_s = max(self._attempt.read_patience_s(rank) for rank in waited_for)
                ranks = ", ".join(str(rank) for rank in waited_for)
                click.secho(
                    f"waiting for rank {ranks}, at most {patience_s:.0f} s (Ctrl-C ends it)", err=True, dim=True
                )
        self._show_cause(survivors, at_last=True)
        for failure in self._failures(survivors):
            if self.cause is not None and failure.rank != self.cause.rank:
                click.secho(failure.line(), err=True)

    def _ranks_worth_waiting_for(self, waited_s: float) -> list[int]:
        running = [rank for rank, code in self._exit_codes().items() if code is None]
        patience_s = {rank: max(NEWS_PATIENCE_S, self._attempt.read_patience_s(rank)) for rank in running}
        return [rank for rank in running if waited_s < patience_s[rank] + ENDING_S]

    def _show_cause(self, survivors: set[int], *, at_last: bool = False) -> None:
        """Print the failure that the others follow from, once it is known; ``at_last``, the best there is."""
        if self.cause is not None:
            return
        failures = self._failures(survivors)
        self.cause = root_cause(failures)
        if self.cause is None and at_last:  # the cause is on another node: here are only those who lost it
            self.cause = min((f for f in failures if f.exit_code != 0), key=lambda f: (not f.is_consequence, f.at_s))
        if self.cause is not None:
            click.secho(self.cause.headline(), err=True, fg="red", bold=True)
            if self.cause.traceback:
                click.echo(self.cause.traceback.rstrip("\n"), err=True)

    def _failures(self, survivors: set[int]) -> list[Failure]:
        """How each rank has ended, as far as it has."""
        failures = []
        for rank, code in self._exit_codes().items():
            if code is None and self._attempt.has_word(rank):
                code = 1  # it has failed, and is still ending
            if code is not None:
                failures.append(self._attempt.read_failure(rank, code, was_told_to_end=rank in survivors))
        return failures

    def end_what_is_left(self) -> None:
        """Kill what ended workers have started and not ended. Each worker leads a process group of its own."""
        for process in self._processes().values():
            if process.poll() is not None:
                _kill_group(process.pid)

    def kill(self) -> None:
        """End every worker now, without asking."""
        for process in self._processes().values():
            _kill_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: nobody can help it
                process.wait(ENDING_S)

    def close(self) -> None:
        """Close the meeting place; the other nodes then know that this run is over."""
        self._rdzv_handler.shutdown()

    # -- the processes -------------------------------------------------------------------------------------------

    def _processes(self) -> dict[int, subprocess.Popen[Any]]:
        """The process of each rank, by its rank in the world; none before they are started."""
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
    """What torchrun's own ``launch_agent`` makes of a config: it offers no way to bring another agent."""
    meeting = RendezvousParameters(
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
        rdzv_handler=registry.get_rendezvous_handler(meeting),
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
