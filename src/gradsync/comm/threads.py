"""Ranks as threads of one process: for tests, for teaching, and for trying a strategy on many workers at once.

The sum is taken in rank order by whoever arrives last, so results are the same bits on every run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, ReduceOp, Work, check_op
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.feed import Feed
from gradsync.errors import CollectiveFailed, PeerLost

T = TypeVar("T")

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class _Meeting:
    """One collective: what each rank brought, and whether all have come."""

    def __init__(self, kind: str, awaited: dict[int, int]) -> None:
        self.kind = kind
        self.awaited = awaited  # the group's rank -> the world's rank, of all who must come
        self.brought: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self.over = threading.Event()
        self.error: BaseException | None = None

    def missing(self) -> dict[int, int]:
        return {rank: whole for rank, whole in self.awaited.items() if rank not in self.brought}


class _World:
    """What the threads share: the open meetings, by group and number, and who is gone."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.meetings: dict[tuple[object, ...], _Meeting] = {}
        self.lost: dict[int, str] = {}  # by global rank

    def lose(self, rank: int, reason: str) -> None:
        with self.lock:
            self.lost.setdefault(rank, reason)
            for meeting in self.meetings.values():
                if rank in meeting.missing().values():
                    meeting.over.set()  # it will never come: wake whoever waits there


class _ThreadWork(Work):
    def __init__(self, meeting: _Meeting, world: _World, timeout_s: float) -> None:
        self._meeting = meeting
        self._world = world
        self._timeout_s = timeout_s
        self._given_up: PeerLost | None = None  # a wait that timed out is not begun again

    def done(self) -> bool:
        return self._meeting.over.is_set() or self._given_up is not None

    def wait(self) -> None:
        if self._given_up is not None:
            raise self._given_up
        start = time.monotonic()
        self._meeting.over.wait(self._timeout_s)
        if self._meeting.error is not None:
            raise self._meeting.error
        missing = self._meeting.missing()
        if not missing:
            self._meeting.over.wait()  # the last to come is copying results out: soon over, nobody is awaited
            if self._meeting.error is not None:
                raise self._meeting.error
            return
        gone = {rank: self._world.lost[whole] for rank, whole in missing.items() if whole in self._world.lost}
        reason = next(iter(gone.values())) if gone else f"it did not come to {self._meeting.kind} in time"
        self._given_up = PeerLost(
            rank=tuple(gone or missing), reason=reason, after_s=time.monotonic() - start, during=self._meeting.kind
        )
        raise self._given_up


