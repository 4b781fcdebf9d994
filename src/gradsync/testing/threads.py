"""Ranks as threads of one process: for tests, for teaching, and for trying a strategy on many workers at once.

:func:`run_ranks` starts the threads and gives each a communicator. A collective is pending until every rank has
contributed its tensors. The rank that comes last computes the result, in rank order: the same bits on every run. So
the work of an all-reduce, divided by the number of ranks, does not grow with it.

A strategy on two ranks, without a launcher:

>>> import torch
>>> import gradsync
>>> from gradsync.testing import run_ranks
>>> def train(comm):
...     model = torch.nn.Linear(1, 1, bias=False)
...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
...     with gradsync.synchronize(model, optimizer, "allreduce", comm=comm):
...         model(torch.tensor([[float(comm.rank)]])).sum().backward()
...     return model.weight.grad.item()
>>> run_ranks(2, train)
[0.5, 0.5]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, ReduceOp, Work, Worker, check_op
from gradsync.comm.checks import (
    check_contiguous,
    check_exchange,
    check_rows,
    describe_call,
    different_calls,
    place_of,
)
from gradsync.errors import CollectiveFailed, OutOfStep, PeerLost

T = TypeVar("T")

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class _PendingCollective:
    """A collective that some ranks have called: their tensors, and which ranks are missing."""

    def __init__(self, kind: str, ranks: Sequence[int], members: Sequence[int], generation: int) -> None:
        self.kind = kind
        self.generation = generation  # the number of the world that its group is part of
        self.calls: dict[int, str] = {}  # what each rank asked for
        self.ranks = ranks  # those of the group that take part
        self.members = members  # the rank in the world of each rank of the group
        self.contributions: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self.finished = threading.Event()
        self.error: BaseException | None = None

    @property
    def all_came(self) -> bool:
        return len(self.contributions) == len(self.ranks)

    def missing(self) -> dict[int, int]:
        """Rank in the group -> rank in the world. It looks at every rank: only for when one may be lost."""
        return {rank: self.members[rank] for rank in self.ranks if rank not in self.contributions}


class _World:
    """What the threads share: the pending collectives, by group and number, and the lost ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending: dict[tuple[object, ...], _PendingCollective] = {}
        self.lost: dict[int, str] = {}  # by global rank
        self.departed: dict[int, set[int]] = {}  # global ranks that have left a world for another, by its generation
        self.broken: dict[int, OutOfStep] = {}  # by group, where the ranks have made different calls
        self._groups: dict[tuple[object, ...], int] = {}

    def group_number(self, *identity: object) -> int:
        """A number for a group, the same on all its ranks. (Hashing the ranks of a group takes time.)"""
        with self.lock:
            return self._groups.setdefault(identity, len(self._groups))

    def lose(self, rank: int, reason: str) -> None:
        with self.lock:
            self.lost.setdefault(rank, reason)
            self._wake_waiting_for(rank, self.pending.values())

    def depart(self, rank: int, generation: int) -> None:
        """A rank leaves a world for another one."""
        with self.lock:
            self.departed.setdefault(generation, set()).add(rank)
            of_world = {key: each for key, each in self.pending.items() if each.generation == generation}
            self._wake_waiting_for(rank, of_world.values())
            for key, each in of_world.items():
                if all(self.why_gone(member, generation) for member in each.members):
                    del self.pending[key]  # nobody will come to it any more: it need not hold their tensors

    def _wake_waiting_for(self, rank: int, pending: Iterable[_PendingCollective]) -> None:
        for each in pending:
            if rank in each.missing().values():
                each.finished.set()  # the rank will never come

    def why_gone(self, rank: int, generation: int) -> str | None:
        """Why a rank will not come to a collective of this generation any more; None if it may come."""
        if rank in self.departed.get(generation, ()):
            return "it has left this world of an elastic run, for another one"
        return self.lost.get(rank)


