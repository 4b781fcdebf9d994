"""The supervisor of one node's workers in an elastic run: it starts a new worker where one has died.

It holds the store by which the workers agree on their members, or connects to that of node 0. When a process ends, it
writes so into the store at once: the members then need not wait for a timeout.

[Note: endings] A worker's process ends in one of three ways. *Finished*: exit code 0; the run is ending, and no new
worker is started on any node. *Left*: exit code 0 after it has written ``left/<uid>``; it is not replaced. *Died*:
anything else; a new worker with the next incarnation takes its slot, after a delay.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from gradsync.cli.launch.chaos import Cut, Fault, Schedule
from gradsync.cli.launch.elastic_options import ElasticSettings
from gradsync.cli.launch.elastic_store import (
    LOOPBACK,
    STORE_LOST_S,
    Event,
    Finished,
    GivenUp,
    HostedStore,
    Left,
    MembersChanged,
    NextIncarnation,
    Node,
    OtherLaunchers,
    PeerAddresses,
    RunEnding,
    StoreLost,
    StoreReports,
    enter_run,
    is_own_address,
    next_incarnation,
    wait_for_nodes,
    wait_for_store,
)
from gradsync.cli.launch.failures import Failure, format_ranks
from gradsync.cli.launch.folder_lock import FolderLock
from gradsync.cli.launch.process import WorkerProcess
from gradsync.comm.tcp.handshake import url_address
from gradsync.elastic.store import BoundedStore
from gradsync.errors import StoreUnreachable

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LONGEST_DELAY_S = 30.0
SHORTEST_RETRY_S = 0.1  # where the system could not start a process
EARLY_S = 60.0  # a worker that dies within this time of its start doubles its slot's delay
HOPELESS_S = 10.0  # a worker that fails by itself within this time of its start, ...
HOPELESS_TIMES = 3  # ... so many times in a row, shows an error of the script
POLL_S = 0.01  # where the system does not tell of the end of a process
REPORTS_S = 5.0  # to write the last reports
OTHERS_POLL_S = 0.2
LOCK_MARGIN_S = 15.0  # the workers of a launcher that was killed end within the grace period and this


def run_elastic(settings: ElasticSettings, command: Sequence[str], folder: Path) -> int:
    """Run the workers of this node until the run has ended; returns the exit code.

    Args:
        settings: from the options.
        command: what each worker runs.
        folder: for the workers' failure reports.
    """
    with contextlib.ExitStack() as stack:
        try:
            hosted, store = _open_store(settings)
            lock = None
            if settings.resume is not None and hosted is not None:  # one lock for the run
                lock = stack.enter_context(FolderLock(settings.resume, wait_s=settings.grace_s + LOCK_MARGIN_S))
            agreed: dict[str, Any] = {
                "-n": settings.workers,
                "--min": settings.min_workers,
                "--max": settings.max_workers,
            }
            agreed |= {"--on-partition": settings.on_partition, "--partition-timeout-s": settings.partition_timeout_s}
            node = enter_run(
                store,
                is_host=hosted is not None,
                node_rank=settings.node_rank,
                settings=agreed | {"--nnodes": settings.min_nodes, "--resume": settings.resume is not None},
                run_id=settings.run_id,
            )
            wait_for_nodes(store, node, settings.min_nodes)
            agent = ElasticAgent(settings, command, folder, store, node, lock)
        except StoreUnreachable as error:
            raise click.ClickException(str(error)) from error
        code = agent.run()
        store.close()
        return code  # `hosted` lives until here


def _open_store(settings: ElasticSettings) -> tuple[HostedStore | None, BoundedStore]:
    """Host the run's store, or connect to that of node 0."""
    if settings.address is None:
        hosted = HostedStore(LOOPBACK, 0)
        return hosted, BoundedStore(LOOPBACK, hosted.port)
    host, port = settings.address
    # Without ranks the node whose address it is hosts the store. A second launcher on it finds the port in use.
    if settings.node_rank == 0 or (settings.node_rank is None and is_own_address(host)):
        try:
            return HostedStore(host, port), BoundedStore(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or settings.node_rank == 0:
                raise click.ClickException(
                    f"the store can't listen at {url_address(host)}:{port}: {error.strerror}. Is another run's node 0 "
                    "there? Give another --master-port on all nodes."
                ) from error
    wait_for_store(host, port)
    return None, BoundedStore(host, port)


@dataclass
class _Slot:
    """One place for a worker on this node."""

    number: int  # in the run
    local_rank: int
    delay_s: float  # before the next worker
    worker: WorkerProcess | None = None
    starts_at_s: float | None = None  # when a new worker is due; None: none is
    incarnation: int | None = None  # of the next worker; None: the store has not answered yet
    last_death: Failure | None = None
    hopeless: int = 0  # workers in a row that failed by themselves soon after their start
    ended: set[str] = field(default_factory=set)  # uids with code 0, of which the store has not said how they ended


class ElasticAgent:
    """Supervises the workers of one node. ``run()`` blocks until the run has ended, and leaves no process behind.

    Args:
        settings: from the options.
        command: what each worker runs.
        folder: for the workers' failure reports.
        store: the run's store.
        node: this launcher's place in the run.
        lock: of the folder of --resume, if this launcher holds it: the workers hold it too.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        command: Sequence[str],
        folder: Path,
        store: BoundedStore,
        node: Node,
        lock: FolderLock | None = None,
    ) -> None:
        self._settings = settings
        self._command = list(command)
        self._folder = folder
        self._store = store
        self._node = node
        self._lock = lock
        first = node.number * settings.workers
        delay_s = settings.restart_delay_s
        self._slots = [_Slot(first + i, i, delay_s) for i in range(settings.workers)]
        for slot in self._slots:
            slot.incarnation = next_incarnation(store, slot.number)
        self._schedule = (
            Schedule(settings.faults, seed=settings.chaos_seed, node=node.number, longest_s=settings.longest_fault_s)
            if settings.faults
            else None
        )
        self._stopped_until_s: dict[str, float] = {}  # workers that --chaos has stopped, by uid
        self._cut: Cut | None = None
        self._cut_s = 0.0  # how long the cut lasts for which the addresses were asked
        self._restarts = 0
        self._is_ending = False  # a worker has finished
        self._is_store_lost = False
        self._signal: signal.Signals | None = None  # that has ended the run
        self._given_up: int | None = None  # the exit code, if the run can't succeed
        self._last_death: Failure | None = None  # of a worker that was not replaced, and whose work nobody has done
        self._num_signals = 0
        self._kill_at_s: float | None = None  # when workers that were told to end are killed
        self._start_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._wakeups, self._waker = socket.socketpair()
        for end in (self._wakeups, self._waker):
            end.setblocking(False)
        self._selector.register(self._wakeups, selectors.EVENT_READ)
        self._reports = StoreReports(store, node, alone=settings.max_nodes == 1, notify=self._wake)

    def run(self) -> int:
        """Start the workers and supervise them until the run has ended; returns the launcher's exit code."""
        if self._schedule is not None:
            faults = "; ".join(f"{rate.kind} every {rate.mean_s:g} s" for rate in self._settings.faults)
            _say(f"chaos: {faults}, on average (--chaos-seed {self._settings.chaos_seed})")
        with self._handling_signals():
            try:
                for slot in self._slots:
                    self._start(slot)
                while not self._is_over():
                    self._selector.select(self._wait_s())
                    self._handle_signals()
                    self._collect_exits()
                    for event in self._reports.take_events():
                        self._handle_event(event)
                    self._act_in_time()
                    # Workers that are cut off wait for the store. Without any, nobody needs it any more.
                    is_needed = any(slot.worker or slot.starts_at_s is not None for slot in self._slots)
                    self._reports.patience_s = (
                        max(STORE_LOST_S, self._settings.patience_s) if is_needed else STORE_LOST_S
                    )
                self._end()
            finally:
                self._kill_all()
                if self._cut is not None:
                    self._cut.heal()
        if self._signal is not None:
            click.secho(f"ended by {self._signal.name}", err=True)
        return self._exit_code()

    # -- the loop ------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return not any(slot.worker or slot.starts_at_s is not None or slot.ended for slot in self._slots)

    def _wait_s(self) -> float | None:
        """How long nothing is to be done, unless a process ends, a signal comes or the store answers."""
        times = [
            slot.starts_at_s for slot in self._slots if slot.starts_at_s is not None and slot.incarnation is not None
        ]
        times += self._stopped_until_s.values()
        if self._kill_at_s is not None:
            times.append(self._kill_at_s)
        if self._schedule is not None and not self._is_stopping():
            times.append(self._start_s + self._schedule.next_at_s)
        if any(slot.worker is not None and slot.worker.pidfd is None for slot in self._slots):
            times.append(time.monotonic() + POLL_S)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def _act_in_time(self) -> None:
        """Do what is due: start workers, kill those that take too long to end, inject faults."""
        now_s = time.monotonic()
        for slot in self._slots:
            if slot.starts_at_s is not None and slot.incarnation is not None and slot.starts_at_s <= now_s:
                self._start(slot)
        if self._kill_at_s is not None and self._kill_at_s <= now_s:
            self._kill_all()
        for uid in [uid for uid, until_s in self._stopped_until_s.items() if until_s <= now_s]:
            self._resume(uid)
        while self._schedule is not None and not self._is_stopping():
            if self._start_s + self._schedule.next_at_s > now_s:
                break
            self._inject(self._schedule.pop())

    def _is_stopping(self) -> bool:
        """Whether no new workers are started."""
        return self._is_ending or self._kill_at_s is not None or self._is_store_lost

    # -- starting ------------------------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        assert slot.incarnation is not None, "the store has given it"
        uid = f"{slot.number}.{slot.incarnation}"
        try:
            slot.worker = worker = WorkerProcess(
                self._command,
                self._environment(slot, uid),
                slot=slot.number,
                uid=uid,
                errors_dir=self._folder,
                prefix=self._settings.prefix,
                keep_open=() if self._lock is None else self._lock.descriptors,
            )
        except OSError as error:  # no memory, no process ids or no space: a moment later there may be some
            delay_s = max(slot.delay_s, SHORTEST_RETRY_S)
            _say(f"worker {slot.number} can't be started: {error}; tried again in {delay_s:g} s", fg="red", bold=True)
            slot.starts_at_s = time.monotonic() + delay_s
            self._double_delay(slot)
            return
        slot.starts_at_s = slot.incarnation = None
        if worker.pidfd is not None:
            self._selector.register(worker.pidfd, selectors.EVENT_READ)
        if self._settings.verbose:
            _say(f"worker {slot.number} starts as {uid}, process {worker.pid}")

    def _environment(self, slot: _Slot, uid: str) -> dict[str, str]:
        """What torchrun would set for a worker, and what an elastic one needs beside that."""
        settings = self._settings
        started = settings.workers * settings.min_nodes
        # A node that comes later has ranks beyond those: a world that holds its rank is the best that can be said.
        world_size = str(max(started, settings.workers * (self._node.number + 1)))
        elastic = {
            "store": f"{url_address(self._store.host)}:{self._store.port}",
            "run": self._node.run_id,
            "uid": uid,
            "slot": slot.number,
            "founders": [f"{number}.0" for number in range(started)],
            "min": settings.min_workers,
            "max": settings.max_workers,
            "resume": None if settings.resume is None else str(settings.resume),
            "save_every_s": settings.save_every_s,
            "nodes": settings.max_nodes,
            "on_partition": settings.on_partition,
            "partition_timeout_s": settings.partition_timeout_s,
        }
        return {
            **os.environ,
            "RANK": str(slot.number),
            "LOCAL_RANK": str(slot.local_rank),
            "GROUP_RANK": str(self._node.number),
            "ROLE_RANK": str(slot.number),
            "ROLE_NAME": "default",
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(settings.workers),
            "GROUP_WORLD_SIZE": str(max(settings.min_nodes, self._node.number + 1)),
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self._store.host,
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
            "TORCHELASTIC_RUN_ID": self._node.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # a worker that is rank 0 must not host a store too
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            # torch would print a stack whenever a peer's connection is lost, which is no error here.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "INFO" if settings.verbose else "ERROR"),
            "GRADSYNC_LAUNCHER_PID": str(os.getpid()),
            "GRADSYNC_GRACE_S": str(settings.grace_s),
            "GRADSYNC_ELASTIC": json.dumps(elastic),
        }

    # -- ends of processes: see [Note: endings] --------------------------------------------------------------------

    def _collect_exits(self) -> None:
        for slot in self._slots:
            if slot.worker is None or (code := slot.worker.poll()) is None:
                continue
            worker, slot.worker = slot.worker, None
            self._stopped_until_s.pop(worker.uid, None)
            if worker.pidfd is not None:
                self._selector.unregister(worker.pidfd)
            if code == 0:
                slot.ended.add(worker.uid)
                self._reports.report_exit(worker.uid)
                worker.close()
                continue
            failure = worker.read_failure(code, was_told_to_end=self._kill_at_s is not None)
            self._reports.report_death(worker.uid, failure.predicate().removeprefix("was "))
            worker.close()
            self._handle_death(slot, failure, lived_s=time.monotonic() - worker.started_at_s)

    def _handle_death(self, slot: _Slot, failure: Failure, *, lived_s: float) -> None:
        """Say that a worker has died, and why; arrange for a new one, unless none is to come."""
        if self._kill_at_s is not None:
            # It was told to end. Only an error on its way out is news.
            if failure.kind and failure.kind != "SystemExit" and not failure.is_consequence:
                self._report(failure, "it had been told to end")
            return
        if lived_s > EARLY_S:
            slot.delay_s = self._settings.restart_delay_s
        is_own_failure = failure.signal is None and not failure.is_consequence
        slot.hopeless = slot.hopeless + 1 if is_own_failure and lived_s < HOPELESS_S else 0
        slot.last_death = failure
        if self._is_stopping() or self._restarts == self._settings.max_restarts or slot.hopeless == HOPELESS_TIMES:
            self._last_death = failure
            self._report(failure, self._why_not_replaced(slot))
            if slot.hopeless == HOPELESS_TIMES and not self._is_stopping():
                self._give_up(failure.launcher_code, f"worker {slot.number} {failure.predicate()}")
            elif not self._is_stopping():
                self._give_up_if_too_few(failure)
            return
        self._restarts += 1
        slot.starts_at_s = time.monotonic() + slot.delay_s
        self._reports.ask_incarnation(slot.number)
        self._report(
            failure,
            f"a new one starts in {slot.delay_s:g} s ({self._restarts} of {self._settings.max_restarts})",
        )
        self._double_delay(slot)

    def _double_delay(self, slot: _Slot) -> None:
        slot.delay_s = min(2 * slot.delay_s, max(LONGEST_DELAY_S, self._settings.restart_delay_s))

    def _why_not_replaced(self, slot: _Slot) -> str:
        if self._is_ending:
            return "it is not started again, as other workers have finished"
        if self._is_store_lost:
            return "it is not started again, as the store is lost"
        if slot.hopeless == HOPELESS_TIMES:
            return f"the run is given up, as it has failed {HOPELESS_TIMES} times within {HOPELESS_S:g} s of its start"
        return f"it is not started again, as {self._restarts} workers have been (--max-restarts)"

    def _report(self, failure: Failure, then: str) -> None:
        _say(f"worker {failure.rank} {failure.predicate()}; {then}", fg="red", bold=True)
        if failure.traceback and not failure.is_consequence:
            click.echo(failure.traceback.rstrip("\n"), err=True)

    def _give_up_if_too_few(self, failure: Failure) -> None:
        """With restarts used up: end the run if fewer workers are left than it needs. Other nodes may have more."""
        left = sum(slot.worker is not None or slot.starts_at_s is not None for slot in self._slots)
        if 0 < left < self._settings.min_workers and self._settings.max_nodes == 1:
            why = f"{left} workers are left, and --min {self._settings.min_workers} are needed"
            _say(f"the run is given up: {why}", fg="red", bold=True)
            self._give_up(failure.launcher_code, why)

    def _give_up(self, code: int, reason: str) -> None:
        self._given_up = code
        self._reports.report_given_up(reason)
        self._tell_all_to_end()

    def _handle_event(self, event: Event) -> None:
        match event:
            case Finished(uid):
                self._forget(uid)
                self._begin_ending()
            case Left(uid, reason):
                self._forget(uid)
                _say(f"worker {uid.partition('.')[0]} has left: {reason}")
            case NextIncarnation(number, incarnation):
                for slot in self._slots:
                    if slot.number == number:
                        slot.incarnation = incarnation
            case RunEnding():
                self._begin_ending()
            case GivenUp(reason) if self._given_up is None:
                _say(f"the run was given up on another node: {reason}", fg="red", bold=True)
                self._given_up = 1
                self._tell_all_to_end()
            case MembersChanged(text):
                _say(text)
            case PeerAddresses(addresses):
                self._cut_off(addresses)
            case StoreLost(reason):
                self._is_store_lost = True
                for slot in self._slots:
                    if slot.starts_at_s is not None:
                        self._last_death = slot.last_death
                    self._is_ending |= bool(slot.ended)  # it has ended with code 0
                    slot.ended.clear()
                self._cancel_starts()
                if any(slot.worker for slot in self._slots):
                    _say(f"the store of node 0 is lost ({reason}); the workers end by themselves", fg="red", bold=True)

    def _forget(self, uid: str) -> None:
        for slot in self._slots:
            slot.ended.discard(uid)

    def _begin_ending(self) -> None:
        """No new workers from now on. Earlier deaths do not count: the run has come to its end without them."""
        if not self._is_ending:
            self._is_ending = True
            self._last_death = None
            self._cancel_starts()

    def _cancel_starts(self) -> None:
        for slot in self._slots:
            slot.starts_at_s = None

    # -- faults of --chaos ---------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        """Do what a fault of the schedule says to one of the workers that run now."""
        workers = {slot.number: slot.worker for slot in self._slots if slot.worker is not None}
        if fault.kind == "cut":
            self._cut_s = fault.duration_s
            self._reports.ask_addresses()  # the answer is where it is cut off from
            return
        if not workers:
            return
        worker = workers[fault.victim_among(list(workers))]
        if fault.kind == "kill":
            _say(f"chaos: worker {worker.slot} is killed", fg="yellow")
            worker.send(signal.SIGKILL)
            return
        _say(f"chaos: worker {worker.slot} is stopped for {fault.duration_s:.1f} s", fg="yellow")
        worker.send(signal.SIGSTOP)
        until_s = time.monotonic() + fault.duration_s
        self._stopped_until_s[worker.uid] = max(until_s, self._stopped_until_s.get(worker.uid, 0.0))

    def _resume(self, uid: str) -> None:
        del self._stopped_until_s[uid]
        for slot in self._slots:
            if slot.worker is not None and slot.worker.uid == uid:
                slot.worker.send(signal.SIGCONT)

    def _cut_off(self, addresses: Sequence[str]) -> None:
        if not addresses or self._is_stopping():
            return
        if self._cut is not None:
            self._cut.heal()
        _say(f"chaos: this node sends nothing to {', '.join(addresses)} for {self._cut_s:.1f} s", fg="yellow")
        self._cut = Cut(addresses, self._cut_s)

    # -- ending --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """Catch the signals that end the run; one that is ignored, as under nohup, stays so."""
        caught = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, lambda *_: None) for number in caught}
        wakeup_fd = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup_fd)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while numbers := self._wakeups.recv(64):
                for number in numbers:
                    if number in SIGNALS:
                        self._handle_signal(signal.Signals(number))

    def _handle_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._signal is not None or self._kill_at_s is not None:
            self._signal = self._signal or number
            self._kill_all()
            return
        self._signal = number
        self._tell_all_to_end()

    def _tell_all_to_end(self) -> None:
        """Tell all workers once to leave in order. They are killed if they take longer than the grace period."""
        self._cancel_starts()
        self._kill_at_s = time.monotonic() + self._settings.grace_s
        for slot in self._slots:
            if slot.worker is not None:
                slot.worker.send(signal.SIGTERM)
                slot.worker.send(signal.SIGCONT)

    def _kill_all(self) -> None:
        for slot in self._slots:
            if slot.worker is not None:
                slot.worker.kill()

    def _end(self) -> None:
        """Tell the other launchers that this one ends. The one that holds the store waits for them."""
        self._reports.close(REPORTS_S)
        for event in self._reports.take_events():
            if isinstance(event, MembersChanged):
                self._handle_event(event)
        if not self._node.is_host or self._settings.max_nodes == 1:
            return
        others, notice = OtherLaunchers(self._store, self._node), False
        # After a signal, or at the end of the run, the others have the grace period. Else they go on training, and
        # this one holds their store for as long as they show that they are alive.
        end_s = time.monotonic() + self._settings.grace_s if self._is_stopping() else float("inf")
        with contextlib.suppress(StoreUnreachable):
            while time.monotonic() < end_s and (alive := others.alive(self._settings.grace_s)):
                if not notice:
                    notice = True
                    names = f"launcher{'s' if len(alive) > 1 else ''} {format_ranks(alive)}"
                    click.secho(f"waiting for {names} of other nodes to end (Ctrl-C ends it)", err=True, dim=True)
                self._selector.select(OTHERS_POLL_S)
                before = self._num_signals
                self._handle_signals()
                if self._num_signals > before:
                    return

    def _exit_code(self) -> int:
        if self._signal is not None:
            return 128 + self._signal
        if self._given_up is not None:
            return self._given_up
        if self._last_death is not None:
            return self._last_death.launcher_code
        return 1 if self._is_store_lost and not self._is_ending else 0


def _say(text: str, **style: Any) -> None:
    """Print a line with the time of day."""
    click.secho(f"{time.strftime('%H:%M:%S')} {text}", err=True, **style)
