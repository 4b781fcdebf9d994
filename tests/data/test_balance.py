"""``shard(..., balance=True)``: a slow rank gets less of every step, and nothing else changes."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradsync
from gradsync.comm.base import Communicator, Solo
from gradsync.comm.connect import connect
from gradsync.data import ShardedLoader, balance, shard
from gradsync.data.balance import Balance
from gradsync.data.order import BatchSplit, even_part, split_by_speed
from gradsync.errors import OutOfStep
from gradsync.replicas.batch_context import batch_source
from gradsync.testing.threads import run_ranks
from tests.data.test_shard import Stream, joined, steps_of
from tests.support.ranks import run_processes

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(130, 3, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randn(130, 2, generator=GENERATOR, dtype=torch.float64)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


# -- how a step is cut --------------------------------------------------------------------------------------------

SPEEDS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=4).map(tuple)


@settings(max_examples=100, deadline=None)
@given(num_samples=st.integers(0, 12), speeds=SPEEDS)
def test_split_by_speed_ends_earliest(num_samples: int, speeds: tuple[float, ...]) -> None:
    parts = split_by_speed(num_samples, speeds)
    assert sum(parts) == num_samples
    least = 1 if num_samples >= len(speeds) else 0
    assert min(parts) >= least

    def lasts(cut: tuple[int, ...]) -> float:
        return max(num / speed for num, speed in zip(cut, speeds, strict=True))

    all_cuts = itertools.product(range(least, num_samples + 1), repeat=len(speeds))
    assert lasts(parts) == min(lasts(cut) for cut in all_cuts if sum(cut) == num_samples)


@given(num_samples=st.integers(0, 5000), speeds=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40).map(tuple))
@settings(max_examples=100, deadline=None)
def test_split_by_speed_gives_every_sample_away(num_samples: int, speeds: tuple[float, ...]) -> None:
    parts = split_by_speed(num_samples, speeds)
    assert sum(parts) == num_samples
    assert min(parts) >= (1 if num_samples >= len(speeds) else 0)


@given(num_samples=st.integers(0, 500), world_size=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_split_by_speed_with_equal_speeds_is_even(num_samples: int, world_size: int) -> None:
    even = [even_part(num_samples, world_size, rank) for rank in range(world_size)]
    parts = split_by_speed(num_samples, (1.0 / world_size,) * world_size)
    assert list(parts) == [part.stop - part.start for part in even]


# -- with a clock of our own --------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """A clock for each thread, which advances only when the test sets ``clock.now_s``."""
    fake = threading.local()
    monkeypatch.setattr(balance, "time", SimpleNamespace(perf_counter=lambda: getattr(fake, "now_s", 0.0)))
    return fake


def walk(
    shares: Balance, clock: threading.local, num_steps: int, *, seconds: float, waited: float = 0.0, ahead: int = 0
) -> list[tuple[int, int]]:
    """Act as a loader of steps of 32 that cuts ``ahead`` steps in advance; returns this rank's (start, end) of each."""
    first = shares.next_step
    drawn = [shares.own(first + step, 32) for step in range(ahead)]
    for step in range(num_steps):
        shares.ask()
        drawn.append(shares.own(first + step + ahead, 32))
        part = shares.own(first + step, 32)
        assert part == drawn[step], "parts that were cut in advance do not change"
        shares.hand_out(part.stop - part.start)
        clock.now_s = getattr(clock, "now_s", 0.0) + seconds * (part.stop - part.start) + waited
        shares._source.waited_s += waited
    return [(part.start, part.stop) for part in drawn[:num_steps]]


def cut_of(comm: Communicator) -> BatchSplit:
    return BatchSplit(global_batch_size=32, world_size=comm.world_size, rank=comm.rank, drop_last=False)


@pytest.mark.parametrize("ahead", [(0, 0, 0), (0, 4, 1)])
def test_balance_follows_speeds_and_keeps_steps_whole(ahead: tuple[int, ...], clock: threading.local) -> None:
    """Also when the ranks' loaders cut different numbers of steps ahead."""

    def rank(comm: Communicator) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
        shares = Balance(cut_of(comm), comm, num_ahead=ahead[comm.rank])
        seconds = (1.0, 1.0, 4.0)[comm.rank]
        parts = walk(shares, clock, 40, seconds=seconds, ahead=ahead[comm.rank])
        parts += walk(shares, clock, 25, seconds=seconds, ahead=ahead[comm.rank])  # another epoch
        return parts, shares.parts()

    results = run_ranks(3, rank)
    for cuts in zip(*(parts for parts, _ in results), strict=True):
        assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])], "no gap and nothing twice"
        assert cuts[-1][1] == 32
    assert results[0][0][0] == (0, 11), "even at first"
    assert {last_parts for _, last_parts in results} == {(15, 14, 3)}


