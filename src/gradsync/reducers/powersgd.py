"""PowerSGD: of a gradient's matrix two thin factors go over the wire, and what they leave out is sent later.

With Q from the last step: P = M Q, summed over the ranks and made orthonormal; Q = Mᵀ P, summed; and M ≈ P Qᵀ. That is
one round of a power iteration. As gradients change slowly, one round a step follows their large directions.

[Note: own residual] A rank's gradients are its share of the mean, and the ranks' shares are only added up. So is what
is left over: with Q = Σ Qᵣ and Qᵣ = Mᵣᵀ P, rank r keeps Mᵣ - P Qᵣᵀ. It needs nothing from the others for that; summed
over the ranks it is Σ Mᵣ - P Qᵀ: just what the result did not say, whatever the weights are. A rank without data has a
gradient of zeros, and still sends what it owes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.bucket import Bucket, BucketPlan
from gradsync.comm.base import Communicator, Finished, Work
from gradsync.reducers.base import Reducer
from gradsync.reducers.lowrank import Frame, Layout, Maths, Matrix, maths_for, random_vectors
from gradsync.slot import Slot


class _Desk:
    """All that one bucket's matrices need, kept from step to step. Drafts become what is kept once the step counts."""

    def __init__(self, bucket: Bucket, layout: Layout, seed: int, *, alternating: bool) -> None:
        self.bucket = bucket
        self.layout = layout
        self.busy = False  # between reduce() and end_step()
        if not layout.matrices:
            return
        self.maths: Maths = maths_for(layout, seed)
        self.rows = [matrix.rows for matrix in layout.matrices]
        self.cols = [matrix.cols for matrix in layout.matrices]
        self.kept, self.draft = Frame.zeros(layout), Frame.zeros(layout)
        self.right, self.right_draft = self._empty(layout.right_numel), self._empty(layout.right_numel)
        left_numel = layout.left_numel if alternating else 0
        self.left, self.left_draft = self._empty(left_numel), self._empty(left_numel)
        # What is not a matrix travels with the first factors, or with those that alone travel.
        self.left_wire = _Wire(bucket, layout, layout.left_numel, with_dense=True)
        self.right_wire = _Wire(bucket, layout, layout.right_numel, with_dense=alternating)

    def _empty(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.layout.dtype, device=self.layout.device)

    def commit(self, *, left: bool, right: bool, feedback: bool) -> None:
        if feedback:
            self.kept, self.draft = self.draft, self.kept
        if left:
            self.left, self.left_draft = self.left_draft, self.left
        if right:
            self.right, self.right_draft = self.right_draft, self.right


class _Wire:
    """What one all-reduce carries: factors, and if so said the values of what is no matrix, and the flags."""

    def __init__(self, bucket: Bucket, layout: Layout, numel: int, *, with_dense: bool) -> None:
        slots = layout.dense if with_dense else []
        num_flags = bucket.flags.numel() if with_dense else 0
        total = numel + sum(slot.flat.numel() for slot in slots) + num_flags
        self.whole = torch.zeros(total, dtype=layout.dtype, device=layout.device)
        self.factors = self.whole[:numel]
        self._flags = self.whole[total - num_flags :]
        self._dense: list[tuple[Slot, Tensor]] = []
        for slot in slots:
            self._dense.append((slot, self.whole[numel : numel + slot.flat.numel()]))
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

    def spoilt(self) -> list[str]:
        """The names of what came back with NaN or inf, of what is no matrix."""
        return [slot.name for slot, place in self._dense if not _is_finite(place)]


