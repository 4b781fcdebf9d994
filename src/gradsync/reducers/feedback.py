"""What becomes of what a lossy codec could not say: kept, by parameter name, and sent with a later step.

[Note: one residual a value] A rank encodes its values for the shards of others, and the sum for its own shard; its own
values of its own shard it need not encode at all. So every value has one residual on each rank: of what this rank
gave, or, in its own shard, of what it answered to all. Both are shares of a mean that nobody got yet: they may be
added up, and moved between ranks.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.codecs.base import Payload, Residual
from gradsync.codecs.chain import Chain
from gradsync.codecs.sparse import Sparse
from gradsync.comm import large_pages
from gradsync.reducers.shards import Piece, worked_in
from gradsync.slot import Slot

Kept = dict[str, dict[str, Tensor]]  # kind ("residuals"), then parameter name; flat, as values lie in the bucket


class Turn(NamedTuple):
    """One piece's values on their way: what they are multiplied by, and what is random about them."""

    piece: Piece
    gain: float  # makes x, the values, this rank's share of the mean, in unscaled units
    out: Tensor
    out_gain: float  # back to the loss scale
    key: int
    may_undo: bool  # a GradScaler may find that the step did not count
    share: float  # this rank's part of all weight
    world_size: int


class Memory:
    """Tensors by parameter name that change with every step, or do not if the step did not count.

    Where a step may be undone each has a second copy: what is written during the step; ``end_step`` keeps one of them.
    """

    def __init__(self) -> None:
        self.now: dict[str, Tensor] = {}
        self._next: dict[str, Tensor] = {}

    def of(self, turn: Turn) -> Residual:
        """This piece's part."""
        piece, slot = turn.piece, turn.piece.slot
        now = piece.of(_entry(self.now, slot))
        return Residual(now, piece.of(_entry(self._next, slot)) if turn.may_undo else now)

    def writable(self, turn: Turn) -> Tensor:
        """This piece's part to be changed in place."""
        part = self.of(turn)
        if part.after.data_ptr() != part.before.data_ptr():
            part.after.copy_(part.before)
        return part.after

    def clear(self) -> None:
        self.now, self._next = {}, {}

    def end_step(self, *, finite: bool) -> None:
        if finite and self._next:
            self.now, self._next = {**self.now, **self._next}, self.now


def _entry(tensors: dict[str, Tensor], slot: Slot) -> Tensor:
    known = tensors.get(slot.name)
    if known is None:
        flat = slot.flat
        known = tensors[slot.name] = large_pages.zeros(flat.numel(), worked_in(flat.dtype), flat.device)
    return known


class Feedback(abc.ABC):
    """How a rank encodes what it gives and what it answers, and what it remembers of it."""

    minds_everything = False  # also of what travels whole it remembers something

    def __init__(self) -> None:
        self.memories: dict[str, Memory] = {}  # by kind; a rank's own, and their sum over the ranks is what counts
        self.shared: dict[str, Memory] = {}  # the same on all ranks

    @abc.abstractmethod
    def give(self, turn: Turn, x: Tensor, payload: Payload) -> None:
        """Encode this rank's values ``x`` for a shard of another rank (or for a sum)."""

    @abc.abstractmethod
    def answer(self, turn: Turn, x: Tensor, received: Sequence[Payload], payload: Payload) -> bool:
        """In this rank's own shard: sum what was given, encode the sum, and write to ``out`` what that says."""

    def take(self, turn: Turn, payload: Payload) -> bool:
        """Write to ``out`` what the owner of a shard answered."""
        return turn.piece.codec.decode(payload, turn.out, gain=turn.out_gain, key=turn.key)

    def take_sum(self, turn: Turn, payloads: Sequence[Payload]) -> bool:
        """Write to ``out`` the sum of what all ranks gave, in rank order."""
        return turn.piece.codec.decode_sum(payloads, turn.out, gain=turn.out_gain, key=turn.key)

    def minds(self, name: str) -> bool:
        """Whether a parameter has to come by here even if it travels whole: something of it is still owed, perhaps."""
        return self.minds_everything or any(name in memory.now for memory in self.memories.values())

    def end_step(self, *, finite: bool) -> None:
        """Keep what this step has changed, or forget it."""
        for memory in (*self.memories.values(), *self.shared.values()):
            memory.end_step(finite=finite)

    def on_new_plan(self) -> None:  # noqa: B027 - a residual is where it is needed whatever the plan
        """Parameters, or parts of them, may belong to other shards from now on."""


class NoFeedback(Feedback):
    """What was not said is lost: for codecs that are right on average, or to see what feedback is worth."""

    def give(self, turn: Turn, x: Tensor, payload: Payload) -> None:
        turn.piece.codec.encode(x, payload, gain=turn.gain, key=turn.key)

    def answer(self, turn: Turn, x: Tensor, received: Sequence[Payload], payload: Payload) -> bool:
        return turn.piece.codec.merge(
            x, received, payload, gain=turn.gain, key=turn.key, out=turn.out, out_gain=turn.out_gain
        )