def test_balance_does_not_count_waiting_as_work(clock: threading.local) -> None:
    """All take equally long for a step, as in synchronous training: two of them because they wait for the third."""

    def rank(comm: Communicator) -> tuple[int, ...]:
        shares = Balance(cut_of(comm), comm, num_ahead=0)
        for _ in range(12):
            own = shares.own(shares.next_step, 32)
            work = (1.0, 1.0, 4.0)[comm.rank] * (own.stop - own.start)
            walk(shares, clock, 1, seconds=0.0, waited=100.0)
            clock.now_s += work
        return shares.parts()

    assert run_ranks(3, rank) == [(15, 14, 3)] * 3


def test_balance_ignores_small_differences(clock: threading.local) -> None:
    def rank(comm: Communicator) -> tuple[int, ...]:
        shares = Balance(cut_of(comm), comm, num_ahead=0)
        walk(shares, clock, 60, seconds=(1.0, 1.07)[comm.rank])
        return shares.parts()

    assert run_ranks(2, rank) == [(16, 16)] * 2


def test_balance_ignores_one_slow_step_and_follows_a_slow_rank(clock: threading.local) -> None:
    def rank(comm: Communicator) -> list[tuple[int, ...]]:
        shares = Balance(cut_of(comm), comm, num_ahead=0)
        seen = []
        for seconds in (1.0, 50.0 if comm.rank else 1.0, 1.0):  # a page fault, a checkpoint
            walk(shares, clock, 5 if seconds == 1.0 else 1, seconds=seconds)
        seen.append(shares.parts())
        for _ in range(4):
            walk(shares, clock, 9, seconds=3.0 if comm.rank else 1.0)
            seen.append(shares.parts())
        return seen

    seen = run_ranks(2, rank)[0]
    assert seen[0] == (16, 16)
    assert seen[1][1] > seen[2][1] > 8, "by half at a time"
    assert seen[-1] == (24, 8)


def test_balance_finds_ranks_that_leave_a_loop_at_different_steps(clock: threading.local) -> None:
    def rank(comm: Communicator) -> None:
        shares = Balance(cut_of(comm), comm, num_ahead=comm.rank)
        shares._period += comm.rank  # as if rank 1 had been handed another number of steps
        walk(shares, clock, 30, seconds=1.0, ahead=comm.rank)

    with pytest.raises(OutOfStep, match="Leave its loops at the same step"):
        run_ranks(2, rank, timeout_s=5.0)


# -- the loader ---------------------------------------------------------------------------------------------------


def with_shares(loader: ShardedLoader, shares: list[float]) -> ShardedLoader:
    loader.load_state_dict({**loader.state_dict(), "shares": shares})
    return loader


@settings(max_examples=25, deadline=None)
@given(
    shares=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=4),
    num_samples=st.integers(1, 70),
    more=st.integers(1, 9),
    as_stream=st.booleans(),
)
def test_balance_keeps_the_samples_of_every_step(
    shares: list[float], num_samples: int, more: int, as_stream: bool
) -> None:
    size = len(shares) + more
    data: Any = Stream(num_samples) if as_stream else range(num_samples)
    alone = steps_of(shard(data, global_batch_size=size, seed=4, comm=Solo()))

    def rank(comm: Communicator) -> list[list[int]]:
        loader = shard(data, global_batch_size=size, seed=4, balance=True, comm=comm)
        return steps_of(with_shares(loader, shares))

    assert joined(run_ranks(len(shares), rank)) == alone


def test_balance_resumes_with_the_same_shares() -> None:
    shares = [0.5, 0.375, 0.125]

    def before(comm: Communicator) -> dict[str, Any]:
        loader = with_shares(shard(range(50), global_batch_size=16, balance=True, comm=comm), shares)
        batches = iter(loader)
        assert [len(next(batches)) for _ in range(2)] == [(8, 6, 2)[comm.rank]] * 2
        return loader.state_dict()

    states = run_ranks(3, before)
    assert states[0] == states[1] == states[2]
    assert states[0]["position"] == 32
    assert states[0]["shares"] == shares

    def after(comm: Communicator) -> tuple[tuple[int, ...], list[list[int]]]:
        loader = shard(range(50), global_batch_size=16, balance=True, comm=comm)
        loader.load_state_dict(states[0])
        return loader.parts, [batch.tolist() for batch in loader]

    alone = steps_of(shard(range(50), global_batch_size=16, comm=Solo()))
    for num_ranks, parts in ((3, (8, 6, 2)), (4, (4, 4, 4, 4)), (1, (16,))):
        results = run_ranks(num_ranks, after)
        assert {resumed for resumed, _ in results} == {parts}, "parts of another number of ranks are ignored"
        assert joined([steps for _, steps in results]) == alone[2:]


