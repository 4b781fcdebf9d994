"""The cost model: predicts a recorded step with another choice, network or number of ranks. Pure and deterministic.

[Note: calibration] A recorded backward is longer than the computing in it: the transport took its share of the core.
So the computing is scaled until the simulation of what ran, on the network on which it ran, takes as long as recorded.
The scale is bounded, as the network may have been measured in a bad moment. What scaling can't explain (ranks that wait
for each other's jitter) is added to every choice that waits for all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter

from gradsync.advisor.comm_pattern import CommPattern, comm_pattern_of
from gradsync.advisor.costs import Cost, Costs
from gradsync.advisor.measurement import Choice, Gradient, Measurement
from gradsync.advisor.network import LARGE_BYTES, Network
from gradsync.advisor.simulate import BucketWork, Program, StageWork, Timeline, simulate
from gradsync.buckets.bucket import Bucket, BucketPlan, plan_buckets
from gradsync.comm.base import Solo
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.reducers.plain import Plain
from gradsync.strategies.allreduce import header_bytes

MIN_SCALE = 0.75  # at least this share of a recorded backward is computing, whatever the transport seems to take
OUTER_PASSES = 12.0  # memory passes of an outer step, in copies: difference from the anchor, outer step, and back


@dataclass(frozen=True)
class Compute:
    """What a rank computes in a step when no communication disturbs it. Made by :func:`calibrate`."""

    measurement: Measurement
    increments: tuple[float, ...]  # seconds of backward from one gradient to the next
    unexplained_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return sum(self.increments)

    @property
    def step_s(self) -> float:
        """The step of a single rank."""
        return self.measurement.forward_s + self.backward_s + self.measurement.after_s


@dataclass(frozen=True)
class Prediction:
    """What a choice would cost."""

    choice: Choice
    world_size: int
    step_s: float
    compute_s: float
    bytes_per_step: float
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def sync_s(self) -> float:
        """By how much the step is longer than computing alone."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def share(self) -> float:
        """The share of the step that synchronization takes, 0 to 1."""
        return self.sync_s / self.step_s


class CannotPredict(ValueError):
    """A strategy that the cost model does not know."""


def calibrate(measurement: Measurement, network: Network, costs: Costs) -> Compute:
    """Estimate the computing in a step that was recorded on ``network``. See [Note: calibration]."""
    wanted_s = measurement.step_s - measurement.waiting_s
    pattern = comm_pattern_of(measurement.choice.strategy)
    if pattern.kind != "gradients" or measurement.world_size == 1:
        return Compute(measurement, measurement.increments())
    copied = pattern.copies_gradients

    def scaled(scale: float) -> Compute:
        parts = [scale * part for part in measurement.increments()]
        if not copied:  # increments include the copy of gradients; `_backward_pieces` subtracts it where there is none
            parts = [part + _copy_s(g, costs) for part, g in zip(parts, measurement.gradients, strict=True)]
        return Compute(measurement, tuple(parts))

    def simulated_s(scale: float) -> float:
        return _gradient_sync(scaled(scale), measurement.choice, pattern, network, costs, measurement.world_size)[
            0
        ].step_s

    low, high = MIN_SCALE, 1.0
    if simulated_s(high) > wanted_s:
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if simulated_s(middle) > wanted_s else (middle, high)
    left_s = wanted_s - simulated_s(high)
    return Compute(measurement, scaled(high).increments, max(0.0, left_s))


def predict(compute: Compute, choice: Choice, network: Network, costs: Costs, *, world_size: int) -> Prediction:
    """Predict the time and bytes of a step with this choice. Raises :class:`CannotPredict` for an unknown strategy."""
    pattern, measurement = comm_pattern_of(choice.strategy), compute.measurement
    if world_size == 1 or pattern.kind == "shared":
        timeline = _single_rank(compute, pattern, costs)
        return Prediction(choice, world_size, timeline.step_s, timeline.step_s, 0.0, timeline)
    timeline, sent = _simulate_kind(compute, choice, pattern, network, costs, world_size)
    alone_s = _single_rank(compute, pattern, costs).step_s
    step_s = timeline.step_s
    if pattern.kind == "gradients":  # a strategy that exchanges every H steps waits for jitter H times less often
        step_s += measurement.waiting_s + compute.unexplained_s
    elif pattern.kind == "periodic":
        step_s += (measurement.waiting_s + compute.unexplained_s) * pattern.fragments / pattern.every
    return Prediction(choice, world_size, step_s, min(alone_s, step_s), sent, timeline)