class _ThreadWork(Work):
    def __init__(self, pending: _PendingCollective, world: _World, timeout_s: float) -> None:
        self._pending = pending
        self._world = world
        self._timeout_s = timeout_s
        self._timed_out: PeerLost | None = None  # a wait that timed out is not repeated

    def done(self) -> bool:
        return self._pending.finished.is_set() or self._timed_out is not None

    def wait(self) -> None:
        if self._timed_out is not None:
            raise self._timed_out
        start = time.monotonic()
        self._pending.finished.wait(self._timeout_s)
        if self._pending.error is not None:
            raise self._pending.error
        if self._pending.all_came:
            self._pending.finished.wait()  # the last rank is computing the result: no rank is missing
            if self._pending.error is not None:
                raise self._pending.error
            return
        missing = self._pending.missing()
        reasons = {rank: self._world.why_gone(member, self._pending.generation) for rank, member in missing.items()}
        lost = {rank: reason for rank, reason in reasons.items() if reason is not None}
        reason = next(iter(lost.values())) if lost else f"it did not come to {self._pending.kind} in time"
        self._timed_out = PeerLost(
            rank=tuple(lost or missing), reason=reason, after_s=time.monotonic() - start, during=self._pending.kind
        )
        raise self._timed_out


class Threads(Communicator):
    """One rank of a world of threads; made by :func:`run_ranks`."""

    transport = "threads"
    compares_calls = True
    runs_in_background = True
    why = "ranks are threads of one process"

    def __init__(
        self,
        world: _World,
        members: Sequence[int],
        rank: int,
        group: int,
        *,
        timeout_s: float,
        worker: Worker,
        generation: int | None = None,
    ) -> None:
        super().__init__(rank, len(members), timeout_s=timeout_s, worker=worker)
        self.world = world
        self.members = list(members)  # global rank of each rank of this group
        self._group = group  # its number
        self._generation = group if generation is None else generation  # the number of its world
        self._count = 0  # collectives started: the n-th calls of all ranks belong together
        self._splits = 0
        self._p2p_counts: dict[tuple[int, int], int] = {}

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)

        def finish(contributions: dict[int, tuple[Tensor, Tensor]]) -> None:
            total = _reduce([contributions[rank][0] for rank in range(self.world_size)], op)
            for given, _ in contributions.values():
                given.copy_(total)

        return self._start_collective(f"all_reduce({op})", tensor, None, finish)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))

        def finish(contributions: dict[int, tuple[Tensor, Tensor]]) -> None:
            rows = [contributions[rank][0].clone() for rank in range(self.world_size)]
            for _, into in contributions.values():
                for row, value in zip(into, rows, strict=True):
                    row.copy_(value)

        return self._start_collective("all_gather", tensor, out, finish)

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))

        def finish(contributions: dict[int, tuple[Tensor, Tensor]]) -> None:
            total = _reduce([contributions[rank][0] for rank in range(self.world_size)], op)
            for rank, (_, into) in contributions.items():
                into.copy_(total[rank])

        return self._start_collective(f"reduce_scatter({op})", tensor, out, finish)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)

        def finish(contributions: dict[int, tuple[Tensor, Tensor]]) -> None:
            sent = {rank: given.clone() for rank, (given, _) in contributions.items()}
            for rank, (_, into) in contributions.items():
                for source in range(self.world_size):
                    into[source].copy_(sent[source][rank])

        return self._start_collective("all_to_all", tensor, out, finish)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)

        def finish(contributions: dict[int, tuple[Tensor, Tensor]]) -> None:
            for rank, (given, _) in contributions.items():
                if rank != src:
                    given.copy_(contributions[src][0])

        return self._start_collective(f"broadcast(src={src})", tensor, None, finish)

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        return self._start_p2p(self.rank, dst, tensor)

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        return self._start_p2p(src, self.rank, tensor)

    def barrier(self) -> None:
        self._start_collective("barrier", None, None, lambda contributions: None).wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        chosen = self._check_ranks(ranks)
        self._splits += 1
        if self.rank not in chosen:
            return None
        members = [self.members[rank] for rank in chosen]
        group = self.world.group_number(self._group, self._splits, tuple(chosen))
        return Threads(
            self.world,
            members,
            chosen.index(self.rank),
            group,
            timeout_s=self.timeout_s,
            worker=self.worker,
            generation=self._generation,
        )

    def abandon(self) -> None:
        """Leave this world: whoever waits for this rank in it raises."""
        self.world.depart(self.members[self.rank], self._generation)

    def reconfigure_handle(self) -> str:
        return f"thread-{self.members[self.rank]}"

    def reconfigure(self, generation: str, handles: Sequence[str], *, timeout_s: float | None = None) -> Threads:
        """See :meth:`Communicator.reconfigure`. The members are ranks of the same :func:`run_ranks`."""
        rank = place_of(self.reconfigure_handle(), handles)
        if any(not handle.removeprefix("thread-").isdigit() for handle in handles):
            raise ValueError(f"handles must be those of ranks that are threads; got {list(handles)}.")
        members = [int(handle.removeprefix("thread-")) for handle in handles]
        group = self.world.group_number("generation", generation, tuple(handles))
        new = Threads(self.world, members, rank, group, timeout_s=timeout_s or self.timeout_s, worker=self.worker)
        has_lost = not self.world.lost.keys().isdisjoint(self.members)
        if has_lost:  # a rank may be waiting for this one in the old world
            self.abandon()
        new.barrier()
        self.abandon()
        return new

    def _start_collective(
        self,
        kind: str,
        given: Tensor | None,
        out: Tensor | None,
        finish: Callable[[dict[int, tuple[Tensor, Tensor]]], None],
    ) -> Work:
        if self._group in self.world.broken:
            raise self.world.broken[self._group]
        self._count += 1
        call = kind if given is None else describe_call(kind, given.dtype, given.numel())
        return self._contribute((self._group, self._count), kind, range(self.world_size), call, (given, out), finish)

    def _start_p2p(self, src: int, dst: int, tensor: Tensor) -> Work:
        check_contiguous(tensor)
        number = self._p2p_counts[src, dst] = self._p2p_counts.get((src, dst), 0) + 1

        def finish(contributions: dict[int, tuple[Tensor, Tensor]]) -> None:
            contributions[dst][0].copy_(contributions[src][0])

        key, kind = (self._group, "pair", src, dst, number), f"send {src} to {dst}"
        call = describe_call(kind, tensor.dtype, tensor.numel())
        return self._contribute(key, kind, sorted({src, dst}), call, (tensor, None), finish)

    def _contribute(
        self,
        key: tuple[object, ...],
        kind: str,
        ranks: Sequence[int],
        call: str,
        tensors: tuple[Tensor | None, Tensor | None],
        finish: Callable[[dict[int, tuple[Tensor, Tensor]]], None],
    ) -> Work:
        """Contribute to the collective of this key. The first rank makes it pending; the last one runs ``finish``."""
        with self.world.lock:
            pending = self.world.pending.get(key)
            if pending is None:
                pending = self.world.pending[key] = _PendingCollective(kind, ranks, self.members, self._generation)
            pending.contributions[self.rank] = tensors
            pending.calls[self.rank] = call
            is_last = pending.all_came
            if is_last:
                del self.world.pending[key]
                if len(set(pending.calls.values())) > 1:
                    pending.error = different_calls(dict(sorted(pending.calls.items())))
                    if "pair" not in key:
                        self.world.broken[self._group] = pending.error
            elif (self.world.lost or self._generation in self.world.departed) and any(
                self.world.why_gone(member, self._generation) for member in pending.missing().values()
            ):
                pending.finished.set()
        if is_last:
            if pending.error is None:
                try:
                    with torch.no_grad():
                        finish(pending.contributions)  # type: ignore[arg-type]  # the kinds that read a tensor got one
                except Exception as error:
                    pending.error = CollectiveFailed(f"{pending.kind}: {error}")
            pending.finished.set()
        return _ThreadWork(pending, self.world, self.timeout_s)


