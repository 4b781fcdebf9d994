"""From a recorded step to what it would be with another choice, network or number of ranks. Pure and deterministic.

[Note: calibration] A recorded backward is longer than the computing in it: the transport took its share of the core.
So the computing is scaled until the simulation of what ran, on the network on which it ran, takes as long as it took:
within bounds, as the network may have been measured in a bad moment. What that can't explain (ranks that wait for each
other's jitter) is added to every choice that waits for all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import Parameter

from gradsync.advisor.costs import Cost, Costs
from gradsync.advisor.meaning import Meaning, meaning_of
from gradsync.advisor.measurement import Choice, Gradient, Measurement
from gradsync.advisor.network import LARGE_BYTES, Network
from gradsync.advisor.simulate import BucketWork, Program, Stage, Timeline, simulate
from gradsync.bucket import Bucket, BucketPlan, plan_buckets
from gradsync.comm.base import Solo
from gradsync.reducers.compressed import Compressed

LEAST_SCALE = 0.75  # of a recorded backward that is computing, however much the transport is said to take
OUTER_PASSES = 12.0  # over memory, in copies: the difference from the anchor, the outer step, and back


@dataclass(frozen=True)
class Compute:
    """What a rank computes in a step when nobody disturbs it; made by :func:`calibrate`."""

    measurement: Measurement
    increments: tuple[float, ...]  # of backward, up to each gradient
    unexplained_s: float = 0.0

    @property
    def backward_s(self) -> float:
        return sum(self.increments)

    @property
    def step_s(self) -> float:
        """The step of a rank that is alone."""
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
        """What the step takes longer than computing alone."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def share(self) -> float:
        """Of the step, what synchronization takes: 0 to 1."""
        return self.sync_s / self.step_s


class CannotPredict(ValueError):
    """A strategy that the cost model does not know."""


def calibrate(measurement: Measurement, network: Network, costs: Costs) -> Compute:
    """Find what of a recorded step was computing; ``network``: on which it was recorded. See [Note: calibration]."""
    wanted_s = measurement.step_s - measurement.waiting_s
    meaning = meaning_of(measurement.choice.strategy)
    if meaning.kind != "gradients" or measurement.world_size == 1:
        return Compute(measurement, measurement.increments())
    copied = not meaning.reads_fresh_gradients

    def scaled(scale: float) -> Compute:
        parts = [scale * part for part in measurement.increments()]
        if not copied:  # increments are kept as if gradients were copied; the model takes the copies off where not
            parts = [part + _copy_s(g, costs) for part, g in zip(parts, measurement.gradients, strict=True)]
        return Compute(measurement, tuple(parts))

    def simulated_s(scale: float) -> float:
        return _gradients(scaled(scale), measurement.choice, meaning, network, costs, measurement.world_size)[0].step_s

    low, high = LEAST_SCALE, 1.0
    if simulated_s(high) > wanted_s:
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if simulated_s(middle) > wanted_s else (middle, high)
    left_s = wanted_s - simulated_s(high)
    return Compute(measurement, scaled(high).increments, max(0.0, left_s))


def predict(compute: Compute, choice: Choice, network: Network, costs: Costs, *, world_size: int) -> Prediction:
    """What a step would take, and send, with this choice. Raises :class:`CannotPredict` for an unknown strategy."""
    meaning, measurement = meaning_of(choice.strategy), compute.measurement
    if world_size == 1 or meaning.kind == "shared":
        timeline = _alone(compute, meaning, costs)
        return Prediction(choice, world_size, timeline.step_s, timeline.step_s, 0.0, timeline)
    timeline, sent = _simulated(compute, choice, meaning, network, costs, world_size)
    alone_s = _alone(compute, meaning, costs).step_s
    step_s = timeline.step_s
    if meaning.kind == "gradients":  # who exchanges every H steps waits for the others' jitter that much less often
        step_s += measurement.waiting_s + compute.unexplained_s
    elif meaning.kind == "periodic":
        step_s += (measurement.waiting_s + compute.unexplained_s) * meaning.fragments / meaning.every
    return Prediction(choice, world_size, step_s, min(alone_s, step_s), sent, timeline)


def _simulated(
    compute: Compute, choice: Choice, meaning: Meaning, network: Network, costs: Costs, world_size: int
) -> tuple[Timeline, float]:
    match meaning.kind:
        case "gradients":
            return _gradients(compute, choice, meaning, network, costs, world_size)
        case "periodic":
            return _periodic(compute, choice, meaning, network, costs, world_size)
        case "server":  # gradients there, parameters back, neither beside compute
            return _exchanged(compute, meaning, network, costs, world_size, times=2)
        case "gossip":  # the parameters to one neighbour
            return _exchanged(compute, meaning, network, costs, world_size, times=1)
    raise CannotPredict(f"there is no cost model for {choice.strategy!r}: measure it, with `gradsync compare`.")


# -- strategies that average gradients in backward ---------------------------------------------------------------------


