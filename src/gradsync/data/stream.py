"""Data that can only be read from front to back: every rank reads the whole stream and keeps its part of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from gradsync.data.order import BatchSplit, Shares

Part = tuple[list[Any], int]  # this rank's samples of a step, and how many all ranks have in it


class LocalStream(IterableDataset[Part]):
    """The rank's part of each step of a stream; runs in the loader's worker if there is one."""

    def __init__(self, stream: IterableDataset[Any], cut: BatchSplit, shares: Shares) -> None:
        self.stream = stream
        self.cut = cut
        self._shares = shares
        self._first = 0  # the number of the epoch's first step: a worker's shares never change
        # In shared memory: a persistent worker has a copy of this object, made before the first epoch.
        self._position = torch.zeros((), dtype=torch.int64).share_memory_()

    def begin_at(self, position: int) -> None:
        """Have the next epoch pass over ``position`` samples."""
        self._first = self._shares.next_step
        self._position.fill_(position)

    def __iter__(self) -> Iterator[Part]:
        position = int(self._position.item())
        samples = iter(self.stream)
        passed = sum(1 for _ in islice(samples, position))
        if passed < position:
            raise ValueError(
                f"the state's position is {position}, but the stream ended after {passed} samples. "
                "Resume with the stream that the state was saved from."
            )
        num_read, number = passed, self._first
        while step := list(islice(samples, self.cut.global_batch_size)):
            num_read += len(step)
            if len(step) < self.cut.global_batch_size and self.cut.drop_last:
                break
            yield step[self._shares.own(number, len(step))], len(step)
            number += 1
        if num_read == 0:
            raise ValueError("a dataset to shard must have at least one sample; this stream had none.")


class CollateLocal:
    """Collates the samples and keeps the counts beside them; a class, so that it can be sent to a spawned worker."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, part: Part) -> tuple[Any, int, int]:
        samples, num_in_step = part
        return (self.collate(samples) if samples else None), len(samples), num_in_step
