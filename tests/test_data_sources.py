"""What the sharded loader takes, and what it refuses: tensors, loaders, streams, samplers, worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from gradsync.comm.base import Communicator, Solo
from gradsync.comm.threads import run_ranks
from gradsync.data import shard
from tests.test_data import Steps, Stream, joined, steps_of


class Squares(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def test_tensors_sequences_and_datasets() -> None:
    rows, labels = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    options: Any = {"batch_size": 2, "shuffle": False, "comm": Solo()}
    (first, first_labels), *_ = list(shard((rows, labels), **options))
    assert torch.equal(first, rows[:2])
    assert torch.equal(first_labels, labels[:2])
    (again, _), *_ = list(shard(TensorDataset(rows, labels), **options))
    assert torch.equal(again, first)
    assert torch.equal(next(iter(shard(rows, **options))), rows[:2])
    assert next(iter(shard(["a", "b", "c"], **options))) == ["a", "b"]


def _twice(samples: list[tuple[int, int]]) -> list[int]:
    return [2 * index for index, _ in samples]


def _collate_tensor(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 10


def test_a_loaders_own_settings_are_taken_over() -> None:
    loader = DataLoader(Squares(), batch_size=5, collate_fn=_twice, drop_last=True)
    assert next(iter(shard(loader, comm=Solo()))) == [0, 2, 4, 6, 8], "sequential, as the loader was"
    assert len(list(shard(loader, comm=Solo()))) == 4
    assert len(list(shard(loader, drop_last=False, batch_size=10, comm=Solo()))) == 3
    assert next(iter(shard(loader, shuffle=True, comm=Solo()))) != [0, 2, 4, 6, 8]
    shuffled = DataLoader(Squares(), batch_size=5, shuffle=True)
    seeded = shard(Squares(), batch_size=5, seed=4, comm=Solo())
    ours = [indices.tolist() for indices, _ in shard(shuffled, seed=4, comm=Solo())]
    assert ours == [indices.tolist() for indices, _ in seeded]


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes(persistent: bool) -> None:
    def order(**options: Any) -> list[Any]:
        loader = shard(Squares(), batch_size=4, seed=2, comm=Solo(), **options)
        got: list[Any] = []
        for batch in loader:
            got.append([part.tolist() for part in batch])
            assert loader.position == min(23, 4 * len(got)), "what was handed out, not what was prefetched"
            if len(got) == 2:
                state = loader.state_dict()
        got += [[part.tolist() for part in batch] for batch in loader]
        loader.load_state_dict(state)
        return got + [[part.tolist() for part in batch] for batch in loader]

    assert order(num_workers=2, persistent_workers=persistent, prefetch_factor=3) == order()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_in_a_worker_process(persistent: bool) -> None:
    loader = shard(Stream(11), batch_size=4, num_workers=1, persistent_workers=persistent, comm=Solo())
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    state = loader.state_dict()
    assert state["position"] == 4
    assert steps_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    loader.load_state_dict(state)
    assert steps_of(loader) == [[4, 5, 6, 7], [8, 9, 10]]
    assert steps_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_a_streams_loader_keeps_its_collate_function() -> None:
    loader = DataLoader(Stream(5), batch_size=3, collate_fn=_collate_tensor)
    parts = run_ranks(2, lambda comm: steps_of(shard(loader, comm=comm)))
    assert parts == [[[0, 10, 20]], [[30, 40]]]
    with pytest.raises(TypeError, match="has no len"):
        len(shard(loader, comm=Solo()))


def test_a_stream_shorter_than_the_position_is_refused() -> None:
    loader = shard(Stream(5), batch_size=3, comm=Solo())
    loader.load_state_dict({**loader.state_dict(), "position": 9})
    with pytest.raises(ValueError, match="position is 9, but the stream ended after 5"):
        list(loader)


# -- a sampler of the user's own ----------------------------------------------------------------------------------


def weighted(num_samples: int = 30) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, 11.0).tolist(), num_samples)


def test_a_samplers_order_is_drawn_once_and_shared() -> None:
    def rank(comm: Communicator) -> tuple[Steps, Steps, int]:
        loader = shard(DataLoader(range(10), batch_size=4, sampler=weighted()), comm=comm)  # type: ignore[arg-type]
        return steps_of(loader), steps_of(loader), len(loader)

    first, second, lengths = zip(*run_ranks(3, rank), strict=True)
    assert [len(step) for step in joined(list(first))] == [12, 12, 6]
    assert joined(list(first)) != joined(list(second))
    assert set(lengths) == {3}
    # Each rank alone would have drawn its own: what joins is one draw only if the parts come from the same list.
    state_orders = run_ranks(3, _order_in_state)
    assert all(torch.equal(order, state_orders[0]) for order in state_orders)


def _order_in_state(comm: Communicator) -> torch.Tensor:
    loader = shard(DataLoader(range(10), batch_size=4, sampler=weighted()), comm=comm)  # type: ignore[arg-type]
    next(iter(loader))
    order: torch.Tensor = loader.state_dict()["order"]
    return order


def test_a_samplers_epoch_is_resumed_to_the_sample() -> None:
    source: Any = DataLoader(range(10), batch_size=4, sampler=weighted())  # type: ignore[arg-type]
    loader = shard(source, comm=Solo())
    loop = iter(loader)
    next(loop)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in loop]

    def rank(comm: Communicator) -> Steps:
        resumed = shard(source, global_batch_size=4, comm=comm)
        resumed.load_state_dict(state)
        return steps_of(resumed)

    assert joined(run_ranks(3, rank)) == rest
    with pytest.raises(ValueError, match="loader with a sampler of its own"):
        loader.load_state_dict(shard(range(10), batch_size=4, comm=Solo()).state_dict())


def test_random_sampling_with_replacement_is_a_sampler_of_its_own() -> None:
    sampler = RandomSampler(range(10), replacement=True, num_samples=25)
    source: Any = DataLoader(range(10), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    assert [len(step) for step in steps_of(shard(source, comm=Solo()))] == [4] * 6 + [1]


class _Failing:
    def __iter__(self) -> Iterator[int]:
        raise OSError("the list of indices is gone")

    def __len__(self) -> int:
        return 10


def test_a_sampler_that_fails_does_so_on_every_rank() -> None:
    def rank(comm: Communicator) -> str:
        source: Any = DataLoader(range(10), batch_size=4, sampler=_Failing())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="failed on rank 0") as caught:
            iter(shard(source, comm=comm))
        return str(caught.value)

    assert "the list of indices is gone" in run_ranks(2, rank)[0]


# -- what it refuses ----------------------------------------------------------------------------------------------


def test_a_loader_that_is_sharded_already_is_refused() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Squares(), num_replicas=2, rank=0)
    with pytest.raises(ValueError, match=r"sharded already.*DistributedSampler"):
        shard(DataLoader(Squares(), batch_size=4, sampler=sampler), comm=Solo())
    with pytest.raises(TypeError, match="sharded already"):
        shard(shard(Squares(), batch_size=4, comm=Solo()), comm=Solo())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (range(10), {}, "batch_size .* or global_batch_size"),
        (range(10), {"batch_size": 2, "global_batch_size": 4}, "not both; got batch_size=2 global_batch_size=4"),
        (range(10), {"batch_size": 0}, "batch_size must be 1 or more"),
        ([], {"batch_size": 2}, "at least one sample"),
        (Stream(0), {"batch_size": 2}, "at least one sample"),
        (Stream(4), {"batch_size": 2, "shuffle": True}, "shuffle must be off"),
        (Stream(4), {"batch_size": 2, "num_workers": 2}, "num_workers must be 0 or 1"),
        (range(10), {"batch_size": 20, "drop_last": True}, "leaves no step"),
        (range(10), {"batch_size": 2, "in_order": False}, "in_order must be True"),
        (DataLoader(Squares(), batch_size=None), {}, "needs a batch_size"),
        (DataLoader(Stream(4), batch_size=None), {}, "must have a batch_size"),
        (
            DataLoader(Squares(), batch_sampler=BatchSampler(SequentialSampler(Squares()), 2, False)),
            {},
            "batch_sampler.*Make it with batch_size",
        ),
        (DataLoader(Squares(), sampler=[1, 2]), {"shuffle": True}, "shuffle can't be said"),
    ],
)
def test_mistakes_are_named(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(shard(data, comm=Solo(), **options))


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="got generator"):
        shard((index for index in range(3)), batch_size=1, comm=Solo())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option 'sampler'"):
        shard(range(3), batch_size=1, sampler=[1], comm=Solo())


def test_a_step_smaller_than_the_world_is_refused() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"global_batch_size=2 on 3 ranks. Try global_batch_size=3"):
            shard(range(10), global_batch_size=2, comm=comm)

    run_ranks(3, rank)
