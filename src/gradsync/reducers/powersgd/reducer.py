"""PowerSGD: sends two thin factors of each gradient matrix; the approximation error is fed back into later steps.

With Q from the last step: P = M Q, summed over the ranks and made orthonormal; Q = Mᵀ P, summed; and M ≈ P Qᵀ. That is
one round of a power iteration. Gradients change slowly, so one round per step follows their dominant directions.

[Note: own residual] A rank's gradients are already its share of the mean: the ranks' shares are only summed. The same
holds for the residuals: with Q = Σ Qᵣ and Qᵣ = Mᵣᵀ P, rank r keeps Mᵣ - P Qᵣᵀ. It needs nothing from the other ranks
for that; summed over the ranks it is Σ Mᵣ - P Qᵀ: exactly the error of the result, for any weights. A rank without data
has a gradient of zeros, and still sends its residual.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.buckets.bucket import Bucket, BucketPlan
from gradsync.buckets.slot import Slot
from gradsync.comm.base import Communicator, Finished, Work
from gradsync.reducers.base import Reducer
from gradsync.reducers.outcome import StepOutcome
from gradsync.reducers.powersgd.lowrank import FactoredResidual, Layout, LowRankOps, Matrix, ops_for, random_vectors
from gradsync.reducers.spikes import TypicalMagnitude, compile_kernels, drop_beyond, warn_dropped


class _BucketState:
    """Residuals, factors and buffers of one bucket. A step writes the pending ones; ``commit`` makes them current."""

    def __init__(self, bucket: Bucket, layout: Layout, seed: int, *, alternating: bool) -> None:
        self.bucket = bucket
        self.layout = layout
        self.in_flight = False  # between reduce() and end_step()
        if not layout.matrices:
            return
        self.ops: LowRankOps = ops_for(layout, seed)
        self.rows = [matrix.rows for matrix in layout.matrices]
        self.cols = [matrix.cols for matrix in layout.matrices]
        self.committed, self.pending = FactoredResidual.zeros(layout), FactoredResidual.zeros(layout)
        self.right, self.right_pending = self._empty(layout.right_numel), self._empty(layout.right_numel)
        left_numel = layout.left_numel if alternating else 0
        self.left, self.left_pending = self._empty(left_numel), self._empty(left_numel)
        # Uncompressed slots and flags are sent with the first factors, or with the only ones if alternating.
        self.left_buffer = _AllReduceBuffer(bucket, layout, layout.left_numel, with_dense=True)
        self.right_buffer = _AllReduceBuffer(bucket, layout, layout.right_numel, with_dense=alternating)

    def _empty(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.layout.dtype, device=self.layout.device)

    def commit(self, *, left: bool, right: bool, feedback: bool) -> None:
        if feedback:
            self.committed, self.pending = self.pending, self.committed
        if left:
            self.left, self.left_pending = self.left_pending, self.left
        if right:
            self.right, self.right_pending = self.right_pending, self.right

    def drop_beyond(self, bound: float) -> list[str]:
        """After a spike: drop larger values of the residuals; returns the names of the parameters that had any."""
        residuals = self.ops.residuals(self.committed)
        parts = {
            matrix.slot.name: _slice(residuals, matrix.flat_offset, matrix.numel) for matrix in self.layout.matrices
        }
        names = [name for name, part in parts.items() if drop_beyond(part, bound)]
        self.committed.matrices.copy_(residuals)
        self.committed.left.zero_()
        self.committed.right.zero_()
        return names


class _AllReduceBuffer:
    """The input and output of one all-reduce: factors and, if ``with_dense``, uncompressed slots and the flags."""

    def __init__(self, bucket: Bucket, layout: Layout, numel: int, *, with_dense: bool) -> None:
        slots = layout.dense if with_dense else []
        num_flags = bucket.flags.numel() if with_dense else 0
        total = numel + sum(slot.flat.numel() for slot in slots) + num_flags
        self.flat = torch.zeros(total, dtype=layout.dtype, device=layout.device)
        self.factors = self.flat[:numel]
        self._flags = self.flat[total - num_flags :]
        self._dense: list[tuple[Slot, Tensor]] = []
        for slot in slots:
            self._dense.append((slot, self.flat[numel : numel + slot.flat.numel()]))
            numel += slot.flat.numel()

    def pack(self, flags: Tensor) -> None:
        for slot, place in self._dense:
            place.copy_(slot.source)
            if slot.source_gain != 1.0:
                place.mul_(slot.source_gain)
        self._flags.copy_(flags)

    def unpack(self, flags: Tensor) -> None:
        for slot, place in self._dense:
            slot.flat.copy_(place)
        flags.copy_(self._flags)

    def check(self, outcome: StepOutcome) -> None:
        """Tell ``outcome`` which of the uncompressed slots have NaN or inf."""
        names, places = [slot.name for slot, _ in self._dense], [place for _, place in self._dense]
        outcome.add_tensors(names, places, whole=self.flat)


@spec.register("reducer", "powersgd")
class PowerSGD(Reducer):
    """Sends two thin factors of each weight's gradient, with error feedback.

    Args:
        rank: columns of a factor. Higher => more bytes and a closer mean; 1 to 8 are usual.
        alternating: sends one factor per step, left and right in turn: half the bytes and one all-reduce instead of
            two, but each step projects the gradient on a factor that is one step old.
        min_compression: a matrix is sent as factors if they are this many times smaller. Higher => fewer are.
        start_step: before it everything is sent uncompressed. Higher => a safer start, and that many slow steps.
        feedback: False drops the approximation error. It saves nothing, and shows what feedback is worth.
        seed: of the initial factors, together with the parameter's name.

    It keeps two more tensors of a compressed parameter's size (float32 for 16-bit gradients): one to roll back to if a
    step does not count.

    >>> from gradsync import spec
    >>> reducer = spec.parse("powersgd(rank=2)", "reducer")
    >>> reducer.num_stages, spec.render(reducer)
    (2, 'powersgd(rank=2)')
    """

    def __init__(
        self,
        *,
        rank: int = 4,
        alternating: bool = False,
        min_compression: float = 2.0,
        start_step: int = 0,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank must be at least 1; got {rank=}.")
        if min_compression < 1.0:
            raise ValueError(
                f"min_compression must be at least 1: factors no larger than the matrix; got {min_compression=}."
            )
        if start_step < 0:
            raise ValueError(f"start_step must be 0 or more; got {start_step=}.")
        self.rank, self.alternating, self.min_compression = rank, alternating, min_compression
        self.start_step, self.feedback, self.seed = start_step, feedback, seed
        self.num_stages = 1 if alternating else 2
        self._steps = 0
        self._typical = TypicalMagnitude()  # of the last steps: see spikes.py
        self._states: dict[int, _BucketState] = {}  # by the bucket's index
        # Loaded state, by kind and parameter name, that is not in a bucket's state yet.
        self._unplaced: dict[str, dict[str, Tensor]] = {"residuals": {}, "left": {}, "right": {}}
        self._buckets: list[Bucket] = []  # those to reduce; none in a world of one
        self._flushed: set[str] = set()  # uncompressed parameters whose residual was sent in this step

    def spec_arguments(self) -> dict[str, Any]:
        """The constructor arguments, for specs."""
        names = ("rank", "alternating", "min_compression", "start_step", "feedback", "seed")
        return {name: getattr(self, name) for name in names}

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self._clear_states()
        self._buckets = plan.buckets if comm.world_size > 1 else []
        if any(bucket.storage.is_cpu for bucket in self._buckets):
            compile_kernels()

    def in_place_range(self, slot: Slot, comm: Communicator) -> tuple[int, int] | None:
        return None if slot.is_small else (0, slot.flat.numel())

    # -- one bucket -----------------------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        if comm.world_size == 1:  # nothing is sent, so nothing is compressed
            yield from [Finished()] * self.num_stages
            return
        state = self._state_of(bucket)
        assert not state.in_flight, "end_step() comes after every backward"
        state.in_flight = True
        self._flush_residuals(bucket, state)
        if not state.layout.matrices or self._steps < self.start_step:
            yield from self._reduce_uncompressed(bucket, comm)
        elif self.alternating:
            yield from self._reduce_alternating(bucket, comm, state)
        else:
            yield from self._reduce_both_factors(bucket, comm, state)

    def _reduce_uncompressed(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        for slot in bucket.slots:
            slot.copy_in()
        yield comm.all_reduce(bucket.storage)
        slots = bucket.slots
        self.outcome.add_tensors([s.name for s in slots], [s.flat for s in slots], whole=bucket.buffer)
        yield from [Finished()] * (self.num_stages - 1)

    def _reduce_both_factors(self, bucket: Bucket, comm: Communicator, state: _BucketState) -> Iterator[Work]:
        ops, pending = state.ops, state.pending
        first, second = state.left_buffer, state.right_buffer
        ops.compensate_left(
            state.committed, state.right, after=pending.matrices, out=first.factors, gain=1 / bucket.loss_scale
        )
        first.pack(bucket.flags)
        yield comm.all_reduce(first.flat)
        first.unpack(bucket.flags)
        ops.orthonormalize(first.factors, state.rows, out=pending.left)
        ops.project_right(pending.matrices, pending.left, out=pending.right)  # [Note: own residual]
        second.flat.copy_(pending.right)
        yield comm.all_reduce(second.flat)
        ops.expand(pending.left, second.factors, buffer=bucket.buffer, gain=bucket.loss_scale)
        ops.orthonormalize(second.factors, state.cols, out=state.right_pending, keep=state.right)
        self._record_nonfinite(state, first, [(second, state.cols)])

    def _reduce_alternating(self, bucket: Bucket, comm: Communicator, state: _BucketState) -> Iterator[Work]:
        ops, pending, gain = state.ops, state.pending, 1 / bucket.loss_scale
        if self._sends_left:
            buffer, own, fixed, sizes = state.left_buffer, pending.left, pending.right, state.rows
            ops.compensate_left(state.committed, state.right, after=pending.matrices, out=own, gain=gain)
            fixed.copy_(state.right)
        else:
            buffer, own, fixed, sizes = state.right_buffer, pending.right, pending.left, state.cols
            ops.compensate_right(state.committed, state.left, after=pending.matrices, out=own, gain=gain)
            fixed.copy_(state.left)
        buffer.factors.copy_(own)  # [Note: own residual]: with either factor fixed and orthonormal
        buffer.pack(bucket.flags)
        yield comm.all_reduce(buffer.flat)
        buffer.unpack(bucket.flags)
        if self._sends_left:
            ops.expand(buffer.factors, state.right, buffer=bucket.buffer, gain=bucket.loss_scale)
            ops.orthonormalize(buffer.factors, sizes, out=state.left_pending, keep=state.left)
        else:
            ops.expand(state.left, buffer.factors, buffer=bucket.buffer, gain=bucket.loss_scale)
            ops.orthonormalize(buffer.factors, sizes, out=state.right_pending, keep=state.right)
        self._record_nonfinite(state, buffer, [(buffer, sizes)])

    @property
    def _sends_left(self) -> bool:
        return self._steps % 2 == 0

    def _flush_residuals(self, bucket: Bucket, state: _BucketState) -> None:
        """Add loaded residuals to parameters that were compressed when the state was saved, and no longer are."""
        for slot in state.layout.dense:
            residual = self._unplaced["residuals"].get(slot.name)
            if residual is not None:
                slot.copy_in()
                slot.flat.add_(slot.flattened(residual), alpha=bucket.loss_scale)
                self._flushed.add(slot.name)

    def _record_nonfinite(
        self, state: _BucketState, dense: _AllReduceBuffer, factored: list[tuple[_AllReduceBuffer, list[int]]]
    ) -> None:
        """Record the parameters whose mean has NaN or inf: if a matrix has one, so does its factor."""
        dense.check(self.outcome)
        names = [matrix.slot.name for matrix in state.layout.matrices]
        for buffer, sizes in factored:
            peak = buffer.factors.abs().amax()
            self.outcome.add_peak(float(peak) if peak.is_cpu else peak)
            parts = buffer.factors.split([self.rank * size for size in sizes])
            self.outcome.add_tensors(names, parts, whole=buffer.factors)

    def end_step(self, *, finite: bool) -> None:
        peak = self.outcome.peak
        super().end_step(finite=finite)
        left = self.alternating and self._sends_left
        factored = self._steps >= self.start_step
        bound = self._typical.observe(peak) if finite else None
        lost = []
        for state in self._states.values():
            if state.in_flight and finite and factored and state.layout.matrices:
                # After a spike the old factors are kept: those of the spike would be a bad start for the next step.
                follow = bound is None
                state.commit(left=left and follow, right=not left and follow, feedback=self.feedback)
                lost += [] if bound is None or not self.feedback else state.drop_beyond(bound)
            state.in_flight = False
        warn_dropped(lost)
        if finite:
            for name in self._flushed:
                del self._unplaced["residuals"][name]
        self._flushed.clear()
        self._steps += finite

    def discard(self) -> None:
        super().discard()
        self._flushed.clear()
        for state in self._states.values():
            state.in_flight = False

    def accept(self, shared: dict[str, Any], unsent: Collection[str]) -> list[str]:
        """The factors of the next step are the other rank's: here they may not have been received."""
        if int(shared["steps"]) == self._steps:  # the means were not finite
            self.discard()
            return []
        self.outcome = StepOutcome()  # without a peak: it may not be that of all buckets
        self.end_step(finite=True)
        state = self.state_dict()
        residuals = state["own"]["residuals"]
        lost = [name for name in residuals if name in unsent]
        for name in lost:
            residuals[name].zero_()
        bound = self._typical.follow(float(shared["usual"]))
        if bound is not None:
            warn_dropped([name for name, residual in residuals.items() if drop_beyond(residual, bound)])
        self.load_state_dict({**shared, "own": state["own"]})
        return lost

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        layout = Layout(bucket, self.rank, self.min_compression)
        if not layout.matrices or self._steps < self.start_step:
            return 2 * (world_size - 1) * bucket.num_bytes // world_size
        factors = layout.left_numel + layout.right_numel
        if self.alternating:
            factors //= 2  # over two steps
        numel = factors + layout.dense_numel + bucket.flags.numel()
        return 2 * (world_size - 1) * numel * layout.dtype.itemsize // world_size

    # -- saved state, and state across a new plan -----------------------------------------------------------------

    def _state_of(self, bucket: Bucket) -> _BucketState:
        state = self._states.get(bucket.index)
        if state is not None and state.bucket is bucket:
            return state
        if state is not None or self._knows(bucket):
            self._clear_states()  # the plan has changed
        state = _BucketState(
            bucket, Layout(bucket, self.rank, self.min_compression), self.seed, alternating=self.alternating
        )
        for matrix in state.layout.matrices:
            self._place_state(state, matrix)
        self._states[bucket.index] = state
        return state

    def _knows(self, bucket: Bucket) -> bool:
        names = {slot.name for slot in bucket.slots}
        return any(matrix.slot.name in names for state in self._states.values() for matrix in state.layout.matrices)

    def _place_state(self, state: _BucketState, matrix: Matrix) -> None:
        """Fill in a parameter's part of its bucket's state: loaded values, or seeded random factors."""
        name = matrix.slot.name
        residual = self._unplaced["residuals"].pop(name, None)
        if residual is not None:
            _slice(state.committed.matrices, matrix.flat_offset, matrix.numel).copy_(matrix.slot.flattened(residual))
        sides = [("right", state.right, matrix.right_offset, matrix.cols)]
        if self.alternating:
            sides.append(("left", state.left, matrix.left_offset, matrix.rows))
        for side, factors, start, size in sides:
            place = _slice(factors, start, self.rank * size)
            known = self._unplaced[side].pop(name, None)
            if known is None:
                place.copy_(random_vectors(self.rank, size, self.seed, f"{side} {name}").view(-1))
                state.ops.orthonormalize(place, [size], out=place)
            elif known.shape != (self.rank, size):
                raise ValueError(
                    f"the {side} factor of {name} must have shape {(self.rank, size)}; got {tuple(known.shape)}. Use "
                    "the rank that the state was saved with, or leave its factors out: residuals are good for any rank."
                )
            else:
                place.copy_(known.reshape(-1))

    def _clear_states(self) -> None:
        self._unplaced = self._copy_state()
        self._states.clear()

    def unsent(self) -> dict[str, Tensor]:
        found = dict(self._unplaced["residuals"])
        for state in self._states.values():
            if self.feedback and state.layout.matrices:
                residuals = state.ops.residuals(state.committed)
                for matrix in state.layout.matrices:
                    found[matrix.slot.name] = matrix.slot.shaped(_slice(residuals, matrix.flat_offset, matrix.numel))
        return found

    def _copy_state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the whole state, by kind and parameter name."""
        found = {kind: dict(tensors) for kind, tensors in self._unplaced.items()}
        found["residuals"] = {name: residual.clone() for name, residual in self.unsent().items()}
        for state in self._states.values():
            for matrix in state.layout.matrices:
                slot = matrix.slot
                right = _slice(state.right, matrix.right_offset, self.rank * matrix.cols)
                found["right"][slot.name] = right.view(self.rank, -1).clone()
                if self.alternating:
                    left = _slice(state.left, matrix.left_offset, self.rank * matrix.rows)
                    found["left"][slot.name] = left.view(self.rank, -1).clone()
        return found

    def state_dict(self) -> dict[str, Any]:
        """``own``: this rank's residuals, which are summed if there are fewer ranks later; ``shared``: equal on all."""
        for bucket in self._buckets:
            self._state_of(bucket)  # so that the state has all its keys before the first step
        found = self._copy_state()
        return {
            "steps": self._steps,
            "usual": self._typical.magnitude,
            "own": {"residuals": found["residuals"]},
            "shared": {side: found[side] for side in ("left", "right")},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Each parameter's part is applied when its bucket is reduced for the first time."""
        expected = {"steps", "usual", "own", "shared"}
        if set(state) | {"usual"} != expected:
            raise ValueError(
                f"PowerSGD keeps {sorted(expected)}; got {sorted(state)}. Was it saved by another reducer?"
            )
        residuals, shared = state["own"].get("residuals"), state["shared"]
        if set(state["own"]) != {"residuals"} or not set(shared) <= {"left", "right"}:
            raise ValueError(
                "expected PowerSGD's residuals under 'own', and its left and right factors under 'shared'; "
                f"got {sorted(state['own'])} and {sorted(shared)}. Was it saved by another reducer?"
            )
        self._steps = int(state["steps"])
        self._typical.magnitude = float(state.get("usual", 0.0))
        self._states.clear()
        self._unplaced = {
            "residuals": {name: value.clone() for name, value in residuals.items()},
            "left": {name: value.clone() for name, value in shared.get("left", {}).items()},
            "right": {name: value.clone() for name, value in shared.get("right", {}).items()},
        }


def _slice(flat: Tensor, start: int, numel: int) -> Tensor:
    return flat[start : start + numel]
