"""Keeping the bucket plan right: laid out by the order in which gradients become ready, and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from gradsync.bucket import BucketPlan, plan_buckets
from gradsync.comm.base import Communicator
from gradsync.slot import AnySlot, Slot


class Planner:
    """Owns the plan and its slots, and makes a new one when parameters are frozen or the real order is known."""

    def __init__(
        self,
        params: Mapping[str, Parameter],
        comm: Communicator,
        *,
        sparse: Sequence[str],
        bucket_bytes: int,
        first_bucket_bytes: int,
    ) -> None:
        self._params = params
        self._comm = comm
        self._sparse = set(sparse)
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._trainable = self._trainable_now()
        self.ready_order: list[str] | None = []  # as gradients come, in the first round; None once the plan follows it
        self.slots: dict[str, AnySlot] = {}
        self._seen: list[Any] = []  # what the plan was made for: see `_looks`
        # Autograd runs about backwards through the model: until it has shown the real order, this is the best guess.
        self.install(self._layout([name for name, on in reversed(self._trainable.items()) if on]))

    def install(self, layout: Sequence[Sequence[str]]) -> None:
        """Make buckets of this layout, and move into them what the old ones hold."""
        sparse = [name for name, on in self._trainable.items() if on and name in self._sparse]
        old = self.slots
        before = getattr(self, "plan", None)
        self.plan = BucketPlan(layout, sparse, self._params, self._comm)
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
        """Let go of the buckets."""
        self.slots = {}
        self.plan.dissolve()

    def follow_model(self, *, mid_window: bool) -> bool:
        """Plan anew if the user has moved, frozen or unfrozen parameters since the last step. (Most often: nothing.)

        Within a window a frozen parameter stays: what it has gathered is still to be averaged.
        """
        if self._looks() == self._seen:
            return False
        moved = self._follow_conversions()
        changed = self._follow_frozen(mid_window=mid_window) or moved
        self._seen = [] if mid_window else self._looks()
        return changed

    def _looks(self) -> list[Any]:
        """All of the model that a plan depends on."""
        params = [(param.requires_grad, param.dtype, param.device) for param in self._params.values()]
        return [*params, *[slot.view.data_ptr() for bucket in self.plan.buckets for slot in bucket.slots]]

    def _follow_conversions(self) -> bool:
        """Plan anew when ``model.to(memory_format=...)`` has moved gradients out of their buckets."""
        if not any(slot.is_displaced() for slot in self.slots.values() if isinstance(slot, Slot)):
            return False
        self.install(self.plan.layout)
        return True

    def _follow_frozen(self, *, mid_window: bool) -> bool:
        """Plan anew when parameters were frozen or unfrozen. (The header finds ranks that disagree.)"""
        now = {name: on or (mid_window and self._trainable[name]) for name, on in self._trainable_now().items()}
        if now == self._trainable:
            return False
        self._trainable = now
        known = [name for names in self.plan.layout for name in names if now[name]]
        fresh = [name for name, on in reversed(now.items()) if on and name not in known]
        self.install(self._layout([*fresh, *known]))
        return True

    def follow_size(self, bucket_bytes: int | None) -> bool:
        """Plan anew, in the same order, when buckets shall be of another size."""
        if bucket_bytes is None or bucket_bytes == self._bucket_bytes:
            return False
        self._bucket_bytes = bucket_bytes
        layout = self._layout([name for names in self.plan.layout for name in names])
        if layout == self.plan.layout:
            return False
        self.install(layout)
        return True

    def follow_ready_order(self, leader: int) -> bool:
        """After the first round: lay the buckets out in the order in which the leader's gradients became ready."""
        if self.ready_order is None:
            return False
        names = [name for names in self.plan.layout for name in names]
        number = {name: at for at, name in enumerate(names)}
        seen = dict.fromkeys(name for name in self.ready_order if name in number)
        order = [*seen, *(name for name in names if name not in seen)]  # what nobody used comes last
        wire = torch.tensor([number[name] for name in order], dtype=torch.int64)
        self._comm.broadcast(wire, leader).wait()
        self.ready_order = None
        layout = self._layout([names[at] for at in wire.tolist()])
        if layout == self.plan.layout:
            return False
        self.install(layout)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The plan, which sums depend on: the order of values in a bucket is the order in which they are added."""
        return {"layout": [list(names) for names in self.plan.layout], "planned": self.ready_order is None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Lay the buckets out as they were saved."""
        expected = {name for names in self.plan.layout for name in names}
        got = {name for names in state["layout"] for name in names}
        if expected != got:
            odd = sorted(expected ^ got)[0]
            where = "the saved state" if odd in got else "this model's trainable parameters"
            raise ValueError(f"the state is of another model: {odd!r} is only in {where}. Load it into the same model.")
        for slot in self.slots.values():
            slot.forget()  # what was gathered here before belongs to another past
        self.ready_order = None if state["planned"] else []
        self.install(state["layout"])

    def _trainable_now(self) -> dict[str, bool]:
        return {name: param.requires_grad for name, param in self._params.items()}

    def _layout(self, ready_order: Sequence[str]) -> list[list[str]]:
        params = [(name, self._params[name]) for name in ready_order if name not in self._sparse]
        return plan_buckets(params, cap_bytes=self._bucket_bytes, first_cap_bytes=self._first_bucket_bytes)
