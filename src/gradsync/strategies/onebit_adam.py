"""1-bit Adam: exact at first; then the variance stands still, and momentum travels in one bit a value.

Adam divides by the root of a running mean of squared gradients. Squares of compressed gradients say little, so Adam and
compression go badly together. Momentum does not care: so once the variance has settled it is frozen, and what the ranks
send is each one's momentum, with feedback of what the bits left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.bucket import Bucket, BucketPlan
from gradsync.codecs.base import COMPILED_DTYPES
from gradsync.comm.base import Communicator
from gradsync.header import Header
from gradsync.reducers.allreduce import Plain
from gradsync.reducers.compressed import Compressed
from gradsync.reducers.rules import CodecRule
from gradsync.slot import Slot
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.base import Verdict
from gradsync.training import Training

REFUSED = ("amsgrad", "maximize", "differentiable")


@spec.register("strategy", "onebit_adam")
class OneBitAdam(AllReduce):
    """Dense warm-up, then frozen variance and compressed momentum, with the user's own ``Adam`` or ``AdamW``.

    From the end of the warm-up on, ``.grad`` after a backward is the mean *momentum*, and ``optimizer.step()`` applies
    it: the learning rate, its schedule, betas, eps and decoupled weight decay stay the optimizer's, and so does its
    state. (Clipping then clips the momentum.)

    Args:
        warmup_steps: exact ones before the variance is frozen. Its authors take 15 to 25 % of the run.
        codec: what momentum is compressed by.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> sync = gradsync.synchronize(model, optimizer, "onebit_adam(warmup_steps=200)")
    >>> sync.close()
    """

    steps_itself = True

    def __init__(self, *, warmup_steps: int = 100, codec: CodecRule = "sign") -> None:
        super().__init__()
        if warmup_steps < 1:
            raise ValueError(f"without a warm-up there is no variance to freeze; got {warmup_steps=}. Try 100.")
        self.warmup_steps = warmup_steps
        self._plain, self._compressed = Plain(), Compressed(codec)
        self._settled: dict[str, float] = {}  # by parameter name: how many steps its variance has seen
        self._frozen = False  # whether the last backward's means are momentum
        self.bucket_bytes = self._compressed.bucket_bytes

    def spec_arguments(self) -> dict[str, Any]:
        return {"warmup_steps": self.warmup_steps, "codec": self._compressed.rules.written()}

    def meet(self, training: Training) -> None:
        optimizer = training.optimizer
        if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            raise ValueError(f"onebit_adam goes with Adam or AdamW; got {type(optimizer).__name__}.")
        for group in optimizer.param_groups:
            odd = [name for name in REFUSED if group.get(name)]
            if odd:
                raise ValueError(f"onebit_adam can't do {odd[0]}=True.")
            if group["weight_decay"] and not group.get("decoupled_weight_decay"):
                raise ValueError("onebit_adam needs weight decay apart from the gradient. Use AdamW.")
        self._optimizer = optimizer

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        for reducer in (self._plain, self._compressed):
            reducer.attach(plan, comm)
        self._group_of = {param: group for group in self._optimizer.param_groups for param in group["params"]}

    def open(self, header: Header) -> None:
        self._frozen = header.step >= self.warmup_steps
        self.reducer = self._compressed if self._frozen else self._plain
        self.reads_fresh_gradients = self.reads_small_gradients = self._frozen  # momentum is made of them on their way
        super().open(header)

    def on_bucket_ready(self, bucket: Bucket) -> None:
        if self._frozen:
            for slot in bucket.slots:
                state = self._optimizer.state.get(slot.param)
                if state:
                    self._make_momentum(slot, state["exp_avg"], self._group_of[slot.param]["betas"][0])
        super().on_bucket_ready(bucket)

    def _make_momentum(self, slot: Slot, average: Tensor, beta: float) -> None:
        """Have this rank's share of the momentum in the bucket: the old mean's, and of its own gradient."""
        alpha = beta * slot.bucket.factor * slot.bucket.loss_scale
        if _is_compiled_for(slot.view, average):
            from gradsync.strategies.onebit_kernels import blend  # Numba takes a second to import

            blend(slot.flat, slot.source, average, gain=slot.source_gain, keep=1 - beta, alpha=alpha)
            slot.release()
        else:
            slot.recall()
            slot.view.mul_(1 - beta).add_(average, alpha=alpha)

    def before_step(self, step: int) -> Verdict:
        if not self._frozen:
            return Verdict.APPLY
        with torch.no_grad():
            for name, slot in self._compressed.slots.items():
                if slot.param.grad is not None:
                    self._step(name, slot.param, slot.param.grad)
        return Verdict.DONE_ELSEWHERE

    def _step(self, name: str, param: Tensor, momentum: Tensor) -> None:
        group, state = self._group_of[param], self._optimizer.state[param]
        if not state:
            raise ValueError(
                f"parameter {name} got its first gradient after the warm-up of {self.warmup_steps} steps, so there is "
                "no variance to divide by. Make warmup_steps longer."
            )
        beta1, beta2 = group["betas"]
        settled = self._settled.setdefault(name, float(state["step"]))  # steps that its variance has seen
        average, variance = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        rate, eps, correction = float(group["lr"]), group["eps"], 1 - beta2**settled
        decay = 1 - rate * group["weight_decay"]
        rate = -rate / (1 - beta1 ** float(state["step"]))
        if _is_compiled_for(param, momentum, average, variance):
            from gradsync.strategies.onebit_kernels import step

            step(param, momentum, average, variance, correction=correction, eps=eps, decay=decay, rate=rate)
            torch.autograd.graph.increment_version((param, average))
        else:
            average.copy_(momentum)
            param.mul_(decay).addcdiv_(average, (variance / correction).sqrt_().add_(eps), value=rate)

    def state_dict(self) -> dict[str, Any]:
        return {"reducer": self._compressed.state_dict(), "settled": dict(self._settled)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._compressed.load_state_dict(state["reducer"])
        self._settled = dict(state["settled"])

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        own = self._compressed.redistribute([state["reducer"] for state in states], rank, world_size)
        return {"reducer": own, "settled": states[0]["settled"]}


def _is_compiled_for(*tensors: Tensor) -> bool:
    """Whether kernels can take these: values that lie in one order, and in the dtype that kernels are compiled for."""
    return all(tensor.is_cpu and tensor.dtype in COMPILED_DTYPES and tensor.is_contiguous() for tensor in tensors)