def _simulate_kind(
    compute: Compute, choice: Choice, pattern: CommPattern, network: Network, costs: Costs, world_size: int
) -> tuple[Timeline, float]:
    match pattern.kind:
        case "gradients":
            return _gradient_sync(compute, choice, pattern, network, costs, world_size)
        case "periodic":
            return _periodic(compute, choice, pattern, network, costs, world_size)
        case "server":  # gradients to the server, parameters back, neither overlapped with computing
            return _unoverlapped_exchange(compute, pattern, network, costs, world_size, times=2)
        case "gossip":  # the parameters to one neighbour
            return _unoverlapped_exchange(compute, pattern, network, costs, world_size, times=1)
    raise CannotPredict(f"there is no cost model for {choice.strategy!r}: measure it, with `gradsync compare`.")


# -- strategies that average gradients in backward ---------------------------------------------------------------------


def _gradient_sync(
    compute: Compute, choice: Choice, pattern: CommPattern, network: Network, costs: Costs, world_size: int
) -> tuple[Timeline, float]:
    measurement = compute.measurement
    plan = _plan_of(measurement, pattern, choice.bucket_bytes)
    works, sent, stages = _bucket_works(plan, pattern, network, costs, world_size)
    bucket_of = {name: at for at, names in enumerate(plan.layout) for name in names}
    missing = [len(names) for names in plan.layout]
    pieces: list[tuple[float, tuple[int, ...]]] = []
    following = 0  # the next bucket to launch: always in plan order
    for gradient, seconds in zip(measurement.gradients, _backward_pieces(compute, pattern, costs), strict=True):
        missing[bucket_of[gradient.name]] -= 1
        complete = []
        while following < len(missing) and not missing[following]:
            complete.append(following)
            following += 1
        pieces.append((seconds, tuple(complete)))
    program = Program(
        forward_s=measurement.forward_s,
        backward=tuple(pieces),
        buckets=works,
        after_s=measurement.after_s,
        threaded=stages > 1,
        spare_core=measurement.spare_core,
    )
    return simulate(program, network), sent + header_bytes(world_size)


def _plan_of(measurement: Measurement, pattern: CommPattern, bucket_bytes: int | None) -> BucketPlan:
    """The buckets that the engine would make; default size: the reducer's own, or the transport's if it is exact."""
    reducer = pattern.make_reducer()
    default_bytes = measurement.exact_bucket_bytes if isinstance(reducer, Plain) else reducer.bucket_bytes
    cap_bytes = bucket_bytes or default_bytes
    return _meta_plan(measurement.gradients, cap_bytes, measurement.first_bucket_bytes)


@functools.lru_cache(maxsize=32)
def _meta_plan(gradients: tuple[Gradient, ...], cap_bytes: int, first_bytes: int) -> BucketPlan:
    """A plan of meta tensors, which have no memory. Cached."""
    params = [(g.name, Parameter(torch.empty(g.shape, dtype=g.torch_dtype, device="meta"))) for g in gradients]
    return BucketPlan(
        plan_buckets(params, cap_bytes=cap_bytes, first_cap_bytes=first_bytes), [], dict(params), _META_COMM
    )


