"""Error feedback: the error of a lossy codec is kept, by parameter name, and sent with a later step.

``Feedback`` encodes and decodes the pieces of a bucket and keeps what it needs for that in ``ParameterState``. Its
subclasses are ``ErrorFeedback``, ``Ef21``, ``MomentumCorrection`` (for DGC) and ``NoFeedback``.

[Note: one residual per value] A rank encodes its values for the shards of other ranks, and the sum for its own shard;
its own values of its own shard are never encoded. So every value has one residual on each rank: the encoding error of
what this rank sent to the owner or, in its own shard, of the sum that it sent to all. Both are parts of the mean that
no rank has received yet: they may be added up, and moved between ranks.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.buckets.slot import Slot
from gradsync.codecs.base import Finite, Payload, Residual, all_finite, compute_dtype
from gradsync.codecs.chain import Chain
from gradsync.codecs.sparse import Sparse
from gradsync.comm import hugepages
from gradsync.reducers.compressed.shards import Piece
from gradsync.reducers.spikes import drop_beyond


class EncodeTask(NamedTuple):
    """One piece to be encoded and decoded in one step, with its factors and its random key."""

    piece: Piece
    gain: float  # times the values = this rank's share of the mean, without the loss scale
    out: Tensor
    out_gain: float  # the loss scale
    key: int
    may_roll_back: bool  # a GradScaler may skip the step, or a lost peer interrupt it
    weight_share: float  # this rank's weight / the sum over ranks
    world_size: int


class ParameterState:
    """Flat tensors by parameter name, which change in every step that counts.

    If a step may be rolled back, each tensor has a second copy, which is written during the step; ``end_step`` commits
    the new copy or drops it. ``discard`` also drops the tensors that the step was the first to need: on other ranks it
    may have been interrupted before it came to them, and the layout of rows depends on who has one.
    """

    def __init__(self) -> None:
        self.committed: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}
        self._written: set[str] = set()  # the parameters whose second copy was written in this step
        self._added: set[str] = set()  # those that got a tensor in this step

    def slices_for(self, task: EncodeTask) -> Residual:
        """The piece's part of its parameter's tensor: as committed, and to be written in this step."""
        piece, slot = task.piece, task.piece.slot
        now = piece.part_of(self._now(slot))
        return Residual(now, piece.part_of(self._next(slot)) if task.may_roll_back else now)

    def _now(self, slot: Slot) -> Tensor:
        if slot.name not in self.committed:
            self._added.add(slot.name)
        return _tensor_for(self.committed, slot)

    def _next(self, slot: Slot) -> Tensor:
        self._written.add(slot.name)
        return _tensor_for(self._pending, slot)

    def writable(self, task: EncodeTask) -> Tensor:
        """The piece's part of its parameter's tensor, to be changed in place."""
        part = self.slices_for(task)
        if part.after.data_ptr() != part.before.data_ptr():
            part.after.copy_(part.before)
        return part.after

    def clear(self) -> None:
        self.committed, self._pending = {}, {}
        self._written, self._added = set(), set()

    def take(self, slot: Slot, *, may_roll_back: bool) -> Tensor:
        """A parameter's values, which are zero from this step on."""
        now = self._now(slot)
        if may_roll_back:
            self._next(slot).zero_()
            return now
        taken = now.clone()
        now.zero_()
        return taken

    def keep_zero(self, slot: Slot) -> None:
        """Let a parameter have a tensor, which stays zero in this step."""
        self._now(slot)

    def end_step(self, *, finite: bool) -> None:
        if finite:
            for name in self._written:
                self.committed[name], self._pending[name] = self._pending[name], self.committed[name]
        self._written, self._added = set(), set()

    def discard(self) -> None:
        """Undo a step that did not end."""
        for name in self._added:
            del self.committed[name]
        self._written, self._added = set(), set()


def _tensor_for(tensors: dict[str, Tensor], slot: Slot) -> Tensor:
    tensor = tensors.get(slot.name)
    if tensor is None:
        flat = slot.flat
        tensor = tensors[slot.name] = hugepages.zeros(flat.numel(), compute_dtype(flat.dtype), flat.device)
    return tensor


