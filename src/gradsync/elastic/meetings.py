"""``Meetings``: where the members of an epoch come together for an exchange that may begin without the late ones.

A meeting has a number, from 1 on in each epoch. Each member writes that it has come. When all have come, or a quorum
has and its grace is over, a member that waits writes who takes part. The store takes the first such list, so all read
the same one; a member that comes later reads that it is not in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from gradsync.comm.base import Communicator, Worker
from gradsync.comm.members import connect_members
from gradsync.elastic.membership import Membership
from gradsync.errors import PeerLost, StoreUnreachable

POLL_S = 0.005
END_EVERY = 10  # polls from one look for lost members to the next


class Meetings:
    """One member's part in the meetings of its epochs. ``look`` may be called in another thread than the rest."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._is_used = False
        self._newest = (-1, 0)  # the epoch, and the newest meeting that somebody has come to

    @property
    def newest(self) -> int:
        """The newest meeting of this epoch that a member has come to, as far as ``look`` has seen; 0 if none was."""
        self._is_used = True
        epoch, number = self._newest
        return number if epoch == self._membership.epoch.number else 0

    def look(self) -> None:
        """Ask the store for the newest meeting, if anybody here wants to know."""
        if self._is_used:
            epoch = self._membership.epoch.number
            self._newest = epoch, int(self._membership.authority.get(f"meet/{epoch}/newest") or 0)

    def announce(self, what: str) -> None:
        """Tell members that wait in ``come(..., unless=what)``, now or later, that they need not wait."""
        self._membership.authority.set(f"meet/{self._membership.epoch.number}/{what}", "yes")

    def come(self, number: int, comm: Communicator, *, quorum: int, grace_s: float, unless: str) -> list[int]:
        """Come to a meeting, and wait until it begins. Blocks. Returns the ranks that take part: this one or not.

        Nobody does if ``unless`` was announced. Raises ``PeerLost`` if a member was lost, or the epoch has ended; and
        if no quorum has come within the communicator's ``timeout_s`` after this member.
        """
        place = f"meet/{self._membership.epoch.number}/{number}"
        keys = [f"{place}/came/{rank}" for rank in range(comm.world_size)]
        self._membership.authority.set(keys[comm.rank], "yes")
        self._membership.authority.set(f"meet/{self._membership.epoch.number}/newest", str(number))
        start_s, quorum_s, polls = time.monotonic(), None, 0
        while True:
            begun = self._membership.authority.get(f"{place}/begun")
            if begun is not None:
                return [int(rank) for rank in json.loads(begun)]
            if self._membership.authority.has(f"meet/{self._membership.epoch.number}/{unless}"):
                return []
            missing = set(self._membership.authority.missing(keys))
            came = [rank for rank, key in enumerate(keys) if key not in missing]
            now_s = time.monotonic()
            if len(came) >= quorum and quorum_s is None:
                quorum_s = now_s
            if not missing or (quorum_s is not None and now_s - quorum_s >= grace_s):
                self._membership.authority.set_once(f"{place}/begun", json.dumps(came))
                continue
            if polls % END_EVERY == 0:
                self._raise_if_over(comm, now_s - start_s)
            polls += 1
            time.sleep(POLL_S)

    def _raise_if_over(self, comm: Communicator, waited_s: float) -> None:
        epoch = self._membership.epoch
        why = self._membership.find_end(epoch)
        if why is None and waited_s > comm.timeout_s:
            why = f"no quorum has come to an exchange in {waited_s:.0f} s"
        if why is not None:
            raise PeerLost(rank=comm.rank, reason=why, after_s=waited_s, during="waiting for a quorum")

    def connect(self, number: int, ranks: Sequence[int], comm: Communicator) -> Communicator:
        """Connect the ranks that take part in a meeting; each of them calls it. Blocks."""
        epoch = self._membership.epoch
        try:
            client = self._membership.authority.store.new_client(comm.timeout_s)
            return connect_members(
                client,
                generation=f"{self._membership.authority.generation(epoch.number)}/meeting/{number}",
                rank=list(ranks).index(comm.rank),
                world_size=len(ranks),
                transport="auto",
                timeout_s=comm.timeout_s,
                why=f"an exchange of epoch {epoch.number} without workers that are late",
                worker=Worker(),
            )
        except StoreUnreachable as error:
            raise PeerLost(rank=comm.rank, reason=str(error), after_s=0.0, during="connecting a quorum") from error
