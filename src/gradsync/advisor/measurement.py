"""The advisor's input: how a typical step ran (``Measurement``), and the alternatives to it (``Choice``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from gradsync import spec
from gradsync.buckets.bucket import BUCKET_BYTES, FIRST_BUCKET_BYTES, MIB


@dataclass(frozen=True)
class Choice:
    """One way to keep the replicas in step: a strategy's spec, and the size of its buckets if it is not the default.

    >>> from gradsync.advisor import Choice
    >>> str(Choice("allreduce(codec=int8)")), str(Choice("allreduce", bucket_bytes=4 << 20))
    ('allreduce(codec=int8)', 'allreduce, bucket_bytes=4 MiB')
    """

    strategy: str
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        usual = spec.parse(self.strategy, "strategy").bucket_bytes
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1; got {self.bucket_bytes}.")
        if self.bucket_bytes == usual:  # given or not, it is the same choice
            object.__setattr__(self, "bucket_bytes", None)

    def __str__(self) -> str:
        if self.bucket_bytes is None:
            return self.strategy
        return f"{self.strategy}, bucket_bytes={self.bucket_bytes / MIB:g} MiB"


@dataclass(frozen=True)
class Gradient:
    """A trainable parameter, and when its gradient is ready.

    ``ready_s``: seconds from the beginning of the step. None: only that of a later gradient is known, as where a record
    holds whole buckets; it is then estimated by bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    ready_s: float | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"dtype must be one of torch's, such as 'float32'; got {self.dtype!r}.")
        return found


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One typical step of a run, in parts that add up to it: medians over some recorded steps of one rank.

    Args:
        gradients: in the order in which they become ready.
        forward_s: from the beginning of the step to the beginning of backward: data, ``zero_grad``, forward.
        backward_s: from there to the last gradient.
        exposed_s: from the last gradient to the return of ``backward()``: what synchronization added.
        after_s: from there to the end of ``optimizer.step()``.
        waiting_s: the part of ``exposed_s`` spent waiting for slower ranks. No choice that waits for all removes it.
        choice: what ran.
        exact_bucket_bytes: the default size of buckets of exact strategies on the transport that ran.
        ranks_per_host, cores_per_host, threads: they decide whether compute and transport share cores.

    >>> from gradsync.advisor import Choice, Gradient, Measurement
    >>> gradients = (Gradient("weight", (1000, 100), ready_s=0.03),)
    >>> step = Measurement(gradients=gradients, forward_s=0.01, backward_s=0.02, exposed_s=0.005, after_s=0.001)
    >>> round(step.step_s, 3), step.num_bytes
    (0.036, 400000)
    >>> Measurement.from_dict(step.as_dict()) == step
    True
    """

    gradients: tuple[Gradient, ...]
    forward_s: float
    backward_s: float
    exposed_s: float
    after_s: float
    waiting_s: float = 0.0
    choice: Choice = field(default_factory=lambda: Choice("allreduce"))
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    exact_bucket_bytes: int = BUCKET_BYTES
    world_size: int = 2
    ranks_per_host: int = 1
    cores_per_host: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.gradients:
            raise ValueError("a measurement needs at least one gradient; got none. Record a few steps first.")
        times = (self.forward_s, self.backward_s, self.exposed_s, self.after_s, self.waiting_s)
        if not all(math.isfinite(part) and part >= 0.0 for part in times) or self.step_s <= 0.0:
            raise ValueError(f"the parts of a step are seconds of 0 or more, and not all 0; got {times}.")

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.exposed_s + self.after_s

    @property
    def num_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient in self.gradients)

    @property
    def spare_core(self) -> bool:
        """Whether a rank has a core more than those on which it computes."""
        return self.cores_per_host // max(1, self.ranks_per_host) > self.threads

    def increments(self) -> tuple[float, ...]:
        """For each gradient, the recorded seconds of backward since the previous one. They add up to ``backward_s``.

        Gradients of unknown time share the interval up to the next known one in proportion to their bytes.
        """
        known: list[float] = []
        start, waiting = 0.0, []
        for at, gradient in enumerate(self.gradients):
            waiting.append(gradient)
            last = at == len(self.gradients) - 1
            if gradient.ready_s is None and not last:
                continue
            end = self.backward_s if last else min(max(gradient.ready_s - self.forward_s, start), self.backward_s)  # type: ignore[operator]
            weights = [max(1, each.num_bytes) for each in waiting]
            known += [(end - start) * weight / sum(weights) for weight in weights]
            start, waiting = end, []
        return tuple(known)

    def with_world(self, world_size: int) -> Measurement:
        """The same step with another number of ranks."""
        return replace(self, world_size=world_size)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Restore a measurement from ``as_dict``, directly or from JSON."""
        gradients = [Gradient(**{**each, "shape": tuple(each["shape"])}) for each in data["gradients"]]
        return cls(**{**data, "gradients": tuple(gradients), "choice": Choice(**data["choice"])})


def gradients_of(params: Sequence[tuple[str, torch.Tensor]], ready_s: Mapping[str, float]) -> tuple[Gradient, ...]:
    """Describe parameters, given in the order in which their gradients become ready.

    >>> import torch
    >>> from gradsync.advisor.measurement import gradients_of
    >>> gradients_of([("bias", torch.zeros(3))], {"bias": 0.5})
    (Gradient(name='bias', shape=(3,), dtype='float32', ready_s=0.5),)
    """
    return tuple(
        Gradient(name, tuple(param.shape), str(param.dtype).removeprefix("torch."), ready_s.get(name))
        for name, param in params
    )
