"""Which workers take part: epochs, and how the members agree on the next one.

Every worker has a *uid* (its slot, and how often that slot was started) and a *slot* that it keeps for as long as it
lives. An epoch is an ordered list of members; a member's rank is its place in the list, which is sorted by slot.

[Note: one authority] A new epoch is one write into the store that the launcher holds: ``set_once("epoch/7", ...)``. The
store takes the first write, and every worker reads what it took. So there are never two histories, whoever writes.

[Note: when the next epoch is decided] Each member of the last epoch that sees it end writes a ballot: "I have applied k
steps". A member is known to be dead when its launcher has written so. Once every member has either voted or died, the
first to see that decides. A member that does neither (frozen, or cut off) is waited for until ``timeout_s``; then those
that have voted go on without it if they are a majority of the members that are not known to be dead. Exactly half of
them is enough if it includes the first of them. Otherwise they wait: with ``on_partition="pause"``.

[Note: sides] With ``"diverge"`` those that have voted go on after ``timeout_s``, a majority or not: in node 0's store
if they reach it, else in a history of their own (see authority.py). When the members of a side reach node 0's store
again, they end their history by a last epoch, and ask the main history together, by one request, to take them back as
*returning* members. The epoch that does so lists the *sides* that meet, with the samples that each has trained since
the split. Recovery merges them. Until a member has said that it has merged, its ballots carry its side.

[Note: members that train apart] Under local SGD and DiLoCo members step on their own between two exchanges. What they
have in common are the exchanges, so a ballot counts these, from ``APART`` on: above any number of steps, because local
SGD begins with exact ones. A member that is behind by an exchange takes over its result and nothing else: its weights,
its clock and its place in the data are its own. A member that notices the end of an epoch may be some steps ahead of
others, which train on until their next exchange, or until they read ``over/N``, within a step or two. They all keep
what they have trained: no step is repeated or skipped, and at the next exchange all clocks are equal again. Only the
data is split anew at the same sample for all: at the place of the member that is farthest. Those behind go on with
their old part up to there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gradsync.elastic.authority import MAIN, Authority
from gradsync.elastic.leave import leave_requested
from gradsync.elastic.store import BoundedStore
from gradsync.errors import Partitioned, StoreUnreachable

log = logging.getLogger("gradsync")

OnPartition = Literal["pause", "diverge"]
ON_PARTITION: tuple[OnPartition, ...] = ("pause", "diverge")

NO_STATE = -1  # the step of a member that has nothing: it must be healed
APART = 1 << 40  # see [Note: members that train apart]
POLL_S = 0.004
SLOW_POLL_S = 0.05
SLOW_AFTER_S = 0.5


@dataclass(frozen=True)
class Member:
    """One worker of an epoch."""

    uid: str
    slot: int
    step: int  # the synchronizing steps that it had applied when the epoch began; NO_STATE: it is a newcomer
    history: str = MAIN  # whose state it has: that of the epoch's own, or that of the side from which it returns


@dataclass(frozen=True)
class Samples:
    """The samples that a worker has trained in an epoch so far."""

    own: float = 0.0  # in steps whose gradients stayed with it
    together: float = 0.0  # of all members, in steps whose gradients were averaged


NO_SAMPLES = Samples()


@dataclass(frozen=True)
class Split:
    """Where a side history has left the main one."""

    number: int  # after this epoch
    samples: float  # that had been trained until then
    at_s: float  # of the clock


@dataclass(frozen=True)
class Side:
    """One of the sides that meet in an epoch."""

    history: str
    samples: float  # that it has trained since the split
    split_s: float  # for how long it was cut off


@dataclass(frozen=True)
class Epoch:
    """The members of one stretch of a run, in rank order."""

    number: int
    members: tuple[Member, ...]
    cause: str
    read_joins: int = 0  # requests to join up to this number have been dealt with
    left: tuple[str, ...] = ()  # the uids that have left in order since the epoch before
    history: str = MAIN
    samples: float = 0.0  # that this history had trained when the epoch began
    at_s: float = 0.0  # of the clock, when it was decided
    split: Split | None = None  # of a side history
    returns: bool = False  # it is the last one of a side history: its members go back to the main one
    sides: tuple[Side, ...] = ()  # that are to be merged, the epoch's own history first; most often none

    def rank_of(self, uid: str) -> int | None:
        """The rank of a worker; None if it is no member."""
        return next((rank for rank, member in enumerate(self.members) if member.uid == uid), None)

    @property
    def newest_step(self) -> int:
        """The most steps that a member of its own history has applied."""
        return max(member.step for member in self.members if member.history == self.history)

    @property
    def donor(self) -> int:
        """The rank whose state is the truth: the first of those that have applied the most steps."""
        return next(
            rank
            for rank, member in enumerate(self.members)
            if member.history == self.history and member.step == self.newest_step
        )

    def is_behind(self, member: Member) -> bool:
        """Whether a member must be healed. One that returns from a side has a state of its own."""
        return member.history == self.history and member.step != self.newest_step

    @property
    def trains_apart(self) -> bool:
        """See [Note: members that train apart]."""
        return self.newest_step >= APART

    def needs_everything(self, member: Member) -> bool:
        """Whether a member gets all of another's state, and not only the result of an exchange."""
        return self.is_behind(member) and member.step < APART

    @property
    def needs_healing(self) -> bool:
        return any(self.is_behind(member) for member in self.members)

    @property
    def furthest(self) -> int:
        """The first rank that has applied the most steps, whichever side it was on: all go on from its place."""
        furthest_step = max(member.step for member in self.members)
        return next(rank for rank, member in enumerate(self.members) if member.step == furthest_step)

    def share_of(self, rank: int) -> float:
        """The weight of a member's state when the sides are merged. Those of all members add up to 1."""
        own = self.members[rank].history
        total = sum(side.samples for side in self.sides)
        if total == 0.0:
            return 1 / len(self.members)
        samples = next(side.samples for side in self.sides if side.history == own)
        return samples / total / sum(member.history == own for member in self.members)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Epoch:
        value = json.loads(text)
        value["members"] = tuple(Member(**member) for member in value["members"])
        value["left"] = tuple(value["left"])
        value["sides"] = tuple(Side(**side) for side in value["sides"])
        value["split"] = None if value["split"] is None else Split(**value["split"])
        return Epoch(**value)