class ErrorFeedback(Feedback):
    """The classic: what was not said is added to the next step's values."""

    def __init__(self) -> None:
        super().__init__()
        self._residuals = self.memories["residuals"] = Memory()

    def give(self, turn: Turn, x: Tensor, payload: Payload) -> None:
        turn.piece.codec.encode(x, payload, gain=turn.gain, residual=self._residuals.of(turn), key=turn.key)

    def answer(self, turn: Turn, x: Tensor, received: Sequence[Payload], payload: Payload) -> bool:
        return turn.piece.codec.merge(
            x,
            received,
            payload,
            gain=turn.gain,
            residual=self._residuals.of(turn),
            key=turn.key,
            out=turn.out,
            out_gain=turn.out_gain,
        )


class Ef21(Feedback):
    """EF21: every rank keeps an estimate of its gradient, and sends the codec's word for how far that is off.

    Of a shard its owner keeps the sum of the others' estimates; of the result all ranks keep one estimate. Nothing is
    ever owed, so with another plan the estimates begin anew at zero.
    """

    minds_everything = True

    def __init__(self) -> None:
        super().__init__()
        self._given = self.memories["estimates"] = Memory()
        self._result = self.shared["results"] = Memory()

    def give(self, turn: Turn, x: Tensor, payload: Payload) -> None:
        codec = turn.piece.codec
        estimate = self._given.writable(turn)
        codec.encode(_off(turn, x, estimate), payload, key=turn.key)
        codec.decode(payload, estimate, add=True, key=turn.key)

    def answer(self, turn: Turn, x: Tensor, received: Sequence[Payload], payload: Payload) -> bool:
        codec = turn.piece.codec
        others = self._given.writable(turn)
        for other in received:
            codec.decode(other, others, add=True, key=turn.key)
        result = self._result.of(turn)
        codec.encode(_off(turn, x, result.before).add_(others), payload, key=turn.key)
        return self.take(turn, payload)

    def take(self, turn: Turn, payload: Payload) -> bool:
        result = self._result.writable(turn)
        finite = turn.piece.codec.decode(payload, result, add=True, key=turn.key)
        torch.mul(result, turn.out_gain, out=turn.out)
        return finite

    def take_sum(self, turn: Turn, payloads: Sequence[Payload]) -> bool:
        result, codec = self._result.writable(turn), turn.piece.codec
        finite = True
        for payload in payloads:
            finite = codec.decode(payload, result, add=True, key=turn.key) and finite
        torch.mul(result, turn.out_gain, out=turn.out)
        return finite

    def on_new_plan(self) -> None:
        for memory in (self._given, self._result):
            memory.clear()


def _off(turn: Turn, x: Tensor, estimate: Tensor) -> Tensor:
    return torch.sub(x * turn.gain, estimate)


class MomentumCorrection(Feedback):
    """Deep Gradient Compression: momentum is gathered before the selection, and forgotten where a value was sent.

    ``velocity = momentum * velocity + gradient``; the velocity is what is fed back. The optimizer then must have no
    momentum of its own. What is sent whole keeps its velocity: that is plain momentum.
    """

    minds_everything = True

    def __init__(self, *, momentum: float, clip_norm: float | None) -> None:
        super().__init__()
        self._momentum = momentum
        self._clip_norm = clip_norm
        self._residuals = self.memories["residuals"] = Memory()
        self._velocities = self.memories["velocities"] = Memory()

    def give(self, turn: Turn, x: Tensor, payload: Payload) -> None:
        codec = turn.piece.codec
        velocity = self._gather(turn, x)
        codec.encode(velocity, payload, residual=self._residuals.of(turn), key=turn.key)
        if isinstance(codec, Sparse | Chain):
            codec.erase(payload, velocity, key=turn.key)

    def answer(self, turn: Turn, x: Tensor, received: Sequence[Payload], payload: Payload) -> bool:
        codec = turn.piece.codec
        velocity = self._gather(turn, x)
        residual = self._residuals.of(turn)
        finite = codec.merge(
            velocity, received, payload, residual=residual, key=turn.key, out=turn.out, out_gain=turn.out_gain
        )
        if isinstance(codec, Sparse | Chain):
            codec.erase(payload, velocity, key=turn.key)
        return finite

    def _gather(self, turn: Turn, x: Tensor) -> Tensor:
        """The velocity with this step's gradient in it."""
        gain = turn.gain
        if self._clip_norm is not None:
            norm = float(torch.linalg.vector_norm(turn.piece.slot.source)) * turn.gain
            limit = self._clip_norm * turn.share / math.sqrt(turn.world_size)
            gain *= min(1.0, limit / norm) if norm > 0 else 1.0
        return self._velocities.writable(turn).mul_(self._momentum).add_(x, alpha=gain)


FEEDBACKS: dict[str, Callable[[], Feedback]] = {"ef": ErrorFeedback, "ef21": Ef21, "none": NoFeedback}
