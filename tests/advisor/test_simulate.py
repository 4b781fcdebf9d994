"""The simulation against steps that were reckoned by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.advisor.simulate import BucketWork, Program, Stage, simulate
from tests.advisor.steps import network


def program(buckets: int, *, cpu_s: float = 0.0, sent: float = 100.0, finish_s: float = 0.0, **more: Any) -> Program:
    work = BucketWork((Stage(cpu_s, sent),), finish_s)
    backward = tuple((1.0, (at,)) for at in range(buckets))
    return Program(2.0, backward, (work,) * buckets, 0.5, **more)


def test_a_wire_faster_than_backward_shows_the_last_bucket_only() -> None:
    step = simulate(program(4), network(200.0))  # half a second a bucket, a second between two of them
    assert step.exposed_s == pytest.approx(0.5)
    assert step.step_s == pytest.approx(2 + 4 + 0.5 + 0.5)


def test_a_wire_slower_than_backward_is_what_the_step_waits_for() -> None:
    step = simulate(program(4), network(50.0))  # two seconds a bucket, from the first gradient on
    assert step.step_s == pytest.approx(2 + 1 + 4 * 2 + 0.5)
    assert step.wire_s == pytest.approx(8)


def test_encoding_holds_backward_up_and_decoding_comes_after_it() -> None:
    step = simulate(program(4, cpu_s=0.25, finish_s=0.125, sent=0.0), network())
    assert step.step_s == pytest.approx(2 + 4 + 4 * 0.25 + 4 * 0.125 + 0.5)
    assert step.work_s == pytest.approx(1.5)


def test_decoding_what_has_come_hides_behind_what_is_still_under_way() -> None:
    step = simulate(program(2, finish_s=0.5), network(50.0))
    # on the wire from 3 to 5 and from 5 to 7; the first is decoded from 5 to 5.5, the second from 7 to 7.5
    assert step.step_s == pytest.approx(8.0)


def test_the_transport_takes_from_who_computes_and_is_slower_meanwhile() -> None:
    busy = network(100.0, busy_bytes_per_s=50.0).__class__(
        **{**network(100.0).as_dict(), "busy_bytes_per_s": 50.0, "cpu_s_per_byte": 0.01}
    )
    work = (BucketWork((Stage(0.0, 100.0),)), BucketWork((Stage(0.0, 0.0),)))
    # 100 bytes at 50 a second: for two seconds half of the core is the transport's
    step = simulate(Program(0.0, ((0.0, (0,)), (2.0, (1,))), work, 0.0), busy)
    assert step.step_s == pytest.approx(2 + 2 * 0.5)


def test_sums_of_16_bits_take_the_transport_longer() -> None:
    slow = network(100.0, half_s_per_byte=0.01)  # as long again as the wire takes
    for half, expected in ((False, 1.0), (True, 2.0)):
        work = (BucketWork((Stage(0.0, 100.0, half=half),)),)
        assert simulate(Program(0.0, ((0.0, (0,)),), work, 0.0), slow).step_s == pytest.approx(expected)


def test_a_burst_goes_through_at_once_and_is_saved_up_again_in_a_pause() -> None:
    burst = network(100.0, burst_bytes=60.0)
    one = BucketWork((Stage(0.0, 100.0),))
    step = simulate(Program(0.0, ((0.0, (0,)),), (one,), 0.0), burst)
    assert step.step_s == pytest.approx(0.4)
    # the second is ready a second after the first is through: the bucket is full again
    step = simulate(Program(0.0, ((0.0, (0,)), (1.4, (1,))), (one, one), 0.0), burst)
    assert step.exposed_s == pytest.approx(0.4)


def test_latency_counts_once_where_collectives_follow_each_other() -> None:
    late = network(100.0, call_s=0.2, busy_call_s=0.2)
    both = (BucketWork((Stage(0.0, 100.0),)),) * 3
    step = simulate(Program(0.0, ((0.0, (0, 1, 2)),), both, 0.0), late)
    assert step.step_s == pytest.approx(3.2)


def test_rings_of_many_ranks_take_a_latency_a_round() -> None:
    far = network(100.0)
    far = far.__class__(**{**far.as_dict(), "latency_s": 0.01})
    work = (BucketWork((Stage(0.0, 100.0, rounds=14),)),)
    assert simulate(Program(0.0, ((0.0, (0,)),), work, 0.0), far).step_s == pytest.approx(1.12)


@pytest.mark.parametrize(("spare", "expected"), [(True, 1 + 1 + 1), (False, 1 + 1 + 1.5)])
def test_a_drivers_thread_shares_the_core_or_has_one(spare: bool, expected: float) -> None:
    """Bucket 0 is ready after a second and takes half a second of work before, and half a second after its wire."""
    work = (BucketWork((Stage(0.5, 0.0),), 0.5), BucketWork((Stage(0.0, 0.0),)))
    step = simulate(Program(1.0, ((0.0, (0,)), (2.0, (1,))), work, 0.0, threaded=True, spare_core=spare), network())
    # alone on its core the thread is done within backward; on a shared one it takes its second from backward
    assert step.step_s == pytest.approx(1 + 2 + (0 if spare else 1))
    assert step.step_s == pytest.approx(expected if spare else expected + 0.5)


def test_stages_of_a_bucket_follow_each_other_on_the_wire() -> None:
    work = (BucketWork((Stage(0.1, 100.0), Stage(0.2, 50.0)), 0.3),)
    step = simulate(Program(0.0, ((0.0, (0,)),), work, 0.0, threaded=True), network(100.0))
    assert step.step_s == pytest.approx(0.1 + 1.0 + 0.2 + 0.5 + 0.3)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.floats(0, 1000), min_size=1, max_size=6),
    works=st.floats(0, 2),
    rate=st.floats(1, 1000),
    threaded=st.booleans(),
)
def test_a_step_is_never_shorter_than_what_it_must_do_nor_longer_than_all_of_it(
    sizes: list[float], works: float, rate: float, threaded: bool
) -> None:
    buckets = tuple(
        BucketWork((Stage(works, size), Stage(works, size)) if threaded else (Stage(works, size),), works)
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