def test_balance_refuses_what_it_can_not_balance() -> None:
    def small(comm: Communicator) -> None:
        shard(range(50), batch_size=1, balance=True, comm=comm)

    with pytest.raises(ValueError, match="larger batch size"):
        run_ranks(2, small)
    with pytest.raises(ValueError, match="num_workers must be 0 for an IterableDataset with balance=True"):
        shard(Stream(9), batch_size=4, balance=True, num_workers=1, comm=Solo())

    def bad_state(comm: Communicator) -> None:
        with_shares(shard(range(50), batch_size=4, balance=True, comm=comm), [0.5, -0.5])

    with pytest.raises(ValueError, match=r"shares above 0; got \[0.5, -0.5\]"):
        run_ranks(2, bad_state)

    def unseen(comm: Communicator) -> None:
        batch_source(comm).wait_unseen_on = "cuda"
        next(iter(shard(range(50), batch_size=4, balance=True, comm=comm)))

    with pytest.raises(ValueError, match="model is on 'cuda', where the host does not wait"):
        run_ranks(2, unseen)


# -- training -----------------------------------------------------------------------------------------------------


def train(
    comm: Communicator,
    *,
    shares: list[float] | None = None,
    naps_s: tuple[float, ...] = (0.0,) * 4,
    accumulate: int = 1,
    num_epochs: int = 2,
    normalized: bool = True,
    strategy: str = "allreduce",
    **options: Any,
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Train, with a nap for each sample; returns the model's tensors and what the ranks have in a step at last."""
    model = copy.deepcopy(MODEL)
    if normalized:
        gradsync.SyncBatchNorm.convert(model, comm)
    else:
        model[1] = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = shard((INPUTS, LABELS), global_batch_size=16, seed=5, comm=comm, **options)
    if shares is not None:
        with_shares(loader, shares)
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, accumulate=accumulate):
        for _ in range(num_epochs):
            for inputs, labels in loader:
                time.sleep(naps_s[comm.rank] * len(inputs))
                (model(inputs) - labels).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [value.detach().clone() for value in model.state_dict().values()], loader.parts


def assert_as_one(results: list[tuple[list[Tensor], tuple[int, ...]]], expected: list[Tensor]) -> None:
    for tensors, _ in results:
        for one, other, first in zip(tensors, expected, results[0][0], strict=True):
            assert (one.double() - other.double()).norm() <= 1e-9 * other.double().norm().clamp(min=1e-3)
            assert torch.equal(one, first), "bitwise equal"


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("shares", [[0.9, 0.1], [0.05, 0.6, 0.35], [0.01, 0.01, 0.01, 0.97]])
def test_balance_with_unequal_parts_trains_as_one_process(shares: list[float], accumulate: int) -> None:
    """130 samples in steps of 16: the last has 2, fewer than some worlds have ranks."""
    expected, _ = train(Solo(), accumulate=accumulate)

    def rank(comm: Communicator) -> tuple[list[Tensor], tuple[int, ...]]:
        return train(comm, shares=shares, accumulate=accumulate, balance=True)

    assert_as_one(run_ranks(len(shares), rank, timeout_s=20.0), expected)


@pytest.mark.parametrize("normalized", [False, True])
def test_balance_gives_a_slow_rank_less_and_trains_as_one_process(normalized: bool) -> None:
    """The fast ranks wait for the slow one, in the all-reduce or in SyncBatchNorm: that must not look like work."""
    expected, _ = train(Solo(), normalized=normalized)

    def rank(comm: Communicator) -> tuple[list[Tensor], tuple[int, ...]]:
        return train(comm, naps_s=(0.001, 0.001, 0.008), normalized=normalized, balance=True)

    results = run_ranks(3, rank, timeout_s=20.0)
    assert_as_one(results, expected)
    parts = {last_parts for _, last_parts in results}
    assert len(parts) == 1, "all ranks agree"
    assert parts.pop()[2] <= 2, "8 times slower: 1 sample of 16, where even shares were 5"


def test_balance_does_not_count_waits_around_the_step() -> None:
    """Local SGD waits for the slow rank after the optimizer's step, here after each."""

    def rank(comm: Communicator) -> tuple[int, ...]:
        naps_s = (0.001, 0.001, 0.008)
        return train(comm, naps_s=naps_s, normalized=False, strategy="local_sgd(every=1)", balance=True)[1]

    parts = run_ranks(3, rank, timeout_s=20.0)
    assert len(set(parts)) == 1
    assert parts[0][2] <= 2


def _train_connected(naps_s: tuple[float, ...], state: dict[str, Tensor]) -> tuple[list[Tensor], tuple[int, ...]]:
    MODEL.load_state_dict(state)  # this process made another one as it was imported
    return train(connect(timeout_s=20.0), naps_s=naps_s, balance=True, num_workers=1, persistent_workers=True)


def test_balance_in_processes_with_loader_workers() -> None:
    expected, _ = train(Solo())
    results = run_processes(2, _train_connected, (0.001, 0.008), MODEL.state_dict())
    assert_as_one(results, expected)
    assert results[0][1] == results[1][1]
    assert results[0][1][1] <= 4, "8 times slower: 1 or 2 samples of 16, where even shares were 8"
