"""``LazyMesh``: the TCP connections for a group's all-to-alls, made in the background from the first of them on.

[Note: why in the background] Two ranks may start the first all-to-alls of two groups in opposite order, or one of them
may wait for another collective first. If a call waited until its group is connected, they would wait for each other. So
the call returns, a thread connects, and then starts the exchanges that were asked for meanwhile, in their order.

The members share their endpoints through the group's store, because a collective of the group itself would come between
those that the caller starts. A clone of the store has a connection of its own: the store's own one is blocked while the
caller makes a new group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Store

from gradsync.comm.background import ThreadedWork, run_in_thread
from gradsync.comm.base import Work
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.rendezvous import gloo_addresses
from gradsync.comm.tcp.endpoint import Endpoint, connect_all
from gradsync.comm.tcp.exchange import ExchangeWork
from gradsync.comm.tcp.mesh import TcpMesh
from gradsync.errors import GradSyncError

POLL_S = 0.005  # how often the thread looks for the other ranks' endpoints
EXIT_S = 2.0  # how long a call of the store may take when the process exits

Start = Callable[[TcpMesh], ExchangeWork]


class LateExchange(ThreadedWork):
    """An exchange that starts when its group is connected."""

    def __init__(self, start: Start, guard: CollectiveGuard, call: Call) -> None:
        super().__init__(guard, call)
        self._start = start
        self._exchange: ExchangeWork | None = None

    def begin(self, mesh: TcpMesh) -> None:
        """Start the exchange: the group is connected."""
        self._exchange = self._start(mesh)
        self.part_done()

    def done(self) -> bool:
        return super().done() and (self._exchange is None or self._exchange.done())

    def wait(self) -> None:
        super().wait()
        assert self._exchange is not None, "it has begun, or waiting has raised"
        self._exchange.wait()


class LazyMesh:
    """A mesh of a group that connects at the first exchange. No method blocks for the other ranks.

    ``store``: the group's, from which only this group reads.
    """

    def __init__(self, rank: int, guard: CollectiveGuard, store: Store) -> None:
        self._rank = rank
        self._guard = guard
        self._store: Any = store  # torch's annotations do not have clone()
        self._lock = threading.Lock()
        self.mesh: TcpMesh | None = None  # once it is connected
        self._pending: list[LateExchange] = []
        self._started = False
        self._error = ""
        self._storing = threading.Lock()  # held during a call of the store
        # A thread that returns from such a call while the interpreter shuts down would abort the process.
        guard.heartbeat.before_leaving.append(weakref.WeakMethod(self._stop_connecting))

    def exchange(self, tensor: Tensor, out: Tensor, used: Sequence[int] | None, call: Call) -> Work:
        """As :meth:`TcpMesh.exchange`."""
        with self._lock:
            if self.mesh is not None:
                return self.mesh.exchange(tensor, out, used, call)
            work = LateExchange(lambda mesh: mesh.exchange(tensor, out, used, call), self._guard, call)
            if self._error:
                work.fail(self._error)
                return work
            self._pending.append(work)
            if not self._started:
                self._started = True
                run_in_thread(functools.partial(self._connect, call))
        return work

    def close(self) -> None:
        """Close the connections, or do not make them. Safe to call twice."""
        self._stop_connecting()
        if self.mesh is not None:
            self.mesh.close()

    def _stop_connecting(self) -> None:
        self._fail("the communicator is closed")
        if self._storing.acquire(timeout=EXIT_S):
            self._storing.release()

    def _connect(self, call: Call) -> None:
        share = functools.partial(self._share, call)
        try:
            connections = connect_all(self._rank, share, gloo_addresses(), self._guard, call)
        except (OSError, RuntimeError, GradSyncError) as error:  # RuntimeError: of the store
            self._fail(str(error))
            return
        mesh = TcpMesh(self._rank, connections, self._guard)
        with self._lock:
            if self._error:
                mesh.close()
                return
            for work in self._pending:
                work.begin(mesh)
            self._pending = []
            self.mesh = mesh

    def _share(self, call: Call, own: Endpoint) -> list[Endpoint]:
        """All ranks' endpoints. Waits for the last rank without a timeout: a rank that waits for its work has one."""
        keys = [f"endpoint/{rank}" for rank in range(len(self._guard.members))]
        with self._calling_store():
            store = self._store.clone()
            store.set(keys[self._rank], json.dumps(dataclasses.asdict(own)))
        while True:
            self._guard.raise_if_lost(call)
            with self._calling_store():
                if store.check(keys):
                    return [Endpoint(**json.loads(value)) for value in store.multi_get(keys)]
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _calling_store(self) -> Iterator[None]:
        with self._storing:
            if self._error:
                raise ConnectionError(self._error)
            yield

    def _fail(self, error: str) -> None:
        with self._lock:
            self._error = self._error or error
            pending, self._pending = self._pending, []
        for work in pending:
            work.fail(error)
