"""The simulation, compared with steps that were computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.advisor.simulate import BucketWork, Program, StageWork, simulate
from tests.advisor.steps import network


def program(buckets: int, *, cpu_s: float = 0.0, sent: float = 100.0, finish_s: float = 0.0, **more: Any) -> Program:
    work = BucketWork((StageWork(cpu_s, sent),), finish_s)
    backward = tuple((1.0, (at,)) for at in range(buckets))
    return Program(2.0, backward, (work,) * buckets, 0.5, **more)


def test_simulate_fast_wire_exposes_the_last_bucket_only() -> None:
    step = simulate(program(4), network(200.0))  # half a second a bucket, a second between two of them
    assert step.exposed_s == pytest.approx(0.5)
    assert step.step_s == pytest.approx(2 + 4 + 0.5 + 0.5)


def test_simulate_slow_wire_determines_the_step() -> None:
    step = simulate(program(4), network(50.0))  # two seconds a bucket, from the first gradient on
    assert step.step_s == pytest.approx(2 + 1 + 4 * 2 + 0.5)
    assert step.wire_s == pytest.approx(8)


def test_simulate_encodes_within_backward_and_decodes_after_it() -> None:
    step = simulate(program(4, cpu_s=0.25, finish_s=0.125, sent=0.0), network())
    assert step.step_s == pytest.approx(2 + 4 + 4 * 0.25 + 4 * 0.125 + 0.5)
    assert step.work_s == pytest.approx(1.5)


def test_simulate_decodes_while_later_buckets_are_in_flight() -> None:
    step = simulate(program(2, finish_s=0.5), network(50.0))
    # on the wire from 3 to 5 and from 5 to 7; the first is decoded from 5 to 5.5, the second from 7 to 7.5
    assert step.step_s == pytest.approx(8.0)


def test_simulate_transport_and_compute_slow_each_other() -> None:
    busy = network(100.0, busy_bytes_per_s=50.0).__class__(
        **{**network(100.0).as_dict(), "busy_bytes_per_s": 50.0, "cpu_s_per_byte": 0.01}
    )
    work = (BucketWork((StageWork(0.0, 100.0),)), BucketWork((StageWork(0.0, 0.0),)))
    # 100 bytes at 50 a second: for two seconds half of the core is the transport's
    step = simulate(Program(0.0, ((0.0, (0,)), (2.0, (1,))), work, 0.0), busy)
    assert step.step_s == pytest.approx(2 + 2 * 0.5)


def test_simulate_16_bit_sums_take_longer() -> None:
    slow = network(100.0, half_s_per_byte=0.01)  # as long again as the wire takes
    for half, expected in ((False, 1.0), (True, 2.0)):
        work = (BucketWork((StageWork(0.0, 100.0, half=half),)),)
        assert simulate(Program(0.0, ((0.0, (0,)),), work, 0.0), slow).step_s == pytest.approx(expected)


def test_simulate_burst_is_refilled_in_a_pause() -> None:
    burst = network(100.0, burst_bytes=60.0)
    one = BucketWork((StageWork(0.0, 100.0),))
    step = simulate(Program(0.0, ((0.0, (0,)),), (one,), 0.0), burst)
    assert step.step_s == pytest.approx(0.4)
    # the second is ready a second after the first is through: the bucket is full again
    step = simulate(Program(0.0, ((0.0, (0,)), (1.4, (1,))), (one, one), 0.0), burst)
    assert step.exposed_s == pytest.approx(0.4)


def test_simulate_latency_counts_once_for_queued_collectives() -> None:
    late = network(100.0, call_s=0.2, busy_call_s=0.2)
    both = (BucketWork((StageWork(0.0, 100.0),)),) * 3
    step = simulate(Program(0.0, ((0.0, (0, 1, 2)),), both, 0.0), late)
    assert step.step_s == pytest.approx(3.2)


def test_simulate_latency_counts_per_round() -> None:
    far = network(100.0)
    far = far.__class__(**{**far.as_dict(), "latency_s": 0.01})
    work = (BucketWork((StageWork(0.0, 100.0, rounds=14),)),)
    assert simulate(Program(0.0, ((0.0, (0,)),), work, 0.0), far).step_s == pytest.approx(1.12)


@pytest.mark.parametrize(("spare", "expected"), [(True, 1 + 1 + 1), (False, 1 + 1 + 1.5)])
def test_simulate_background_thread_with_and_without_a_spare_core(spare: bool, expected: float) -> None:
    """Bucket 0 is ready after a second and takes half a second of work before, and half a second after its wire."""
    work = (BucketWork((StageWork(0.5, 0.0),), 0.5), BucketWork((StageWork(0.0, 0.0),)))
    step = simulate(Program(1.0, ((0.0, (0,)), (2.0, (1,))), work, 0.0, threaded=True, spare_core=spare), network())
    # alone on its core the thread is done within backward; on a shared one it takes its second from backward
    assert step.step_s == pytest.approx(1 + 2 + (0 if spare else 1))
    assert step.step_s == pytest.approx(expected if spare else expected + 0.5)


def test_simulate_runs_stages_one_after_the_other() -> None:
    work = (BucketWork((StageWork(0.1, 100.0), StageWork(0.2, 50.0)), 0.3),)
    step = simulate(Program(0.0, ((0.0, (0,)),), work, 0.0, threaded=True), network(100.0))
    assert step.step_s == pytest.approx(0.1 + 1.0 + 0.2 + 0.5 + 0.3)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.floats(0, 1000), min_size=1, max_size=6),
    works=st.floats(0, 2),
    rate=st.floats(1, 1000),
    threaded=st.booleans(),
)
def test_simulate_step_is_within_its_bounds(sizes: list[float], works: float, rate: float, threaded: bool) -> None:
    buckets = tuple(
        BucketWork((StageWork(works, size), StageWork(works, size)) if threaded else (StageWork(works, size),), works)
        for size in sizes
    )
    backward = tuple((0.5, (at,)) for at in range(len(sizes)))
    step = simulate(Program(1.0, backward, buckets, 0.25, threaded=threaded), network(rate))
    compute = 1.25 + 0.5 * len(sizes)
    stages = 2 if threaded else 1
    work, wire = works * (stages + 1) * len(sizes), stages * sum(sizes) / rate
    assert step.step_s >= max(compute, wire) - 1e-6
    assert step.step_s <= compute + work + wire + 1e-6
    assert step.work_s == pytest.approx(work)
    assert step == simulate(Program(1.0, backward, buckets, 0.25, threaded=threaded), network(rate)), "deterministic"