class Feedback(abc.ABC):
    """How a rank encodes its values and its reduced shard, and the state that it keeps for that."""

    needs_all = False  # True => it keeps state of uncompressed parameters, too
    may_sum_hosts = False  # its state may be that of a host's sum: see [Note: codes cross once per host] in reducer.py

    def __init__(self) -> None:
        self.own: dict[str, ParameterState] = {}  # by kind; of this rank: the sum over ranks is what matters
        self.shared: dict[str, ParameterState] = {}  # the same on all ranks

    @abc.abstractmethod
    def encode(self, task: EncodeTask, x: Tensor, payload: Payload) -> None:
        """Encode this rank's values ``x`` for the owner of a shard (or for an all-reduce)."""

    @abc.abstractmethod
    def reduce_shard(self, task: EncodeTask, x: Tensor, received: Sequence[Payload], payload: Payload) -> Finite:
        """In this rank's own shard: sum all ranks' values, encode the sum, and write the decoded sum to ``out``."""

    def sum_shard(self, task: EncodeTask, x: Tensor, received: Sequence[Payload]) -> Finite:
        """As ``reduce_shard``, where no other rank needs the sum: nothing is encoded."""
        torch.mul(x, task.gain * task.out_gain, out=task.out)
        finite = all_finite(task.out)
        for payload in received:
            finite = task.piece.codec.decode(payload, task.out, gain=task.out_gain, add=True, key=task.key) & finite
        return finite

    def decode(self, task: EncodeTask, payload: Payload) -> Finite:
        """Write the decoded sum, received from the owner of a shard, to ``out``."""
        return task.piece.codec.decode(payload, task.out, gain=task.out_gain, key=task.key)

    def decode_sum(self, task: EncodeTask, payloads: Sequence[Payload]) -> Finite:
        """Write the sum of all ranks' decoded payloads, in rank order, to ``out``."""
        return task.piece.codec.decode_sum(payloads, task.out, gain=task.out_gain, key=task.key)

    def needs(self, name: str) -> bool:
        """Whether a parameter must be encoded here even if it is sent uncompressed: it may have a residual."""
        return self.needs_all or any(name in state.committed for state in self.own.values())

    def end_step(self, *, finite: bool) -> None:
        """Commit this step's changes, or drop them if its means were not finite."""
        for state in (*self.own.values(), *self.shared.values()):
            state.end_step(finite=finite)

    def discard(self) -> None:
        """Undo a step that did not end."""
        for state in (*self.own.values(), *self.shared.values()):
            state.discard()

    def drop_beyond(self, bound: float) -> list[str]:
        """After a spike: drop larger values; returns the names of the parameters that had any."""
        kept = [item for state in self.own.values() for item in state.committed.items()]
        return list(dict.fromkeys(name for name, values in kept if drop_beyond(values, bound)))

    def drop(self, names: Collection[str]) -> list[str]:
        """Set the residuals of these parameters to zero; returns the names of those that had one."""
        kept = [(name, state.committed[name]) for state in self.own.values() for name in state.committed]
        dropped = [(name, values) for name, values in kept if name in names]
        for _, values in dropped:
            values.zero_()
        return list(dict.fromkeys(name for name, _ in dropped))

    def on_new_plan(self) -> None:
        """Parameters, or parts of them, may belong to other shards from now on, and to other ranks."""
        self.find_stray()

    def find_stray(self) -> None:  # noqa: B027 - only residuals are handed over
        """Residuals were loaded, or other ranks may encode them from now on: see ``hand_over``."""

    def hand_over(self, slots: Sequence[Slot], loss_scale: float, *, may_roll_back: bool) -> None:  # noqa: B027
        """Another rank encodes the sum of these parameters over the host: add this rank's residuals to its values."""


