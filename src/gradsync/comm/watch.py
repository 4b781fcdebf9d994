"""Watching over a group's collectives: who is lost, and who is to blame when one fails or takes too long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from gradsync.comm.lifeline import Lifeline
from gradsync.errors import CollectiveFailed, PeerLost

NEWS_PATIENCE_S = 1.0  # a transport's own error can be quicker than the lifeline's news of who caused it


@dataclass(slots=True)
class Call:
    """One collective under way: its number in the group, its name, and when it began, or began to be waited for."""

    number: int
    what: str
    started_s: float


class Watch:
    """One group's eyes on the lifeline. Counts the group's collectives, so that ranks can be compared."""

    def __init__(self, lifeline: Lifeline, members: Sequence[int], key: str, timeout_s: float) -> None:
        self.lifeline = lifeline
        self.members = list(members)  # the world's rank of each rank of the group
        self.timeout_s = timeout_s
        self.key = key
        self.place = lifeline.here.enter(key)  # how many collectives began here, and what the last one was

    def enter(self, what: str, *, pair: bool = False) -> Call:
        """Note that a collective begins. A ``pair`` is not counted: most ranks have no part in it."""
        if not pair:
            self.pass_by(what)
        return Call(self.place[0], what, time.monotonic())

    def pass_by(self, what: str) -> None:
        """Note a collective that is over as soon as it begins."""
        self.place[0] += 1
        self.place[1] = what

    def retract(self, call: Call) -> None:
        """Say that this rank never finished a collective that it began: the others must not wait for its part."""
        self.place[:] = call.number - 1, f"{call.what}, which it did not finish"

    def check(self, call: Call) -> None:
        """For a rank that waits, now and then: raise if a peer is lost, or if the wait has been too long."""
        self.raise_if_lost(call)
        if time.monotonic() - call.started_s > self.timeout_s:
            self.raise_cause(call, "it timed out")

    def raise_if_lost(self, call: Call) -> None:
        """Raise PeerLost if a rank of the group is known to be dead, or left before it came to this collective."""
        line = self.lifeline
        if not line.lost and not line.left:
            return
        if line.rank in line.lost:
            raise self._lost(line.rank, f"the others gave this rank up: {line.lost[line.rank]}", call)
        for rank, reason in list(line.lost.items()):
            if rank in self.members:
                raise self._lost(rank, reason, call)
        for rank, whereabouts in list(line.left.items()):
            count, last = whereabouts.groups.get(self.key, (0, "nothing"))
            if rank in self.members and count < call.number:
                reason = (
                    f"it has finished and left (it was at {whereabouts.note or last}; this rank is at "
                    f"{line.here.note or call.what}). Do the ranks have different numbers of batches? "
                    "Put the loop into `with sync.join():`, or take the data from gradsync.shard()."
                )
                line.declare_lost([rank], reason)
                raise self._lost(rank, reason, call)

    def raise_cause(self, call: Call, error: str) -> NoReturn:
        """A collective failed or timed out: find out who is to blame, tell the others, and raise."""
        end = time.monotonic() + NEWS_PATIENCE_S
        while time.monotonic() < end:
            self.raise_if_lost(call)
            if time.monotonic() - call.started_s > self.timeout_s:
                break  # news of a death is quick: after so long there is none
            time.sleep(0.01)
        whereabouts = self.lifeline.ask_whereabouts()
        self.raise_if_lost(call)
        others = [rank for rank in self.members if rank != self.lifeline.rank]
        silent = [rank for rank in others if rank not in whereabouts]
        behind = {}
        for rank in others:
            count, last = (0, "")
            if rank in whereabouts:
                count, last = whereabouts[rank].groups.get(self.key, (0, "no collective of this group yet"))
            if rank in whereabouts and count < call.number:
                behind[rank] = whereabouts[rank].note or last
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
                f"this rank is at {self.lifeline.here.note or call.what}"
            )
        self.lifeline.declare_lost(late, reason)
        raise self._lost(late[0], reason, call)

    def _lost(self, rank: int, reason: str, call: Call) -> PeerLost:
        after_s = time.monotonic() - call.started_s
        return PeerLost(rank=rank, reason=reason, after_s=after_s, during=call.what, step=self.lifeline.here.step)
