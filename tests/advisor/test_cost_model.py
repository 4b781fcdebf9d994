"""Predictions: they reproduce the recorded step, and change with the choice, the network and the number of ranks."""

from __future__ import annotations

import itertools

import pytest

from gradsync import spec
from gradsync.advisor import CannotPredict, Choice, Cost, Costs, calibrate, predict
from gradsync.advisor.comm_pattern import comm_pattern_of
from gradsync.advisor.cost_model import MIN_SCALE
from gradsync.buckets.bucket import MIB
from gradsync.comm.base import Solo
from gradsync.strategies.allreduce import AllReduce
from tests.advisor.steps import LAYERS, NUMEL, measurement, network

FREE = Costs(copy=0.0, by_strategy={"compressed(codec=int8) 2": Cost((0.0,), 0.0)})


@pytest.mark.parametrize("rate", [50e6, 200e6, 1e12])
@pytest.mark.parametrize("exposed_s", [0.0, 0.2, 5.0])
def test_predict_reproduces_the_recorded_step(rate: float, exposed_s: float) -> None:
    step, link = measurement(exposed_s=exposed_s), network(rate)
    compute = calibrate(step, link, FREE)
    found = predict(compute, step.choice, link, FREE, world_size=2)
    # The lower bound for any scale of backward: the wire, from the first gradient on.
    least_s = step.forward_s + 0.06 * MIN_SCALE + 40e6 / rate + step.after_s
    assert step.step_s * 0.999 <= found.step_s <= max(step.step_s, 1.2 * least_s) * 1.001
    if rate == 1e12:
        assert found.step_s == pytest.approx(step.step_s, rel=1e-3)


def test_predict_exposes_a_slower_wire() -> None:
    step = measurement()
    compute = calibrate(step, network(1e12), FREE)
    # 40 MB at 40 MB/s is a second from the first gradient (0.36 s) on, and 0.1 s of optimizer
    found = predict(compute, Choice("allreduce", 4_000_000), network(40e6), FREE, world_size=2)
    assert found.step_s == pytest.approx(0.36 + 1.0 + 0.1, rel=1e-3)
    assert found.compute_s == pytest.approx(1.0, rel=1e-4)
    assert found.bytes_per_step == pytest.approx(40e6, rel=1e-3)
    assert found.share == pytest.approx(0.46 / 1.46, rel=0.01)


def test_predict_applies_exchange_and_large_shares() -> None:
    compute = calibrate(measurement(), network(1e12), FREE)
    slow = network(4e6)
    for choice, change in (("allreduce(codec=int8)", {"exchange_share": 0.5}), ("allreduce", {"large_share": 0.5})):
        size = None if "int8" in choice else 100 * MIB
        good = predict(compute, Choice(choice, size), slow, FREE, world_size=2)
        bad = predict(compute, Choice(choice, size), network(4e6, **change), FREE, world_size=2)
        assert bad.bytes_per_step == good.bytes_per_step
        assert bad.timeline.wire_s == pytest.approx(2 * good.timeline.wire_s, rel=0.15)
    other = network(4e6, exchange_share=0.5, large_share=0.5)
    small = Choice("allreduce", 4_000_000)
    exact = [predict(compute, small, link, FREE, world_size=2).step_s for link in (slow, other)]
    assert exact[0] == exact[1], "small all-reduces are neither"


def test_predict_small_buckets_start_sooner_and_pay_per_call() -> None:
    compute = calibrate(measurement(), network(1e12), FREE)
    cheap, dear = network(60e6), network(60e6, call_s=0.5, busy_call_s=0.5)
    small, large = Choice("allreduce", 4_000_000), Choice("allreduce", 100 * MIB)
    assert (
        predict(compute, small, cheap, FREE, world_size=2).step_s
        < predict(compute, large, cheap, FREE, world_size=2).step_s
    )
    assert (
        predict(compute, small, dear, FREE, world_size=2).step_s
        > predict(compute, small, cheap, FREE, world_size=2).step_s
    )


def test_predict_weighs_saved_bytes_against_codec_time() -> None:
    compute = calibrate(measurement(), network(1e12), FREE)
    slow = network(20e6)
    exact = predict(compute, Choice("allreduce"), slow, FREE, world_size=2)
    int8 = predict(compute, Choice("allreduce(codec=int8)"), slow, FREE, world_size=2)
    assert 3.5 < exact.bytes_per_step / int8.bytes_per_step < 4.1
    assert int8.step_s < exact.step_s - 1.0
    dear = Costs(copy=0.0, by_strategy={"compressed(codec=int8) 2": Cost((5e-9,), 5e-9)})  # 0.4 s a step
    assert predict(compute, Choice("allreduce(codec=int8)"), network(1e12), dear, world_size=2).step_s == pytest.approx(
        1.4, rel=1e-4
    )


