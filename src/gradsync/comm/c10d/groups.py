"""How the process groups of a C10d communicator are made and released: ``TorchGroups`` and ``BareGroups``.

A run whose ranks stay the same uses torch's default process group and ``dist.new_group``. An elastic run has another
world whenever its members change, and torch has one default group in a process. Its groups are bare: made without the
default one, each on keys of its own in the store.
"""

from __future__ import annotations

import abc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from gradsync.comm.background import attempt
from gradsync.comm.c10d.reaper import reap
from gradsync.errors import PeerLost

# Headers and objects are CPU tensors on every machine: a group needs Gloo beside the GPU's own backend.
ACCELERATOR = torch.accelerator.current_accelerator(check_available=True)
# NCCL for CUDA and ROCm, XCCL for XPU; "gloo" alone where torch knows none for the device.
DEVICE_BACKEND = dist.Backend.default_device_backend_map.get(ACCELERATOR.type) if ACCELERATOR is not None else None
BACKENDS = f"cpu:gloo,{ACCELERATOR.type}:{DEVICE_BACKEND}" if ACCELERATOR is not None and DEVICE_BACKEND else "gloo"

SHORTEST_POLL_S, LONGEST_POLL_S = 0.001, 0.02  # how often a rank looks whether the other members have come
# Gloo gives up connecting after five times its timeout, and every member is there when it begins.
CONNECT_FRACTION, SHORTEST_CONNECT_S = 0.2, 1.0

_naming = threading.Lock()


class Closable(Protocol):
    """A communicator, as far as the end of its world needs it."""

    def close(self) -> None: ...


class Groups(abc.ABC):
    """Makes and releases process groups. ``rank``: this process's, in the world that all groups are part of."""

    rank: int

    @abc.abstractmethod
    def make(self, members: Sequence[int], name: str, timeout_s: float, check: Callable[[], None]) -> dist.ProcessGroup:
        """A group of these ranks; only they make this call, which blocks. Raises RuntimeError if they can't connect.

        ``name``: the same on all ranks, and never used before. ``check``: called while it waits; raises if a rank is
        lost.
        """

    @abc.abstractmethod
    def store_of(self, group: dist.ProcessGroup) -> Store:
        """The store with the keys of a group."""

    @abc.abstractmethod
    def release(self, group: dist.ProcessGroup, works: Sequence[dist.Work], timeout_s: float) -> None:
        """This process uses the group no more. Does not block. ``works``: those that may be under way."""

    def hold(self, group: dist.ProcessGroup, comm: Closable) -> None:  # noqa: B027 - torch holds its groups itself
        """Keep the communicator of a group until it releases the group, or the world ends and closes it."""

    def register(self, comm: Closable) -> None:  # noqa: B027 - only an elastic world ends before its process
        """Have the end of the world close a communicator that uses others of these groups, if it is still there."""


