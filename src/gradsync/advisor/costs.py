"""The time of each choice's own arithmetic on this machine: seconds for each byte of gradients.

It is measured by a dry run: the choice's own reducer reduces buckets as in training, over a communicator whose
collectives complete at once, and the time between its collectives is taken.
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

from gradsync.advisor.comm_pattern import CommPattern, comm_pattern_of
from gradsync.advisor.measurement import Choice, Gradient
from gradsync.buckets.bucket import BucketPlan, plan_buckets
from gradsync.buckets.slot import Slot
from gradsync.comm.base import DEFAULT_TIMEOUT_S, Communicator, Finished, ReduceOp, Solo, Work
from gradsync.reducers.base import Reducer

SAMPLE_BYTES = 64 << 20  # at most this many bytes of gradients are reduced; a larger model is sampled
ROUNDS = 5


@dataclass(frozen=True)
class Cost:
    """Seconds for each byte of gradients: before each collective (``stages``), and after the last one (``finish``)."""

    stages: tuple[float, ...]
    finish: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The measured costs, by reducer and by whether there are more than two ranks.

    ``copy``: seconds a byte to copy a fresh gradient into its bucket. It is a part of every recorded backward; codecs
    that read gradients where autograd put them save it.

    >>> from gradsync.advisor import Costs
    >>> Costs.typical().of("allreduce", world_size=2)
    Cost(stages=(0.0,), finish=0.0)
    """

    copy: float
    by_strategy: Mapping[str, Cost] = field(default_factory=dict)
    measured: bool = True

    def of(self, strategy: str, *, world_size: int) -> Cost:
        """The cost of a strategy. Raises if it was not measured."""
        pattern = comm_pattern_of(strategy)
        if pattern.is_plain:
            return Cost((0.0,))
        stages = pattern.make_reducer().stages(world_size)
        for key in (_key(pattern, world_size), _key(pattern, 2 if world_size != 2 else 3)):
            if key in self.by_strategy:
                return _with_stages(self.by_strategy[key], stages)
        if self.measured:
            raise ValueError(f"the cost of {strategy!r} was not measured. Give it to measure_costs() too.")
        return typical(pattern, world_size)

    @classmethod
    def typical(cls) -> Costs:
        """The costs on a core of a 2023 server with two ranks on it, for predictions where nothing was measured."""
        return cls(copy=0.25e-9, measured=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Costs:
        """Restore costs from ``as_dict``, directly or from JSON."""
        found = {key: Cost(tuple(cost["stages"]), cost["finish"]) for key, cost in data["by_strategy"].items()}
        return cls(copy=data["copy"], by_strategy=found, measured=data["measured"])


# ns for each byte of float32 gradients: before the wire, after it. From benchmarks/results, 1 thread, memory shared.
TYPICAL_NS = {"Cast": (0.25, 0.35), "Blockwise": (0.45, 0.4), "Sparse": (1.3, 0.2), "PowerSGD": (1.6, 0.6)}


def typical(pattern: CommPattern, world_size: int) -> Cost:
    """A guess for a reducer that was not measured."""
    reducer = pattern.make_reducer()
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
    """Time every choice's reducer, about 0.2 s each. With ``comm`` all ranks do so at once, sharing memory bandwidth.

    Every rank calls it with the same arguments, and all get the same answer: the slowest rank's.
    """
    comm = Solo() if comm is None else comm
    sample = _sample(gradients, sample_bytes)
    found: dict[str, Cost] = {}
    for choice in choices:
        pattern = comm_pattern_of(choice.strategy)
        key = _key(pattern, world_size)
        if not pattern.is_plain and key not in found:
            found[key] = _time_reducer(pattern.make_reducer(), sample, min(max(2, world_size), 4), comm)
    return Costs(copy=_copy_cost(sample, comm), by_strategy=found)


def _with_stages(cost: Cost, stages: int) -> Cost:
    """Convert a cost that was measured with two ranks for more than two, or the reverse.

    Two ranks send each other their whole code. Of more ranks, each decodes the others' codes of its shard, which is
    as much work as decoding one whole code, and encodes the sum.
    """
    if len(cost.stages) == stages:
        return cost
    if len(cost.stages) < stages:
        return Cost((*cost.stages, *[cost.finish] * (stages - len(cost.stages))), cost.finish)
    return Cost(cost.stages[:stages], cost.finish)


def _key(pattern: CommPattern, world_size: int) -> str:
    return f"{pattern.reducer_text} {'2' if world_size == 2 else 'n'}"


def _sample(gradients: Sequence[Gradient], sample_bytes: int) -> list[Gradient]:
    """Gradients of about ``sample_bytes``, spread over the model by bytes; some rows of a too large one."""
    total = sum(gradient.num_bytes for gradient in gradients)
    if total <= sample_bytes:
        return list(gradients)
    chosen: list[Gradient] = []
    seen = taken = 0
    for gradient in gradients:
        seen += gradient.num_bytes
        wanted = sample_bytes * seen // total - taken  # bytes still to be sampled up to here
        if gradient.num_bytes > sample_bytes and gradient.shape:
            rows = max(1, gradient.shape[0] * max(0, wanted) // gradient.num_bytes)
            gradient = replace(gradient, shape=(rows, *gradient.shape[1:]))
        if 2 * wanted >= gradient.num_bytes:
            chosen.append(gradient)
            taken += gradient.num_bytes
    return chosen


def _time_reducer(reducer: Reducer, sample: Sequence[Gradient], world_size: int, comm: Communicator) -> Cost:
    instant_comm = _InstantComm(world_size)
    params = [(gradient.name, _parameter(gradient)) for gradient in sample]
    plan = BucketPlan(plan_buckets(params, cap_bytes=reducer.bucket_bytes), [], dict(params), instant_comm)
    reducer.attach(plan, instant_comm)
    num_bytes = max(1, sum(gradient.num_bytes for gradient in sample))
    rounds: list[list[float]] = []
    for number in range(ROUNDS + 1):  # the first compiles kernels and touches pages
        taken = [0.0] * (reducer.stages(world_size) + 1)
        comm.barrier()
        for bucket in plan.buckets:
            bucket.begin_step()
            for slot in bucket.slots:
                slot.param.grad = _fresh(slot)
                if not slot.is_small:
                    slot.place(None)
                slot.ready = True
            bucket.finalize(1.0 / world_size)
            generator, at, start_s = reducer.reduce(bucket, instant_comm), 0, time.perf_counter()
            for _ in generator:
                taken[at] += time.perf_counter() - start_s
                at, start_s = at + 1, time.perf_counter()
            taken[at] += time.perf_counter() - start_s
            bucket.publish()
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
    instant_comm = _InstantComm(2)
    params = [(gradient.name, _parameter(gradient)) for gradient in sample]
    plan = BucketPlan(plan_buckets(params), [], dict(params), instant_comm)
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
    """A gradient like those of training: values of many magnitudes. Zeros would make some codecs too fast."""
    seed = torch.linspace(-3.0, 3.0, 4099)
    return (
        (seed * seed.abs())
        .repeat(-(-slot.param.numel() // 4099))[: slot.param.numel()]
        .view(slot.param.shape)
        .to(slot.param.dtype)
    )


class _InstantComm(Communicator):
    """Rank 0 of several, whose collectives complete as soon as they start: no data moves."""

    transport = "dry run"

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
        return _InstantComm(len(ranks))
