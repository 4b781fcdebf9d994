"""Which workers take part: epochs, and how the members agree on the next one.

Every worker has a *uid* (its slot, and how often that slot was started) and a *slot* that it keeps for as long as it
lives. An epoch is an ordered list of members; a member's rank is its place in the list, which is sorted by slot.

[Note: one authority] A new epoch is one write into the store that the launcher holds: ``set_once("epoch/7", ...)``. The
store takes the first write, and every worker reads what it took. So there are never two histories, whoever writes.

[Note: when the next epoch is decided] Each member of the last epoch that sees it end writes a ballot: "I have applied k
steps". A member is known to be dead when its launcher has written so. Once every member has either voted or died, the
first to see that decides. A member that does neither (frozen, or cut off) is waited for until ``timeout_s``; then those
that have voted go on without it if they are a majority of the members that are not known to be dead. Exactly half of
them is enough if it includes the first of them. Otherwise they wait: see ``on_partition``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradsync.elastic.leave import leave_requested
from gradsync.elastic.store import BoundedStore
from gradsync.errors import Partitioned, StoreUnreachable

log = logging.getLogger("gradsync")

NO_STATE = -1  # the step of a member that has nothing: it must be healed
POLL_S = 0.004
SLOW_POLL_S = 0.05
SLOW_AFTER_S = 0.5


@dataclass(frozen=True)
class Member:
    """One worker of an epoch."""

    uid: str
    slot: int
    step: int  # the synchronizing steps that it had applied when the epoch began; NO_STATE: it is a newcomer


@dataclass(frozen=True)
class Epoch:
    """The members of one stretch of a run, in rank order."""

    number: int
    members: tuple[Member, ...]
    cause: str
    read_joins: int = 0  # requests to join up to this number have been dealt with
    left: tuple[str, ...] = ()  # the uids that have left in order since the epoch before

    def rank_of(self, uid: str) -> int | None:
        """The rank of a worker; None if it is no member."""
        return next((rank for rank, member in enumerate(self.members) if member.uid == uid), None)

    @property
    def newest_step(self) -> int:
        return max(member.step for member in self.members)

    @property
    def donor(self) -> int:
        """The rank whose state is the truth: the first of those that have applied the most steps."""
        return next(rank for rank, member in enumerate(self.members) if member.step == self.newest_step)

    @property
    def needs_healing(self) -> bool:
        return any(member.step != self.newest_step for member in self.members)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Epoch:
        value = json.loads(text)
        value["members"] = tuple(Member(**member) for member in value["members"])
        value["left"] = tuple(value["left"])
        return Epoch(**value)


@dataclass(frozen=True, kw_only=True)
class MembershipSettings:
    """All workers of a run have the same."""

    min_members: int = 1  # with fewer, all wait for newcomers
    max_members: int | None = None  # newcomers beyond wait
    timeout_s: float = 300.0  # lower => a frozen member is given up sooner, but a slow one too
    partition_timeout_s: float = 1800.0  # for how long the side without a majority waits before it raises


class RunHasEnded(SystemExit):
    """The others have finished training while this worker was about to join: there is nothing left to do."""

    def __init__(self) -> None:
        super().__init__(0)


class RunCutShort(SystemExit):
    """The launcher has ended while the members were changing: they can't agree any more, and end with exit code 1."""

    def __init__(self, why: str) -> None:
        super().__init__(1)
        log.warning("this worker ends: it was told to, and the members can't agree on who goes on, as %s", why)