class TorchGroups(Groups):
    """Groups of torch's default process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def make(self, members: Sequence[int], name: str, timeout_s: float, check: Callable[[], None]) -> dist.ProcessGroup:
        """See :class:`Groups`.

        [Note: names of groups] Ranks find each other in the store under the group's name, so it must be the same on
        all ranks and never be used again. torch does not accept a name: by default it counts the groups that a rank is
        in at the moment, which differs between ranks, and a count is used again after a group was destroyed.
        """
        torch_names: Any = dist.distributed_c10d
        with _naming:
            before = torch_names._process_group_name
            torch_names._process_group_name = lambda *_, **__: name
            try:
                group = dist.new_group(
                    list(members),
                    timeout=timedelta(seconds=timeout_s),
                    backend=BACKENDS,
                    use_local_synchronization=True,
                    sort_ranks=False,  # the caller's order is the group's
                )
            finally:
                torch_names._process_group_name = before
        assert isinstance(group, dist.ProcessGroup), "this rank is among the members"
        return group

    def store_of(self, group: dist.ProcessGroup) -> Store:
        store: Store = dist.distributed_c10d._get_process_group_store(group)
        return store

    def release(self, group: dist.ProcessGroup, works: Sequence[dist.Work], timeout_s: float) -> None:
        # Destroying a group waits for works under way, which a lost peer may never join: the exit ends such a group.
        busy = any(not work.is_completed() for work in works)
        if group is not dist.group.WORLD and dist.is_initialized() and not busy:
            dist.destroy_process_group(group)


class BareGroups(Groups):
    """The groups of one world of an elastic run, which ends when its members change.

    ``store``: with keys of this world only; no other thread may use its connection.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self._store = store
        self.is_store_busy = False  # an abandoned thread may be in a call of it for good
        self._communicators: weakref.WeakSet[Closable] = weakref.WeakSet()
        # A group that was garbage-collected with works under way would block, and the threads of its communicator's
        # connections would stay. So both are kept until the communicator is closed, at the latest by close().
        self._held: dict[dist.ProcessGroup, Closable] = {}

    def make(self, members: Sequence[int], name: str, timeout_s: float, check: Callable[[], None]) -> dist.ProcessGroup:
        end_s = time.monotonic() + timeout_s
        rank = list(members).index(self.rank)
        store = PrefixStore(f"group/{name}", self._store)
        self._wait_for_members(store, members, check, end_s)
        group = ProcessGroup(store, rank, len(members))
        left_s = max(SHORTEST_CONNECT_S, CONNECT_FRACTION * (end_s - time.monotonic()))

        def connect() -> ProcessGroupGloo:
            return ProcessGroupGloo(PrefixStore("cpu", store), rank, len(members), timedelta(seconds=left_s))

        # A member that dies right now would leave the others waiting in C.
        self.is_store_busy = True
        gloo = attempt(connect, check, discard=lambda late: None, check_every_s=LONGEST_POLL_S)
        self.is_store_busy = False
        gloo._set_default_timeout(timedelta(seconds=timeout_s))
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        if ACCELERATOR is not None and DEVICE_BACKEND:
            kind, backend = _device_backend(PrefixStore(ACCELERATOR.type, store), rank, len(members), timeout_s)
            group._register_backend(ACCELERATOR, kind, backend)
            group._set_default_backend(kind)
        named: Any = group
        named._set_group_name(name)  # torch annotates a type of its own for names
        return group

    def _wait_for_members(self, store: Store, members: Sequence[int], check: Callable[[], None], end_s: float) -> None:
        """Wait until all members have come. Gloo would block in C for it, and would not notice that one has died."""
        began_s = time.monotonic()
        keys = [f"came/{rank}" for rank in members]
        if store.add(f"came/{self.rank}", 1) > 1:
            raise ValueError("this rank has been in a group of this name: every generation needs a name of its own.")
        pause_s = SHORTEST_POLL_S
        while not store.check(keys):
            check()
            if time.monotonic() > end_s:
                missing = [rank for rank, key in zip(members, keys, strict=True) if not store.check([key])]
                if not missing:
                    return
                raise PeerLost(
                    rank=tuple(missing),
                    reason="it did not come to connect with the other members in time",
                    after_s=time.monotonic() - began_s,
                    during="connect",
                )
            time.sleep(pause_s)
            pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)

    def store_of(self, group: dist.ProcessGroup) -> Store:
        store: Any = group
        return store.get_group_store()  # type: ignore[no-any-return]  # torch's annotations do not have it

    def release(self, group: dist.ProcessGroup, works: Sequence[dist.Work], timeout_s: float) -> None:
        self._held.pop(group, None)
        reap(group, works, timeout_s=timeout_s)

    def hold(self, group: dist.ProcessGroup, comm: Closable) -> None:
        self._held[group] = comm

    def register(self, comm: Closable) -> None:
        self._communicators.add(comm)

    def close(self) -> None:
        """Close every communicator that uses these groups: the world is over. Does not block."""
        for comm in [*self._communicators, *self._held.values()]:
            comm.close()


def _device_backend(store: Store, rank: int, size: int, timeout_s: float) -> tuple[Any, Any]:
    """The backend for the tensors of this machine's GPUs."""
    timeout = timedelta(seconds=timeout_s)
    if DEVICE_BACKEND == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
    if DEVICE_BACKEND == "xccl":
        xccl: Any = getattr(dist, "ProcessGroupXCCL", None)
        options = xccl.Options()
        options._timeout = timeout
        return ProcessGroup.BackendType.XCCL, xccl(store, rank, size, options)
    raise ValueError(f"an elastic run uses NCCL or XCCL for GPUs; got {DEVICE_BACKEND!r}, which torch gives this one.")
