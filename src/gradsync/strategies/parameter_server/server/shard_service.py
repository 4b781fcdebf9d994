"""The requests of one shard's workers: ``ShardService`` turns each into replies. No socket, no thread.

It keeps the workers' clocks, their pending reads and their barriers, applies pushes to the ``Shard``, and gives each
change to ``on_record``, so that a mirror can replay it. ``server.py`` connects it to sockets.

A bulk-synchronous step with clipping runs like this: all workers push, and the shard aggregates their gradients. Each
worker with a pending read receives the squared norm of this shard's part. The first worker that knows the squared norms
of all shards sends their sum to each shard, which then clips, steps and answers the reads. So the gradient is clipped
by the norm of the whole model, and servers need not know each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradsync.messaging.format import Json, Message
from gradsync.strategies.parameter_server.encoding import Decoder
from gradsync.strategies.parameter_server.job import HyperparameterCheck, Hyperparameters, Job, parse_hyperparameters
from gradsync.strategies.parameter_server.server.barrier import Arrival, WorkerBarriers
from gradsync.strategies.parameter_server.server.clock import WorkerClocks
from gradsync.strategies.parameter_server.server.replication_log import (
    LogRecord,
    applied_clocks,
    apply_record,
    push_record,
    snapshot_record,
    step_record,
)
from gradsync.strategies.parameter_server.server.shard import AggregatedGradients, Push, Shard
from gradsync.strategies.parameter_server.server.staleness import Policy

Replies = list[tuple[bytes, Message]]
JOIN_TIMEOUT_S = 60.0  # for the workers that are expected from the start


class RequestRefused(Exception):
    """A request can't be served. Its sender receives the reason."""


@dataclass
class PendingRead:
    """A worker's read that is not answered yet."""

    peer: bytes
    since_s: float
    awaited: list[int]  # the workers that it waited for at first
    norm_sent_for_step: int = -1


