"""The sharded loader: every sample to one rank, one order at any number of ranks, resumed to the sample."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from gradsync.comm.base import Communicator, Solo
from gradsync.data import ShardedLoader, shard
from gradsync.replicas.batch_context import batch_source
from gradsync.testing.threads import run_ranks

Steps = list[list[int]]


class Stream(IterableDataset[int]):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))


def steps_of(loader: ShardedLoader) -> Steps:
    return [batch.tolist() for batch in loader]


def joined(parts: list[Steps]) -> Steps:
    """The ranks' parts of each step put together again, in rank order."""
    return [[index for part in step for index in part] for step in itertools.zip_longest(*parts, fillvalue=[])]


def epoch_at(num_ranks: int, data: Any, state: dict[str, Any] | None = None, **options: Any) -> Steps:
    """The joined steps of one epoch on some number of ranks."""

    def rank(comm: Communicator) -> Steps:
        loader = shard(data, comm=comm, **options)
        if state is not None:
            loader.load_state_dict(state)
        return steps_of(loader)

    return joined(run_ranks(num_ranks, rank))


# -- the order ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 60),
    num_ranks=st.integers(1, 5),
    more=st.integers(0, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**40),
    as_stream=st.booleans(),
)
def test_shard_gives_the_same_steps_at_any_world_size(
    num_samples: int, num_ranks: int, more: int, shuffle: bool, drop_last: bool, seed: int, as_stream: bool
) -> None:
    size = num_ranks + more
    if drop_last and num_samples < size:
        drop_last = False
    data: Any = Stream(num_samples) if as_stream else range(num_samples)
    options: Any = {
        "global_batch_size": size,
        "shuffle": shuffle and not as_stream,
        "seed": seed,
        "drop_last": drop_last,
    }
    alone = steps_of(shard(data, comm=Solo(), **options))
    assert epoch_at(num_ranks, data, **options) == alone
    used = list(itertools.chain(*alone))
    assert len(set(used)) == len(used) == (num_samples // size * size if drop_last else num_samples)
    assert all(len(step) == size for step in alone[:-1])


@settings(max_examples=60, deadline=None)
@given(num_samples=st.integers(1, 40), ranks=st.integers(1, 5), per_rank=st.integers(1, 4))
def test_shard_splits_a_step_evenly_and_contiguously(num_samples: int, ranks: int, per_rank: int) -> None:
    whole = steps_of(shard(range(num_samples), global_batch_size=ranks * per_rank, comm=Solo()))
    parts = run_ranks(ranks, lambda comm: steps_of(shard(range(num_samples), batch_size=per_rank, comm=comm)))
    assert joined(parts) == whole
    for step in itertools.zip_longest(*parts, fillvalue=[]):
        sizes = [len(part) for part in step]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


def test_shard_orders_differ_by_epoch_and_seed() -> None:
    def orders(seed: int) -> list[Steps]:
        loader = shard(range(50), batch_size=50, seed=seed, comm=Solo())
        return [steps_of(loader) for _ in range(3)]

    assert orders(0) == orders(0)
    seen = [order for seed in (0, 1, 2) for order in orders(seed)]
    assert all(one != other for one, other in itertools.combinations(seen, 2)), "also (0, epoch 1) and (1, epoch 0)"


def test_shard_has_as_many_steps_on_every_rank() -> None:
    def rank(comm: Communicator) -> tuple[int, int]:
        loader = shard(range(9), batch_size=2, comm=comm)  # the last step has one sample
        return len(loader), len(steps_of(loader))

    assert run_ranks(4, rank) == [(2, 2), (2, 1), (2, 1), (2, 1)]
    assert run_ranks(4, lambda comm: len(shard(range(9), batch_size=2, drop_last=True, comm=comm))) == [1] * 4


# -- the position -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    num_samples=st.integers(1, 40),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    size=st.integers(4, 9),
    other_size=st.integers(4, 9),
    steps=st.integers(0, 12),
    as_stream=st.booleans(),
)
def test_loader_resumed_at_another_world_size_gets_exactly_the_rest(
    num_samples: int, before: int, after: int, size: int, other_size: int, steps: int, as_stream: bool
) -> None:
    data: Any = Stream(num_samples) if as_stream else range(num_samples)

    def begin(comm: Communicator) -> tuple[Steps, dict[str, Any]]:
        loader = shard(data, global_batch_size=size, seed=3, comm=comm)
        with torch.no_grad():
            got = [batch.tolist() for batch in itertools.islice(loader, steps)]
            return got, loader.state_dict()

    parts, states = zip(*run_ranks(before, begin), strict=True)
    state = states[0]
    whole = list(itertools.chain(*steps_of(shard(data, global_batch_size=size, seed=3, comm=Solo()))))
    given_out = list(itertools.chain(*joined(list(parts))))
    if state["epoch"] == 1:  # the loop had come to the end
        assert (state["position"], given_out) == (0, whole)
        return
    assert given_out == whole[: state["position"]]
    rest = epoch_at(after, data, state=state, global_batch_size=other_size, seed=3)
    assert list(itertools.chain(*rest)) == whole[state["position"] :]
    assert all(len(step) == other_size for step in rest[:-1])


