"""Where all come together without a collective: a rank without data waits for the others; all take one exact mean.

[Note: keeping company] Who waits goes on mixing, so that nobody's values pile up with it, but only as far as a member
with data has got. When all have said that they wait, each mixes up to the step of the furthest: the same for all.

[Note: a mean that survives] The lowest member adds up and tells all. If it dies half-way some have the mean and some
have not. So whoever has it keeps it until all have said so, and gives it to whoever asks; the next lowest asks all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradsync.comm.messages import Message
from gradsync.errors import OutOfStep, PeerLost
from gradsync.gossip.circle import Circle

# How the first letter of a tensor's name has it averaged.
BY_WEIGHT = "x"  # a sum over the members is divided by the sum of their weights
PLAINLY = "m"  # by their number


class Meeting:
    """One member's part in meetings, which are numbered: all members come to the same ones in the same order."""

    def __init__(self, circle: Circle, *, timeout_s: float) -> None:
        self.circle = circle
        self.timeout_s = timeout_s
        self.number = 0  # of the next meeting
        self._waiting: dict[int, dict[int, tuple[str, int]]] = {}  # by meeting and member: what for, and its clock
        self._parts: dict[int, dict[int, Message]] = {}
        self._means: dict[int, Message] = {}
        self._finished = -1  # the last meeting whose mean this member has
        self._kept: tuple[int, Message] | None = None  # see [Note: a mean that survives]
        self._settled: dict[int, set[int]] = {}
        for kind, handler in {
            "idle": self._hear_idle,
            "part": self._hear_part,
            "mean": self._hear_mean,
            "call": self._hear_call,
            "settled": self._hear_settled,
        }.items():
            circle.on(kind, handler)

    # -- coming together ------------------------------------------------------------------------------------------

    def gather(self, what: str, *, clock: Callable[[], int], step: Callable[[], None] | None) -> int:
        """Wait until all are here, mixing with ``step`` as far as the others get. Returns the meeting's number."""
        number, self.number = self.number, self.number + 1
        with self.circle.changed:
            self._waiting.setdefault(number, {})[self.circle.me] = (what, clock())
        word = {"number": number, "what": what, "clock": clock()}
        told = {self.circle.me}

        def untold() -> set[int]:
            return set(self.circle.book.present()) - told  # all at first; then who has joined meanwhile

        def moves() -> bool:
            behind = step is not None and self._furthest(number) > clock()
            return bool(untold()) or behind or not self._missing(number)

        while True:
            start_s = time.monotonic()
            if not self.circle.wait(moves, self.timeout_s):
                raise PeerLost(
                    rank=tuple(self._missing(number)),
                    reason=f"it did not come to {what}() in time. All ranks that live call it.",
                    after_s=time.monotonic() - start_s,
                    during=what,
                )
            if fresh := untold():
                self.circle.tell("idle", word, fresh)
                told |= fresh
            elif step is not None and self._furthest(number) > clock():
                step()
            elif not self._missing(number):
                break
        self._check_same(number, what)
        with self.circle.changed:
            self._waiting.pop(number)
        return number

    def is_waiting(self, member: int) -> bool:
        """Whether a member has come to a meeting that this one has not."""
        return member in self._waiting.get(self.number, {})

    def _missing(self, number: int) -> list[int]:
        here = self._waiting.get(number, {})
        return [member for member in self.circle.book.present() if member not in here]

    def _furthest(self, number: int) -> int:
        """The clock that all mix up to; as long as somebody is missing, what is known of it."""
        book, here = self.circle.book, self._waiting.get(number, {})
        clocks = [self.circle.clocks.get(member, 0) for member in book.present() if member != self.circle.me]
        said = [clock for member, (_, clock) in here.items() if member not in book.dead]  # some may have left since
        return max([*clocks, *said], default=0)

    def _check_same(self, number: int, what: str) -> None:
        for member, (other, _) in sorted(self._waiting[number].items()):
            if other != what:
                raise OutOfStep(f"rank {member} is in {other}(), this rank in {what}(). All ranks call the same.")

    def _hear_idle(self, sender: int, message: Message) -> None:
        number, what = int(message.fields["number"]), str(message.fields["what"])
        with self.circle.changed:
            self._waiting.setdefault(number, {})[sender] = (what, int(message.fields["clock"]))

    # -- one exact mean -------------------------------------------------------------------------------------------

    def mean(self, number: int, weight: float, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of what the living bring to a meeting, the same bits for all. Blocks."""
        own = Message("part", {"number": number, "weight": weight}, dict(tensors))
        result: Message | None = None
        asked = -1
        while result is None:
            with self.circle.changed:
                leader = min(self.circle.book.present())
            if leader == self.circle.me:
                result = self._lead(number, own, ask=asked >= 0)
            else:
                if asked != leader:
                    self.circle.send(leader, own)
                    asked = leader
                result = self._follow(number, leader)
        with self.circle.changed:
            self._kept, self._finished = (number, result), number
            self._parts.pop(number, None)
            self._means.pop(number, None)
        self.circle.tell("settled", {"number": number})
        with self.circle.changed:
            self._forget_if_all_have_it(number)
        return result.tensors

    def _lead(self, number: int, own: Message, *, ask: bool) -> Message:
        if ask:  # another led before, and may have told some
            self.circle.tell("call", {"number": number})
        me, start_s = self.circle.me, time.monotonic()

        def absent() -> list[int]:
            parts = self._parts.get(number, {})
            return [member for member in self.circle.book.present() if member != me and member not in parts]

        if not self.circle.wait(lambda: number in self._means or not absent(), self.timeout_s):
            raise self._late(absent(), start_s)
        with self.circle.changed:
            if number in self._means:
                return self._means[number]
            present = self.circle.book.present()
            parts = {**{m: p for m, p in self._parts.get(number, {}).items() if m in present}, me: own}
        result = Message("mean", {"number": number}, _mean([parts[member] for member in sorted(parts)]))
        for member in sorted(parts):
            self.circle.send(member, Message("mean", {"number": number}, result.tensors))
        return result

    def _follow(self, number: int, leader: int) -> Message | None:
        start_s = time.monotonic()

        def told() -> bool:
            # That it has left may be known from another, who has got the mean, before its own mean is heard here.
            gone = leader not in self.circle.book.present() and not self.circle.has_line(leader)
            return number in self._means or gone

        if not self.circle.wait(told, self.timeout_s):
            raise self._late([leader], start_s)
        return self._means.get(number)

    def _late(self, members: list[int], start_s: float) -> PeerLost:
        reason = "it lives, but has not sent its part of the mean in time"
        return PeerLost(rank=tuple(members), reason=reason, after_s=time.monotonic() - start_s, during="settle")

    def _hear_part(self, sender: int, message: Message) -> None:
        number = int(message.fields["number"])
        with self.circle.changed:
            if number > self._finished:
                self._parts.setdefault(number, {})[sender] = message
        self._give_kept(number, sender)

    def _hear_call(self, sender: int, message: Message) -> None:
        self._give_kept(int(message.fields["number"]), sender)

    def _give_kept(self, number: int, member: int) -> None:
        kept = self._kept
        if kept is not None and kept[0] == number:
            self.circle.send(member, Message("mean", {"number": number}, kept[1].tensors))

    def _hear_mean(self, sender: int, message: Message) -> None:
        number = int(message.fields["number"])
        with self.circle.changed:
            if number > self._finished:
                self._means.setdefault(number, message)

    def _hear_settled(self, sender: int, message: Message) -> None:
        number = int(message.fields["number"])
        with self.circle.changed:
            self._settled.setdefault(number, set()).add(sender)
            self._forget_if_all_have_it(number)

    def _forget_if_all_have_it(self, number: int) -> None:
        others = set(self.circle.book.present()) - {self.circle.me}
        if self._kept is not None and self._kept[0] == number and others <= self._settled.get(number, set()):
            self._kept = None
            self._settled = {later: who for later, who in self._settled.items() if later > number}


@torch.no_grad()
def _mean(parts: list[Message]) -> dict[str, Tensor]:
    """In the order of the members: the same bits whoever adds up."""
    weight = sum(float(part.fields["weight"]) for part in parts)
    means = {}
    for name, first in parts[0].tensors.items():
        total = first.clone()
        if name[0] in (BY_WEIGHT, PLAINLY):  # else the first member's stand
            for part in parts[1:]:
                total += part.tensors[name]
            total /= weight if name[0] == BY_WEIGHT else len(parts)
        means[name] = total
    return means