class NoFeedback(Feedback):
    """The encoding error is lost: for unbiased codecs, or to measure what feedback is worth."""

    may_sum_hosts = True

    def encode(self, task: EncodeTask, x: Tensor, payload: Payload) -> None:
        task.piece.codec.encode(x, payload, gain=task.gain, key=task.key)

    def reduce_shard(self, task: EncodeTask, x: Tensor, received: Sequence[Payload], payload: Payload) -> Finite:
        return task.piece.codec.merge(
            x, received, payload, gain=task.gain, key=task.key, out=task.out, out_gain=task.out_gain
        )


class ErrorFeedback(Feedback):
    """Classic error feedback: the encoding error is added to the next step's values."""

    may_sum_hosts = True

    def __init__(self) -> None:
        super().__init__()
        self._residuals = self.own["residuals"] = ParameterState()
        self._stray: set[str] = set()  # parameters whose residuals may have to be handed over
        self._used_up: set[int] = set()  # keys of the pieces that this rank owns and has no residual of
        self._handed_over: set[str] = set()  # in this step, of the stray ones
        self._using_up: set[int] = set()  # in this step

    def find_stray(self) -> None:
        self._stray, self._handed_over = set(self._residuals.committed), set()
        self._used_up, self._using_up = set(), set()

    def end_step(self, *, finite: bool) -> None:
        super().end_step(finite=finite)
        if finite:
            self._stray -= self._handed_over
            self._used_up |= self._using_up
        self._handed_over, self._using_up = set(), set()

    def discard(self) -> None:
        super().discard()
        self._handed_over, self._using_up = set(), set()

    def sum_shard(self, task: EncodeTask, x: Tensor, received: Sequence[Payload]) -> Finite:
        finite = super().sum_shard(task, x, received)
        residual = self._residuals.slices_for(task)
        if task.piece.key not in self._used_up:  # from a time when another rank owned the piece
            task.out.add_(residual.before, alpha=task.out_gain)
            self._using_up.add(task.piece.key)
            residual.after.zero_()
        elif residual.after is not residual.before:
            residual.after.zero_()
        return finite

    def hand_over(self, slots: Sequence[Slot], loss_scale: float, *, may_roll_back: bool) -> None:
        for slot in slots:
            if slot.name in self._stray:
                residual = self._residuals.take(slot, may_roll_back=may_roll_back)
                slot.flat.add_(residual.to(slot.flat.dtype), alpha=loss_scale)
                self._handed_over.add(slot.name)
            else:
                self._residuals.keep_zero(slot)

    def encode(self, task: EncodeTask, x: Tensor, payload: Payload) -> None:
        task.piece.codec.encode(x, payload, gain=task.gain, residual=self._residuals.slices_for(task), key=task.key)

    def reduce_shard(self, task: EncodeTask, x: Tensor, received: Sequence[Payload], payload: Payload) -> Finite:
        return task.piece.codec.merge(
            x,
            received,
            payload,
            gain=task.gain,
            residual=self._residuals.slices_for(task),
            key=task.key,
            out=task.out,
            out_gain=task.out_gain,
        )