class Threads(Communicator):
    """One rank of a world of threads; made by :func:`run_ranks`."""

    transport = "threads"
    why = "ranks are threads of one process"

    def __init__(
        self,
        world: _World,
        members: Sequence[int],
        rank: int,
        group: tuple[object, ...],
        *,
        timeout_s: float,
        feed: Feed,
    ) -> None:
        super().__init__(rank, len(members), timeout_s=timeout_s, feed=feed)
        self.world = world
        self.members = list(members)  # global rank of each rank of this group
        self._group = group
        self._count = 0  # collectives started: what pairs the ranks' calls
        self._splits = 0
        self._pair_counts: dict[tuple[int, int], int] = {}

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)

        def finish(brought: dict[int, tuple[Tensor, Tensor]]) -> None:
            total = _reduce([brought[rank][0] for rank in range(self.world_size)], op)
            for given, _ in brought.values():
                given.copy_(total)

        return self._meet(f"all_reduce({op})", tensor, None, finish)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))

        def finish(brought: dict[int, tuple[Tensor, Tensor]]) -> None:
            rows = [brought[rank][0].clone() for rank in range(self.world_size)]
            for _, into in brought.values():
                for row, value in zip(into, rows, strict=True):
                    row.copy_(value)

        return self._meet("all_gather", tensor, out, finish)

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))

        def finish(brought: dict[int, tuple[Tensor, Tensor]]) -> None:
            total = _reduce([brought[rank][0] for rank in range(self.world_size)], op)
            for rank, (_, into) in brought.items():
                into.copy_(total[rank])

        return self._meet(f"reduce_scatter({op})", tensor, out, finish)

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)

        def finish(brought: dict[int, tuple[Tensor, Tensor]]) -> None:
            sent = {rank: given.clone() for rank, (given, _) in brought.items()}
            for rank, (_, into) in brought.items():
                for source in range(self.world_size):
                    into[source].copy_(sent[source][rank])

        return self._meet("all_to_all", tensor, out, finish)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)

        def finish(brought: dict[int, tuple[Tensor, Tensor]]) -> None:
            for rank, (given, _) in brought.items():
                if rank != src:
                    given.copy_(brought[src][0])

        return self._meet(f"broadcast(src={src})", tensor, None, finish)

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        return self._pair(self.rank, dst, tensor)

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        return self._pair(src, self.rank, tensor)

    def barrier(self) -> None:
        self._meet("barrier", None, None, lambda brought: None).wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        chosen = self._check_ranks(ranks)
        self._splits += 1
        if self.rank not in chosen:
            return None
        members = [self.members[rank] for rank in chosen]
        group = (*self._group, self._splits, tuple(chosen))
        return Threads(self.world, members, chosen.index(self.rank), group, timeout_s=self.timeout_s, feed=self.feed)

    def _meet(
        self,
        kind: str,
        given: Tensor | None,
        out: Tensor | None,
        finish: Callable[[dict[int, tuple[Tensor, Tensor]]], None],
    ) -> Work:
        self._count += 1
        key = (*self._group, self._count)
        return self._arrive(key, _Meeting(kind, dict(enumerate(self.members))), (given, out), finish)

    def _pair(self, src: int, dst: int, tensor: Tensor) -> Work:
        check_contiguous(tensor)
        number = self._pair_counts[src, dst] = self._pair_counts.get((src, dst), 0) + 1

        def finish(brought: dict[int, tuple[Tensor, Tensor]]) -> None:
            brought[dst][0].copy_(brought[src][0])

        key = (*self._group, "pair", src, dst, number)
        pair = {rank: self.members[rank] for rank in (src, dst)}
        return self._arrive(key, _Meeting(f"send {src} to {dst}", pair), (tensor, None), finish)

    def _arrive(
        self,
        key: tuple[object, ...],
        proposed: _Meeting,
        brings: tuple[Tensor | None, Tensor | None],
        finish: Callable[[dict[int, tuple[Tensor, Tensor]]], None],
    ) -> Work:
        """Come to the meeting of this key, opening it if nobody has; whoever comes last does the work."""
        with self.world.lock:
            meeting = self.world.meetings.setdefault(key, proposed)
            if meeting.kind != proposed.kind and meeting.error is None:
                meeting.error = CollectiveFailed(
                    f"ranks make different calls: rank {self.rank} is in {proposed.kind}, another in {meeting.kind}."
                )
            meeting.brought[self.rank] = brings
            missing = meeting.missing()
            if not missing:
                del self.world.meetings[key]
            elif any(whole in self.world.lost for whole in missing.values()):
                meeting.over.set()
        if not missing:
            if meeting.error is None:
                try:
                    with torch.no_grad():
                        finish(meeting.brought)  # type: ignore[arg-type]  # the kinds that read a tensor brought one
                except Exception as error:
                    meeting.error = CollectiveFailed(f"{meeting.kind}: {error}")
            meeting.over.set()
        return _ThreadWork(meeting, self.world, self.timeout_s)


def _reduce(rows: Sequence[Tensor], op: str) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total = _COMBINE[op](total, row)
    return total


def run_ranks(world_size: int, fn: Callable[[Communicator], T], *, timeout_s: float = 30.0) -> list[T]:
    """Run ``fn(comm)`` in ``world_size`` threads, a rank each; returns what they returned, in rank order.

    A rank whose ``fn`` raises is lost to the others, as a process that dies would be; its error is the one raised here.

    >>> import torch
    >>> from gradsync.comm.threads import run_ranks
    >>> def total(comm):
    ...     t = torch.tensor([float(comm.rank)])
    ...     comm.all_reduce(t).wait()
    ...     return t.item()
    >>> run_ranks(3, total)
    [3.0, 3.0, 3.0]
    """
    world = _World()
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        comm = Threads(world, range(world_size), rank, ("world",), timeout_s=timeout_s, feed=Feed())
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
        # The cause before its echoes: the others only raise that this rank is gone.
        rank, cause = min(errors, key=lambda failed: isinstance(failed[1], PeerLost))
        cause.add_note(f"(raised on rank {rank} of {world_size})")
        raise cause
    return [results[rank] for rank in range(world_size)]
