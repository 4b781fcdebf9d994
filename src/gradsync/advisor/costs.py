"""What each choice's own arithmetic takes on this machine: seconds for each byte of gradients that it handles.

It is measured by rehearsal: the choice's own reducer is walked over buckets as it is in training, with a communicator
that has everything arrive at once, and what stands between its collectives is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.advisor.meaning import Meaning, meaning_of
from gradsync.advisor.measurement import Choice, Gradient
from gradsync.bucket import BucketPlan, plan_buckets
from gradsync.comm.base import DEFAULT_TIMEOUT_S, Communicator, Finished, ReduceOp, Solo, Work
from gradsync.reducers.base import Reducer
from gradsync.slot import Slot

SAMPLE_BYTES = 64 << 20  # of gradients at most are rehearsed; of a larger model a part stands for all
ROUNDS = 5


@dataclass(frozen=True)
class Cost:
    """Seconds for each byte of gradients: before each of its collectives, and after the last one."""

    stages: tuple[float, ...]
    finish: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured, by the text of the strategy and whether there are more than two ranks.

    ``copy``: of moving a fresh gradient into its bucket, which is a part of every recorded backward, and which codecs
    that read gradients where they lie leave out.

    >>> from gradsync.advisor import Costs
    >>> Costs.typical().of("allreduce", world_size=2)
    Cost(stages=(0.0,), finish=0.0)
    """

    copy: float
    by_strategy: Mapping[str, Cost] = field(default_factory=dict)
    measured: bool = True

    def of(self, strategy: str, *, world_size: int) -> Cost:
        """The cost of a strategy. Raises if it was not measured."""
        meaning = meaning_of(strategy)
        if meaning.is_plain:
            return Cost((0.0,))
        stages = meaning.make_reducer().stages(world_size)
        for key in (_key(meaning, world_size), _key(meaning, 2 if world_size != 2 else 3)):
            if key in self.by_strategy:
                return _with_stages(self.by_strategy[key], stages)
        if self.measured:
            raise ValueError(f"the cost of {strategy!r} was not measured. Give it to measure_costs() too.")
        return typical(meaning, world_size)

    @classmethod
    def typical(cls) -> Costs:
        """Of a core of a 2023 server with two ranks on it, for predictions where nothing could be measured."""
        return cls(copy=0.25e-9, measured=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """What ``as_dict`` gave."""
        found = {key: Cost(tuple(cost["stages"]), cost["finish"]) for key, cost in data["by_strategy"].items()}
        return cls(copy=data["copy"], by_strategy=found, measured=data["measured"])


# ns for each byte of float32 gradients: before the wire, after it. From benchmarks/results, 1 thread, memory shared.
TYPICAL_NS = {"Cast": (0.25, 0.35), "Blockwise": (0.45, 0.4), "Sparse": (1.3, 0.2), "PowerSGD": (1.6, 0.6)}


def typical(meaning: Meaning, world_size: int) -> Cost:
    """A guess for a reducer that was not measured."""
    reducer = meaning.make_reducer()
    names = [base.__name__ for base in type(reducer).__mro__]
    for rule in getattr(getattr(reducer, "rules", None), "patterns", ()):
        names += [base.__name__ for base in type(rule[1]).__mro__]
    before, after = next((TYPICAL_NS[name] for name in names if name in TYPICAL_NS), TYPICAL_NS["Blockwise"])
    stages = reducer.stages(world_size)
    return Cost((before * 1e-9,) + (0.3e-9,) * (stages - 1), after * 1e-9)


def measure_costs(
    gradients: Sequence[Gradient],
    choices: Iterable[Choice],
    *,
    world_size: int = 2,
    comm: Communicator | None = None,
    sample_bytes: int = SAMPLE_BYTES,
) -> Costs:
    """Rehearse every choice, about 0.2 s each. With ``comm`` all ranks do so at once, sharing memory as in training.

    Every rank calls it with the same arguments, and all get the same answer: the slowest rank's.
    """
    comm = Solo() if comm is None else comm
    sample = _sample(gradients, sample_bytes)
    found: dict[str, Cost] = {}
    for choice in choices:
        meaning = meaning_of(choice.strategy)
        key = _key(meaning, world_size)
        if not meaning.is_plain and key not in found:
            found[key] = _rehearse(meaning.make_reducer(), sample, min(max(2, world_size), 4), comm)
    return Costs(copy=_copy_cost(sample, comm), by_strategy=found)


def _with_stages(cost: Cost, stages: int) -> Cost:
    """A cost that was measured with two ranks, or with more, for the other case.

    Of two ranks each gives all of its own to the other. Of more, each decodes the others' codes of its shard, which is
    as much as decoding all of one, and encodes the sum.
    """
    if len(cost.stages) == stages:
        return cost
    if len(cost.stages) < stages:
        return Cost((*cost.stages, *[cost.finish] * (stages - len(cost.stages))), cost.finish)
    return Cost(cost.stages[:stages], cost.finish)


def _key(meaning: Meaning, world_size: int) -> str:
    return f"{meaning.reducer_text} {'2' if world_size == 2 else 'n'}"


def _sample(gradients: Sequence[Gradient], sample_bytes: int) -> list[Gradient]:
    """Gradients of about so many bytes, spread over the model by bytes; of one that is too large, some rows."""
    total = sum(gradient.num_bytes for gradient in gradients)
    if total <= sample_bytes:
        return list(gradients)
    chosen: list[Gradient] = []
    seen = taken = 0
    for gradient in gradients:
        seen += gradient.num_bytes
        wanted = sample_bytes * seen // total - taken  # bytes, up to here
        if gradient.num_bytes > sample_bytes and gradient.shape:
            rows = max(1, gradient.shape[0] * max(0, wanted) // gradient.num_bytes)
            gradient = replace(gradient, shape=(rows, *gradient.shape[1:]))
        if 2 * wanted >= gradient.num_bytes:
            chosen.append(gradient)
            taken += gradient.num_bytes
    return chosen


def _rehearse(reducer: Reducer, sample: Sequence[Gradient], world_size: int, comm: Communicator) -> Cost:
    stage = _Stage(world_size)
    params = [(gradient.name, _parameter(gradient)) for gradient in sample]
    plan = BucketPlan(plan_buckets(params, cap_bytes=reducer.bucket_bytes), [], dict(params), stage)
    reducer.attach(plan, stage)
    num_bytes = max(1, sum(gradient.num_bytes for gradient in sample))
    rounds: list[list[float]] = []
    for number in range(ROUNDS + 1):  # the first compiles kernels and touches pages
        taken = [0.0] * (reducer.stages(world_size) + 1)
        comm.barrier()
        for bucket in plan.buckets:
            bucket.open()
            for slot in bucket.slots:
                slot.param.grad = _fresh(slot)
                if not slot.is_small:
                    slot.bring_in(None, may_lend=reducer.reads_fresh_gradients)
                slot.ready = True
            bucket.seal(1.0 / world_size, lend_small=reducer.reads_small_gradients)
            generator, at, start_s = reducer.reduce(bucket, stage), 0, time.perf_counter()
            for _ in generator:
                taken[at] += time.perf_counter() - start_s
                at, start_s = at + 1, time.perf_counter()
            taken[at] += time.perf_counter() - start_s
            bucket.unseal()
        reducer.end_step(finite=True)
        if number:
            rounds.append(taken)
    medians = torch.tensor([statistics.median(parts) / num_bytes for parts in zip(*rounds, strict=True)])
    agreed = medians.double()
    comm.all_reduce(agreed, op="max").wait()
    plan.dissolve()
    *before, after = agreed.tolist()
    return Cost(tuple(before), after)


def _copy_cost(sample: Sequence[Gradient], comm: Communicator) -> float:
    stage = _Stage(2)
    params = [(gradient.name, _parameter(gradient)) for gradient in sample]
    plan = BucketPlan(plan_buckets(params), [], dict(params), stage)
    taken: list[float] = []
    for _ in range(ROUNDS + 1):
        fresh = {slot.name: _fresh(slot) for bucket in plan.buckets for slot in bucket.slots}
        comm.barrier()
        start_s = time.perf_counter()
        for bucket in plan.buckets:
            for slot in bucket.slots:
                slot.param.grad = fresh[slot.name]
                slot.collect(0.5)
        taken.append(time.perf_counter() - start_s)
    agreed = torch.tensor([statistics.median(taken[1:]) / max(1, plan.num_bytes)], dtype=torch.float64)
    comm.all_reduce(agreed, op="max").wait()
    plan.dissolve()
    return float(agreed[0])


def _parameter(gradient: Gradient) -> Parameter:
    return Parameter(torch.zeros(gradient.shape, dtype=gradient.torch_dtype))


def _fresh(slot: Slot) -> Tensor:
    """A gradient such as training brings: numbers of many sizes, not zeros, which some codecs are done with sooner."""
    seed = torch.linspace(-3.0, 3.0, 4099)
    return (
        (seed * seed.abs())
        .repeat(-(-slot.param.numel() // 4099))[: slot.param.numel()]
        .view(slot.param.shape)
        .to(slot.param.dtype)
    )


class _Stage(Communicator):
    """One of many ranks whose collectives are over as soon as they start: nothing moves."""

    transport = "rehearsal"

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size, timeout_s=DEFAULT_TIMEOUT_S)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        return Finished()

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        out.copy_(tensor.expand_as(out))
        return Finished()

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        out.copy_(tensor[0])
        return Finished()

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        out.copy_(tensor)
        out[0].copy_(tensor[1])
        return Finished()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        return Finished()

    def send(self, tensor: Tensor, dst: int) -> Work:
        return Finished()

    def recv(self, tensor: Tensor, src: int) -> Work:
        return Finished()

    def barrier(self) -> None:
        return None

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        return _Stage(len(ranks))