def test_predict_saves_the_copy_for_codecs_that_read_in_place() -> None:
    costs = Costs(copy=1e-9, by_strategy=FREE.by_strategy)
    compute = calibrate(measurement(), network(1e12), costs)
    found = predict(compute, Choice("allreduce(codec=int8)"), network(1e12), costs, world_size=2)
    assert found.step_s == pytest.approx(1.0 - 0.04, rel=1e-4)


def test_predict_exact_from_a_run_with_a_codec() -> None:
    costs = Costs(copy=1e-9, by_strategy={"compressed(codec=int8) 2": Cost((2e-9,), 1e-9)})
    step = measurement(choice=Choice("allreduce(codec=int8)"), exposed_s=0.04)
    compute = calibrate(step, network(1e12), costs)
    assert predict(compute, step.choice, network(1e12), costs, world_size=2).step_s == pytest.approx(1.04, rel=1e-3)
    exact = predict(compute, Choice("allreduce"), network(1e12), costs, world_size=2)
    assert exact.step_s == pytest.approx(1.04 - 0.12 + 0.04, rel=0.01)  # encode and decode less, the copy more


@pytest.mark.parametrize("text", ["allreduce", "allreduce(codec=int8)", "allreduce(codec=topk(density=0.01))"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_predicted_bytes_are_those_of_the_strategy(text: str, world_size: int) -> None:
    from gradsync.advisor.cost_model import _META_COMM, _meta_plan

    step = measurement()
    compute = calibrate(step, network(), FREE)
    found = predict(compute, Choice(text), network(), Costs.typical(), world_size=world_size)
    strategy = spec.parse(text)
    assert isinstance(strategy, AllReduce)
    plan = _meta_plan(step.gradients, strategy.bucket_bytes, step.first_bucket_bytes)
    strategy.attach(plan, _META_COMM)
    strategy.comm = Solo()
    strategy.comm.world_size = world_size
    assert found.bytes_per_step == strategy.bytes_per_step()


def test_predict_grows_with_the_number_of_ranks() -> None:
    compute = calibrate(measurement(), network(1e12), FREE)
    link = network(100e6)
    steps = [predict(compute, Choice("allreduce"), link, FREE, world_size=size) for size in (1, 2, 4, 64, 1024)]
    assert [round(step.bytes_per_step / 40e6, 2) for step in steps] == [0, 1, 1.5, 1.97, 2]
    assert all(fewer.step_s <= more.step_s for fewer, more in itertools.pairwise(steps))
    assert steps[0].step_s == pytest.approx(1.0, rel=1e-4)


def test_predict_keeps_waiting_for_stragglers() -> None:
    step = measurement(exposed_s=0.3, waiting_s=0.3)
    compute = calibrate(step, network(1e12), FREE)
    for text in ("allreduce", "allreduce(codec=int8)"):
        assert predict(compute, Choice(text), network(1e12), FREE, world_size=2).step_s == pytest.approx(1.3, rel=0.01)


def test_predict_refuses_unknown_strategies() -> None:
    class Odd(AllReduce):
        pass

    spec.register("strategy", "test_odd_one")(Odd)
    assert comm_pattern_of("test_odd_one").kind == "gradients"  # a kind of all-reduce is one
    compute = calibrate(measurement(), network(), FREE)
    from gradsync.strategies.local import Local

    class Alone(Local):
        def bytes_per_step(self) -> int:
            return 0

    spec.register("strategy", "test_stays_alone")(Alone)
    with pytest.raises(CannotPredict, match="gradsync compare"):
        predict(compute, Choice("test_stays_alone"), network(), FREE, world_size=2)


def test_predict_refuses_a_cost_that_was_not_measured() -> None:
    compute = calibrate(measurement(), network(), FREE)
    with pytest.raises(ValueError, match=r"allreduce\(codec=int4\).*measure_costs"):
        predict(compute, Choice("allreduce(codec=int4)"), network(), FREE, world_size=2)


def test_increments_spread_unknown_times_by_bytes() -> None:
    from dataclasses import replace

    step = measurement()
    whole = tuple(replace(g, ready_s=g.ready_s if at in (4, 9) else None) for at, g in enumerate(step.gradients))
    assert measurement(gradients=whole).increments() == pytest.approx(step.increments())
    assert len(step.increments()) == LAYERS
    assert step.num_bytes == 4 * LAYERS * NUMEL


@pytest.mark.parametrize("broken", [{"gradients": ()}, {"forward_s": -1.0}, {"backward_s": float("nan")}])
def test_measurement_refuses_impossible_values(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got"):
        measurement(**broken)
