"""Compressed reduction: fewer bytes on the wire, and what they could not say is sent later.

[Note: two stages] Payloads that can't be added up on the way would have to be gathered by everyone from everyone: n
times the bytes of one. Instead every rank owns a shard of each bucket. It gets the others' payloads of that shard, sums
what they say, encodes the sum, and shares that. A rank so sends 2 (n - 1) / n payloads, whatever n is; and all ranks,
the owner as well, read the result from the same bytes, so the replicas stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.bucket import MIB, Bucket, BucketPlan
from gradsync.codecs.base import Codec
from gradsync.codecs.cast import Bf16, Fp16
from gradsync.codecs.chain import Chain
from gradsync.codecs.dense import Dense
from gradsync.codecs.sparse import Sparse
from gradsync.comm.base import Communicator, Finished, Work
from gradsync.reducers.base import Reducer
from gradsync.reducers.bundle import LARGEST_NUMEL
from gradsync.reducers.feedback import FEEDBACKS, Feedback, Memory, MomentumCorrection, Turn
from gradsync.reducers.rules import MIN_NUMEL, CodecRule, Rules
from gradsync.reducers.shards import Piece, cut, worked_in
from gradsync.reducers.wire import Wire

WHOLE: dict[torch.dtype, Codec] = {torch.float16: Fp16(), torch.bfloat16: Bf16()}


@spec.register("reducer", "compressed")
class Compressed(Reducer):
    """Sends codes instead of values, with feedback of what the codes leave out.

    Args:
        codec: one for all, or ``{"*.embedding.weight": "topk(density=0.01)", "*": "int8"}``: the first pattern that
            fits a parameter's name counts.
        feedback: "ef" adds what was not said to the next step, "ef21" sends differences from an estimate, "none"
            forgets it. (``dgc`` brings its own.)
        min_numel: parameters with fewer values, and all vectors, are sent whole unless a pattern names them.
            Lower => more is compressed, and a little less is sent.
        seed: of the codecs that round or choose at random.

    >>> from gradsync.reducers import Compressed
    >>> Compressed("int8", feedback="ef21").num_stages
    2
    >>> Compressed("fp16").num_stages                       # sums of 16-bit floats need no second stage
    1
    """

    reads_fresh_gradients = reads_small_gradients = True
    bucket_bytes = 9 * MIB  # each costs half a millisecond of Python; of codes the wire has less to do than the cores

    def __init__(
        self, codec: CodecRule = "int8", *, feedback: str = "ef", min_numel: int = MIN_NUMEL, seed: int = 0
    ) -> None:
        super().__init__()
        if feedback not in FEEDBACKS:
            raise ValueError(f"feedback must be one of {', '.join(FEEDBACKS)}; got {feedback!r}.")
        self.rules = Rules.read(codec, min_numel=min_numel)
        self._feedback_name = feedback
        self._seed = seed
        self._steps = 0
        self._feedback = self._make_feedback()
        self._settle_stages({torch.float32})
        self._wires: dict[int, Wire] = {}
        self._chosen: dict[str, Codec] = {}
        self._warms_up = any(type(codec).at is not Codec.at for _, codec in self.rules.patterns)

    def _make_feedback(self) -> Feedback:
        sparse = [codec for _, codec in self.rules.patterns if isinstance(codec, Sparse | Chain)]
        wanted = {(codec.momentum, codec.clip_norm) for codec in sparse} - {(0.0, None)}
        if not wanted:
            return FEEDBACKS[self._feedback_name]()
        if len(wanted) > 1:
            raise ValueError(f"dgc has one momentum and one clip_norm for all parameters; got {sorted(wanted)}.")
        if self._feedback_name != "ef":
            raise ValueError(f"dgc brings a feedback of its own; got feedback={self._feedback_name!r}. Leave it out.")
        momentum, clip_norm = wanted.pop()
        return MomentumCorrection(momentum=momentum, clip_norm=clip_norm)

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs."""
        return {
            "codec": self.rules.written(),
            "feedback": self._feedback_name,
            "min_numel": self.rules.min_numel,
            "seed": self._seed,
        }

    # -- one bucket -----------------------------------------------------------------------------------------------

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self.rules.check([slot.name for slot in plan.slots()])
        self._chosen = {name: self.rules.codec_of(name, slot.param) for name, slot in self.slots.items()}
        self._settle_stages({worked_in(bucket.buffer.dtype) for bucket in plan.buckets})
        self._wires = {}
        self._feedback.on_new_plan()

    def _settle_stages(self, dtypes: set[torch.dtype]) -> None:
        """One stage where all payloads can be added up, and in a dtype in which small parameters can go whole."""
        sums = {codec.sums_as for _, codec in self.rules.patterns if not isinstance(codec, Dense)}
        common = sums.pop() if len(sums) == 1 else None
        self._sums_as = None if common == torch.float32 and dtypes != {torch.float32} else common
        self.num_stages = 1 if self._sums_as is not None else 2

    def stages(self, world_size: int) -> int:
        return 1 if world_size == 2 else self.num_stages

    @property
    def sums_as(self) -> torch.dtype | None:
        """What payloads are added up as on the way, by an all-reduce; None: they are exchanged."""
        return self._sums_as

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        if comm.world_size == 1:  # nobody to send to, so nothing to leave out
            yield from [Finished()] * self.stages(comm.world_size)
        elif self._sums_as is not None:
            yield from self._reduce_by_sum(bucket, comm)
        elif comm.world_size == 2:
            yield from self._reduce_by_exchange(bucket, comm)
        else:
            yield from self._reduce_by_shards(bucket, comm)

    def _reduce_by_sum(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        wire = self._wire_of(bucket, comm.world_size)
        row, bundle = wire.rows_given[0], wire.shards.bundle
        turns = self._give(wire, row, 0, bucket, comm)
        bundle.give(row)
        assert self._sums_as is not None
        yield comm.all_reduce(row.view(self._sums_as))
        self._take(wire, row, 0, turns)
        self.nonfinite += bundle.take_sum([row])

    def _reduce_by_exchange(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        """Two ranks: each gives all of its own to the other. That is no more than two halves, and one stage less."""
        wire, peer = self._wire_of(bucket, comm.world_size), 1 - comm.rank
        bundle, mine, theirs = wire.shards.bundle, wire.rows_given[peer], wire.rows_got[peer]
        turns = self._give(wire, mine, 0, bucket, comm)
        bundle.give(mine)
        bucket.release()
        yield comm.all_to_all(wire.given, out=wire.got, own=False, used=wire.pack(comm))
        rows = (mine, theirs) if comm.rank == 0 else (theirs, mine)
        for row in rows:
            wire.packings[0].unpack(row)
        for turn, *payloads in zip(turns, *(wire.payloads(row, 0) for row in rows), strict=True):
            self._end(turn, finite=self._feedback.take_sum(turn, payloads))
        self.nonfinite += bundle.take_sum(rows)

    def _reduce_by_shards(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        wire, here, last = self._wire_of(bucket, comm.world_size), comm.rank, comm.world_size - 1
        bundle = wire.shards.bundle
        others = [rank for rank in range(comm.world_size) if rank != here]
        turns = {rank: self._give(wire, wire.rows_given[rank], rank, bucket, comm) for rank in others}
        bundle.give(wire.answer if here == last else wire.rows_given[last])
        yield comm.all_to_all(wire.given, out=wire.got, own=False, used=wire.pack(comm))
        received = [wire.rows_got[rank] for rank in others]
        for row in received:
            wire.packings[here].unpack(row)
        answers = wire.payloads(wire.answer, here)
        payloads = zip(*(wire.payloads(row, here) for row in received), strict=True)
        for piece, answer, theirs in zip(wire.shards.rows[here], answers, payloads, strict=True):
            turn = self._turn(piece, bucket, comm)
            self._end(turn, finite=self._feedback.answer(turn, _values(piece), theirs, answer))
        if here == last:
            bundle.add(received, wire.answer)
        yield comm.all_gather(wire.answer, out=wire.given)
        for rank in others:
            self._take(wire, wire.rows_given[rank], rank, turns[rank])
        self.nonfinite += bundle.take_sum([wire.rows_given[last]])

    def _give(self, wire: Wire, row: Tensor, shard: int, bucket: Bucket, comm: Communicator) -> list[Turn]:
        """Encode this rank's part of a shard into a row."""
        turns = [self._turn(piece, bucket, comm) for piece in wire.shards.rows[shard]]
        for turn, payload in zip(turns, wire.payloads(row, shard), strict=True):
            self._feedback.give(turn, _values(turn.piece), payload)
        return turns

    def _take(self, wire: Wire, row: Tensor, shard: int, turns: Sequence[Turn]) -> None:
        """Write what a row says where it belongs."""
        for turn, payload in zip(turns, wire.payloads(row, shard), strict=True):
            self._end(turn, finite=self._feedback.take(turn, payload))

    def _turn(self, piece: Piece, bucket: Bucket, comm: Communicator) -> Turn:
        shared = piece.codec.sums_as is not None  # then all ranks choose alike
        key = _mix(self._seed, self._steps, piece.key, 0 if shared else 1 + comm.rank)
        gain, scale, out = piece.slot.source_gain, bucket.loss_scale, piece.flat
        if worked_in(out.dtype) != out.dtype:
            out = torch.empty_like(out, dtype=worked_in(out.dtype))
        return Turn(piece, gain / scale, out, scale, key, bucket.may_overflow, bucket.factor, comm.world_size)

    def _end(self, turn: Turn, *, finite: bool) -> None:
        """``out`` is written: put it where it belongs, and remember whether it is all numbers."""
        if turn.out is not turn.piece.flat:
            turn.piece.flat.copy_(turn.out)
        if not finite:
            self.nonfinite.append(turn.piece.slot.name)

    def end_step(self, *, finite: bool) -> None:
        super().end_step(finite=finite)
        self._feedback.end_step(finite=finite)
        self._steps += finite

    # -- what lies where ------------------------------------------------------------------------------------------

    def _codecs_of(self, bucket: Bucket, num_shards: int) -> dict[str, Codec]:
        """What each slot is encoded by at this step; those that are not named are bundled."""
        whole = WHOLE.get(self._sums_as or bucket.buffer.dtype, Dense())  # what is added up must be of one dtype
        codecs: dict[str, Codec] = {}
        for slot in bucket.slots:
            codec = self._chosen[slot.name].at(self._steps)
            if isinstance(codec, Dense) or (self._sums_as is not None and codec.sums_as is None):
                codec = whole
            codecs[slot.name] = codec
        dtype = worked_in(bucket.buffer.dtype)
        sizes = {slot.name: codecs[slot.name].encoded_bytes(slot.flat.numel(), dtype) for slot in bucket.slots}
        room = sum(sizes.values()) / num_shards  # the bundle belongs to one shard, which must not be longer for it
        for slot in bucket.slots:
            small = isinstance(codecs[slot.name], Dense) and slot.flat.numel() <= LARGEST_NUMEL
            if small and sizes[slot.name] <= room and not self._feedback.minds(slot.name):
                room -= sizes[slot.name]
                del codecs[slot.name]
        return codecs

    def codecs(self) -> dict[str, str]:
        return {name: spec.render(codec) for name, codec in self._chosen.items()}

    def _wire_of(self, bucket: Bucket, world_size: int) -> Wire:
        wire = self._wires.get(bucket.index)
        if wire is not None and not self._warms_up:
            return wire
        summed = self._sums_as is not None
        num_shards = 1 if summed or world_size == 2 else world_size
        codecs = self._codecs_of(bucket, num_shards)
        if wire is None or wire.codecs != codecs:
            shards = cut(bucket, codecs, num_shards, bundled_as=self._sums_as or bucket.buffer.dtype)
            num_rows = 1 if summed else world_size
            wire = Wire(codecs, shards, num_rows, bucket.device)
            self._wires[bucket.index] = wire
        return wire

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        if world_size == 1:
            return 0
        wire = self._wire_of(bucket, world_size)
        if self._sums_as is not None:
            return 2 * (world_size - 1) * wire.shards.row_bytes // world_size
        if world_size == 2:
            return wire.bytes_given
        return wire.bytes_given + (world_size - 1) * wire.shards.row_bytes

    def unsent(self) -> dict[str, Tensor]:
        owed = self._feedback.memories.get("residuals")
        return {} if owed is None else {name: self.slots[name].shaped(flat) for name, flat in owed.now.items()}

    # -- what must survive a restart ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "own": {kind: self._saved(memory) for kind, memory in self._feedback.memories.items()},
            "shared": {kind: self._saved(memory) for kind, memory in self._feedback.shared.items()},
        }

    def _saved(self, memory: Memory) -> dict[str, Tensor]:
        return {name: self.slots[name].shaped(flat).clone() for name, flat in memory.now.items() if name in self.slots}

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        if self._feedback_name == "ef21":  # estimates begin anew: nothing is owed
            return {"steps": states[0]["steps"], "own": {"estimates": {}}, "shared": {"results": {}}}
        state = super().redistribute(states, rank, world_size)
        for kind, own in state["own"].items():  # the names decide what lies where: they are the same on all ranks
            for name, value in (item for saved in states for item in saved["own"][kind].items()):
                own.setdefault(name, torch.zeros_like(value))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"steps", "own", "shared"}:
            raise ValueError(f"expected the state of a compressed reducer; got {sorted(state)}.")
        self._steps = int(state["steps"])
        self._wires = {}  # what is still owed of a parameter decides how it travels
        for key, memories in (("own", self._feedback.memories), ("shared", self._feedback.shared)):
            if set(state[key]) != set(memories):
                raise ValueError(f"the state holds {sorted(state[key])}; this reducer keeps {sorted(memories)}.")
            for kind, memory in memories.items():
                memory.clear()
                memory.now = {name: self.slots[name].flattened(saved) for name, saved in state[key][kind].items()}


def _values(piece: Piece) -> Tensor:
    """What this rank has of a piece, in a dtype that codecs take."""
    x = piece.of(piece.slot.source)
    return x.to(worked_in(x.dtype))


def _mix(*parts: int) -> int:
    """One number from several, such that neighbours have nothing in common; 63 bits."""
    mixed = 0
    for part in parts:
        mixed = (mixed ^ (part & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
        mixed ^= mixed >> 32
    return mixed >> 1


_MASK = (1 << 64) - 1
