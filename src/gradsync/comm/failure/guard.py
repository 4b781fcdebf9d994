"""Watching over the collectives of one group: which rank is to blame when one fails or takes too long.

A transport begins each collective with ``CollectiveGuard.begin`` and calls ``check`` from time to time while it waits.
The guard combines what the heartbeat knows (ranks that are lost, ranks that have left, each rank's progress) into
:class:`gradsync.PeerLost`, or :class:`gradsync.CollectiveFailed` when every rank is alive and took part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from gradsync.comm.failure.heartbeat import Heartbeat
from gradsync.errors import CollectiveFailed, PeerLost

DIAGNOSIS_S = 1.0  # a transport's own error can arrive before the heartbeat's message about the rank that caused it


@dataclass(slots=True)
class Call:
    """One collective under way: its sequence number in the group, its name, when it began (or the wait for it did)."""

    number: int  # the sequence number: all ranks count alike
    what: str
    started_s: float


class CollectiveGuard:
    """Watches one group through the heartbeat. Counts the group's collectives, so that ranks can be compared."""

    def __init__(self, heartbeat: Heartbeat, members: Sequence[int], key: str, timeout_s: float) -> None:
        self.heartbeat = heartbeat
        self.members = list(members)  # the world's rank of each rank of the group
        self.timeout_s = timeout_s
        self.key = key
        self.position = heartbeat.progress.position_in(key)  # [number of collectives begun, name of the last one]

    def begin(self, what: str, *, p2p: bool = False) -> Call:
        """Count a collective that begins. A send or receive (``p2p``) is not counted: most ranks have no part in it."""
        if not p2p:
            self.position[0] += 1
            self.position[1] = what
        return Call(self.position[0], what, time.monotonic())

    def retract(self, call: Call) -> None:
        """Record that this rank never finished a collective that it began: the others must not wait for its part."""
        self.position[:] = call.number - 1, f"{call.what}, which it did not finish"

    def check(self, call: Call) -> None:
        """Called from time to time by a rank that waits: raise if a peer is lost, or the wait exceeds ``timeout_s``."""
        self.raise_if_lost(call)
        if time.monotonic() - call.started_s > self.timeout_s:
            self.raise_cause(call, "it timed out")

    def raise_if_lost(self, call: Call) -> None:
        """Raise PeerLost if a rank of the group is known to be dead, or left before it came to this collective."""
        heartbeat = self.heartbeat
        if not heartbeat.lost and not heartbeat.left:
            return
        if heartbeat.rank in heartbeat.lost:
            raise self._lost(heartbeat.rank, f"the others gave this rank up: {heartbeat.lost[heartbeat.rank]}", call)
        for rank, reason in list(heartbeat.lost.items()):
            if rank in self.members or heartbeat.loss_ends_all:
                raise self._lost(rank, reason, call)
        if heartbeat.rank in heartbeat.left:
            raise CollectiveFailed(f"{call.what} was under way when this rank left its world, for another one.")
        for rank, progress in list(heartbeat.left.items()):
            count, last = progress.groups.get(self.key, (0, "nothing"))
            if rank in self.members and count < call.number:
                if heartbeat.loss_ends_all:  # it is not declared lost: the others are about to leave too
                    raise self._lost(rank, "it has left this world of an elastic run, for another one", call)
                reason = (
                    f"it has finished and left (it was at {progress.note or last}; this rank is at "
                    f"{heartbeat.progress.note or call.what}). Do the ranks have different numbers of batches? "
                    "Put the loop into `with sync.join():`, or take the data from gradsync.shard()."
                )
                heartbeat.declare_lost([rank], reason)
                raise self._lost(rank, reason, call)

    def raise_cause(self, call: Call, error: str) -> NoReturn:
        """A collective failed or timed out: find the rank to blame, tell the other ranks, and raise."""
        end = time.monotonic() + DIAGNOSIS_S
        while time.monotonic() < end:
            self.raise_if_lost(call)
            if time.monotonic() - call.started_s > self.timeout_s:
                break  # the message about a dead rank is quick: after so long none will come
            time.sleep(0.01)
        progress = self.heartbeat.ask_progress()
        self.raise_if_lost(call)
        others = [rank for rank in self.members if rank != self.heartbeat.rank]
        silent = [rank for rank in others if rank not in progress]
        behind = {}
        for rank in others:
            count, last = (0, "")
            if rank in progress:
                count, last = progress[rank].groups.get(self.key, (0, "no collective of this group yet"))
            if rank in progress and count < call.number:
                behind[rank] = progress[rank].note or last
        late = silent or list(behind)
        if not late:
            after_s = time.monotonic() - call.started_s
            raise CollectiveFailed(
                f"{call.what} failed after {after_s:.1f} s, though every rank is alive and took part: {error}"
            )
        reason = "it does not answer (frozen, or its host is gone)"
        if not silent:
            reason = (
                f"it did not come to {call.what} in time; it is still at {behind[late[0]]}, "
                f"this rank is at {self.heartbeat.progress.note or call.what}"
            )
        self.heartbeat.declare_lost(late, reason)
        raise self._lost(late[0], reason, call)

    def _lost(self, rank: int, reason: str, call: Call) -> PeerLost:
        after_s = time.monotonic() - call.started_s
        return PeerLost(rank=rank, reason=reason, after_s=after_s, during=call.what, step=self.heartbeat.progress.step)
