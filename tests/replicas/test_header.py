"""The step header: what its two all-reduces give on all ranks, and when the headers themselves are gathered."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.base import Work
from gradsync.replicas.header import (
    BUSY_SLOTS,
    NO_TIMING,
    UNKNOWN_STEPS,
    Header,
    HeaderExchange,
    HeadersDiffer,
    PreviousStepTiming,
    StepHeaders,
    StepTimings,
    find_odd_rank,
    reduced_sizes,
)
from gradsync.strategies.allreduce import header_bytes
from gradsync.testing import run_ranks
from gradsync.testing.threads import Threads
from tests.support.models import build

USUAL = Header(step=4, weight=8.0, num_backwards=1, fingerprint=77, has_data=True, num_steps=1, epoch=0, position=32)
IDLE = Header(step=4, weight=0.0, num_backwards=0, fingerprint=77, has_data=False, num_steps=0, hyperparameters=9)


def exchange(*headers: Header) -> StepHeaders:
    """What the exchange of these headers gives; the same on all ranks."""
    found = run_ranks(len(headers), lambda comm: HeaderExchange(headers[comm.rank], comm).wait())
    assert all(each == found[0] for each in found)
    return found[0]


def difference(*headers: Header) -> HeadersDiffer:
    """The error that the exchange of these headers raises; the same on all ranks."""

    def run(comm: Communicator) -> HeadersDiffer:
        begun = HeaderExchange(headers[comm.rank], comm)
        with pytest.raises(HeadersDiffer) as raised:
            begun.wait()
        with pytest.raises(HeadersDiffer) as again:  # without another collective
            begun.wait()
        assert again.value is raised.value
        return raised.value

    found = run_ranks(len(headers), run)
    assert len({str(each) for each in found}) == 1
    return found[0]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often ranks have called these collectives, and made a header from values of another rank."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                counts[name] += 1
            return original(*args, **kwargs)

        return call

    for name in ("all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter"):
        monkeypatch.setattr(Threads, name, counted(name, getattr(Threads, name)))
    monkeypatch.setattr(Header, "unpack", staticmethod(counted("unpack", Header.unpack)))
    return counts


# -- what a step learns -----------------------------------------------------------------------------------------------


def test_step_headers_are_sums_and_extremes() -> None:
    headers = exchange(
        replace(IDLE, checksum=1.0),
        replace(USUAL, weight=0.25, num_backwards=3, wants_change=True),
        replace(USUAL, weight=3.0, buffers_changed=True),
    )
    assert headers == StepHeaders(
        world_size=3,
        total_weight=3.25,
        num_backwards=3,
        num_backwards_differ=True,
        num_with_data=2,
        leader=1,
        buffers_changed=True,
        change_wanted=True,
        same_gradients=False,
        timings=None,
    )
    assert headers.any_have_data
    assert not headers.all_have_data


def test_step_headers_of_ranks_without_data_compare_only_plan_and_step() -> None:
    headers = exchange(replace(IDLE, num_backwards=1, weight=2.0), replace(IDLE, hyperparameters=5, loss_scale=3.0))
    assert not headers.any_have_data
    assert headers.leader == 0
    assert headers.total_weight == 2.0
    assert headers.num_backwards_differ
    assert not exchange(IDLE, IDLE).num_backwards_differ
    assert exchange(USUAL, USUAL).all_have_data


def test_step_headers_of_one_rank() -> None:
    headers = exchange(replace(USUAL, checksum=2.0, loss_scale=math.nan))
    assert (headers.total_weight, headers.leader, headers.all_have_data) == (8.0, 0, True)
    assert not headers.same_gradients  # with whom?


@pytest.mark.parametrize(
    ("checksums", "same"),
    [
        ((2.5, 2.5, 2.5), True),
        ((-2.5, -2.5, -2.5), True),
        ((2.5, 2.5, 2.25), False),
        ((0.0, -0.0, 0.0), False),  # all zero
        ((math.inf, math.inf, math.inf), True),
        ((math.inf, -math.inf, math.inf), False),
        ((math.nan, math.nan, math.nan), False),
        ((math.nan, 1.0, 1.0), False),
        ((1.0, 1.0, math.nan), False),
    ],
)
def test_step_headers_compare_checksums(checksums: tuple[float, ...], same: bool) -> None:
    assert exchange(*(replace(USUAL, checksum=checksum) for checksum in checksums)).same_gradients == same


def test_exchange_sends_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transports differ in what the maximum of NaN and a number is."""
    sent: list[torch.Tensor] = []
    original = Threads.all_reduce

    def all_reduce(self: Threads, tensor: torch.Tensor, **options: Any) -> Work:
        sent.append(tensor.clone())
        return original(self, tensor, **options)

    monkeypatch.setattr(Threads, "all_reduce", all_reduce)
    exchange(replace(USUAL, checksum=math.nan), replace(USUAL, checksum=1.0))
    assert len(sent) == 4
    assert not any(tensor.isnan().any() for tensor in sent)


def test_step_timings_are_the_latest_marks_and_all_busy_times() -> None:
    timings = [PreviousStepTiming(3, 10.0, 50.0, 0.1), PreviousStepTiming(3, 20.0, 40.0, 0.7)]
    headers = exchange(*(replace(USUAL, previous_step=timing) for timing in timings))
    assert headers.timings == StepTimings(step=3, last_opened_us=20.0, last_begun_us=50.0, busy_us={0: 0.1, 1: 0.7})
    assert exchange(replace(USUAL, previous_step=timings[0]), replace(USUAL, previous_step=NO_TIMING)).timings is None
    assert exchange(replace(USUAL, previous_step=timings[0]._replace(step=2)), USUAL).timings is None