class Ef21(Feedback):
    """EF21: every rank keeps an estimate of its gradient, and sends the encoded difference from it.

    The owner of a shard keeps the sum of the other ranks' estimates; all ranks keep one estimate of the result. There
    is no residual, so with another plan the estimates start again at zero.
    """

    needs_all = True

    def __init__(self) -> None:
        super().__init__()
        self._estimates = self.own["estimates"] = ParameterState()
        self._results = self.shared["results"] = ParameterState()

    def encode(self, task: EncodeTask, x: Tensor, payload: Payload) -> None:
        codec = task.piece.codec
        estimate = self._estimates.writable(task)
        codec.encode(_difference(task, x, estimate), payload, key=task.key)
        codec.decode(payload, estimate, add=True, key=task.key)

    def reduce_shard(self, task: EncodeTask, x: Tensor, received: Sequence[Payload], payload: Payload) -> Finite:
        codec = task.piece.codec
        others = self._estimates.writable(task)
        for other in received:
            codec.decode(other, others, add=True, key=task.key)
        result = self._results.slices_for(task)
        codec.encode(_difference(task, x, result.before).add_(others), payload, key=task.key)
        return self.decode(task, payload)

    def decode(self, task: EncodeTask, payload: Payload) -> Finite:
        result = self._results.writable(task)
        finite = task.piece.codec.decode(payload, result, add=True, key=task.key)
        torch.mul(result, task.out_gain, out=task.out)
        return finite

    def decode_sum(self, task: EncodeTask, payloads: Sequence[Payload]) -> Finite:
        result, codec = self._results.writable(task), task.piece.codec
        finite: Finite = True
        for payload in payloads:
            finite = codec.decode(payload, result, add=True, key=task.key) & finite
        torch.mul(result, task.out_gain, out=task.out)
        return finite

    def drop_beyond(self, bound: float) -> list[str]:
        """Reset all estimates: they are sums of what was sent to other ranks, so all ranks must drop them or none."""
        names = list(self._results.committed)
        self.on_new_plan()
        return names

    def on_new_plan(self) -> None:
        super().on_new_plan()
        for state in (self._estimates, self._results):
            state.clear()


def _difference(task: EncodeTask, x: Tensor, estimate: Tensor) -> Tensor:
    return torch.sub(x * task.gain, estimate)


class MomentumCorrection(Feedback):
    """Deep Gradient Compression: momentum is accumulated before the selection, and reset where a value was sent.

    ``velocity = momentum * velocity + gradient``; the velocity is encoded, with error feedback. The optimizer must have
    no momentum. Uncompressed parameters keep their velocity: that is plain momentum.
    """

    needs_all = True

    def __init__(self, *, momentum: float, clip_norm: float | None) -> None:
        super().__init__()
        self._momentum = momentum
        self._clip_norm = clip_norm
        self._residuals = self.own["residuals"] = ParameterState()
        self._velocities = self.own["velocities"] = ParameterState()

    def encode(self, task: EncodeTask, x: Tensor, payload: Payload) -> None:
        codec = task.piece.codec
        velocity = self._accumulate(task, x)
        codec.encode(velocity, payload, residual=self._residuals.slices_for(task), key=task.key)
        if isinstance(codec, Sparse | Chain):
            codec.erase(payload, velocity, key=task.key)

    def reduce_shard(self, task: EncodeTask, x: Tensor, received: Sequence[Payload], payload: Payload) -> Finite:
        codec = task.piece.codec
        velocity = self._accumulate(task, x)
        residual = self._residuals.slices_for(task)
        finite = codec.merge(
            velocity, received, payload, residual=residual, key=task.key, out=task.out, out_gain=task.out_gain
        )
        if isinstance(codec, Sparse | Chain):
            codec.erase(payload, velocity, key=task.key)
        return finite

    def _accumulate(self, task: EncodeTask, x: Tensor) -> Tensor:
        """Update the velocity with this step's gradient, clipped if asked for, and return it."""
        gain = task.gain
        velocity = self._velocities.writable(task).mul_(self._momentum)
        if self._clip_norm is not None:
            limit = self._clip_norm * task.weight_share / math.sqrt(task.world_size)
            whole = torch.linalg.vector_norm(task.piece.slot.source)
            if not whole.is_cpu:  # the host does not wait for the norm
                return velocity.add_(x * _clipping_on_device(whole * gain, limit).mul_(gain))
            norm = float(whole) * gain
            gain *= min(1.0, limit / norm) if norm > 0 else 1.0
        return velocity.add_(x, alpha=gain)


def _clipping_on_device(norm: Tensor, limit: float) -> Tensor:
    """The factor that brings a norm down to its limit: 1 if the norm is zero or below the limit."""
    return torch.where(norm > 0, (limit / norm).clamp(max=1.0), 1.0)


FEEDBACKS: dict[str, Callable[[], Feedback]] = {"ef": ErrorFeedback, "ef21": Ef21, "none": NoFeedback}
