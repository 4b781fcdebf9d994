"""Fault injection: a communicator that is late, drops out or dies, reproducibly from a seed.

Rank 1 dies at its second collective, and rank 0 finds out:

>>> import torch
>>> import gradsync
>>> from gradsync.testing import Faulty, run_ranks
>>> class Killed(Exception):
...     pass
>>> def die():
...     raise Killed
>>> def train(comm):
...     faulty = Faulty(comm, seed=0, kill_at=2 if comm.rank == 1 else None, on_kill=die)
...     try:
...         for step in range(5):
...             faulty.all_reduce(torch.ones(1)).wait()
...     except (Killed, gradsync.PeerLost) as error:
...         return f"step {step}: {type(error).__name__}"
>>> run_ranks(2, train)
['step 1: PeerLost', 'step 1: Killed']
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from gradsync.comm.base import Communicator, ReduceOp, SourceSlice, Work
from gradsync.comm.forwarding import Forwarding
from gradsync.errors import PeerLost


class _FaultPlan:
    """The faults of one rank. All groups split from its communicator share it: a process dies in all its groups."""

    def __init__(
        self,
        rank: int,
        *,
        seed: int,
        delay_s: float,
        delay_probability: float,
        drop_probability: float,
        kill_probability: float,
        kill_at: int | None,
        on_kill: Callable[[], None] | None,
    ) -> None:
        self._rank = rank
        self._seed = seed
        self._delay_s = delay_s
        self._delay_probability = delay_probability
        self._drop_probability = drop_probability
        self._kill_probability = kill_probability
        self._kill_at = kill_at
        self._on_kill = on_kill
        self._lock = threading.Lock()  # two models of one rank may be in backward at once
        self._count = 0
        self._silent = False

    def take_part_in_next(self) -> bool:
        """Inject the fault of the next collective, if it has one; False if the rank does not take part in it."""
        with self._lock:
            self._count += 1
            number = self._count
        # A new generator for each number: the fault does not depend on what happened before.
        draw = random.Random(f"{self._seed}:{self._rank}:{number}")
        late, dropped, killed = (draw.random() for _ in range(3))
        if killed < self._kill_probability or number == self._kill_at:
            self._kill()
        if dropped < self._drop_probability:
            self._silent = True
        if self._silent:
            return False
        if late < self._delay_probability:
            time.sleep(draw.uniform(0.0, self._delay_s))
        return True

    def _kill(self) -> None:
        if self._on_kill is None:
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            self._on_kill()
        self._silent = True  # a dead rank sends nothing more, even if its thread is still here


class _DroppedWork(Work):
    """A collective that this rank has started but that never reached the others. Waiting for it times out."""

    def __init__(self, comm: Faulty, what: str) -> None:
        self._comm = comm
        self._what = what
        self._started_s = time.monotonic()

    def done(self) -> bool:
        return time.monotonic() - self._started_s >= self._comm.timeout_s

    def wait(self) -> None:
        time.sleep(max(0.0, self._started_s + self._comm.timeout_s - time.monotonic()))
        # From here it looks as if all others had fallen silent at once.
        raise PeerLost(
            rank=tuple(rank for rank in range(self._comm.world_size) if rank != self._comm.rank),
            reason="no answer came: this rank's part was dropped on its way",
            after_s=time.monotonic() - self._started_s,
            during=self._what,
        )


class Faulty(Forwarding):
    """Wraps any communicator and injects delays, drops and deaths from a seed. For tests, and to try out a recovery.

    The faults depend only on ``seed``, the rank, and how many collectives (of all its groups together) the rank has
    started. Wrap the communicator on every rank; the options may differ from rank to rank.

    Args:
        comm: the communicator that moves the tensors.
        seed: decides which faults occur.
        delay_s: the longest delay before a collective starts; higher => ranks are further apart.
        delay_probability: the fraction of collectives that are delayed.
        drop_probability: the fraction of collectives at which the rank drops out. It never takes part in anything
            again. At their timeout the others raise :class:`gradsync.PeerLost`, and so does this rank.
        kill_probability: the fraction of collectives at which the rank dies.
        kill_at: the number of the collective, from 1, at which the rank dies in any case.
        on_kill: how the rank dies, for ranks that are threads. It should raise; if it returns, the rank drops out
            instead. Default: SIGKILL to the own process.

    >>> import torch
    >>> from gradsync.testing.faults import Faulty
    >>> from gradsync.testing.threads import run_ranks
    >>> def total(comm):
    ...     t = torch.tensor([float(comm.rank)])
    ...     Faulty(comm, seed=0, delay_s=0.01).all_reduce(t).wait()
    ...     return t.item()
    >>> run_ranks(3, total)
    [3.0, 3.0, 3.0]
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        seed: int,
        delay_s: float = 0.0,
        delay_probability: float = 1.0,
        drop_probability: float = 0.0,
        kill_probability: float = 0.0,
        kill_at: int | None = None,
        on_kill: Callable[[], None] | None = None,
    ) -> None:
        if delay_s < 0.0:
            raise ValueError(f"delay_s must be 0 or more; got {delay_s=}.")
        for name, value in (
            ("delay_probability", delay_probability),
            ("drop_probability", drop_probability),
            ("kill_probability", kill_probability),
        ):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1; got {name}={value}.")
        if kill_at is not None and kill_at < 1:
            raise ValueError(f"kill_at counts collectives from 1; got {kill_at=}.")
        plan = _FaultPlan(
            comm.rank,
            seed=seed,
            delay_s=delay_s,
            delay_probability=delay_probability,
            drop_probability=drop_probability,
            kill_probability=kill_probability,
            kill_at=kill_at,
            on_kill=on_kill,
        )
        self._wrap(comm, plan)

    def _wrap(self, comm: Communicator, plan: _FaultPlan) -> None:
        super().__init__(comm)
        self.why = f"{comm.why}, with faults"
        self._plan = plan

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        return self._unless_silent("all_reduce", lambda: self.inner.all_reduce(tensor, op=op))

    def all_reduce_from(self, buffer: Tensor, sources: Sequence[SourceSlice]) -> Work:
        return self._unless_silent("all_reduce", lambda: self.inner.all_reduce_from(buffer, sources))

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        return self._unless_silent("all_gather", lambda: self.inner.all_gather(tensor, out=out))

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        return self._unless_silent("reduce_scatter", lambda: self.inner.reduce_scatter(tensor, out=out, op=op))

    def reduce_slices(self, buffer: Tensor, sources: Sequence[SourceSlice] = ()) -> Work:
        return self._unless_silent("reduce_scatter", lambda: self.inner.reduce_slices(buffer, sources))

    def gather_slices(self, buffer: Tensor) -> Work:
        return self._unless_silent("all_gather", lambda: self.inner.gather_slices(buffer))

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        return self._unless_silent("all_to_all", lambda: self.inner.all_to_all(tensor, out=out, own=own, used=used))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        return self._unless_silent("broadcast", lambda: self.inner.broadcast(tensor, src))

    def send(self, tensor: Tensor, dst: int) -> Work:
        return self._unless_silent("send", lambda: self.inner.send(tensor, dst))

    def recv(self, tensor: Tensor, src: int) -> Work:
        return self._unless_silent("recv", lambda: self.inner.recv(tensor, src))

    def barrier(self) -> None:
        if self._takes_part():
            self.inner.barrier()
        else:
            _DroppedWork(self, "barrier").wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        group = self.inner.split(ranks)
        return None if group is None else self._wrapped(group)

    def reconfigure(self, generation: str, handles: Sequence[str], *, timeout_s: float | None = None) -> Communicator:
        return self._wrapped(self.inner.reconfigure(generation, handles, timeout_s=timeout_s))

    def control_group(self) -> Communicator:
        return self.clone()

    def compare(self, largest: Tensor, what: str) -> Work:
        return self.all_reduce(largest, op="max")

    def _wrapped(self, comm: Communicator) -> Faulty:
        """Another communicator of this rank, with the same faults."""
        wrapped = Faulty.__new__(Faulty)
        wrapped._wrap(comm, self._plan)
        return wrapped

    @property
    def heartbeat(self) -> None:
        """None: the transport's heartbeat does not know of injected faults."""
        return None

    def _unless_silent(self, what: str, start: Callable[[], Work]) -> Work:
        return start() if self._takes_part() else _DroppedWork(self, what)

    def _takes_part(self) -> bool:
        # In a world of one nothing is sent, so nothing can be lost.
        return self._plan.take_part_in_next() or self.world_size == 1
