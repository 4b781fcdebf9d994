"""A harness that drives a PowerSGD reducer step by step, for tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.buckets.bucket import BucketPlan, plan_buckets
from gradsync.comm import Communicator
from gradsync.reducers import Driver
from gradsync.reducers.powersgd.reducer import PowerSGD

# Two equal shapes, a channels-last convolution, some that are sent uncompressed.
SHAPES: dict[str, tuple[int, ...]] = {
    "a": (24, 30),
    "bias": (30,),
    "b": (24, 30),
    "conv": (20, 8, 3, 3),
    "few": (5, 4),
    "none": (0,),
    "one": (),
    "tall": (70, 17),
}


class ReducerHarness:
    """One rank's parameters, buckets and reducer, driven as a strategy drives them."""

    def __init__(
        self,
        comm: Communicator,
        reducer: PowerSGD,
        *,
        dtype: torch.dtype = torch.float32,
        cap_bytes: int = 9000,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
    ) -> None:
        self.comm, self.reducer = comm, reducer
        self.params = {name: Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}
        if "conv" in self.params:
            conv = torch.zeros(SHAPES["conv"], dtype=dtype).to(memory_format=torch.channels_last)
            self.params["conv"] = Parameter(conv)
        self.rebuild(cap_bytes)

    def rebuild(self, cap_bytes: int) -> None:
        self.plan = BucketPlan(plan_buckets(list(self.params.items()), cap_bytes=cap_bytes), [], self.params, self.comm)
        self.reducer.attach(self.plan, self.comm)

    def step(
        self,
        grads: dict[str, Tensor],
        *,
        factor: float | None = None,
        in_place: bool = False,
        loss_scale: float = 1.0,
        finite: bool | None = None,
    ) -> dict[str, Tensor]:
        """Reduce; returns the means of the parameters that any rank has a gradient for.

        ``in_place``: the reducer reads gradients where autograd put them.
        """
        for name, param in self.params.items():
            param.grad = torch.empty_like(param).copy_(grads[name]) if name in grads else None
        driver = Driver(self.reducer, self.comm, len(self.plan.buckets))
        for bucket in self.plan.buckets:
            bucket.begin_step()
            bucket.loss_scale = loss_scale
            for slot in bucket.slots:
                slot.in_place = (0, slot.flat.numel()) if in_place else None
            if in_place:
                read = [slot.read_in_place() for slot in bucket.slots if slot.param.grad is not None]
                assert any(read)
            bucket.finalize(1.0 / self.comm.world_size if factor is None else factor)
            driver.add(bucket)
        driver.drain()
        for bucket in self.plan.buckets:
            bucket.publish()
        self.nonfinite = list(self.reducer.nonfinite)
        self.reducer.end_step(finite=not self.nonfinite if finite is None else finite)
        return {name: param.grad.clone() for name, param in self.params.items() if param.grad is not None}

    def residuals(self) -> dict[str, Tensor]:
        residuals: dict[str, Tensor] = self.reducer.state_dict()["own"]["residuals"]
        return residuals