@pytest.mark.parametrize("world_size", [16, 17, 40])
def test_step_timings_bring_every_ranks_busy_time_in_turn(world_size: int) -> None:
    def run(comm: Communicator) -> list[StepHeaders]:
        headers = []
        for step in range(3):
            timing = PreviousStepTiming(step, 0.0, 0.0, busy_us=100.0 * step + comm.rank)
            headers.append(HeaderExchange(replace(USUAL, step=step, previous_step=timing), comm).wait())
        return headers

    found = run_ranks(world_size, run)
    assert all(each == found[0] for each in found)
    known: set[int] = set()
    for step, headers in enumerate(found[0]):
        assert headers.timings is not None
        assert len(headers.timings.busy_us) == min(world_size, BUSY_SLOTS)
        assert headers.timings.busy_us == {rank: 100.0 * step + rank for rank in headers.timings.busy_us}
        known |= set(headers.timings.busy_us)
    assert known == set(range(world_size))


# -- ranks that are out of step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"fingerprint": -77}, "bucket plan"),
        ({"step": 5}, "number of synchronizing backwards"),
        ({"epoch": 1}, "batch"),
        ({"position": 40}, "batch"),
        ({"num_steps": 0}, "number of calls of optimizer.step() since the last synchronizing backward"),
        ({"hyperparameters": 1}, "optimizer's hyperparameters"),
        ({"loss_scale": math.inf}, "GradScaler scale"),
        ({"loss_scale": 0.5}, "GradScaler scale"),
        ({"loss_scale": math.nan}, "GradScaler scale"),
    ],
)
@pytest.mark.parametrize("odd", [0, 2])
def test_exchange_names_the_rank_and_value_that_differ(changed: dict[str, Any], what: str, odd: int) -> None:
    headers = [replace(USUAL, **changed) if rank == odd else USUAL for rank in range(3)]
    differ = difference(*headers)
    expected = find_odd_rank(headers)
    assert expected is not None
    assert (differ.what, differ.rank, str(differ)) == (what, odd, str(expected))
    assert f"rank {odd} is out of step: its {what} is " in str(differ)


def test_exchange_compares_only_known_numbers_of_steps_of_ranks_with_data() -> None:
    assert exchange(replace(USUAL, num_steps=3), replace(USUAL, num_steps=UNKNOWN_STEPS)).all_have_data
    assert exchange(USUAL, replace(IDLE, num_steps=5, loss_scale=2.0, epoch=3)).num_with_data == 1
    assert difference(USUAL, replace(USUAL, num_steps=2), IDLE).what.startswith("number of calls")
    assert difference(USUAL, replace(IDLE, fingerprint=1)).what == "bucket plan"


def test_exchange_polls_without_blocking() -> None:
    both_polled = threading.Barrier(2)

    def run(comm: Communicator) -> tuple[StepHeaders | None, StepHeaders | None]:
        if comm.rank == 1:
            both_polled.wait()
            return HeaderExchange(USUAL, comm).wait(), None
        begun = HeaderExchange(USUAL, comm)
        early = begun.poll()
        both_polled.wait()
        begun.wait()
        return early, begun.poll()

    (early, late), (other, _) = run_ranks(2, run)
    assert early is None
    assert late == other is not None


# -- the cost ---------------------------------------------------------------------------------------------------------


def test_exchange_gathers_headers_only_where_they_differ(calls: Counter[str]) -> None:
    num_ranks = 48
    exchange(*[USUAL] * num_ranks)
    assert calls == {"all_reduce": 2 * num_ranks}
    calls.clear()
    difference(*[USUAL] * (num_ranks - 1), replace(USUAL, step=9))
    assert calls == {"all_reduce": 2 * num_ranks, "all_gather": num_ranks, "unpack": num_ranks**2}


def test_exchange_sends_no_more_in_a_larger_world(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    original = Threads.all_reduce

    def all_reduce(self: Threads, tensor: torch.Tensor, **options: Any) -> Work:
        sent.append((self.world_size, tensor.nbytes))
        return original(self, tensor, **options)

    monkeypatch.setattr(Threads, "all_reduce", all_reduce)
    for world_size in (16, 64):
        exchange(*[USUAL] * world_size)
        sizes = {num_bytes for ranks, num_bytes in sent if ranks == world_size}
        assert sizes == {8 * numel for numel in reduced_sizes(16)}
    assert header_bytes(2) == 8 * sum(reduced_sizes(2))
    assert header_bytes(1024) < 2 * 8 * sum(reduced_sizes(16))


def test_healthy_steps_gather_no_header(calls: Counter[str]) -> None:
    num_ranks, steps = 8, 3

    def train(comm: Communicator) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, comm=comm):
            for step in range(2 + steps):
                comm.barrier()
                if step == 2 and comm.rank == 0:  # the first steps plan the buckets
                    calls.clear()
                comm.barrier()
                optimizer.zero_grad()
                model(torch.full((1, 4), float(comm.rank))).sum().backward()
                optimizer.step()
            comm.barrier()

    run_ranks(num_ranks, train)
    assert calls["all_gather"] == calls["unpack"] == 0
    assert calls["all_reduce"] >= (2 + 1) * num_ranks * steps  # two of the header, one or more of buckets