class ShardService:
    """Serves the requests of one shard's workers.

    Args:
        index: the shard's number.
        job: what to train.
        names: of the shard's parameters.
        groups: hyperparameters to begin with.
        policy: what to do with stale gradients.
        is_connected: whether a peer's connection stands.
        on_record: is called with each log record, before the replies that depend on it are returned.
    """

    def __init__(
        self,
        index: int,
        job: Job,
        names: Sequence[str],
        groups: Sequence[Hyperparameters],
        *,
        policy: Policy | None = None,
        is_connected: Callable[[bytes], bool] = lambda peer: True,
        on_record: Callable[[LogRecord], None] | None = None,
    ) -> None:
        self.index = index
        self.job = job
        self.shard = Shard(job, names, groups, policy)
        self.clocks = WorkerClocks(job.staleness, range(job.num_workers), backup=job.backup)
        self.peers: dict[int, bytes] = {}
        self.pending_reads: dict[int, PendingRead] = {}
        self.awaited_s: dict[int, float] = {}  # by worker: how long others waited for it
        self.num_late = 0  # pushes for steps that were already finished
        self._push_weights: dict[int, float] = {}  # of each worker's last push
        self.lost_updates: list[str] = []  # in words, for the workers
        self.barriers = WorkerBarriers()
        self._known_workers = set(range(job.num_workers))  # every number so far
        self._runs: set[str] = set()  # that workers of this shard have joined from
        self.on_record = on_record
        self._is_connected = is_connected
        self._decoder = Decoder(job)
        self._hyperparameter_check = HyperparameterCheck(job.optimizer)
        self._filler: int | None = None  # the worker that brings the initial parameters
        self._pending_pushes: dict[int, dict[int, Push]] = {}  # bulk-synchronous: by step, then worker
        # Of step `clocks.current_step`, while it waits for the norm over all shards.
        self._aggregated: AggregatedGradients | None = None
        self._last_squared_norm = 0.0
        self._last_pusher: int | None = None  # the worker whose push came last
        self._started_s = time.monotonic()

    def worker_of(self, peer: bytes) -> int | None:
        return next((worker for worker, known in self.peers.items() if known == peer), None)

    # -- joining and leaving --------------------------------------------------------------------------------------

    def next_worker_id(self) -> int:
        """A number for a worker without one: 0 for the very first, else one that no worker has had."""
        return max(self._known_workers) + 1 if self.peers or self.shard.filled else 0

    def check_run(self, run: str, *, alone: bool, resume: bool) -> None:
        """Refuse a run that would get another run's weights without having asked for them.

        ``alone``: a single process, which may join a run under way. ``resume``: it asks for the weights.
        """
        under_way = any(self._is_connected(peer) for peer in self.peers.values())
        if self.shard.filled and run not in self._runs and not resume and not (alone and under_way):
            raise RequestRefused(
                f"it holds the weights of an earlier run, after {self.shard.version} updates. To begin with this "
                "run's own, end the servers and start them anew (with an empty folder of snapshots); to continue "
                "from theirs, use parameter_server(resume=True)."
            )
        self._runs.add(run)

    def join(
        self,
        peer: bytes,
        job: Job,
        worker: int,
        clock: int | None,
        read_version: int | None,
        *,
        observer: bool = False,
    ) -> Replies:
        """A worker joins, or comes back with ``clock`` pushes made and version ``read_version`` read.

        An ``observer`` only reads: nobody waits for it.
        """
        # A worker that joins late does not know how many workers there were at the start.
        difference = self.job.difference(replace(job, num_workers=self.job.num_workers, backup=self.job.backup))
        if difference:
            raise RequestRefused(
                f"the servers run another job: here {difference}. Start them anew, or give the same settings."
            )
        before = self.peers.get(worker)
        if before not in (None, peer) and self._is_connected(before or b""):
            raise RequestRefused(f"a worker {worker} is already connected. Each worker needs a number of its own.")
        self._record_lost_updates(clock, read_version)
        self.peers[worker] = peer
        self._known_workers.add(worker)
        if observer:
            self.clocks.remove(worker)
            joined_at = clock or 0
        else:
            joined_at = self.clocks.join(
                worker, None if clock is None else max(clock, self.clocks.by_worker.get(worker, 0))
            )
        if not self.shard.filled and self._filler is None:
            self._filler = worker
        self._replicate_clocks()
        fields = {
            "clock": joined_at,
            "worker": worker,
            "version": self.shard.version,
            "fill": self._filler == worker and not self.shard.filled,
            "lost": list(self.lost_updates),
        }
        return [(peer, self._message("joined", fields)), *self._advance()]

    def _record_lost_updates(self, clock: int | None, read_version: int | None) -> None:
        """Find updates that a worker knows of and this shard does not, because it was restored from a snapshot."""
        if read_version is None:
            return  # the worker is new here
        behind = 0
        if self.job.staleness == 0 and clock is not None and clock > self.clocks.current_step:
            behind = clock - self.clocks.current_step
            self.clocks.current_step = clock
            self._pending_pushes = {step: kept for step, kept in self._pending_pushes.items() if step >= clock}
        if read_version > self.shard.version:
            behind = max(behind, read_version - self.shard.version)
            self.shard.version = read_version
        if behind:
            self.lost_updates.append(f"shard {self.index}: {behind} update{'s' if behind > 1 else ''} lost")

    def fill(self, peer: bytes, tensors: dict[str, Tensor]) -> Replies:
        """The first worker brings the initial parameters. If others bring them too, they are ignored."""
        if not self.shard.filled:
            try:
                self.shard.fill(tensors)
            except ValueError as error:
                raise RequestRefused(str(error)) from None
            self._replicate_snapshot()
        return [(peer, self._message("filled")), *self._advance()]

    def remove_worker(self, worker: int) -> Replies:
        """Remove a worker that left or died: nobody waits for it."""
        self.peers.pop(worker, None)
        self.shard.remove_worker(worker)
        replies = self.make_observer(worker)
        self.barriers.remove(worker)
        replies += self._complete_barriers()
        if worker == self._filler and not self.shard.filled:
            self._filler = None
            reason = f"worker {worker}, which was to bring the parameters, is gone. Start again."
            replies += [
                (read.peer, self._message("refused", {"reason": reason})) for read in self.pending_reads.values()
            ]
            self.pending_reads.clear()
        return replies

    def make_observer(self, worker: int) -> Replies:
        """Nobody waits for this worker any more, though it stays connected and may read."""
        self.pending_reads.pop(worker, None)
        self.clocks.remove(worker)
        self._replicate_clocks()
        return self._advance()

    def barrier(self, worker: int, tag: str, value: Json, tensors: dict[str, Tensor]) -> Replies:
        """A worker arrives at a barrier, and waits for all other connected workers."""
        self.barriers.arrive(tag, worker, Arrival(self.peers[worker], value, tensors))
        return self._complete_barriers()

    def _complete_barriers(self) -> Replies:
        return [
            (peer, Message(reply.kind, {"shard": self.index, **reply.fields}, reply.tensors))
            for peer, reply in self.barriers.complete(self.peers)
        ]

    def remove_absent_workers(self, timeout_s: float = JOIN_TIMEOUT_S) -> Replies:
        """Remove the workers that were expected from the start and have not joined in time."""
        if time.monotonic() < self._started_s + timeout_s:
            return []
        absent = [worker for worker in self.clocks.by_worker if worker not in self.peers]
        return [reply for worker in absent for reply in self.remove_worker(worker)]

    # -- pushes ---------------------------------------------------------------------------------------------------

    def push(self, worker: int, fields: dict[str, Json], tensors: dict[str, Tensor]) -> Replies:
        """A worker's gradients of one step."""
        push = self._parse_push(worker, fields, tensors)
        # A duplicate is a push that was sent again, because a server was lost in between.
        duplicate = push.clock < self.clocks.by_worker.get(worker, 0)
        counts = self.clocks.push(worker, push.clock)
        self._last_pusher = worker
        if counts and self.job.staleness == 0:
            self._pending_pushes.setdefault(push.clock, {})[worker] = push
        elif counts and push.weight > 0:
            push.lr_share = self._lr_share(push)
            if self.on_record is not None:
                self.on_record(push_record(push, self.clocks))
            self.shard.apply_push(push)
        elif not counts and not duplicate:
            self.num_late += 1
        replies = self._advance()
        if self.job.mirrors and self.job.staleness != 0:
            self._replicate_clocks()
            replies.append((self.peers[worker], self._message("pushed", {"clock": push.clock})))
        return replies

    def _lr_share(self, push: Push) -> float:
        """The factor of the learning rate. Stale-synchronous: the workers' pushes together move as far as one step.

        Asynchronous: every push is a whole step.
        """
        self._push_weights[push.worker] = push.weight
        if self.job.staleness is None:
            return 1.0
        return push.weight / sum(self._push_weights.get(worker, push.weight) for worker in self.clocks.by_worker)

    def _parse_push(self, worker: int, fields: dict[str, Json], tensors: dict[str, Tensor]) -> Push:
        if not self.shard.filled:
            raise RequestRefused("a push was received before the initial parameters.")
        clock, weight, squared_norm = fields["clock"], float(fields["weight"]), fields["squared_norm"]
        if clock > self.clocks.by_worker.get(worker, clock):
            raise RequestRefused(
                f"worker {worker} claims {clock} earlier pushes; {self.clocks.by_worker[worker]} were received."
            )
        try:
            groups = parse_hyperparameters(fields["groups"])
            self._hyperparameter_check.check(groups)
            grads = {
                name: self._decoder.decode(name, tensor, worker=worker, clock=clock)
                if self._decoder.decodes(name)
                else tensor
                for name, tensor in tensors.items()
            }
            self.shard.check(grads)
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRefused(f"this is no push: {error}") from None
        if len(groups) <= max(param.group for param in self.job.params):
            raise RequestRefused("this is no push: it has too few groups.")
        return Push(worker, clock, weight, groups, grads, None if squared_norm is None else float(squared_norm))

    def clip(self, step: int, squared_norm: float) -> Replies:
        """A worker has sent the squared norm of a step's gradient over all shards."""
        if self._aggregated is None or step != self.clocks.current_step:
            return []  # another worker was faster
        self._step(squared_norm)
        return self._advance()

    def _advance(self) -> Replies:
        """Make the steps that are complete, and serve the reads that are ready."""
        while (
            self.job.staleness == 0
            and self._aggregated is None
            and self.shard.filled
            and self.clocks.step_is_complete()
        ):
            pushes = self._pending_pushes.pop(self.clocks.current_step, {})
            if not pushes:  # the workers that had pushed are gone, or their pushes were lost with another server
                self.clocks.finish_step()
                continue
            self._aggregated = self.shard.aggregate(list(pushes.values()))
            self._last_squared_norm = self._aggregated.squared_norm
            if self.job.clip_norm is None:
                self._step(None)
        return self._serve_pending_reads()

    def _step(self, squared_norm: float | None) -> None:
        assert self._aggregated is not None
        gradients, self._aggregated = self._aggregated, None
        self.clocks.finish_step()
        if self.on_record is not None:
            self.on_record(step_record(gradients, squared_norm, self.clocks))
        self.shard.step(gradients, squared_norm=squared_norm)
        self._pending_pushes = {
            step: kept for step, kept in self._pending_pushes.items() if step >= self.clocks.current_step
        }

    # -- reads ----------------------------------------------------------------------------------------------------

    def pull(self, worker: int, clock: int, *, newest: bool = False) -> Replies:
        """A worker that has made ``clock`` pushes reads. ``newest``: at once, whatever the staleness bound."""
        if newest and self.shard.filled:
            return [(self.peers[worker], self._parameters(worker))]
        if clock != self.clocks.by_worker[worker]:
            raise RequestRefused(
                f"worker {worker} has made {clock} pushes, and {self.clocks.by_worker[worker]} are known here."
            )
        self.pending_reads[worker] = PendingRead(self.peers[worker], time.monotonic(), self.clocks.awaited(worker))
        return self._serve_pending_reads()

    def _serve_pending_reads(self) -> Replies:
        replies: Replies = []
        for worker, read in list(self.pending_reads.items()):
            if self.shard.filled and self.clocks.may_read(worker):
                del self.pending_reads[worker]
                self._record_wait(read)
                replies.append((read.peer, self._parameters(worker)))
            elif (
                self._aggregated is not None
                and self.job.clip_norm is not None
                and read.norm_sent_for_step != self.clocks.current_step
            ):
                read.norm_sent_for_step = self.clocks.current_step
                fields = {"step": self.clocks.current_step, "squared_norm": self._aggregated.squared_norm}
                replies.append((read.peer, self._message("norm", fields)))
        return replies

    def _parameters(self, worker: int) -> Message:
        tensors = self.shard.read(worker)
        if self.on_record is not None:
            self.on_record(LogRecord("read", {"worker": worker}, {}))
        fields = {
            "version": self.shard.version,
            "step": self.clocks.current_step - 1,
            "squared_norm": self._last_squared_norm,
        }
        return Message("parameters", {"shard": self.index, **fields}, tensors)

    def _record_wait(self, read: PendingRead) -> None:
        """Charge the time of a read to the last worker that it waited for."""
        if self._last_pusher in read.awaited:
            waited_s = time.monotonic() - read.since_s
            self.awaited_s[self._last_pusher] = self.awaited_s.get(self._last_pusher, 0.0) + waited_s

    # -- state and statistics -------------------------------------------------------------------------------------

    def state(self) -> Message:
        metadata, tensors = self.shard.save()
        kept = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith("backup")}
        fields = {"shard": self.index, "clocks": self.clocks.state_dict(), "metadata": metadata}
        return Message("state", fields, kept)

    def load(self, fields: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        """Load a saved state. The connected workers continue from its clocks."""
        try:
            self.shard.load(fields["metadata"], tensors)
            saved = {str(key): int(value) for key, value in fields["clocks"].items()}
            floor = saved["floor"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RequestRefused(f"this is no state of shard {self.index}: {error!r}") from None
        beginning = min((clock for key, clock in saved.items() if key != "floor"), default=floor)
        self.clocks.current_step = floor
        self.clocks.by_worker = {worker: saved.get(str(worker), beginning) for worker in self.clocks.by_worker}
        self.shard.read_at.clear()
        self.pending_reads.clear()
        self._pending_pushes.clear()
        self._aggregated = None
        self._replicate_snapshot()

    def stats(self) -> Message:
        fields = {
            "taus": [list(entry) for entry in sorted(self.shard.taus.items())],
            "clocks": [list(entry) for entry in sorted(self.clocks.by_worker.items())],
            "awaited_s": [list(entry) for entry in sorted(self.awaited_s.items())],
            "version": self.shard.version,
            "dropped": self.shard.dropped,
            "late": self.num_late,
            "lost": list(self.lost_updates),
        }
        return self._message("stats", fields)

    def _message(self, kind: str, fields: dict[str, Json] | None = None) -> Message:
        return Message(kind, {"shard": self.index, **(fields or {})})

    # -- replication ----------------------------------------------------------------------------------------------

    def _replicate_clocks(self) -> None:
        if self.on_record is not None:
            self.on_record(LogRecord("clocks", {"clocks": applied_clocks(self.clocks)}, {}))

    def _replicate_snapshot(self) -> None:
        if self.on_record is not None:
            self.on_record(self.snapshot())

    def snapshot(self) -> LogRecord:
        """The whole state of the shard: the first record of a copy."""
        return snapshot_record(self.shard, self.clocks)

    def replay(self, record: LogRecord) -> None:
        """Apply a log record of the service that holds the original shard, or of a snapshot."""
        fields = record.fields
        if record.kind == "step":
            self._last_squared_norm = float(fields["own_squared_norm"])
        apply_record(record, self.shard)
        if "clocks" in fields:
            self.clocks.load_state_dict({str(key): int(clock) for key, clock in fields["clocks"].items()})

    def take_over(self, peers: dict[int, bytes]) -> Replies:
        """Make this copy the shard, with the workers that are connected to this server, and no others."""
        self.peers = {worker: peer for worker, peer in peers.items() if worker in self.clocks.by_worker}
        gone = [worker for worker in self.clocks.by_worker if worker not in self.peers]
        return [reply for worker in gone for reply in self.remove_worker(worker)]