def _gradients(
    compute: Compute, choice: Choice, meaning: Meaning, network: Network, costs: Costs, world_size: int
) -> tuple[Timeline, float]:
    measurement = compute.measurement
    plan = _plan_of(measurement, meaning, choice.bucket_bytes)
    works, sent, stages = _bucket_works(plan, meaning, network, costs, world_size)
    bucket_of = {name: at for at, names in enumerate(plan.layout) for name in names}
    missing = [len(names) for names in plan.layout]
    pieces: list[tuple[float, tuple[int, ...]]] = []
    following = 0  # the bucket that is launched next: always in plan order
    for gradient, seconds in zip(measurement.gradients, _undisturbed(compute, meaning, costs), strict=True):
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
    return simulate(program, network), sent


def _plan_of(measurement: Measurement, meaning: Meaning, bucket_bytes: int | None) -> BucketPlan:
    """The buckets that the engine would make; of the reducer's own size unless said."""
    cap_bytes = bucket_bytes or meaning.make_reducer().bucket_bytes
    return _shadow_plan(measurement.gradients, cap_bytes, measurement.first_bucket_bytes)


@functools.lru_cache(maxsize=32)
def _shadow_plan(gradients: tuple[Gradient, ...], cap_bytes: int, first_bytes: int) -> BucketPlan:
    """The same buckets each time they are asked for, of tensors without memory."""
    params = [(g.name, Parameter(torch.empty(g.shape, dtype=g.torch_dtype, device="meta"))) for g in gradients]
    return BucketPlan(plan_buckets(params, cap_bytes=cap_bytes, first_cap_bytes=first_bytes), [], dict(params), _META)


class _Nowhere(Solo):
    """Gives buckets no memory."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=device)


_META = _Nowhere()


def _bucket_works(
    plan: BucketPlan, meaning: Meaning, network: Network, costs: Costs, world_size: int
) -> tuple[tuple[BucketWork, ...], float, int]:
    """What becomes of each bucket, the bytes of all, and the number of collectives a bucket."""
    reducer = meaning.make_reducer()
    reducer.attach(plan, _META)
    cost, stages = costs.of(meaning.strategy, world_size=world_size), reducer.stages(world_size)
    rounds = 2 * (world_size - 1) if stages == 1 else world_size - 1
    # What goes at a lower rate is as if it were more.
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
    parts = [Stage(cpu_s, sent / stages, max(2, rounds), half) for cpu_s in seconds[:stages]]
    return BucketWork(tuple(parts), cost.finish * bucket.num_bytes)


def _undisturbed(compute: Compute, meaning: Meaning, costs: Costs) -> Sequence[float]:
    """Backward's pieces, without the copy into buckets where there is none."""
    if not meaning.reads_fresh_gradients:
        return compute.increments
    pairs = zip(compute.increments, compute.measurement.gradients, strict=True)
    return [max(0.0, seconds - _copy_s(gradient, costs)) for seconds, gradient in pairs]


def _copy_s(gradient: Gradient, costs: Costs) -> float:
    return costs.copy * gradient.num_bytes


def _alone(compute: Compute, meaning: Meaning, costs: Costs) -> Timeline:
    measurement = compute.measurement
    backward = ((sum(_undisturbed(compute, meaning, costs)), ()),)
    return simulate(Program(measurement.forward_s, backward, (), measurement.after_s), Network.named("1gbit"))


# -- strategies that exchange something else ---------------------------------------------------------------------------


def _periodic(
    compute: Compute, choice: Choice, meaning: Meaning, network: Network, costs: Costs, world_size: int
) -> tuple[Timeline, float]:
    """Every ``every`` steps the model goes round, at once between two steps, or by fragments while training goes on."""
    measurement = compute.measurement
    plan = _plan_of(measurement, meaning, choice.bucket_bytes)
    works, sent, stages = _bucket_works(plan, meaning, network, costs, world_size)
    timeline = _alone(compute, meaning, costs)
    alone_s = timeline.step_s
    outer_s = OUTER_PASSES * costs.copy * measurement.num_bytes
    exchange = simulate(Program(0.0, ((0.0, tuple(range(len(works)))),), works, 0.0, threaded=stages > 1), network)
    if meaning.overlap == 0:
        exposed_s = exchange.step_s + outer_s
    else:
        stolen_s = 0.0 if measurement.spare_core else sent * network.cpu_s_per_byte
        hidden_s = meaning.overlap * meaning.fragments * alone_s  # in which what is under way may come back
        exposed_s = exchange.work_s + outer_s + stolen_s + max(0.0, exchange.step_s - hidden_s)
    timeline.exposed_s = exposed_s / meaning.every
    timeline.step_s = alone_s + timeline.exposed_s
    return timeline, sent / meaning.every


def _exchanged(
    compute: Compute, meaning: Meaning, network: Network, costs: Costs, world_size: int, *, times: int
) -> tuple[Timeline, float]:
    """``times`` the model over the wire after each step, and nothing beside it."""
    measurement = compute.measurement
    plan = _plan_of(measurement, meaning, None)
    _, whole, _ = _bucket_works(plan, meaning, network, costs, 2)
    sent = times * whole * ((world_size - 1) / world_size if times == 2 else 1.0)
    cost = costs.of(meaning.strategy, world_size=2)
    work_s = (sum(cost.stages) + cost.finish) * measurement.num_bytes
    timeline = _alone(compute, meaning, costs)
    timeline.exposed_s = work_s + sent / network.bytes_per_s + times * network.rounds_s(2, busy=False)
    timeline.step_s += timeline.exposed_s
    return timeline, sent