def test_loader_begins_the_next_epoch_after_a_resumed_one() -> None:
    loader = shard(range(10), batch_size=4, comm=Solo())
    for _ in itertools.islice(loader, 2):
        pass
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert state == {"version": 1, "epoch": 0, "position": 8, "seed": 0, "shuffle": True, "num_samples": 10}

    resumed = shard(range(10), batch_size=4, comm=Solo())
    resumed.load_state_dict(state)
    assert len(resumed) == 3, "a whole epoch's steps, so that schedules do not move"
    assert len(steps_of(resumed)) == 1
    assert (resumed.epoch, resumed.position) == (1, 0)
    second = shard(range(10), batch_size=4, comm=Solo())
    second.set_epoch(1)
    assert steps_of(resumed) == steps_of(second)


def test_loader_set_epoch_works_as_with_distributed_sampler() -> None:
    loader = shard(range(10), batch_size=5, comm=Solo())
    wanted = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        wanted.append(steps_of(loader))
    plain = shard(range(10), batch_size=5, comm=Solo())
    assert wanted == [steps_of(plain) for _ in range(3)]

    next(iter(loader))
    resumed = shard(range(10), batch_size=5, comm=Solo())
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(3)
    assert len(steps_of(resumed)) == 1, "the resumed epoch's own set_epoch keeps the position"
    loader.sampler.set_epoch(0)  # as loops for DDP have it
    assert steps_of(loader) == wanted[0]
    assert len(loader.dataset) == 10
    with pytest.raises(ValueError, match="epoch must be 0 or more"):
        loader.set_epoch(-1)


def test_loader_loop_left_early_ends_its_epoch() -> None:
    loader = shard(range(12), batch_size=4, comm=Solo())
    first = next(iter(loader)).tolist()
    assert (loader.epoch, loader.position) == (0, 4)
    again = steps_of(loader)
    assert len(again) == 3
    assert loader.epoch == 2
    assert again[0] != first


def test_loader_allows_one_loop_at_a_time() -> None:
    loader = shard(range(12), batch_size=4, comm=Solo())
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(RuntimeError, match="one loop at a time"):
        next(older)
    assert len(list(newer)) == 3
    assert list(newer) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"saved with seed=1, this loader has seed=0.*seed=1"),
        ({"num_samples": 11}, r"saved with num_samples=11, this loader has num_samples=10.*same data"),
        ({"shuffle": False}, r"saved with shuffle=False, this loader has shuffle=True"),
        ({"version": 9}, r"must have version 1; got 9"),
        ({"position": 11}, r"position must be from 0 to num_samples"),
    ],
)
def test_loader_refuses_a_state_of_other_data(change: dict[str, Any], message: str) -> None:
    loader = shard(range(10), batch_size=4, comm=Solo())
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})


# -- weights and join ---------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(num_samples=st.integers(1, 30), num_ranks=st.integers(1, 5), per_rank=st.integers(1, 3), stream=st.booleans())
def test_loader_sets_weights_and_joins_uneven_ends(
    num_samples: int, num_ranks: int, per_rank: int, stream: bool
) -> None:
    data: Any = Stream(num_samples) if stream else range(num_samples)

    def rank(comm: Communicator) -> tuple[int, bool]:
        ends: list[int] = []
        batch_source(comm).subscribe(lambda: ends.append(len(sizes)))
        sizes: list[int] = []
        for batch in shard(data, batch_size=per_rank, comm=comm):
            assert not ends
            assert batch_source(comm).batch_weight == len(batch)
            sizes.append(len(batch))
        assert batch_source(comm).batch_weight == 1.0
        assert ends in ([], [len(sizes)])
        return len(sizes), bool(ends)

    numbers, ends = zip(*run_ranks(num_ranks, rank), strict=True)
    assert set(ends) == {len(set(numbers)) > 1}, "joined on every rank if and only if their numbers differ"


def test_loader_sets_no_weight_in_evaluation() -> None:
    def rank(comm: Communicator) -> int:
        ends: list[int] = []
        batch_source(comm).subscribe(lambda: ends.append(1))
        batch_source(comm).batch_weight = 7.0  # of the training batch in hand
        with torch.no_grad():
            batches = 0
            for _ in shard(range(3), batch_size=1, comm=comm):
                assert batch_source(comm).batch_weight == 7.0
                batches += 1
        assert batch_source(comm).batch_weight == 7.0
        assert not ends
        return batches

    assert run_ranks(2, rank) == [2, 1]


def test_loader_clears_the_weight_when_a_loop_is_left() -> None:
    comm = Solo()
    for _ in shard(range(10), batch_size=4, comm=comm):
        assert batch_source(comm).batch_weight == 4.0
        break
    assert batch_source(comm).batch_weight == 1.0


def test_loader_iterator_out_of_date_leaves_the_weight_alone() -> None:
    comm = Solo()
    loader = shard(range(10), batch_size=4, comm=comm)
    older = iter(loader)
    next(older)
    newer = iter(loader)
    next(newer)
    del older
    assert batch_source(comm).batch_weight == 4.0
