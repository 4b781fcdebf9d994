"""``connect_members``: the world communicator of one epoch of an elastic run, in a process that outlives the epoch.

``connect`` makes one world for the life of the process, by torch's default process group. An elastic run has another
world whenever its members change. Each has a *generation*, a name that is used once: its keys in the store, its
heartbeat (with its rank 0 as the hub), its groups, connections and shared memory are its own. So the worlds of one
process never meet, and closing one releases all that it holds.

The store must outlive every member: the launcher holds it.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import secrets
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from gradsync.comm.base import Communicator, Solo, Worker
from gradsync.comm.c10d.communicator import C10d, after_barrier, make_group
from gradsync.comm.c10d.groups import LONGEST_POLL_S, SHORTEST_POLL_S, BareGroups
from gradsync.comm.checked import checked
from gradsync.comm.checks import place_of
from gradsync.comm.connect import over_transport
from gradsync.comm.failure.guard import DIAGNOSIS_S, CollectiveGuard
from gradsync.comm.failure.heartbeat import HUB, Heartbeat
from gradsync.comm.forwarding import Forwarding
from gradsync.comm.rendezvous import choose_gloo_interface, gloo_addresses, own_addresses, requested_transport
from gradsync.errors import CollectiveFailed, GradSyncError, PeerLost

MEMBER_TRANSPORTS = ("auto", "tcp", "c10d", "shm", "hierarchical", "solo")
WORLD = "world"  # the name of the group of all members


def connect_members(
    store: Store,
    *,
    generation: str,
    rank: int,
    world_size: int,
    transport: str = "auto",
    timeout_s: float,
    why: str,
    worker: Worker | None = None,
) -> Communicator:
    """Connect this process with the other members of an epoch. Blocks until all have come, at most ``timeout_s``.

    The transport is chosen as by :func:`gradsync.connect`: ``"auto"`` is shared memory on one host, and TCP or
    hierarchical between hosts. One member alone is a world of one, whatever the transport. ``"hierarchical"`` is the
    same as ``"auto"``: members that leave may leave one host. Calls are compared as by ``connect``.

    Raises :class:`gradsync.PeerLost` or :class:`gradsync.CollectiveFailed` if a member does not come, or dies
    meanwhile. ``close()`` of what it returns releases all that this world holds.

    Args:
        store: held by a process that outlives all members. A connection of its own is made to it.
        generation: the name of this epoch's world; the same on all members, and never used before with this store.
        rank: this member's place in the epoch.
        world_size: how many members the epoch has.
        transport: one of ``MEMBER_TRANSPORTS``.
        timeout_s: for connecting, and for the collectives of the communicator.
        why: why this world was made, for ``comm.why``.
        worker: this worker's identity, if it has been in another world.
    """
    if transport == "auto":
        transport = requested_transport((*MEMBER_TRANSPORTS, "mpi"))
    if transport == "mpi":
        raise ValueError(
            "transport='mpi' can't connect the members of an elastic run: MPI ends all ranks when one of them dies. "
            f"Use one of {', '.join(MEMBER_TRANSPORTS)}."
        )
    if transport not in MEMBER_TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(MEMBER_TRANSPORTS)}; got {transport!r}.")
    if transport == "solo" and world_size > 1:
        raise ValueError(f"transport='solo' is for one member; got {world_size=}. Use 'auto'.")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1; got {rank=} {world_size=}.")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be above 0; got {timeout_s=}.")
    return _connect(
        _Member(
            store=store,
            transport=transport,
            timeout_s=timeout_s,
            why=why,
            worker=worker if worker is not None else Worker(),
            handle=secrets.token_hex(8),
        ),
        generation,
        rank,
        world_size,
    )


@dataclass(frozen=True, kw_only=True)
class _Member:
    """What stays the same in all worlds of a member."""

    store: Store
    transport: str
    timeout_s: float
    why: str
    worker: Worker
    handle: str


class MembersWorld(Forwarding):
    """The world communicator of one epoch. Made by :func:`connect_members`, or by ``reconfigure`` of another one."""

    compares_calls = True

    def __init__(self, inner: Communicator, member: _Member, resources: _Resources | None) -> None:
        super().__init__(inner)
        self._member = member
        self._resources = resources  # None: it has none, as a world of one
        _open_worlds.add(self)

    def unchecked(self) -> Communicator:
        return self.inner.unchecked()

    def clone(self) -> Communicator:
        return self.inner.clone()

    def close(self) -> None:
        """Leave the world, and release all that it holds, its clones and splits too. Does not wait for anything."""
        self.leave()

    def abandon(self) -> None:
        self.leave()

    def leave(self, failure: str = "") -> None:
        """As ``close``. ``failure``: why this member ends, for the other members."""
        resources, self._resources = self._resources, None
        if resources is not None:
            resources.announce_leaving(failure)
        self.inner.close()
        if resources is not None:
            resources.release()
        _open_worlds.discard(self)

    def reconfigure_handle(self) -> str:
        return self._member.handle

    def reconfigure(self, generation: str, handles: Sequence[str], *, timeout_s: float | None = None) -> Communicator:
        """See :meth:`Communicator.reconfigure`.

        After a loss this world is abandoned first: a peer may be waiting for this rank in it. Otherwise it is abandoned
        when all have come to the new one: a peer may still be at the end of a collective.
        """
        rank = place_of(self._member.handle, handles)
        member = self._member
        if timeout_s is not None:
            member = dataclasses.replace(member, timeout_s=timeout_s)
        if self.heartbeat is not None and self.heartbeat.lost:
            self.abandon()
        world = _connect(member, generation, rank, len(handles))
        self.abandon()
        return world


def _connect(member: _Member, generation: str, rank: int, world_size: int) -> MembersWorld:
    if world_size == 1:
        solo = Solo(timeout_s=member.timeout_s, worker=member.worker)
        solo.why = f"{member.why}; {solo.why}"
        return MembersWorld(solo, member, None)
    began_s = time.monotonic()
    choose_gloo_interface(_host_of(member.store))
    resources = _Resources(member, generation, rank)
    try:
        resources.heartbeat = _connect_heartbeat(resources.store, rank, world_size, member.timeout_s)
        guard = CollectiveGuard(resources.heartbeat, range(world_size), WORLD, member.timeout_s)
        base = C10d(
            make_group(resources.groups, range(world_size), WORLD, guard),
            range(world_size),
            resources.heartbeat,
            timeout_s=member.timeout_s,
            why=f"{member.why}; {world_size} members",
            worker=member.worker,
            groups=resources.groups,
        )
        transport = "auto" if member.transport == "hierarchical" else member.transport
        return MembersWorld(checked(over_transport(after_barrier(base), transport)), member, resources)
    except BaseException as error:
        cause = _cause_of(error, resources.heartbeat, generation, began_s)
        resources.announce_leaving("")
        resources.release()
        if cause is error:
            raise
        raise cause from error


class _Resources:
    """What one world holds beside its communicators: its heartbeat, its groups, and a connection to the store."""

    def __init__(self, member: _Member, generation: str, rank: int) -> None:
        self._pool = _store_pools.setdefault(member.store, [])
        self._connection: Any = self._pool.pop() if self._pool else _clone(member.store)
        self._connection.set_timeout(timedelta(seconds=member.timeout_s))
        self.store = PrefixStore(f"gradsync/generation/{generation}", self._connection)
        self.groups = BareGroups(self.store, rank)
        self.heartbeat: Heartbeat | None = None

    def announce_leaving(self, failure: str) -> None:
        """Close the heartbeat. This comes first: peers must not take connections that close for a death."""
        if self.heartbeat is not None:
            self.heartbeat.close(failure)

    def release(self) -> None:
        """Close the communicators and release the groups."""
        self.groups.close()
        if not self.groups.is_store_busy:
            self._pool.append(self._connection)


# Connections that no world uses, by the store that they are clones of. The caller's own connection may be in use, or
# blocked in a call. (They are kept because torch looks up names for each new one: with a name server that does not
# answer, that takes five seconds.)
_store_pools: weakref.WeakKeyDictionary[Store, list[Store]] = weakref.WeakKeyDictionary()
# A forked child must not use its parent's connections.
os.register_at_fork(after_in_child=_store_pools.clear)


def _clone(store: Any) -> Store:
    return store.clone()  # type: ignore[no-any-return]  # torch's annotations do not have it


def _connect_heartbeat(store: Store, rank: int, world_size: int, timeout_s: float) -> Heartbeat:
    """The heartbeat of a new world. Rank 0 may be on any host, so it gives all its addresses."""
    end_s, began_s, pause_s = time.monotonic() + timeout_s, time.monotonic(), SHORTEST_POLL_S
    while rank != HUB and not store.check(["heartbeat"]):  # in Python: the store would wait in C
        if time.monotonic() > end_s:
            reason = "it did not come to connect with the other members in time"
            raise PeerLost(rank=HUB, reason=reason, after_s=time.monotonic() - began_s, during="connect")
        time.sleep(pause_s)
        pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)
    return Heartbeat(
        rank,
        world_size,
        store,
        addresses=list(dict.fromkeys([*gloo_addresses(), *own_addresses(), "127.0.0.1"])),
        timeout_s=timeout_s,
        connect_timeout_s=max(0.0, end_s - time.monotonic()),
        loss_ends_all=True,
    )


def _cause_of(error: BaseException, heartbeat: Heartbeat | None, generation: str, began_s: float) -> BaseException:
    """The error to raise when connecting has failed: it names the member that is lost, if one is."""
    if isinstance(error, GradSyncError) or not isinstance(error, RuntimeError | OSError):
        return error
    end_s = time.monotonic() + DIAGNOSIS_S
    while heartbeat is not None and not heartbeat.lost and time.monotonic() < end_s:
        time.sleep(0.01)
    after_s = time.monotonic() - began_s
    if heartbeat is not None and heartbeat.lost:
        rank, reason = next(iter(heartbeat.lost.items()))
        return PeerLost(rank=rank, reason=reason, after_s=after_s, during="connect")
    return CollectiveFailed(f"the members of generation {generation!r} could not connect in {after_s:.1f} s: {error}")


def _host_of(store: Store) -> str:
    """The host of the process that holds a store: of a TCP store, behind any number of prefixes."""
    inner: Any = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return str(getattr(inner, "host", ""))


_open_worlds: weakref.WeakSet[MembersWorld] = weakref.WeakSet()


@atexit.register
def _leave_at_exit() -> None:
    """Tell the other members that this one left in order, and did not die; or what it failed with."""
    error = getattr(sys, "last_value", None)  # what the interpreter printed, if an exception ends it
    for world in list(_open_worlds):
        world.leave("" if error is None else f"it failed with {type(error).__name__}: {error}")