@dataclass(frozen=True)
class _JoinRequest:
    """What is written by a newcomer; or by each returning member of a side, with the same words."""

    members: tuple[Member, ...]
    side: Side | None = None
    split: int = 0  # the epoch after which the side has left

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> _JoinRequest:
        value = json.loads(text)
        side = None if value["side"] is None else Side(**value["side"])
        return _JoinRequest(tuple(Member(**member) for member in value["members"]), side, value["split"])


@dataclass(frozen=True, kw_only=True)
class MembershipSettings:
    """All workers of a run have the same."""

    min_members: int = 1  # with fewer, all wait for newcomers
    max_members: int | None = None  # newcomers beyond wait
    timeout_s: float = 300.0  # lower => a frozen member is given up sooner, but a slow one too
    partition_timeout_s: float = 1800.0  # for how long the side without a majority waits before it raises
    on_partition: OnPartition = "pause"  # "diverge": every side goes on


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
        self.authority = Authority(store)
        self.uid = uid
        self.slot = slot
        self.settings = settings
        self.sees_home = False  # on a side history: node 0's store has answered a moment ago
        self._side = MAIN  # whose state this worker has
        self._merged_in = 0  # the last epoch in which it has merged the sides
        self._left_from = Epoch(0, (), "")  # the last epoch of the main history that it knew when it left
        members = tuple(Member(founder, int(founder.partition(".")[0]), 0) for founder in founders)
        self.epoch = Epoch(0, members, "the start")
        self.left: set[str] = set()  # the uids that have left in order, as far as this worker knows
        self._num_rejoins = 0

    @property
    def is_founder(self) -> bool:
        """Whether this worker is one of those that begin the run."""
        return self.epoch.number == 0 and self.epoch.rank_of(self.uid) is not None

    # -- agreeing -------------------------------------------------------------------------------------------------

    def agree(self, step: int, *, cause: str, leaving: bool = False, samples: Samples = NO_SAMPLES) -> Epoch:
        """End this epoch and agree on the next, as a member that has applied ``step`` steps. Blocks.

        The result may leave this worker out: it wanted to leave, or the others have given it up meanwhile. One that
        leaves does not wait for the decision, only until nobody needs it any more: all others have voted or died.

        ``samples``: what it has trained in this epoch.
        """
        number = self.epoch.number + 1
        begun_s = start_s = reached_s = time.monotonic()  # of all this; of this history; when its store answered last
        has_voted = False
        while True:
            waited_s = time.monotonic() - start_s
            try:
                if not has_voted:
                    self.authority.set_once(f"over/{number - 1}", cause)
                    ballot = {"step": step, "leaving": leaving, "side": self._side, "merged": self._merged_in}
                    ballot |= {"home": self.sees_home, **asdict(samples)}
                    self.authority.set(f"ballot/{number}/{self.uid}", json.dumps(ballot))
                    has_voted = True
                if (epoch := self._read_epoch(number)) is not None:
                    return self._adopt(epoch)
                if leaving and not self._silent(self._ballots(number)):
                    return Epoch(number, (), cause)
                self._try_to_decide(number, waited_s, cause)
                reached_s = time.monotonic()
                why = self._missing_text(number)
            except StoreUnreachable as unreachable:
                if leave_requested() is not None:
                    raise RunCutShort(str(unreachable)) from unreachable
                why = str(unreachable)
                if time.monotonic() - reached_s > self.settings.timeout_s and self._diverges():
                    if not self.authority.is_home and self.authority.can_reach_home():
                        return self._give_up_side(number, cause)
                    if self._begin_side():
                        start_s = reached_s = time.monotonic()
                        has_voted = False
                        continue
            self.check_patience(time.monotonic() - begun_s, why)
            time.sleep(POLL_S if waited_s < SLOW_AFTER_S else SLOW_POLL_S)

    def _adopt(self, epoch: Epoch) -> Epoch:
        self.epoch = epoch
        self.left.update(epoch.left)
        if (rank := epoch.rank_of(self.uid)) is not None:
            self._side = epoch.members[rank].history
        return epoch

    def _try_to_decide(self, number: int, waited_s: float, cause: str) -> None:
        """Write the next epoch if the rule allows it: see [Note: when the next epoch is decided]."""
        ballots = self._ballots(number)
        silent = self._silent(ballots)
        dead = {member.uid for member in self.epoch.members if self._is_gone(member.uid)}
        voters = [member for member in self.epoch.members if member.uid in ballots and member.uid not in dead]
        may_go_on = self._diverges() or self._is_majority(voters, dead)
        if silent and not (waited_s > self.settings.timeout_s and may_go_on):
            return
        staying = [m for m in voters if not ballots[m.uid]["leaving"]]
        if not staying:
            return  # the last ones leave: nobody is left who could give a newcomer anything
        if silent:
            cause = f"{cause}; given up: {', '.join(f'worker {member.slot}' for member in silent)}"
        members, sides = self._after_merging(staying, ballots)
        samples = self.epoch.samples + max(ballots[m.uid]["together"] for m in voters)
        samples += sum(ballots[m.uid]["own"] for m in voters)
        split = self.epoch.split
        if self.authority.is_home:
            split = None
        elif split is None:
            split = Split(self.epoch.number, samples, time.time())
        is_whole = all(member.step != NO_STATE for member in members)  # else they are healed first
        returns = not self.authority.is_home and is_whole and all(ballots[m.uid]["home"] for m in staying)
        read_joins = self.epoch.read_joins if self._is_own_history(self.epoch) else 0
        if not returns:
            joiners, more, read_joins = self._joiners(members, read_joins)
            members += joiners
            sides = self._with_own_side(sides, more, samples)
        if len(members) < self.settings.min_members:
            return  # newcomers may still come
        left = tuple(member.uid for member in voters if ballots[member.uid]["leaving"])
        epoch = Epoch(
            number,
            tuple(sorted(members, key=lambda member: member.slot)),
            cause,
            read_joins,
            left=left,
            history=self.authority.history,
            samples=samples,
            at_s=time.time(),
            split=split,
            returns=returns,
            sides=sides,
        )
        self.authority.set_once(f"epoch/{number}", epoch.to_json())
        self.authority.set("latest", str(number))

    def _is_own_history(self, epoch: Epoch) -> bool:
        """Whether an epoch was decided in this worker's history, and is not the one before its split."""
        return epoch.history == self.authority.history

    def _after_merging(
        self, staying: Sequence[Member], ballots: dict[str, dict[str, Any]]
    ) -> tuple[list[Member], tuple[Side, ...]]:
        """The members that stay, each with the state that it has; the sides that are still to be merged."""
        own = self.authority.history
        steps = {m.uid: int(ballots[m.uid]["step"]) for m in staying}
        sides = self.epoch.sides
        if sides and any(ballots[m.uid]["merged"] == self.epoch.number for m in staying):
            # Some have merged, and what they have is the truth. The others are healed.
            for member in staying:
                if ballots[member.uid]["merged"] != self.epoch.number:
                    steps[member.uid] = NO_STATE
            sides = ()
        labels = {m.uid: str(ballots[m.uid]["side"]) if sides else own for m in staying}
        sides = tuple(side for side in sides if side.history in labels.values())
        if sides and own not in labels.values():  # of its own side nobody is left: another takes its place
            first = sides[0]
            labels = {uid: own if label == first.history else label for uid, label in labels.items()}
            sides = (Side(own, first.samples, first.split_s), *sides[1:])
        if len(sides) == 1:
            sides = ()
        return [Member(m.uid, m.slot, steps[m.uid], labels[m.uid]) for m in staying], sides

    def _with_own_side(self, sides: tuple[Side, ...], more: Sequence[_JoinRequest], samples: float) -> tuple[Side, ...]:
        """The sides that meet, this history's own first: with those that return now."""
        returning = [request.side for request in more if request.side is not None]
        if not returning:
            return sides
        if not sides:
            splits = [self._read_epoch(request.split + 1) for request in more if request.side is not None]
            since = min((epoch.samples for epoch in splits if epoch is not None), default=samples)
            sides = (Side(self.authority.history, max(0.0, samples - since), max(s.split_s for s in returning)),)
        return (*sides, *returning)

    def _silent(self, ballots: dict[str, dict[str, Any]]) -> list[Member]:
        """The members that have not voted, and are not known to be dead."""
        return [m for m in self.epoch.members if m.uid not in ballots and not self._is_gone(m.uid)]

    def _is_majority(self, voters: Sequence[Member], dead: set[str]) -> bool:
        alive = [member for member in self.epoch.members if member.uid not in dead]
        return 2 * len(voters) > len(alive) or (2 * len(voters) == len(alive) and alive[0] in voters)

    def _ballots(self, number: int) -> dict[str, dict[str, Any]]:
        found = {}
        for member in self.epoch.members:
            text = self.authority.get(f"ballot/{number}/{member.uid}")
            if text is not None:
                found[member.uid] = json.loads(text)
        return found

    def _joiners(self, members: Sequence[Member], read: int) -> tuple[list[Member], list[_JoinRequest], int]:
        """The workers that wait to join and still live, as many as there is room for, and their requests; up to which
        request that is.
        """
        known = {member.uid for member in members}
        taken = {member.slot for member in members}
        found: list[Member] = []
        requests: list[_JoinRequest] = []
        while (text := self.authority.get(f"join/{read + 1}")) is not None:
            request = _JoinRequest.from_json(text)
            living = [m for m in request.members if m.uid not in known and not self._is_gone(m.uid)]
            limit = self.settings.max_members
            if living and limit is not None and len(members) + len(found) + len(living) > limit:
                break
            read += 1
            for member in living:
                free = member.slot if member.slot not in taken else _first_free(taken)
                taken.add(free)
                known.add(member.uid)
                label = self.authority.history if request.side is None else member.history
                found.append(Member(member.uid, free, member.step, label))
            if living:
                requests.append(request)
        return found, requests, read

    def check_patience(self, waited_s: float, why: str) -> None:
        """Raise ``Partitioned`` if this worker has waited for as long as it may."""
        limit_s = self.settings.timeout_s + self.settings.partition_timeout_s
        if waited_s > limit_s:
            raise Partitioned(
                f"this worker has waited {waited_s:.0f} s for the next epoch: {why}. It is on the side of a partition "
                "that may not go on, or too few workers are left. Restart it when the others can be reached; "
                "partition_timeout_s sets how long it waits."
            )

    def _missing_text(self, number: int) -> str:
        members = [member for member in self.epoch.members if not self._is_gone(member.uid)]
        missing = [m for m in members if not self.authority.has(f"ballot/{number}/{m.uid}")]
        if missing:
            return f"workers {', '.join(str(m.slot) for m in missing)} are silent, and the others are no majority"
        return f"there are {len(members)} workers, and at least {self.settings.min_members} are needed"

    # -- sides: see [Note: sides] ---------------------------------------------------------------------------------

    def _diverges(self) -> bool:
        return self.settings.on_partition == "diverge"

    def _begin_side(self) -> bool:
        last = self.epoch
        if not self.authority.begin_side(last.history, last.number):
            return False
        if last.history == MAIN:
            self._left_from = last
        self.sees_home = False
        log.warning(
            "the store of this history can't be reached: this side goes on by itself, as history %s",
            self.authority.history,
        )
        return True

    def _give_up_side(self, number: int, cause: str) -> Epoch:
        """The store of this side is lost, and node 0's answers: this worker joins again, with nothing."""
        log.warning("the store of history %s is lost: what this side has trained is lost too", self.authority.history)
        self.authority.return_home()
        self._side, self.epoch = MAIN, self._left_from
        return Epoch(number, (), cause)

    def return_home(self, last: Epoch, step: int) -> Epoch:
        """Go back to the main history with the others of a side, whose last epoch this is. Blocks."""
        assert last.split is not None, "a side has split"
        side = Side(last.history, last.samples - last.split.samples, last.at_s - last.split.at_s)
        # New names: the main history may have counted on the old ones, and given them up.
        names = {m.uid: f"{process_of(m.uid)}r{last.history}.{last.number}" for m in last.members}
        members = tuple(Member(names[m.uid], m.slot, m.step, last.history) for m in last.members)
        before = self.uid
        self.authority.return_home()
        self.uid, self.epoch = names[self.uid], self._left_from
        log.warning("node 0's store can be reached again: history %s goes back to the main one", last.history)
        try:
            return self._wait_for_epoch(_JoinRequest(members, side, last.split.number), is_returning=True)
        except StoreUnreachable:
            self.uid, self.epoch = before, last
            if not self._begin_side():
                raise
        return self.agree(step, cause="node 0's store was lost again")

    # -- joining --------------------------------------------------------------------------------------------------

    def join(self) -> Epoch:
        """Ask the members to take this worker in, and wait until an epoch includes it. Blocks.

        If every member of the last epoch is dead, those that wait begin anew with what their script has loaded. If a
        member has finished, the run is over: this worker ends with exit code 0 (``RunHasEnded``).
        """
        return self._wait_for_epoch(_JoinRequest((Member(self.uid, self.slot, NO_STATE),)))

    def _wait_for_epoch(self, request: _JoinRequest, *, is_returning: bool = False) -> Epoch:
        """Make a request and wait until an epoch includes this worker.

        Raises ``StoreUnreachable`` if the members of a side that return lose the store again.
        """
        start_s = reached_s = time.monotonic()
        asked = -1
        position = 0  # of the request
        while True:
            waited_s = time.monotonic() - start_s
            why = "no epoch has included it yet"
            try:
                latest = self.latest_epoch()
                if latest.rank_of(self.uid) is not None:
                    return self._adopt(latest)
                if any(self.authority.store.has(f"finished/{process_of(member.uid)}") for member in latest.members):
                    if is_returning:
                        log.warning("the main side has finished: what this side has trained is not merged")
                    raise RunHasEnded
                if latest.read_joins >= position:  # it was never made; or an epoch that included it is over already
                    position = self._enter(request, latest.read_joins)
                if latest.number != asked:
                    who = ", ".join(str(member.slot) for member in request.members)
                    waits = "return from a side" if is_returning else "waits to join"
                    self.authority.set(f"wants/{latest.number}", f"worker {who} {waits}")
                    asked = latest.number
                own = {process_of(member.uid) for member in request.members} if is_returning else set()
                if all(self._is_gone(m.uid) for m in latest.members if process_of(m.uid) not in own):
                    self._begin_anew(latest, request if is_returning else None)
                reached_s = time.monotonic()
            except StoreUnreachable as unreachable:
                why = str(unreachable)
                if is_returning and time.monotonic() - reached_s > self.settings.timeout_s:
                    raise
            self.check_patience(waited_s, why)
            time.sleep(POLL_S if waited_s < SLOW_AFTER_S else SLOW_POLL_S)

    def _enter(self, request: _JoinRequest, read: int) -> int:
        """Write a request at the first free place behind those that were dealt with; returns the place.

        A request that is there already, because an answer was lost or another member of a side was first, is not
        written twice.
        """
        position, text = read + 1, request.to_json()
        while self.authority.set_once(f"join/{position}", text) != text:
            position += 1
        return position

    def rejoin(self) -> Epoch:
        """The others have given this worker up: join again, as a newcomer with nothing. Blocks."""
        self._num_rejoins += 1
        self._side = self.authority.history
        self.uid = f"{process_of(self.uid)}r{self._num_rejoins}"
        return self.join()

    def latest_epoch(self) -> Epoch:
        """The newest epoch that was decided in this history."""
        number = int(self.authority.get("latest") or 0)
        epoch = self.epoch if number <= self.epoch.number else self._read_epoch(number)
        while epoch is not None and (later := self._read_epoch(epoch.number + 1)) is not None:
            epoch = later  # decided, and "latest" is not written yet
        assert epoch is not None, "an epoch that is the latest was decided"
        return epoch

    def _read_epoch(self, number: int) -> Epoch | None:
        text = self.authority.get(f"epoch/{number}")
        return None if text is None else Epoch.from_json(text)

    def _begin_anew(self, last: Epoch, returning: _JoinRequest | None) -> None:
        """All members of the last epoch are dead: go on with a side that returns, or with those that wait."""
        number, samples = last.number + 1, 0.0
        if returning is not None:
            assert returning.side is not None, "it returns from one"
            members = [Member(m.uid, m.slot, m.step) for m in returning.members if not self._is_gone(m.uid)]
            cause, read = "every other worker was lost; a side that was cut off goes on", last.read_joins
            samples = last.samples + returning.side.samples
        else:
            joiners, requests, read = self._joiners((), last.read_joins)
            if any(request.side is not None for request in requests):
                return  # a side returns: its members decide
            members = [Member(m.uid, m.slot, 0) for m in joiners]
            cause = "every worker was lost; training begins again with what the script loads"
        if len(members) < self.settings.min_members:
            return
        members.sort(key=lambda member: member.slot)
        history = self.authority.history
        epoch = Epoch(number, tuple(members), cause, read, history=history, samples=samples, at_s=time.time())
        self.authority.set_once(f"epoch/{number}", epoch.to_json())
        self.authority.set("latest", str(number))

    def write_change(self, number: int, text: str) -> None:
        """Tell the launchers what this epoch's beginning has cost; on a side that is cut off, its workers say it."""
        if self.authority.is_home:
            self.authority.set(f"changed/{number}", text)
            self.authority.set("changed", str(number))

    # -- watching -------------------------------------------------------------------------------------------------

    def find_end(self, epoch: Epoch) -> str | None:
        """Why an epoch that is being connected can't come about any more; None while it can."""
        for member in epoch.members:
            if member.uid != self.uid and self._is_gone(member.uid):
                return f"worker {member.slot} was lost"
        return self.authority.get(f"over/{epoch.number}")

    def change_wanted(self) -> str | None:
        """Why somebody asks for another epoch although nothing has failed; None most of the time."""
        return self.authority.get(f"wants/{self.epoch.number}")

    def is_over(self) -> bool:
        """Whether another member has ended this epoch."""
        return self.authority.has(f"over/{self.epoch.number}")

    def ask_for_change(self, why: str) -> None:
        self.authority.set(f"wants/{self.epoch.number}", why)

    def look_home(self) -> None:
        """On a side history: see whether node 0's store answers. The last member to see it asks for a change."""
        number = self.epoch.number
        self.sees_home = self.authority.can_reach_home()
        if not self.sees_home:
            return
        self.authority.set(f"home/{number}/{self.uid}", "yes")
        if all(self.authority.has(f"home/{number}/{member.uid}") for member in self.epoch.members):
            self.ask_for_change("node 0's store can be reached again")

    def merged(self, epoch: Epoch) -> None:
        """This worker has merged the sides that meet in an epoch."""
        self._side, self._merged_in = self.authority.history, epoch.number

    def write_left(self, why: str) -> None:
        """Tell the launcher that this worker leaves in order."""
        key = f"left/{process_of(self.uid)}"
        if self._diverges():
            self.authority.write_everywhere(key, why)
        else:
            self.authority.home.set(key, why)

    def _is_gone(self, uid: str) -> bool:
        """Whether a worker's process has ended, or is about to."""
        store = self.authority.store
        return store.has(f"dead/{process_of(uid)}") or store.has(f"left/{process_of(uid)}")


def process_of(uid: str) -> str:
    """The uid under which the launcher knows the process: one that rejoins has that of its first uid."""
    return uid.partition("r")[0]


def _first_free(taken: set[int]) -> int:
    return next(n for n in range(len(taken) + 1) if n not in taken)
