"""1-bit Adam: exact at first; then the variance is frozen, and the ranks send momentum with one bit per value.

Adam divides by the root of a running mean of squared gradients. The squares of compressed gradients are a poor estimate
of it, so Adam and compression go badly together. Momentum is not squared, and can be compressed. So once the variance
has settled it is frozen, and the ranks send their momentum instead of gradients, with error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.buckets.bucket import Bucket, BucketPlan
from gradsync.buckets.slot import Slot
from gradsync.codecs.base import COMPILED_DTYPES
from gradsync.comm.base import Communicator
from gradsync.reducers.base import Reducer
from gradsync.reducers.codec_rules import CodecRule
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.replicas.header import Header
from gradsync.replicas.training import Training
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.base import OwnStep, Placement, Verdict
from gradsync.strategies.gradient_sync import GradientSync, ReducerSync

UNSUPPORTED = ("amsgrad", "maximize", "differentiable")


@spec.register("strategy", "onebit_adam")
class OneBitAdam(AllReduce):
    """Dense warm-up, then frozen variance and compressed momentum, with the user's own ``Adam`` or ``AdamW``.

    From the end of the warm-up on, ``.grad`` after a backward is the mean *momentum*, and ``optimizer.step()`` applies
    it: the learning rate, its schedule, betas, eps and decoupled weight decay stay the optimizer's, and so does its
    state. (Clipping then clips the momentum.)

    Args:
        warmup_steps: exact steps before the variance is frozen. The paper's authors take 15 to 25 % of the run.
        codec: compresses the momentum.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> sync = gradsync.synchronize(model, optimizer, "onebit_adam(warmup_steps=200)")
    >>> sync.close()
    """

    def __init__(self, *, warmup_steps: int = 100, codec: CodecRule = "sign") -> None:
        super().__init__()
        if warmup_steps < 1:
            raise ValueError(f"without a warm-up there is no variance to freeze; got {warmup_steps=}. Try 100.")
        self.warmup_steps = warmup_steps
        self._compressed = Compressed(codec)
        self.sync = _PhaseSync(self.reducer, self, frozen=False)
        self._momentum_sync = _PhaseSync(self._compressed, self, frozen=True)
        self._variance_steps: dict[str, float] = {}  # by parameter name: the steps that its frozen variance is made of
        self._frozen = False  # whether the last backward's means are momentum
        self.bucket_bytes = self._compressed.bucket_bytes

    def spec_arguments(self) -> dict[str, Any]:
        return {"warmup_steps": self.warmup_steps, "codec": self._compressed.rules.as_argument()}

    def setup(self, training: Training) -> None:
        training.check_all_optimized(spec.render(self))
        optimizer = training.optimizer
        if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
            raise ValueError(f"onebit_adam requires Adam or AdamW; got {type(optimizer).__name__}.")
        for group in optimizer.param_groups:
            odd = [name for name in UNSUPPORTED if group.get(name)]
            if odd:
                raise ValueError(f"onebit_adam can't do {odd[0]}=True.")
            if group["weight_decay"] and not group.get("decoupled_weight_decay"):
                raise ValueError("onebit_adam needs weight decay apart from the gradient. Use AdamW.")
        self._optimizer = optimizer

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self._momentum_sync.attach(plan, comm, self.recorder)
        self._current_sync().reducer.place_gradients(plan, comm)  # both were attached: the last would win
        self._group_of = {param: group for group in self._optimizer.param_groups for param in group["params"]}

    def gradient_sync(self, step: int) -> GradientSync:
        return self._momentum_sync if step >= self.warmup_steps else self.sync

    def enter_phase(self, *, frozen: bool) -> None:
        """A backward begins, of the warm-up or of the steps after it."""
        if frozen != self._frozen:
            self._frozen = frozen
            self._current_sync().reducer.place_gradients(self.plan, self.comm)

    def _current_sync(self) -> ReducerSync:
        return self._momentum_sync if self._frozen else self.sync

    def bytes_per_step(self) -> int:
        return self._bytes_per_step(self._current_sync().reducer)

    def codecs(self) -> dict[str, str]:
        return self._current_sync().reducer.codecs()

    def discard_step(self) -> None:
        super().discard_step()
        self._momentum_sync.discard()

    def accept_step(self, shared: dict[str, Any]) -> list[str]:
        self._variance_steps = dict(shared["settled"])
        self.sync.discard()  # the means of the warm-up leave nothing behind
        return self._momentum_sync.accept(shared["reducer"])

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "settled": dict(self._variance_steps)}

    def close(self) -> None:
        super().close()
        self._momentum_sync.abandon()

    def own_step(self) -> OwnStep:
        return self._step_frozen

    def _step_frozen(self, step: int) -> Verdict:
        """After the warm-up, apply the mean momentum here; before, leave the step to the optimizer."""
        if not self._frozen:
            return Verdict.APPLY
        with torch.no_grad():
            for name, slot in self._compressed.slots.items():
                if slot.param.grad is not None:
                    self._step(name, slot.param, slot.param.grad)
        return Verdict.DONE_ELSEWHERE

    def make_momentum(self, slot: Slot) -> None:
        """Turn a gradient in a bucket into this rank's share of the momentum: of the old mean, and of its gradient."""
        state = self._optimizer.state.get(slot.param)
        if not state:
            return
        average, beta = state["exp_avg"], self._group_of[slot.param]["betas"][0]
        alpha = beta * slot.bucket.factor * slot.bucket.loss_scale
        if _is_compiled_for(slot.view, average):
            from gradsync.kernels.onebit_adam import blend_momentum  # Numba takes a second to import

            blend_momentum(slot.flat, slot.source, average, gain=slot.source_gain, keep=1 - beta, alpha=alpha)
            slot.release()
        else:
            slot.copy_in()
            slot.view.mul_(1 - beta).add_(average, alpha=alpha)

    def _step(self, name: str, param: Tensor, momentum: Tensor) -> None:
        group, state = self._group_of[param], self._optimizer.state[param]
        if not state:
            raise ValueError(
                f"parameter {name} got its first gradient after the warm-up of {self.warmup_steps} steps, so there is "
                "no variance to divide by. Make warmup_steps longer."
            )
        beta1, beta2 = group["betas"]
        variance_steps = self._variance_steps.setdefault(name, float(state["step"]))
        average, variance = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        rate, eps, correction = float(group["lr"]), group["eps"], 1 - beta2**variance_steps
        decay = 1 - rate * group["weight_decay"]
        rate = -rate / (1 - beta1 ** float(state["step"]))
        if _is_compiled_for(param, momentum, average, variance):
            from gradsync.kernels.onebit_adam import step

            step(param, momentum, average, variance, correction=correction, eps=eps, decay=decay, rate=rate)
            torch.autograd.graph.increment_version((param, average))
        else:
            average.copy_(momentum)
            param.mul_(decay).addcdiv_(average, (variance / correction).sqrt_().add_(eps), value=rate)

    def state_dict(self) -> dict[str, Any]:
        return {"reducer": self._momentum_sync.state_dict(), "settled": dict(self._variance_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._momentum_sync.load_state_dict(state["reducer"])
        self._variance_steps = dict(state["settled"])

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        own = self._compressed.redistribute([state["reducer"] for state in states], rank, world_size)
        return {"reducer": own, "settled": states[0]["settled"]}

    def placement(self, path: tuple[str, ...]) -> Placement:
        return Placement.VARYING if path == ("settled",) else super().placement(path)


class _PhaseSync(ReducerSync):
    """Averages gradients during the warm-up, and once the variance is ``frozen`` momentum in their place."""

    def __init__(self, reducer: Reducer, strategy: OneBitAdam, *, frozen: bool) -> None:
        super().__init__(reducer)
        self._strategy = strategy
        self._frozen = frozen

    def begin_step(self, header: Header) -> None:
        self._strategy.enter_phase(frozen=self._frozen)
        super().begin_step(header)

    def launch(self, bucket: Bucket) -> None:
        for slot in bucket.slots if self._frozen else ():
            self._strategy.make_momentum(slot)
        super().launch(bucket)


def _is_compiled_for(*tensors: Tensor) -> bool:
    """Whether the compiled kernels can take these tensors: contiguous, on the CPU, of a dtype they are compiled for."""
    return all(tensor.is_cpu and tensor.dtype in COMPILED_DTYPES and tensor.is_contiguous() for tensor in tensors)
