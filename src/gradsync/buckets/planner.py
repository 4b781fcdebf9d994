"""The planner: lays buckets out in the order in which gradients become ready, the same on every rank.

It makes a new plan when parameters are frozen or moved, when the real order is known after the first step, and when
the strategy wants other buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.buckets.bucket import Allocator, BucketPlan, fingerprint_of, plan_buckets
from gradsync.buckets.slot import AnySlot, Slot
from gradsync.comm.base import Communicator

SLICE_ALIGN = 64  # values: no two ranks write to one cache line
Layout = list[list[str]]
# Raises, on all ranks, unless all of them are about to make the plan with this fingerprint.
Agreement = Callable[[int], None]


class Planner:
    """Owns the current plan and its slots. ``sliced``: every bucket can be cut into equal slices, one for each rank.

    ``plan``: the state of another rank's planner, to begin with its layout.
    """

    def __init__(
        self,
        params: Mapping[str, Parameter],
        comm: Communicator,
        *,
        sparse: Sequence[str],
        bucket_bytes: int,
        first_bucket_bytes: int,
        bucketed: bool,
        sliced: bool = False,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        self._params = params
        self._comm = comm
        self._sliced = sliced
        self._multiple_of = comm.world_size * SLICE_ALIGN if sliced else 1
        self._sparse = set(sparse)
        self.bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._trainable = self._trainable_now()
        self.ready_order: list[str] | None = []  # as gradients come, in the first round; None once the plan follows it
        self.slots: dict[str, AnySlot] = {}
        self._seen: list[Any] = []  # the model that the plan was made for: see `_model_layout`
        # Autograd runs about backwards through the model: until it has shown the real order, this is the best guess.
        guess = [name for name, on in reversed(self._trainable.items()) if on]
        if plan is not None:
            self._check_layout(plan["layout"])
            self.bucket_bytes = plan["bucket_bytes"]
            self.ready_order = None if plan["planned"] else []
            self._install(plan["layout"])
        else:
            self._install(self._layout(guess) if bucketed else None)

    def _install(self, layout: Layout | None, allocator: Allocator | None = None) -> None:
        """Make buckets of this layout, and move into them what the old slots hold. Blocks: all ranks call it.

        None: make none, for gradients that stay with their rank. ``allocator``: the communicator, unless given.
        """
        old = self.slots
        before = getattr(self, "plan", None)
        self.bucketed = layout is not None
        self._strides = self._strides_now()
        loose = [name for name, on in self._trainable.items() if on and name not in self._sparse and layout is None]
        self.plan = BucketPlan(
            layout or [],
            self._trainable_sparse(),
            self._params,
            allocator or self._comm,
            loose=loose,
            multiple_of=self._multiple_of,
        )
        self.plan.is_provisional = self.ready_order is not None
        self.slots = {slot.name: slot for slot in self.plan.slots()}
        for name, slot in self.slots.items():
            if name in old:
                slot.inherit(old[name])
            if isinstance(slot, Slot):
                slot.collect()
        if before is not None:
            before.dissolve()
        self._seen = []

    def drop(self) -> None:
        """Release the buckets."""
        self.slots = {}
        self.plan.dissolve()

    def follow(self, *, mid_window: bool, bucketed: bool, bucket_bytes: int | None, agree: Agreement) -> bool:
        """Plan anew if what the plan depends on has changed since the last step. (Most often: nothing.)

        That is the model (moved, frozen and unfrozen parameters), whether gradients go in buckets at all, and the
        wanted bucket size. Within a window nothing changes, not even for a frozen parameter: what was
        accumulated is still to be averaged.

        [Note: agree, then allocate] Making buckets may be a collective, and only the ranks that have noticed a change
        make them. So the new plan's fingerprint is exchanged first, in place of the header that the other ranks then
        send: all ranks find the difference there, instead of waiting for each other.
        """
        wanted_bytes = bucket_bytes or self.bucket_bytes
        if self._model_layout() == self._seen and bucketed == self.bucketed and wanted_bytes == self.bucket_bytes:
            return False
        displaced = any(slot.is_displaced() for slot in self.slots.values() if isinstance(slot, Slot))
        trainable = self._trainable_now()
        if mid_window:
            bucketed, wanted_bytes = self.bucketed, self.bucket_bytes
            trainable = {name: on or self._trainable[name] for name, on in trainable.items()}
        refreshed = displaced and self._strides_now() == self._strides
        if refreshed:
            # The model was moved away and back, perhaps on one rank alone, to save a copy: the buckets are unchanged,
            # so new views are made in the same memory, without the other ranks.
            self._install(self.plan.layout, _SameMemory(self.plan))
            displaced = False
        changed = displaced or bucketed != self.bucketed
        changed |= (trainable, wanted_bytes) != (self._trainable, self.bucket_bytes)
        if changed:
            changed = self._plan_anew(trainable, wanted_bytes, bucketed=bucketed, displaced=displaced, agree=agree)
        self._seen = [] if mid_window else self._model_layout()
        return changed or refreshed

    def _plan_anew(
        self, trainable: dict[str, bool], bucket_bytes: int, *, bucketed: bool, displaced: bool, agree: Agreement
    ) -> bool:
        known = [name for names in self.plan.layout for name in names if trainable[name]]
        fresh = [name for name, on in reversed(trainable.items()) if on and name not in known]
        before = (self._trainable, self.bucketed, self.plan.layout)
        as_it_is = (trainable, bucket_bytes, True) == (self._trainable, self.bucket_bytes, self.bucketed)
        self._trainable, self.bucket_bytes = trainable, bucket_bytes
        layout = None if not bucketed else self.plan.layout if as_it_is else self._layout([*fresh, *known])
        if not displaced and before == (trainable, bucketed, layout):
            return False  # other sizes, the same buckets
        if layout is not None:
            agree(fingerprint_of(layout, self._trainable_sparse()))
        self._install(layout)
        return True

    def _trainable_sparse(self) -> list[str]:
        return [name for name, on in self._trainable.items() if on and name in self._sparse]

    def describe(self) -> dict[str, str]:
        """Everything that a plan depends on, one line each, to find where two ranks differ."""
        lines = {}
        for name, param in self._params.items():
            state = "trained" if self._trainable[name] else "frozen"
            lines[f"parameter {name}"] = f"{state}, {param.dtype}, strides {param.stride()}"
        return lines | {"bucket layout": str(self.plan.layout), "bucket_bytes": str(self.bucket_bytes)}

    def _model_layout(self) -> list[Any]:
        """Everything of the model that a plan depends on."""
        params = [(param.requires_grad, param.dtype, param.device) for param in self._params.values()]
        return [*params, *[slot.view.data_ptr() for bucket in self.plan.buckets for slot in bucket.slots]]

    def follow_ready_order(self, leader: int) -> bool:
        """After the first round: lay the buckets out in the order in which the leader's gradients became ready."""
        if self.ready_order is None:
            return False
        names = [name for names in self.plan.layout for name in names]
        number = {name: at for at, name in enumerate(names)}
        seen = dict.fromkeys(name for name in self.ready_order if name in number)
        order = [*seen, *(name for name in names if name not in seen)]  # unused parameters come last
        wire = torch.tensor([number[name] for name in order], dtype=torch.int64)
        self._comm.broadcast(wire, leader).wait()
        self.ready_order = None
        layout = self._layout([names[at] for at in wire.tolist()])
        if layout == self.plan.layout:
            self.plan.is_provisional = False
            return self._multiple_of > 1  # a strategy of slices must be told that the plan is final
        self._install(layout)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The plan, which sums depend on: the order of values in a bucket is the order in which they are added."""
        layout = [list(names) for names in self.plan.layout] if self.bucketed else None
        return {"layout": layout, "planned": self.ready_order is None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lay the buckets out as they were saved; gradients that were in none then are in none now."""
        layout = state["layout"]
        self._check_layout(layout)
        for slot in self.slots.values():
            slot.forget()  # gradients that were accumulated before the load are dropped
        self.ready_order = None if state["planned"] else []
        self._install(layout)

    def _check_layout(self, layout: Layout | None) -> None:
        if layout is None:
            return
        expected = {name for name, on in self._trainable.items() if on and name not in self._sparse}
        got = {name for names in layout for name in names}
        if expected != got:
            odd = sorted(expected ^ got)[0]
            where = "the saved state" if odd in got else "this model's trainable parameters"
            raise ValueError(f"the state is of another model: {odd!r} is only in {where}. Load it into the same model.")

    def move_to(self, comm: Communicator, plan: Mapping[str, Any] | None) -> None:
        """Make the buckets anew on another communicator; ``plan``: another rank's, whose layout they take over.

        Blocks: all ranks call it. What the slots hold is dropped.
        """
        self._comm = comm
        self._multiple_of = comm.world_size * SLICE_ALIGN if self._sliced else 1
        if plan is not None:
            self.bucket_bytes = plan["bucket_bytes"]
        self.load_state_dict(self.state_dict() if plan is None else plan)

    def _strides_now(self) -> list[tuple[int, ...]]:
        return [param.stride() for param in self._params.values()]

    def _trainable_now(self) -> dict[str, bool]:
        return {name: param.requires_grad for name, param in self._params.items()}

    def _layout(self, ready_order: Sequence[str]) -> Layout:
        params = [(name, self._params[name]) for name in ready_order if name not in self._sparse]
        return plan_buckets(params, cap_bytes=self.bucket_bytes, first_cap_bytes=self._first_bucket_bytes)


class _SameMemory:
    """Gives the buckets of a plan the memory that those of the last one had."""

    def __init__(self, plan: BucketPlan) -> None:
        self._storages = iter([bucket.storage for bucket in plan.buckets])

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        storage = next(self._storages)
        assert (storage.numel(), storage.dtype, storage.device) == (numel, dtype, device), "the layout is the same"
        return storage