class _MetaComm(Solo):
    """Allocates buckets on the meta device."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)


_META_COMM = _MetaComm()


def _bucket_works(
    plan: BucketPlan, pattern: CommPattern, network: Network, costs: Costs, world_size: int
) -> tuple[tuple[BucketWork, ...], float, int]:
    """The simulated work of each bucket, the bytes sent for all, and the number of collectives per bucket."""
    reducer = pattern.make_reducer()
    reducer.attach(plan, _META_COMM)
    cost, stages = costs.of(pattern.strategy, world_size=world_size), reducer.stages(world_size)
    rounds = 2 * (world_size - 1) if stages == 1 else world_size - 1
    # A transfer at a lower rate is simulated as a larger one.
    sums_as = reducer.sums_as if isinstance(reducer, Compressed) else torch.float32
    share = network.exchange_share if sums_as is None else 1.0
    half = sums_as in (torch.float16, torch.bfloat16)
    works, total = [], 0.0
    for bucket in plan.buckets:
        sent = float(reducer.bytes_sent(bucket, world_size))
        total += sent
        large = network.large_share if sent / stages > LARGE_BYTES else 1.0
        works.append(_work(bucket, cost, sent / share / large, stages, rounds, half=half))
    return tuple(works), total, stages


def _work(bucket: Bucket, cost: Cost, sent: float, stages: int, rounds: int, *, half: bool) -> BucketWork:
    seconds = [per_byte * bucket.num_bytes for per_byte in cost.stages]
    seconds += [0.0] * (stages - len(seconds))
    parts = [StageWork(cpu_s, sent / stages, max(2, rounds), half) for cpu_s in seconds[:stages]]
    return BucketWork(tuple(parts), cost.finish * bucket.num_bytes)


def _backward_pieces(compute: Compute, pattern: CommPattern, costs: Costs) -> Sequence[float]:
    """The seconds of backward up to each gradient, without the copy into buckets where there is none."""
    if pattern.copies_gradients:
        return compute.increments
    pairs = zip(compute.increments, compute.measurement.gradients, strict=True)
    return [max(0.0, seconds - _copy_s(gradient, costs)) for seconds, gradient in pairs]


def _copy_s(gradient: Gradient, costs: Costs) -> float:
    return costs.copy * gradient.num_bytes


def _single_rank(compute: Compute, pattern: CommPattern, costs: Costs) -> Timeline:
    measurement = compute.measurement
    backward = ((sum(_backward_pieces(compute, pattern, costs)), ()),)
    return simulate(Program(measurement.forward_s, backward, (), measurement.after_s), Network.named("1gbit"))


# -- strategies that exchange something else ---------------------------------------------------------------------------


def _periodic(
    compute: Compute, choice: Choice, pattern: CommPattern, network: Network, costs: Costs, world_size: int
) -> tuple[Timeline, float]:
    """Exchange the model every ``every`` steps: whole, between two steps, or in fragments while training goes on."""
    measurement = compute.measurement
    plan = _plan_of(measurement, pattern, choice.bucket_bytes)
    works, sent, stages = _bucket_works(plan, pattern, network, costs, world_size)
    timeline = _single_rank(compute, pattern, costs)
    alone_s = timeline.step_s
    outer_s = OUTER_PASSES * costs.copy * measurement.num_bytes
    exchange = simulate(Program(0.0, ((0.0, tuple(range(len(works)))),), works, 0.0, threaded=stages > 1), network)
    if pattern.overlap == 0:
        exposed_s = exchange.step_s + outer_s
    else:
        stolen_s = 0.0 if measurement.spare_core else sent * network.cpu_s_per_byte
        hidden_s = pattern.overlap * pattern.fragments * alone_s  # exchanges that end within it are hidden
        exposed_s = exchange.work_s + outer_s + stolen_s + max(0.0, exchange.step_s - hidden_s)
    timeline.exposed_s = exposed_s / pattern.every
    timeline.step_s = alone_s + timeline.exposed_s
    return timeline, sent / pattern.every


def _unoverlapped_exchange(
    compute: Compute, pattern: CommPattern, network: Network, costs: Costs, world_size: int, *, times: int
) -> tuple[Timeline, float]:
    """``times`` the model over the wire after each step, overlapped with nothing."""
    measurement = compute.measurement
    plan = _plan_of(measurement, pattern, None)
    _, whole, _ = _bucket_works(plan, pattern, network, costs, 2)
    sent = times * whole * ((world_size - 1) / world_size if times == 2 else 1.0)
    cost = costs.of(pattern.strategy, world_size=2)
    work_s = (sum(cost.stages) + cost.finish) * measurement.num_bytes
    timeline = _single_rank(compute, pattern, costs)
    timeline.exposed_s = work_s + sent / network.bytes_per_s + times * network.rounds_s(2, busy=False)
    timeline.step_s += timeline.exposed_s
    return timeline, sent