def _reduce(rows: Sequence[Tensor], op: str) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total = _COMBINE[op](total, row)
    return total


def run_ranks(world_size: int, fn: Callable[[Communicator], T], *, timeout_s: float = 30.0) -> list[T]:
    """Run ``fn(comm)`` in ``world_size`` threads, a rank each; returns what they returned, in rank order.

    A rank whose ``fn`` raises is lost to the others, like a process that dies. Its error is raised here; the
    :class:`gradsync.PeerLost` of the other ranks is not.

    >>> import torch
    >>> from gradsync.testing.threads import run_ranks
    >>> def total(comm):
    ...     t = torch.tensor([float(comm.rank)])
    ...     comm.all_reduce(t).wait()
    ...     return t.item()
    >>> run_ranks(3, total)
    [3.0, 3.0, 3.0]
    """
    world = _World()
    everyone = world.group_number("world")
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        comm = Threads(world, range(world_size), rank, everyone, timeout_s=timeout_s, worker=Worker())
        try:
            results[rank] = fn(comm)
            world.lose(rank, "it has finished and left")
        except BaseException as error:
            errors.append((rank, error))
            world.lose(rank, f"it failed with {type(error).__name__}: {error}")

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # Raise the cause, not its consequences: the other ranks only raise that this rank is lost.
        rank, cause = min(errors, key=lambda failed: isinstance(failed[1], PeerLost))
        cause.add_note(f"(raised on rank {rank} of {world_size})")
        raise cause
    return [results[rank] for rank in range(world_size)]
