"""The compressed reducer: sends encoded values; the encoding error is kept by error feedback and sent later.

How a bucket is reduced depends on the codec and the number of ranks: payloads that can be summed are all-reduced; two
ranks exchange their payloads; more ranks reduce by shards.

[Note: two stages] Payloads that can't be summed by an all-reduce would have to be all-gathered: n times the bytes.
Instead every rank owns a shard of each bucket. It receives the other ranks' payloads of that shard, sums their decoded
values, encodes the sum, and all-gathers that. So a rank sends 2 (n - 1) / n payloads for any n; and all ranks,
including the owner, decode the result from the same bytes, so the replicas stay bitwise equal.

[Note: codes cross once per host] Where several ranks of each host share memory, codes from rank to rank would cross
between hosts as often as a host has ranks. There the ranks of a host first sum a bucket exactly, in shared memory. One
of them, the bucket's leader, then does with the leaders of the other hosts what ranks do otherwise, and shares the
result. So a host sends what one rank would. Buckets are led by the ranks of a host in turn. A residual is that of the
host's sum, and is kept by the leader. When another rank becomes the leader, because the plan or the number of ranks
changed, the old one adds its residual to its own values once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.buckets.bucket import MIB, Bucket, BucketPlan
from gradsync.buckets.slot import Slot
from gradsync.codecs.base import Codec, Finite, compute_dtype
from gradsync.codecs.cast import Bf16, Fp16
from gradsync.codecs.chain import Chain
from gradsync.codecs.dense import Dense
from gradsync.codecs.sparse import Sparse
from gradsync.comm.base import Communicator, Finished, HostExchange, Work
from gradsync.reducers.base import Reducer
from gradsync.reducers.codec_rules import MIN_NUMEL, CodecRule, CodecRules
from gradsync.reducers.compressed.feedback import FEEDBACKS, EncodeTask, Feedback, MomentumCorrection, ParameterState
from gradsync.reducers.compressed.rows import PayloadRows
from gradsync.reducers.compressed.shards import Piece, shard_bucket
from gradsync.reducers.compressed.small_parameters import LARGEST_NUMEL
from gradsync.reducers.outcome import StepOutcome
from gradsync.reducers.spikes import TypicalMagnitude, compile_kernels, warn_dropped

UNCOMPRESSED: dict[torch.dtype, Codec] = {torch.float16: Fp16(), torch.bfloat16: Bf16()}


@spec.register("reducer", "compressed")
class Compressed(Reducer):
    """Sends encoded gradients, with error feedback.

    Args:
        codec: one for all, or ``{"*.embedding.weight": "topk(density=0.01)", "*": "int8"}``: the first pattern that
            fits a parameter's name counts.
        feedback: "ef" adds the encoding error to the next step, "ef21" sends differences from an estimate, "none"
            drops the error. (``dgc`` brings its own.)
        min_numel: parameters with fewer values, and all vectors, are sent uncompressed unless a pattern matches them.
            Lower => more is compressed, and a little less is sent.
        seed: for codecs that round or choose at random.

    >>> from gradsync.reducers import Compressed
    >>> Compressed("int8", feedback="ef21").num_stages
    2
    >>> Compressed("fp16").num_stages                       # sums of 16-bit floats need no second stage
    1
    """

    bucket_bytes = 9 * MIB  # each costs half a millisecond of Python; encoding takes longer than sending the codes

    def __init__(
        self, codec: CodecRule = "int8", *, feedback: str = "ef", min_numel: int = MIN_NUMEL, seed: int = 0
    ) -> None:
        super().__init__()
        if feedback not in FEEDBACKS:
            raise ValueError(f"feedback must be one of {', '.join(FEEDBACKS)}; got {feedback!r}.")
        self.rules = CodecRules.parse(codec, min_numel=min_numel)
        self._feedback_name = feedback
        self._seed = seed
        self._steps = 0
        self._feedback = self._make_feedback()
        self._typical = TypicalMagnitude()  # of the last steps: see spikes.py
        self._choose_stages({torch.float32})
        self.may_sum_hosts = True  # False: every rank's residual must be that of its own values
        self._payload_rows: dict[int, PayloadRows] = {}
        self._codecs_by_name: dict[str, Codec] = {}
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

    @property
    def can_be_sliced(self) -> bool:
        """Whether a rank may sum its slice of a bucket for itself, and keep residuals of the others' slices only."""
        return type(self._feedback).may_sum_hosts

    def spec_arguments(self) -> dict[str, Any]:
        """The constructor arguments, for specs."""
        return {
            "codec": self.rules.as_argument(),
            "feedback": self._feedback_name,
            "min_numel": self.rules.min_numel,
            "seed": self._seed,
        }

    # -- one bucket -----------------------------------------------------------------------------------------------

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self.rules.check([slot.name for slot in plan.slots()])
        self._codecs_by_name = {name: self.rules.codec_of(name, slot.param) for name, slot in self.slots.items()}
        self._choose_stages({compute_dtype(bucket.buffer.dtype) for bucket in plan.buckets})
        self._payload_rows = {}
        self._feedback.on_new_plan()
        if comm.world_size > 1 and any(bucket.storage.is_cpu for bucket in plan.buckets):
            compile_kernels()

    def in_place_range(self, slot: Slot, comm: Communicator) -> tuple[int, int] | None:
        if self._sums_hosts(comm):
            return None  # the ranks of a host sum their buckets
        return 0, slot.flat.numel()  # small ones too: a compiled call gathers them

    def _sums_hosts(self, comm: Communicator) -> bool:
        """See [Note: codes cross once per host]."""
        return self.may_sum_hosts and comm.num_hosts is not None and self._feedback.may_sum_hosts

    def _choose_stages(self, dtypes: set[torch.dtype]) -> None:
        """One stage if all payloads can be summed in one dtype that small parameters can have, too; else two."""
        sums = {codec.sums_as for _, codec in self.rules.patterns if not isinstance(codec, Dense)}
        common = sums.pop() if len(sums) == 1 else None
        self._sums_as = None if common == torch.float32 and dtypes != {torch.float32} else common
        self.num_stages = 1 if self._sums_as is not None else 2

    def stages(self, world_size: int) -> int:
        return 1 if world_size == 2 else self.num_stages

    def stages_on(self, comm: Communicator) -> int:
        return 1 if self._sums_hosts(comm) else super().stages_on(comm)

    @property
    def sums_as(self) -> torch.dtype | None:
        """The dtype as which payloads are all-reduced; None if they are exchanged instead."""
        return self._sums_as

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        if self._sums_hosts(comm):
            yield from self._reduce_per_host(bucket, comm)
        else:
            yield from self._reduce_among(bucket, comm)

    def _reduce_per_host(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        """See [Note: codes cross once per host]."""
        assert comm.num_hosts is not None, "it sums hosts"
        leads = comm.leads_host(bucket.index)
        if not leads:
            names = self._codecs_of(bucket, self._num_shards(comm.num_hosts))
            self._feedback.hand_over(
                [slot for slot in bucket.slots if slot.name in names],
                bucket.loss_scale,
                may_roll_back=bucket.may_roll_back,
            )
        report = torch.zeros(1 + len(bucket.slots), dtype=torch.float64)  # the peak; for each slot, whether it is bad
        outcome = self.outcome

        def exchange(leaders: Communicator) -> Iterator[Work]:
            stages = self._reduce_among(bucket, leaders)
            # The transport resumes it, whoever waits: a step that was discarded meanwhile must not go on.
            while self.outcome is outcome and (work := next(stages, None)) is not None:
                yield work
            nonfinite = set(self.outcome.nonfinite)
            report[0] = self.outcome.peak
            report[1:] = torch.tensor([slot.name in nonfinite for slot in bucket.slots])

        host_exchange = HostExchange(
            run=exchange,
            num_collectives=self.stages(comm.num_hosts),
            report=report,
            sent_bytes=self.bytes_sent_on(bucket, comm),
        )
        yield comm.reduce_per_host(bucket.storage, bucket.index, host_exchange)
        if not leads:
            peak, *bad = report.tolist()
            self.outcome.add_peak(peak)
            self.outcome.add([slot.name for slot, is_bad in zip(bucket.slots, bad, strict=True) if is_bad], False)

    def _reduce_among(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        """Every rank of the communicator encodes its own values."""
        if comm.world_size == 1:  # nothing is sent, so nothing is compressed
            yield from [Finished()] * self.stages(comm.world_size)
        elif self._sums_as is not None:
            yield from self._reduce_by_sum(bucket, comm)
        elif comm.world_size == 2:
            yield from self._reduce_by_exchange(bucket, comm)
        else:
            yield from self._reduce_by_shards(bucket, comm)

    def _reduce_by_sum(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        buffers = self._payload_rows_of(bucket, comm.world_size)
        row, small = buffers.send_rows[0], buffers.shards.small
        tasks = self._encode_shard(buffers, row, 0, bucket, comm)
        small.write(row)
        assert self._sums_as is not None
        yield comm.all_reduce(row.view(self._sums_as))
        self._decode_shard(buffers, row, 0, tasks)
        small.read_sum([row], self.outcome)
        self._track_peak(buffers, [(row, 0)])

    def _reduce_by_exchange(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        """Two ranks send each other all of their payloads: as many bytes as by shards, and one stage less."""
        buffers, peer = self._payload_rows_of(bucket, comm.world_size), 1 - comm.rank
        small, mine, theirs = buffers.shards.small, buffers.send_rows[peer], buffers.recv_rows[peer]
        tasks = self._encode_shard(buffers, mine, 0, bucket, comm)
        small.write(mine)
        bucket.release()
        yield comm.all_to_all(buffers.send, out=buffers.recv, own=False, used=buffers.elide_zero_blocks(comm))
        rows = (mine, theirs) if comm.rank == 0 else (theirs, mine)
        for row in rows:
            buffers.elisions[0].restore(row)
        for task, *payloads in zip(tasks, *(buffers.payloads(row, 0) for row in rows), strict=True):
            self._finish_piece(task, finite=self._feedback.decode_sum(task, payloads))
        small.read_sum(rows, self.outcome)
        self._track_peak(buffers, [(row, 0) for row in rows])

    def _reduce_by_shards(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        buffers, here, last = self._payload_rows_of(bucket, comm.world_size), comm.rank, comm.world_size - 1
        small = buffers.shards.small
        others = [rank for rank in range(comm.world_size) if rank != here]
        tasks = {rank: self._encode_shard(buffers, buffers.send_rows[rank], rank, bucket, comm) for rank in others}
        small.write(buffers.reduced if here == last else buffers.send_rows[last])
        yield comm.all_to_all(buffers.send, out=buffers.recv, own=False, used=buffers.elide_zero_blocks(comm))
        received = [buffers.recv_rows[rank] for rank in others]
        for row in received:
            buffers.elisions[here].restore(row)
        reduced_payloads = buffers.payloads(buffers.reduced, here)
        payloads = zip(*(buffers.payloads(row, here) for row in received), strict=True)
        for piece, reduced_payload, theirs in zip(buffers.shards.pieces[here], reduced_payloads, payloads, strict=True):
            task = self._task(piece, bucket, comm)
            self._finish_piece(
                task, finite=self._feedback.reduce_shard(task, own_values(piece), theirs, reduced_payload)
            )
        if here == last:
            small.add(received, buffers.reduced)
        yield comm.all_gather(buffers.reduced, out=buffers.send)
        for rank in others:
            self._decode_shard(buffers, buffers.send_rows[rank], rank, tasks[rank])
        small.read_sum([buffers.send_rows[last]], self.outcome)
        self._track_peak(buffers, [(row, rank) for rank, row in enumerate(buffers.send_rows)])

    def _encode_shard(
        self, buffers: PayloadRows, row: Tensor, shard: int, bucket: Bucket, comm: Communicator
    ) -> list[EncodeTask]:
        """Encode this rank's part of a shard into a row."""
        tasks = [self._task(piece, bucket, comm) for piece in buffers.shards.pieces[shard]]
        for task, payload in zip(tasks, buffers.payloads(row, shard), strict=True):
            self._feedback.encode(task, own_values(task.piece), payload)
        return tasks

    def _decode_shard(self, buffers: PayloadRows, row: Tensor, shard: int, tasks: Sequence[EncodeTask]) -> None:
        """Decode a row into the bucket."""
        for task, payload in zip(tasks, buffers.payloads(row, shard), strict=True):
            self._finish_piece(task, finite=self._feedback.decode(task, payload))

    def _task(self, piece: Piece, bucket: Bucket, comm: Communicator) -> EncodeTask:
        shared = piece.codec.sums_as is not None  # then all ranks must choose the same positions
        key = _mix_key(self._seed, self._steps, piece.key, 0 if shared else 1 + comm.rank)
        gain, scale, out = piece.slot.source_gain, bucket.loss_scale, piece.flat
        if compute_dtype(out.dtype) != out.dtype:
            out = torch.empty_like(out, dtype=compute_dtype(out.dtype))
        return EncodeTask(piece, gain / scale, out, scale, key, bucket.may_roll_back, bucket.factor, comm.world_size)

    def _finish_piece(self, task: EncodeTask, *, finite: Finite) -> None:
        """Copy ``out`` to the bucket if it is another tensor, and record whether it is finite."""
        if task.out is not task.piece.flat:
            task.piece.flat.copy_(task.out)
        self.outcome.add([task.piece.slot.name], finite)

    def _track_peak(self, buffers: PayloadRows, rows: Sequence[tuple[Tensor, int]]) -> None:
        if self._feedback.own and (peak := buffers.peak_magnitude(rows)) is not None:
            self.outcome.add_peak(peak)

    def end_step(self, *, finite: bool) -> None:
        peak = self.outcome.peak
        super().end_step(finite=finite)
        self._feedback.end_step(finite=finite)
        self._steps += finite
        bound = self._typical.observe(peak) if finite else None
        if bound is not None:
            warn_dropped(self._feedback.drop_beyond(bound))

    def discard(self) -> None:
        super().discard()
        self._feedback.discard()

    def accept(self, shared: dict[str, Any], unsent: Collection[str]) -> list[str]:
        if int(shared["steps"]) == self._steps:  # the means were not finite
            self.discard()
            return []
        self.outcome = StepOutcome()
        self._feedback.end_step(finite=True)
        lost = self._feedback.drop(unsent)
        self._steps = int(shared["steps"])
        bound = self._typical.follow(float(shared["usual"]))
        if bound is not None:
            warn_dropped(self._feedback.drop_beyond(bound))
        self._load_states(self._feedback.shared, shared["shared"], set(shared["kept"]))
        return lost

    # -- layout ---------------------------------------------------------------------------------------------------

    def _codecs_of(self, bucket: Bucket, num_shards: int) -> dict[str, Codec]:
        """Each slot's codec at this step, by name; slots that are left out are small parameters."""
        # Payloads that are all-reduced must have one dtype.
        uncompressed = UNCOMPRESSED.get(self._sums_as or bucket.buffer.dtype, Dense())
        codecs: dict[str, Codec] = {}
        for slot in bucket.slots:
            codec = self._codecs_by_name[slot.name].at(self._steps)
            if isinstance(codec, Dense) or (self._sums_as is not None and codec.sums_as is None):
                codec = uncompressed
            codecs[slot.name] = codec
        dtype = compute_dtype(bucket.buffer.dtype)
        sizes = {slot.name: codecs[slot.name].encoded_bytes(slot.flat.numel(), dtype) for slot in bucket.slots}
        # All small parameters belong to one shard, which must not become longer than the others.
        remaining = sum(sizes.values()) / num_shards
        for slot in bucket.slots:
            small = isinstance(codecs[slot.name], Dense) and slot.flat.numel() <= LARGEST_NUMEL
            if small and sizes[slot.name] <= remaining and not self._feedback.needs(slot.name):
                remaining -= sizes[slot.name]
                del codecs[slot.name]
        return codecs

    def codecs(self) -> dict[str, str]:
        return {name: spec.render(codec) for name, codec in self._codecs_by_name.items()}

    def _payload_rows_of(self, bucket: Bucket, world_size: int) -> PayloadRows:
        buffers = self._payload_rows.get(bucket.index)
        if buffers is not None and not self._warms_up:
            return buffers
        summed, num_shards = self._sums_as is not None, self._num_shards(world_size)
        codecs = self._codecs_of(bucket, num_shards)
        if buffers is None or buffers.codecs != codecs:
            shards = shard_bucket(bucket, codecs, num_shards, small_dtype=self._sums_as or bucket.buffer.dtype)
            num_rows = 1 if summed else world_size
            buffers = PayloadRows(codecs, shards, num_rows, bucket.device)
            self._payload_rows[bucket.index] = buffers
        return buffers

    def _num_shards(self, world_size: int) -> int:
        return 1 if self._sums_as is not None or world_size == 2 else world_size

    def bytes_sent_on(self, bucket: Bucket, comm: Communicator) -> int:
        if not self._sums_hosts(comm) or comm.num_hosts is None:
            return super().bytes_sent_on(bucket, comm)
        return self.bytes_sent(bucket, comm.num_hosts) if comm.leads_host(bucket.index) else 0

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        if world_size == 1:
            return 0
        buffers = self._payload_rows_of(bucket, world_size)
        if self._sums_as is not None:
            return 2 * (world_size - 1) * buffers.shards.row_bytes // world_size
        if world_size == 2:
            return buffers.last_bytes_sent
        return buffers.last_bytes_sent + (world_size - 1) * buffers.shards.row_bytes

    def unsent(self) -> dict[str, Tensor]:
        residuals = self._feedback.own.get("residuals")
        return (
            {}
            if residuals is None
            else {name: self.slots[name].shaped(flat) for name, flat in residuals.committed.items()}
        )

    # -- saved state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``kept``: the parameters that have a state. The others are saved as zeros, so that the keys never change."""
        parameter_states = (*self._feedback.own.values(), *self._feedback.shared.values())
        return {
            "steps": self._steps,
            "own": {kind: self._saved_tensors(parameter_state) for kind, parameter_state in self._feedback.own.items()},
            "shared": {
                kind: self._saved_tensors(parameter_state) for kind, parameter_state in self._feedback.shared.items()
            },
            "usual": self._typical.magnitude,
            "kept": [
                name
                for name in self.slots
                if any(name in parameter_state.committed for parameter_state in parameter_states)
            ],
        }

    def _saved_tensors(self, parameter_state: ParameterState) -> dict[str, Tensor]:
        saved = {}
        for name, slot in self.slots.items():
            flat = parameter_state.committed.get(name)
            if flat is None:
                flat = torch.zeros(slot.flat.numel(), dtype=compute_dtype(slot.flat.dtype), device=slot.flat.device)
            saved[name] = slot.shaped(flat).clone()
        return saved

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        if self._feedback_name == "ef21":  # there are no residuals, and estimates start again at zero
            return {**states[0], "own": {"estimates": {}}, "shared": {"results": {}}, "kept": []}
        state = super().redistribute(states, rank, world_size)
        for kind, own in state["own"].items():  # the layout depends on the names: they must be equal on all ranks
            for name, value in (item for saved in states for item in saved["own"][kind].items()):
                own.setdefault(name, torch.zeros_like(value))
        state["kept"] = sorted({name for saved in states for name in _kept_names(saved)})
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) | {"kept", "usual"} != {"steps", "own", "shared", "kept", "usual"}:
            raise ValueError(f"expected the state of a compressed reducer; got {sorted(state)}.")
        self._steps = int(state["steps"])
        self._typical.magnitude = float(state.get("usual", 0.0))
        self._payload_rows = {}  # a parameter with a residual is not among the small ones
        for key, parameter_states in (("own", self._feedback.own), ("shared", self._feedback.shared)):
            if set(state[key]) != set(parameter_states):
                raise ValueError(
                    f"the state holds {sorted(state[key])}; this reducer keeps {sorted(parameter_states)}."
                )
            self._load_states(parameter_states, state[key], _kept_names(state))
        self._feedback.find_stray()

    def _load_states(
        self, states: dict[str, ParameterState], saved: dict[str, dict[str, Tensor]], kept: set[str]
    ) -> None:
        for kind, parameter_state in states.items():
            parameter_state.clear()
            parameter_state.committed = {
                name: self.slots[name].flattened(values) for name, values in saved[kind].items() if name in kept
            }


def _kept_names(state: dict[str, Any]) -> set[str]:
    """The parameters that have a state; all of them if it was saved by an older version, which does not list them."""
    everything = {name for key in ("own", "shared") for by_name in state[key].values() for name in by_name}
    return set(state.get("kept", everything))


def own_values(piece: Piece) -> Tensor:
    """This rank's values of a piece, in the dtype in which they are encoded."""
    x = piece.part_of(piece.slot.source)
    return x.to(compute_dtype(x.dtype))


def _mix_key(*parts: int) -> int:
    """A 63-bit hash of several integers."""
    key = 0
    for part in parts:
        key = (key ^ (part & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
        key ^= key >> 32
    return key >> 1


_MASK = (1 << 64) - 1
