"""One shard with the workers that use it: who is there, who waits, and what each is answered. No socket, no thread.

What happens in one bulk-synchronous step with clipping: all workers push; their gradients are summed; whoever waits to
read is told the square of this shard's norm; the first worker that knows those of all shards says their sum; the shard
clips, steps, and answers the reads. So the clipped gradient is exactly the whole model's, and servers need not know
each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradsync.comm.messages import Json, Message
from gradsync.server.clock import Clocks
from gradsync.server.encoding import Decoder
from gradsync.server.job import Hyperparameters, Job, checked
from gradsync.server.meeting import Brought, Meetings
from gradsync.server.records import Record, applied, redo, sum_record, take_record, whole_record
from gradsync.server.shard import Policy, Push, Shard, Sum

Answers = list[tuple[bytes, Message]]
AWAITED_S = 60.0  # what a worker that is expected has to come


class Refused(Exception):
    """A worker asked for what it can't have; it is told why."""


@dataclass
class Waiting:
    """A worker that waits to read."""

    peer: bytes
    since_s: float
    whom: list[int]  # it waited for at first
    told_norm_of: int = -1  # the step


class Keeper:
    """Answers the workers of one shard.

    Args:
        index: the shard's number.
        job: what to do.
        names: the shard's parameters.
        groups: hyperparameters to begin with.
        policy: what becomes of late gradients.
        is_there: whether a peer's connection stands.
        on_change: is given each record, before the answers that tell of it.
    """

    def __init__(
        self,
        index: int,
        job: Job,
        names: Sequence[str],
        groups: Sequence[Hyperparameters],
        *,
        policy: Policy | None = None,
        is_there: Callable[[bytes], bool] = lambda peer: True,
        on_change: Callable[[Record], None] | None = None,
    ) -> None:
        self.index = index
        self.job = job
        self.shard = Shard(job, names, groups, policy)
        self.clocks = Clocks(job.staleness, range(job.num_workers), backup=job.backup)
        self.peers: dict[int, bytes] = {}
        self.waiting: dict[int, Waiting] = {}
        self.awaited_s: dict[int, float] = {}  # by worker: how long others waited for it
        self.late = 0  # pushes for steps that went on without them
        self._weights: dict[int, float] = {}  # of each worker's last push
        self.lost: list[str] = []
        self.meetings = Meetings()
        self._known = set(range(job.num_workers))  # every worker's number so far
        self.on_change = on_change
        self._is_there = is_there
        self._decoder = Decoder(job)
        self._filler: int | None = None
        self._pending: dict[int, dict[int, Push]] = {}  # bulk-synchronous: by step, then worker
        self._sum: Sum | None = None  # of step `clocks.floor`, which waits for the norm of the whole
        self._last_square = 0.0
        self._mover: int | None = None  # whose push came last
        self._begun_s = time.monotonic()

    def worker_of(self, peer: bytes) -> int | None:
        return next((worker for worker, known in self.peers.items() if known == peer), None)

    # -- coming and going -----------------------------------------------------------------------------------------

    def free_number(self) -> int:
        """A number for a worker that has none: 0 for the very first, else one that nobody has had."""
        return max(self._known) + 1 if self.peers or self.shard.filled else 0

    def hello(
        self, peer: bytes, job: Job, worker: int, clock: int | None, seen: int | None, *, aside: bool = False
    ) -> Answers:
        """A worker joins, or comes back with ``clock`` pushes made and version ``seen`` read.

        One that stands ``aside`` only reads: nobody waits for it.
        """
        # A newcomer does not know how many there were at the start.
        difference = self.job.difference(replace(job, num_workers=self.job.num_workers, backup=self.job.backup))
        if difference:
            raise Refused(
                f"the servers run another job: here {difference}. Start them anew, or give the same settings."
            )
        before = self.peers.get(worker)
        if before not in (None, peer) and self._is_there(before or b""):
            raise Refused(f"a worker {worker} is already connected. Each worker needs a number of its own.")
        self._count_losses(worker, clock, seen)
        self.peers[worker] = peer
        self._known.add(worker)
        if aside:
            self.clocks.forget(worker)
            at = clock or 0
        else:
            at = self.clocks.join(worker, None if clock is None else max(clock, self.clocks.of.get(worker, 0)))
        if not self.shard.filled and self._filler is None:
            self._filler = worker
        self._changed()
        told = {
            "clock": at,
            "worker": worker,
            "version": self.shard.version,
            "fill": self._filler == worker and not self.shard.filled,
            "lost": list(self.lost),
        }
        return [(peer, self._message("welcome", told)), *self._advance()]

    def _count_losses(self, worker: int, clock: int | None, seen: int | None) -> None:
        """A worker knows of updates that this shard does not: it began again from a snapshot."""
        if seen is None:
            return  # it is new here
        behind = 0
        if self.job.staleness == 0 and clock is not None and clock > self.clocks.floor:
            behind = clock - self.clocks.floor
            self.clocks.floor = clock
            self._pending = {step: kept for step, kept in self._pending.items() if step >= clock}
        if seen > self.shard.version:
            behind = max(behind, seen - self.shard.version)
            self.shard.version = seen
        if behind:
            self.lost.append(f"shard {self.index}: {behind} update{'s' if behind > 1 else ''} lost")

    def fill(self, peer: bytes, tensors: dict[str, Tensor]) -> Answers:
        """The first worker brings the parameters; those of others who bring them too are not needed."""
        if not self.shard.filled:
            try:
                self.shard.fill(tensors)
            except ValueError as error:
                raise Refused(str(error)) from None
            self._changed_all()
        return [(peer, self._message("filled")), *self._advance()]

    def forget(self, worker: int) -> Answers:
        """A worker left or died: nobody waits for it."""
        self.peers.pop(worker, None)
        self.shard.forget(worker)
        answers = self.step_aside(worker)
        self.meetings.forget(worker)
        answers += self._end_meetings()
        if worker == self._filler and not self.shard.filled:
            self._filler = None
            why = f"worker {worker}, which was to bring the parameters, is gone. Start again."
            answers += [(waits.peer, self._message("refused", {"why": why})) for waits in self.waiting.values()]
            self.waiting.clear()
        return answers

    def step_aside(self, worker: int) -> Answers:
        """Nobody waits for a worker any more, though it stays connected, and may read."""
        self.waiting.pop(worker, None)
        self.clocks.forget(worker)
        self._changed()
        return self._advance()

    def meet(self, worker: int, tag: str, brought: Json, tensors: dict[str, Tensor]) -> Answers:
        """A worker waits for all others that are connected."""
        self.meetings.come(tag, worker, Brought(self.peers[worker], brought, tensors))
        return self._end_meetings()

    def _end_meetings(self) -> Answers:
        return [
            (peer, Message(met.kind, {"shard": self.index, **met.fields}, met.tensors))
            for peer, met in self.meetings.ended(self.peers)
        ]

    def forget_absent(self, awaited_s: float = AWAITED_S) -> Answers:
        """Those who were expected and have not come in time are not waited for."""
        if time.monotonic() < self._begun_s + awaited_s:
            return []
        absent = [worker for worker in self.clocks.of if worker not in self.peers]
        return [answer for worker in absent for answer in self.forget(worker)]

    # -- pushes ---------------------------------------------------------------------------------------------------

    def push(self, worker: int, fields: dict[str, Json], tensors: dict[str, Tensor]) -> Answers:
        """A worker's gradients of one step."""
        push = self._read_push(worker, fields, tensors)
        again = push.clock < self.clocks.of.get(worker, 0)  # it was sent twice, because a server was lost in between
        counts = self.clocks.push(worker, push.clock)
        self._mover = worker
        if counts and self.job.staleness == 0:
            self._pending.setdefault(push.clock, {})[worker] = push
        elif counts and push.weight > 0:
            push.share = self._share(push)
            if self.on_change is not None:
                self.on_change(take_record(push, self.clocks))
            self.shard.take(push)
        elif not counts and not again:
            self.late += 1
        answers = self._advance()
        if self.job.mirrors and self.job.staleness != 0:
            self._changed()
            answers.append((self.peers[worker], self._message("pushed", {"clock": push.clock})))
        return answers

    def _share(self, push: Push) -> float:
        """Of the learning rate: stale-synchronous workers go together as far as one synchronous step would.

        Asynchronous ones make a step each.
        """
        self._weights[push.worker] = push.weight
        if self.job.staleness is None:
            return 1.0
        return push.weight / sum(self._weights.get(worker, push.weight) for worker in self.clocks.of)

    def _read_push(self, worker: int, fields: dict[str, Json], tensors: dict[str, Tensor]) -> Push:
        if not self.shard.filled:
            raise Refused("gradients came before there were parameters.")
        try:
            clock, weight, square = int(fields["clock"]), float(fields["weight"]), fields["square"]
            groups = checked(fields["groups"])
            grads = {
                name: self._decoder.decode(name, tensor, worker=worker, clock=clock)
                if self._decoder.decodes(name)
                else tensor
                for name, tensor in tensors.items()
            }
            self.shard.check(grads)
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"this is no push: {error}") from None
        if len(groups) <= max(param.group for param in self.job.params) or not weight >= 0:
            raise Refused("this is no push: it has too few groups, or a weight below zero.")
        return Push(worker, clock, weight, groups, grads, None if square is None else float(square))

    def clip(self, step: int, square: float) -> Answers:
        """A worker knows the norm of the whole gradient of a step."""
        if self._sum is None or step != self.clocks.floor:
            return []  # another was faster
        self._step(square)
        return self._advance()

    def _advance(self) -> Answers:
        """Make the steps that are complete, and answer the reads that may be answered."""
        while self.job.staleness == 0 and self._sum is None and self.shard.filled and self.clocks.complete():
            pushes = self._pending.pop(self.clocks.floor, {})
            if not pushes:  # those who had pushed are gone, or their pushes are lost with another server
                self.clocks.finish()
                continue
            self._sum = self.shard.total(list(pushes.values()))
            self._last_square = self._sum.square
            if self.job.clip_norm is None:
                self._step(None)
        return self._answer_reads()

    def _step(self, square: float | None) -> None:
        assert self._sum is not None
        self.clocks.finish()
        if self.on_change is not None:
            self.on_change(sum_record(self._sum, square, self.clocks))
        self.shard.step(self._sum, square=square)
        self._sum = None
        self._pending = {step: kept for step, kept in self._pending.items() if step >= self.clocks.floor}

    # -- reads ----------------------------------------------------------------------------------------------------

    def pull(self, worker: int, clock: int, *, newest: bool = False) -> Answers:
        """A worker that has made ``clock`` pushes wants to read; ``newest``: what there is, bound or not."""
        if newest and self.shard.filled:
            return [(self.peers[worker], self._parameters(worker))]
        if clock != self.clocks.of[worker]:
            raise Refused(f"worker {worker} has made {clock} pushes, and {self.clocks.of[worker]} are known here.")
        self.waiting[worker] = Waiting(self.peers[worker], time.monotonic(), self.clocks.awaited(worker))
        return self._answer_reads()

    def _answer_reads(self) -> Answers:
        answers: Answers = []
        for worker, waits in list(self.waiting.items()):
            if self.shard.filled and self.clocks.may_read(worker):
                del self.waiting[worker]
                self._note_wait(waits)
                answers.append((waits.peer, self._parameters(worker)))
            elif self._sum is not None and self.job.clip_norm is not None and waits.told_norm_of != self.clocks.floor:
                waits.told_norm_of = self.clocks.floor
                told = {"step": self.clocks.floor, "square": self._sum.square}
                answers.append((waits.peer, self._message("norm", told)))
        return answers

    def _parameters(self, worker: int) -> Message:
        tensors = self.shard.read(worker)
        if self.on_change is not None:
            self.on_change(Record("read", {"worker": worker}, {}))
        told = {"version": self.shard.version, "step": self.clocks.floor - 1, "square": self._last_square}
        return Message("parameters", {"shard": self.index, **told}, tensors)

    def _note_wait(self, waits: Waiting) -> None:
        """Whoever came last of those that were waited for is who cost the time."""
        if self._mover in waits.whom:
            waited_s = time.monotonic() - waits.since_s
            self.awaited_s[self._mover] = self.awaited_s.get(self._mover, 0.0) + waited_s

    # -- what is asked about it -----------------------------------------------------------------------------------

    def state(self) -> Message:
        told, tensors = self.shard.save()
        kept = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith("backup")}
        fields = {"shard": self.index, "clocks": self.clocks.state_dict(), "told": told}
        return Message("state", fields, kept)

    def load(self, fields: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        """Take a saved state; the workers that are here go on from its clocks."""
        try:
            self.shard.load(fields["told"], tensors)
            saved = {str(key): int(value) for key, value in fields["clocks"].items()}
            floor = saved["floor"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(f"this is no state of shard {self.index}: {error!r}") from None
        beginning = min((clock for key, clock in saved.items() if key != "floor"), default=floor)
        self.clocks.floor = floor
        self.clocks.of = {worker: saved.get(str(worker), beginning) for worker in self.clocks.of}
        self.shard.read_at.clear()
        self.waiting.clear()
        self._pending.clear()
        self._sum = None
        self._changed_all()

    def stats(self) -> Message:
        told = {
            "taus": [list(entry) for entry in sorted(self.shard.taus.items())],
            "clocks": [list(entry) for entry in sorted(self.clocks.of.items())],
            "awaited_s": [list(entry) for entry in sorted(self.awaited_s.items())],
            "version": self.shard.version,
            "dropped": self.shard.dropped,
            "late": self.late,
            "lost": list(self.lost),
        }
        return self._message("stats", told)

    def _message(self, kind: str, fields: dict[str, Json] | None = None) -> Message:
        return Message(kind, {"shard": self.index, **(fields or {})})

    # -- the copy elsewhere ---------------------------------------------------------------------------------------

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(Record("clocks", {"clocks": applied(self.clocks)}, {}))

    def _changed_all(self) -> None:
        if self.on_change is not None:
            self.on_change(self.whole())

    def whole(self) -> Record:
        """All of the shard, to begin a copy with."""
        return whole_record(self.shard, self.clocks)

    def replay(self, record: Record) -> None:
        """Do what another keeper of this shard did."""
        fields = record.fields
        if record.kind == "sum":
            self._last_square = float(fields["own"])
        redo(record, self.shard)
        if "clocks" in fields:
            self.clocks.load_state_dict({str(key): int(clock) for key, clock in fields["clocks"].items()})

    def take_over(self, peers: dict[int, bytes]) -> Answers:
        """From now on this copy is the shard: with the workers that are connected here, and nobody else."""
        self.peers = {worker: peer for worker, peer in peers.items() if worker in self.clocks.of}
        gone = [worker for worker in self.clocks.of if worker not in self.peers]
        return [answer for worker in gone for answer in self.forget(worker)]