@spec.register("reducer", "powersgd")
class PowerSGD(Reducer):
    """Sends two thin factors of each weight's gradient, with feedback of what they leave out.

    Args:
        rank: columns of a factor. Higher => more bytes and a closer mean; 1 to 8 are usual.
        alternating: one factor a step, by turns: half the bytes and one all-reduce instead of two, but each step sees
            the gradient through a factor that is a step old.
        min_compression: a matrix goes as factors if they are this many times smaller. Higher => more goes whole.
        start_step: before it all is sent whole. Higher => a safer start, and that many slow steps.
        feedback: False forgets what was left out. It saves nothing, and shows what feedback is worth.
        seed: of the first factors, with the parameter's name.

    It holds two more tensors of a compressed parameter's size (float32 for 16-bit gradients): one to go back to if a
    step does not count.

    >>> from gradsync import spec
    >>> reducer = spec.parse("powersgd(rank=2)", "reducer")
    >>> reducer.num_stages, spec.render(reducer)
    (2, 'powersgd(rank=2)')
    """

    reads_fresh_gradients = True

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
        self._desks: dict[int, _Desk] = {}  # by the bucket's index
        self._saved: dict[str, dict[str, Tensor]] = {"residuals": {}, "left": {}, "right": {}}  # not yet on a desk
        self._paid: set[str] = set()  # residuals of whole parameters that are on their way

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs."""
        names = ("rank", "alternating", "min_compression", "start_step", "feedback", "seed")
        return {name: getattr(self, name) for name in names}

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self._clear_desks()

    # -- one bucket -----------------------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        if comm.world_size == 1:  # nobody to send to, so nothing to leave out
            yield from [Finished()] * self.num_stages
            return
        desk = self._desk_of(bucket)
        assert not desk.busy, "end_step() comes after every backward"
        desk.busy = True
        self._pay(bucket, desk)
        if not desk.layout.matrices or self._steps < self.start_step:
            yield from self._reduce_whole(bucket, comm)
        elif self.alternating:
            yield from self._reduce_by_turns(bucket, comm, desk)
        else:
            yield from self._reduce_twice(bucket, comm, desk)

    def _reduce_whole(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        for slot in bucket.slots:
            slot.recall()
        yield comm.all_reduce(bucket.storage)
        if not _is_finite(bucket.buffer):
            self.nonfinite += [slot.name for slot in bucket.slots if not _is_finite(slot.flat)]
        yield from [Finished()] * (self.num_stages - 1)

    def _reduce_twice(self, bucket: Bucket, comm: Communicator, desk: _Desk) -> Iterator[Work]:
        maths, draft = desk.maths, desk.draft
        first, second = desk.left_wire, desk.right_wire
        maths.gather_left(desk.kept, desk.right, after=draft.matrices, out=first.factors, gain=1 / bucket.loss_scale)
        first.pack(bucket.flags)
        yield comm.all_reduce(first.whole)
        first.unpack(bucket.flags)
        maths.orthonormalize(first.factors, desk.rows, out=draft.left)
        maths.project_right(draft.matrices, draft.left, out=draft.right)  # [Note: own residual]
        second.whole.copy_(draft.right)
        yield comm.all_reduce(second.whole)
        maths.expand(draft.left, second.factors, buffer=bucket.buffer, gain=bucket.loss_scale)
        maths.orthonormalize(second.factors, desk.cols, out=desk.right_draft, keep=desk.right)
        self._note(desk, first, [(second, desk.cols)])

    def _reduce_by_turns(self, bucket: Bucket, comm: Communicator, desk: _Desk) -> Iterator[Work]:
        maths, draft, gain = desk.maths, desk.draft, 1 / bucket.loss_scale
        if self._turns_left:
            wire, own, fixed, sizes = desk.left_wire, draft.left, draft.right, desk.rows
            maths.gather_left(desk.kept, desk.right, after=draft.matrices, out=own, gain=gain)
            fixed.copy_(desk.right)
        else:
            wire, own, fixed, sizes = desk.right_wire, draft.right, draft.left, desk.cols
            maths.gather_right(desk.kept, desk.left, after=draft.matrices, out=own, gain=gain)
            fixed.copy_(desk.left)
        wire.factors.copy_(own)  # [Note: own residual]: with either factor fixed and orthonormal
        wire.pack(bucket.flags)
        yield comm.all_reduce(wire.whole)
        wire.unpack(bucket.flags)
        if self._turns_left:
            maths.expand(wire.factors, desk.right, buffer=bucket.buffer, gain=bucket.loss_scale)
            maths.orthonormalize(wire.factors, sizes, out=desk.left_draft, keep=desk.left)
        else:
            maths.expand(desk.left, wire.factors, buffer=bucket.buffer, gain=bucket.loss_scale)
            maths.orthonormalize(wire.factors, sizes, out=desk.right_draft, keep=desk.right)
        self._note(desk, wire, [(wire, sizes)])

    @property
    def _turns_left(self) -> bool:
        return self._steps % 2 == 0

    def _pay(self, bucket: Bucket, desk: _Desk) -> None:
        """Send what is owed of parameters that went as factors when the state was saved, and now go whole."""
        for slot in desk.layout.dense:
            owed = self._saved["residuals"].get(slot.name)
            if owed is not None:
                slot.recall()
                slot.flat.add_(slot.flattened(owed), alpha=bucket.loss_scale)
                self._paid.add(slot.name)

    def _note(self, desk: _Desk, whole: _Wire, factored: list[tuple[_Wire, list[int]]]) -> None:
        """Remember the names of what came out with NaN or inf: a factor has it wherever the matrix has."""
        if not _is_finite(whole.whole):
            self.nonfinite += whole.spoilt()
        for wire, sizes in factored:
            if _is_finite(wire.factors):
                continue
            parts = wire.factors.split([self.rank * size for size in sizes])
            self.nonfinite += [
                matrix.slot.name
                for matrix, part in zip(desk.layout.matrices, parts, strict=True)
                if not _is_finite(part)
            ]

    def end_step(self, *, finite: bool) -> None:
        super().end_step(finite=finite)
        left = self.alternating and self._turns_left
        factored = self._steps >= self.start_step
        for desk in self._desks.values():
            if desk.busy and finite and factored and desk.layout.matrices:
                desk.commit(left=left, right=not left, feedback=self.feedback)
            desk.busy = False
        if finite:
            for name in self._paid:
                del self._saved["residuals"][name]
        self._paid.clear()
        self._steps += finite

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        layout = Layout(bucket, self.rank, self.min_compression)
        if not layout.matrices or self._steps < self.start_step:
            return 2 * (world_size - 1) * bucket.num_bytes // world_size
        factors = layout.left_numel + layout.right_numel
        if self.alternating:
            factors //= 2  # over two steps
        numel = factors + layout.dense_numel + bucket.flags.numel()
        return 2 * (world_size - 1) * numel * layout.dtype.itemsize // world_size

    # -- what must survive a new plan, and a restart --------------------------------------------------------------

    def _desk_of(self, bucket: Bucket) -> _Desk:
        desk = self._desks.get(bucket.index)
        if desk is not None and desk.bucket is bucket:
            return desk
        if desk is not None or self._known(bucket):
            self._clear_desks()  # the plan has changed
        desk = _Desk(bucket, Layout(bucket, self.rank, self.min_compression), self.seed, alternating=self.alternating)
        for matrix in desk.layout.matrices:
            self._set_up(desk, matrix)
        self._desks[bucket.index] = desk
        return desk

    def _known(self, bucket: Bucket) -> bool:
        names = {slot.name for slot in bucket.slots}
        return any(matrix.slot.name in names for desk in self._desks.values() for matrix in desk.layout.matrices)

    def _set_up(self, desk: _Desk, matrix: Matrix) -> None:
        """Put a parameter's state on its bucket's desk: what was saved of it, or seeded factors."""
        name = matrix.slot.name
        owed = self._saved["residuals"].pop(name, None)
        if owed is not None:
            _part(desk.kept.matrices, matrix.start, matrix.numel).copy_(matrix.slot.flattened(owed))
        sides = [("right", desk.right, matrix.rights, matrix.cols)]
        if self.alternating:
            sides.append(("left", desk.left, matrix.lefts, matrix.rows))
        for side, factors, start, size in sides:
            place = _part(factors, start, self.rank * size)
            known = self._saved[side].pop(name, None)
            if known is None:
                place.copy_(random_vectors(self.rank, size, self.seed, f"{side} {name}").view(-1))
                desk.maths.orthonormalize(place, [size], out=place)
            elif known.shape != (self.rank, size):
                raise ValueError(
                    f"the {side} factor of {name} must have shape {(self.rank, size)}; got {tuple(known.shape)}. Use "
                    "the rank that the state was saved with, or leave its factors out: residuals are good for any rank."
                )
            else:
                place.copy_(known.reshape(-1))

    def _clear_desks(self) -> None:
        self._saved = self._collect()
        self._desks.clear()

    def unsent(self) -> dict[str, Tensor]:
        found = dict(self._saved["residuals"])
        for desk in self._desks.values():
            if self.feedback and desk.layout.matrices:
                residuals = desk.maths.residuals(desk.kept)
                for matrix in desk.layout.matrices:
                    found[matrix.slot.name] = matrix.slot.shaped(_part(residuals, matrix.start, matrix.numel))
        return found

    def _collect(self) -> dict[str, dict[str, Tensor]]:
        """Copies of all there is, by kind and parameter name."""
        found = {kind: dict(tensors) for kind, tensors in self._saved.items()}
        found["residuals"] = {name: owed.clone() for name, owed in self.unsent().items()}
        for desk in self._desks.values():
            for matrix in desk.layout.matrices:
                slot = matrix.slot
                right = _part(desk.right, matrix.rights, self.rank * matrix.cols)
                found["right"][slot.name] = right.view(self.rank, -1).clone()
                if self.alternating:
                    left = _part(desk.left, matrix.lefts, self.rank * matrix.rows)
                    found["left"][slot.name] = left.view(self.rank, -1).clone()
        return found

    def state_dict(self) -> dict[str, Any]:
        """``own``: what this rank owes, to be added up with the others' if there are to be fewer; ``shared``: alike."""
        found = self._collect()
        return {
            "steps": self._steps,
            "own": {"residuals": found["residuals"]},
            "shared": {side: found[side] for side in ("left", "right")},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back; parameters that have not been met yet find it when they are."""
        expected = {"steps", "own", "shared"}
        if set(state) != expected:
            raise ValueError(
                f"PowerSGD keeps {sorted(expected)}; got {sorted(state)}. Was it saved by another reducer?"
            )
        residuals, shared = state["own"].get("residuals"), state["shared"]
        if set(state["own"]) != {"residuals"} or not set(shared) <= {"left", "right"}:
            raise ValueError(
                "PowerSGD's own state are its residuals, and what is shared are left and right factors; "
                f"got {sorted(state['own'])} and {sorted(shared)}. Was it saved by another reducer?"
            )
        self._steps = int(state["steps"])
        self._desks.clear()
        self._saved = {
            "residuals": {name: value.clone() for name, value in residuals.items()},
            "left": {name: value.clone() for name, value in shared.get("left", {}).items()},
            "right": {name: value.clone() for name, value in shared.get("right", {}).items()},
        }


def _part(flat: Tensor, start: int, numel: int) -> Tensor:
    return flat[start : start + numel]


def _is_finite(values: Tensor) -> bool:
    return bool((values * 0).sum() == 0)  # of NaN and inf this is NaN; a third of what isfinite() takes