class Membership:
    """One worker's view of the membership. Its calls block, and have limits; only one thread makes them."""

    def __init__(
        self, store: BoundedStore, uid: str, slot: int, founders: Sequence[str], settings: MembershipSettings
    ) -> None:
        self._store = store
        self.uid = uid
        self.slot = slot
        self.settings = settings
        members = tuple(Member(founder, int(founder.partition(".")[0]), 0) for founder in founders)
        self.epoch = Epoch(0, members, "the start")
        self.left: set[str] = set()  # the uids that have left in order, as far as this worker knows
        self._num_rejoins = 0

    @property
    def is_founder(self) -> bool:
        """Whether this worker is one of those that begin the run."""
        return self.epoch.number == 0 and self.epoch.rank_of(self.uid) is not None

    # -- agreeing -------------------------------------------------------------------------------------------------

    def agree(self, step: int, *, cause: str, leaving: bool = False) -> Epoch:
        """End this epoch and agree on the next, as a member that has applied ``step`` steps. Blocks.

        The result may leave this worker out: it wanted to leave, or the others have given it up meanwhile. One that
        leaves does not wait for the decision, only until nobody needs it any more: all others have voted or died.
        """
        number = self.epoch.number + 1
        start_s = time.monotonic()
        has_voted = False
        while True:
            waited_s = time.monotonic() - start_s
            try:
                if not has_voted:
                    self._store.set_once(f"over/{number - 1}", cause)
                    self._store.set(f"ballot/{number}/{self.uid}", json.dumps({"step": step, "leaving": leaving}))
                    has_voted = True
                if (epoch := self._read_epoch(number)) is not None:
                    self.epoch = epoch
                    self.left.update(epoch.left)
                    return epoch
                if leaving and not self._silent(self._ballots(number)):
                    return Epoch(number, (), cause)
                self._try_to_decide(number, waited_s, cause)
            except StoreUnreachable as unreachable:
                if leave_requested() is not None:
                    raise RunCutShort(str(unreachable)) from unreachable
                self._check_patience(waited_s, str(unreachable))
            else:
                self._check_patience(waited_s, self._missing_text(number))
            time.sleep(POLL_S if waited_s < SLOW_AFTER_S else SLOW_POLL_S)

    def _try_to_decide(self, number: int, waited_s: float, cause: str) -> None:
        """Write the next epoch if the rule allows it: see [Note: when the next epoch is decided]."""
        ballots = self._ballots(number)
        silent = self._silent(ballots)
        dead = {member.uid for member in self.epoch.members if self._is_gone(member.uid)}
        voters = [member for member in self.epoch.members if member.uid in ballots and member.uid not in dead]
        if silent and not (waited_s > self.settings.timeout_s and self._is_majority(voters, dead)):
            return
        staying = [m for m in voters if not ballots[m.uid]["leaving"]]
        if not staying:
            return  # the last ones leave: nobody is left who could give a newcomer anything
        members = [Member(m.uid, m.slot, int(ballots[m.uid]["step"])) for m in staying]
        joiners, read_joins = self._joiners(len(members))
        taken = {member.slot for member in members}
        for uid, slot in joiners:
            free = slot if slot not in taken else next(n for n in range(len(taken) + 1) if n not in taken)
            taken.add(free)
            members.append(Member(uid, free, NO_STATE))
        if len(members) < self.settings.min_members:
            return  # newcomers may still come
        if silent:
            cause = f"{cause}; given up: {', '.join(f'worker {member.slot}' for member in silent)}"
        members.sort(key=lambda member: member.slot)
        left = tuple(member.uid for member in voters if ballots[member.uid]["leaving"])
        epoch = Epoch(number, tuple(members), cause, read_joins, left)
        self._store.set_once(f"epoch/{number}", epoch.to_json())
        self._store.set("latest", str(number))

    def _silent(self, ballots: dict[str, dict[str, Any]]) -> list[Member]:
        """The members that have not voted, and are not known to be dead."""
        return [m for m in self.epoch.members if m.uid not in ballots and not self._is_gone(m.uid)]

    def _is_majority(self, voters: Sequence[Member], dead: set[str]) -> bool:
        alive = [member for member in self.epoch.members if member.uid not in dead]
        return 2 * len(voters) > len(alive) or (2 * len(voters) == len(alive) and alive[0] in voters)

    def _ballots(self, number: int) -> dict[str, dict[str, Any]]:
        found = {}
        for member in self.epoch.members:
            text = self._store.get(f"ballot/{number}/{member.uid}")
            if text is not None:
                found[member.uid] = json.loads(text)
        return found

    def _joiners(self, num_members: int) -> tuple[list[tuple[str, int]], int]:
        """The workers that wait to join and still live, as many as there is room for; up to which request that is."""
        last = self._store.add("joins", 0)
        found: list[tuple[str, int]] = []
        read = self.epoch.read_joins
        for number in range(self.epoch.read_joins + 1, last + 1):
            text = self._store.get(f"join/{number}")
            if text is None:  # counted, and not yet written
                break
            request = json.loads(text)
            if not self._is_gone(request["uid"]):
                limit = self.settings.max_members
                if limit is not None and num_members + len(found) >= limit:
                    break
                found.append((request["uid"], int(request["slot"])))
            read = number
        return found, read

    def _check_patience(self, waited_s: float, why: str) -> None:
        limit_s = self.settings.timeout_s + self.settings.partition_timeout_s
        if waited_s > limit_s:
            raise Partitioned(
                f"this worker has waited {waited_s:.0f} s for the next epoch: {why}. It is on the side of a partition "
                "that may not go on, or too few workers are left. Restart it when the others can be reached; "
                "partition_timeout_s sets how long it waits."
            )

    def _missing_text(self, number: int) -> str:
        members = [member for member in self.epoch.members if not self._is_gone(member.uid)]
        missing = [m for m in members if not self._store.has(f"ballot/{number}/{m.uid}")]
        if missing:
            return f"workers {', '.join(str(m.slot) for m in missing)} are silent, and the others are no majority"
        return f"there are {len(members)} workers, and at least {self.settings.min_members} are needed"

    # -- joining --------------------------------------------------------------------------------------------------

    def join(self) -> Epoch:
        """Ask the members to take this worker in, and wait until an epoch includes it. Blocks.

        If every member of the last epoch is dead, those that wait begin anew with what their script has loaded. If a
        member has finished, the run is over: this worker ends with exit code 0 (``RunHasEnded``).
        """
        number = self._store.add("joins", 1)
        self._store.set(f"join/{number}", json.dumps({"uid": self.uid, "slot": self.slot}))
        start_s = time.monotonic()
        asked = -1
        while True:
            waited_s = time.monotonic() - start_s
            why = "no epoch has included it yet"
            try:
                latest = self.latest_epoch()
                if latest.rank_of(self.uid) is not None:
                    self.epoch = latest
                    return latest
                if any(self._store.has(f"finished/{_process_of(member.uid)}") for member in latest.members):
                    raise RunHasEnded
                if latest.number != asked:
                    self._store.set(f"wants/{latest.number}", f"worker {self.slot} waits to join")
                    asked = latest.number
                if all(self._is_gone(member.uid) for member in latest.members):
                    self._begin_anew(latest)
            except StoreUnreachable as unreachable:
                why = str(unreachable)
            self._check_patience(waited_s, why)
            time.sleep(POLL_S if waited_s < SLOW_AFTER_S else SLOW_POLL_S)

    def rejoin(self) -> Epoch:
        """The others have given this worker up: join again, as a newcomer with nothing. Blocks."""
        self._num_rejoins += 1
        self.uid = f"{_process_of(self.uid)}r{self._num_rejoins}"
        return self.join()

    def latest_epoch(self) -> Epoch:
        """The newest epoch that was decided."""
        number = int(self._store.get("latest") or 0)
        epoch = self.epoch if number <= self.epoch.number else self._read_epoch(number)
        while epoch is not None and (later := self._read_epoch(epoch.number + 1)) is not None:
            epoch = later  # decided, and "latest" is not written yet
        assert epoch is not None, "an epoch that is the latest was decided"
        return epoch

    def _read_epoch(self, number: int) -> Epoch | None:
        text = self._store.get(f"epoch/{number}")
        return None if text is None else Epoch.from_json(text)

    def _begin_anew(self, last: Epoch) -> None:
        self.epoch = last
        joiners, read = self._joiners(0)
        if len(joiners) < self.settings.min_members:
            return
        members = sorted((Member(uid, slot, 0) for uid, slot in joiners), key=lambda member: member.slot)
        cause = "every worker was lost; training begins again with what the script loads"
        self._store.set_once(f"epoch/{last.number + 1}", Epoch(last.number + 1, tuple(members), cause, read).to_json())
        self._store.set("latest", str(last.number + 1))

    def write_change(self, number: int, text: str) -> None:
        """Tell the launchers what this epoch's beginning has cost."""
        self._store.set(f"changed/{number}", text)
        self._store.set("changed", str(number))

    # -- watching -------------------------------------------------------------------------------------------------

    def find_end(self, epoch: Epoch) -> str | None:
        """Why an epoch that is being connected can't come about any more; None while it can."""
        for member in epoch.members:
            if member.uid != self.uid and self._is_gone(member.uid):
                return f"worker {member.slot} was lost"
        return self._store.get(f"over/{epoch.number}")

    def change_wanted(self) -> str | None:
        """Why somebody asks for another epoch although nothing has failed; None most of the time."""
        return self._store.get(f"wants/{self.epoch.number}")

    def ask_for_change(self, why: str) -> None:
        self._store.set(f"wants/{self.epoch.number}", why)

    def write_left(self, why: str) -> None:
        """Tell the launcher that this worker leaves in order."""
        self._store.set(f"left/{_process_of(self.uid)}", why)

    def _is_gone(self, uid: str) -> bool:
        """Whether a worker's process has ended, or is about to."""
        return self._store.has(f"dead/{_process_of(uid)}") or self._store.has(f"left/{_process_of(uid)}")


def _process_of(uid: str) -> str:
    """The uid under which the launcher knows the process: one that rejoins has that of its first uid."""
    return uid.partition("r")[0]
