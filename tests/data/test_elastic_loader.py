"""A sharded loader in an elastic run: it goes back to a place, and splits its steps among other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import gradsync
from gradsync.comm.base import Communicator
from gradsync.data.loader import ShardedLoader
from gradsync.replicas.batch_context import batch_source
from gradsync.testing import run_ranks

NUM = 23


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(NUM))


def make(comm: Communicator, kind: str, **options: Any) -> ShardedLoader:
    data = Numbers() if kind == "stream" else range(NUM)
    return gradsync.shard(data, batch_size=2, comm=comm, **options)


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_goes_back_and_deals_the_same_samples_to_other_ranks(kind: str, num_workers: int) -> None:
    def read(comm: Communicator) -> list[list[int]]:
        loader = make(comm, kind, num_workers=num_workers)
        seen: list[list[int]] = []
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == 2 and loader.position == 2 * 2 * comm.world_size:
                loader.go_to({"epoch": 0, "position": 2 * comm.world_size})  # the second batch comes again
                loader.split_again(comm.rank % 2, 2)  # ranks 0 and 2 stand for one worker now, 1 and 3 for the other
        return seen

    ranks = run_ranks(4, read)
    whole = [sorted(first + second) for first, second in zip(ranks[0][2:], ranks[1][2:], strict=False)]
    first = sorted(sample for rank in ranks for sample in rank[0])
    again = sorted(sample for rank in ranks for sample in rank[1])
    assert whole[0] == again  # the same global batch, on two ranks instead of four
    assert len(whole[0]) == 8
    trained = first + [sample for step in whole for sample in step]
    assert sorted(trained) == list(range(NUM))


def healed(comm: Communicator, epoch: int, position: int, num_samples: int = NUM) -> None:
    batch_source(comm).healed_place = {
        "version": 1,
        "epoch": epoch,
        "position": position,
        "seed": 0,
        "shuffle": True,
        "num_samples": num_samples,
        "global_batch_size": 8,
    }


@pytest.mark.parametrize("style", ["count", "epoch", "set_epoch"])
def test_newcomer_begins_where_the_others_are_however_the_script_counts_epochs(style: str) -> None:
    def read(comm: Communicator) -> list[tuple[int, int]]:
        loader = make(comm, "map")
        healed(comm, epoch=3, position=16)
        first = loader.epoch if style == "epoch" else 0
        steps = []
        for epoch in range(first, 5):
            if style == "set_epoch":
                loader.set_epoch(epoch)
            steps += [(epoch, len(batch)) for batch in loader]
        return steps

    (steps,) = run_ranks(1, read)
    assert steps == [(3, 7), (4, 8), (4, 8), (4, 7)]  # 7 samples of epoch 3 were left, and steps have 8


def test_loader_of_other_data_does_not_take_the_newcomers_place() -> None:
    def read(comm: Communicator) -> int:
        healed(comm, epoch=3, position=16, num_samples=100)
        return len(list(make(comm, "map")))

    assert run_ranks(1, read) == [12]


def test_evaluation_does_not_take_the_newcomers_place() -> None:
    def read(comm: Communicator) -> tuple[int, int]:
        healed(comm, epoch=3, position=16)
        loader = make(comm, "map")
        with torch.no_grad():
            evaluated = len(list(loader))
        return evaluated, loader.epoch

    assert run_ranks(1, read) == [(12, 3)]


def test_loop_that_is_sent_to_a_later_epoch_ends_and_skips_those_between() -> None:
    def read(comm: Communicator) -> list[tuple[int, int]]:
        loader = make(comm, "map")
        seen = []
        for epoch in range(6):
            for batch in loader:
                seen.append((epoch, len(batch)))
                if len(seen) == 2:
                    loader.go_to({"epoch": 4, "position": 20})
        return seen

    assert run_ranks(1, read) == [[(0, 2), (0, 2), (4, 2), (4, 1), *[(5, 2)] * 11, (5, 1)]]
