"""PowerSGD on a plan of its own, step by step, for tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.bucket import BucketPlan, plan_buckets
from gradsync.comm import Communicator
from gradsync.reducers import Driver
from gradsync.reducers.powersgd import PowerSGD

# Two equal shapes, one that is a matrix only by its memory, some that go whole.
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


class Run:
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
        lend: bool = False,
        loss_scale: float = 1.0,
        finite: bool | None = None,
    ) -> dict[str, Tensor]:
        """Reduce; returns the means of the parameters that any rank had a gradient for."""
        for name, param in self.params.items():
            param.grad = torch.empty_like(param).copy_(grads[name]) if name in grads else None
        driver = Driver(self.reducer, self.comm, len(self.plan.buckets))
        for bucket in self.plan.buckets:
            bucket.open()
            bucket.loss_scale = loss_scale
            if lend:
                lent = [slot.lend() for slot in bucket.slots if slot.param.grad is not None]
                assert any(lent)
            bucket.seal(1.0 / self.comm.world_size if factor is None else factor)
            driver.add(bucket)
        driver.drain()
        for bucket in self.plan.buckets:
            bucket.unseal()
        self.spoilt = list(self.reducer.nonfinite)
        self.reducer.end_step(finite=not self.spoilt if finite is None else finite)
        return {name: param.grad.clone() for name, param in self.params.items() if param.grad is not None}

    def residuals(self) -> dict[str, Tensor]:
        residuals: dict[str, Tensor] = self.reducer.state_dict()["own"]["residuals"]
        return residuals
