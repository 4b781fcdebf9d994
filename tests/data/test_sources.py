"""What the sharded loader takes, and what it refuses: tensors, loaders, streams, samplers, worker processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
from gradsync.data import order, shard
from gradsync.testing.threads import run_ranks
from tests.data.test_shard import Steps, Stream, joined, steps_of


class Squares(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


def test_shard_takes_tensors_sequences_and_datasets() -> None:
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


def test_shard_takes_over_a_loaders_settings() -> None:
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
def test_shard_with_worker_processes(persistent: bool) -> None:
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
def test_shard_of_a_stream_in_a_worker_process(persistent: bool) -> None:
    loader = shard(Stream(11), batch_size=4, num_workers=1, persistent_workers=persistent, comm=Solo())
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    state = loader.state_dict()
    assert state["position"] == 4
    assert steps_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    loader.load_state_dict(state)
    assert steps_of(loader) == [[4, 5, 6, 7], [8, 9, 10]]
    assert steps_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_shard_of_a_stream_keeps_its_collate_function() -> None:
    loader = DataLoader(Stream(5), batch_size=3, collate_fn=_collate_tensor)
    parts = run_ranks(2, lambda comm: steps_of(shard(loader, comm=comm)))
    assert parts == [[[0, 10, 20]], [[30, 40]]]
    with pytest.raises(TypeError, match="has no len"):
        len(shard(loader, comm=Solo()))


def test_shard_refuses_a_stream_shorter_than_its_position() -> None:
    loader = shard(Stream(5), batch_size=3, comm=Solo())
    loader.load_state_dict({**loader.state_dict(), "position": 9})
    with pytest.raises(ValueError, match="position is 9, but the stream ended after 5"):
        list(loader)


# -- a sampler of the user's own ----------------------------------------------------------------------------------


def weighted(num_samples: int = 30) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, 11.0).tolist(), num_samples)


def test_sampler_order_is_drawn_once_and_broadcast() -> None:
    def rank(comm: Communicator) -> tuple[Steps, Steps, int]:
        loader = shard(DataLoader(range(10), batch_size=4, sampler=weighted()), comm=comm)  # type: ignore[arg-type]
        return steps_of(loader), steps_of(loader), len(loader)

    first, second, lengths = zip(*run_ranks(3, rank), strict=True)
    assert [len(step) for step in joined(list(first))] == [12, 12, 6]
    assert joined(list(first)) != joined(list(second))
    assert set(lengths) == {3}
    # Each rank alone would have drawn its own: what joins is one draw only if the parts come from the same list.
    state_orders = run_ranks(3, _order_in_state)
    assert len(set(state_orders)) == 1


def _order_in_state(comm: Communicator) -> bytes:
    loader = shard(DataLoader(range(10), batch_size=4, sampler=weighted()), comm=comm)  # type: ignore[arg-type]
    next(iter(loader))
    order: bytes = loader.state_dict()["order"]
    return order


def test_sampler_order_resumes_to_the_sample() -> None:
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


def with_replacement(num_samples: int) -> Any:
    sampler = RandomSampler(range(10), replacement=True, num_samples=num_samples)
    return DataLoader(range(10), batch_size=4, sampler=sampler)  # type: ignore[arg-type]


def test_shard_samples_with_replacement() -> None:
    steps = steps_of(shard(with_replacement(25), comm=Solo()))
    assert [len(step) for step in steps] == [4] * 6 + [1]
    assert set(chain(*steps)) <= set(range(10))
    split = run_ranks(2, lambda comm: steps_of(shard(with_replacement(25), global_batch_size=4, comm=comm)))
    assert steps == joined(split)
    assert steps != steps_of(shard(with_replacement(25), seed=1, comm=Solo()))


class Endless:
    """A sampler without an end, as training loops that count steps have."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return ((7 * at + self.epoch) % 10 for at in count())


class Long(Endless):
    def __len__(self) -> int:
        return 10**10


def endless(kind: type[Endless]) -> Any:
    return DataLoader(range(10), batch_size=4, sampler=kind())  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda: with_replacement(10**10), lambda: endless(Endless), lambda: endless(Long)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_sampler_order_of_any_length_begins_at_once_and_resumes(
    make: Callable[[], Any], num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "MAX_DRAWN_AT_ONCE", 64)
    monkeypatch.setattr(order, "BLOCK", 32)

    def rank(comm: Communicator) -> Steps:
        loader = shard(make(), global_batch_size=6, comm=comm, num_workers=num_workers)
        loop = iter(loader)
        steps = [next(loop).tolist() for _ in range(20)]
        saved = loader.state_dict()
        assert len(saved.get("order", b"")) < 8 * (64 + 2 * 32 + 6), "not all that was drawn so far"
        goes_on = [next(loop).tolist() for _ in range(20)]
        resumed = shard(make(), global_batch_size=6, comm=comm, num_workers=num_workers)
        resumed.load_state_dict(saved)
        again = iter(resumed)
        assert [next(again).tolist() for _ in range(20)] == goes_on
        return [*steps, *goes_on]

    one, two = run_ranks(1, rank)[0], joined(run_ranks(2, rank))
    assert one == two
    if isinstance(make().sampler, Endless):
        assert list(chain(*one)) == [7 * at % 10 for at in range(240)]
    else:
        assert len(shard(make(), comm=Solo())) == 10**10 // 4
        assert len(set(map(tuple, one))) > 30


def test_loader_with_a_sampler_is_saved_by_distributed_checkpoint(tmp_path: Path) -> None:
    loader = shard(DataLoader(range(10), batch_size=4, sampler=weighted()), comm=Solo())  # type: ignore[arg-type]
    loop = iter(loader)
    next(loop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process, without a group
        dcp.save({"loader": loader}, checkpoint_id=tmp_path)
        resumed = shard(DataLoader(range(10), batch_size=4, sampler=weighted()), comm=Solo())  # type: ignore[arg-type]
        dcp.load({"loader": resumed}, checkpoint_id=tmp_path)
    assert steps_of(resumed) == [batch.tolist() for batch in loop]


class _Failing:
    def __iter__(self) -> Iterator[int]:
        raise OSError("the list of indices is gone")

    def __len__(self) -> int:
        return 10


def test_sampler_order_fails_on_every_rank() -> None:
    def rank(comm: Communicator) -> str:
        source: Any = DataLoader(range(10), batch_size=4, sampler=_Failing())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="failed on rank 0") as caught:
            iter(shard(source, comm=comm))
        return str(caught.value)

    assert "the list of indices is gone" in run_ranks(2, rank)[0]


# -- what it refuses ----------------------------------------------------------------------------------------------


def test_shard_refuses_a_sharded_loader() -> None:
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
        (DataLoader(Squares(), sampler=[1, 2]), {"shuffle": True}, "shuffle can't be set"),
    ],
)
def test_shard_names_mistakes(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(shard(data, comm=Solo(), **options))


def test_shard_names_wrong_types() -> None:
    with pytest.raises(TypeError, match="got generator"):
        shard((index for index in range(3)), batch_size=1, comm=Solo())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option 'sampler'"):
        shard(range(3), batch_size=1, sampler=[1], comm=Solo())


def test_shard_refuses_a_step_smaller_than_the_world() -> None:
    def rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"global_batch_size=2 on 3 ranks. Try global_batch_size=3"):
            shard(range(10), global_batch_size=2, comm=comm)

    run_ranks(3, rank)
