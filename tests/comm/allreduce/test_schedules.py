"""The all-reduce algorithms on a simulated network with any permitted order of delivery: no threads, a seed a schedule.

The network does the worst that transports are allowed to do. It reads a sent tensor as late as possible, and a send
ends only once its receiver is there. So a value that is overwritten too early, or a deadlock, is found at once.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradsync.comm.allreduce import primitives
from gradsync.comm.allreduce.algorithms import ALGORITHMS
from gradsync.comm.allreduce.primitives import Steps
from gradsync.comm.base import Work


class Message(Work):
    """One end of a message."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        assert self.over


class Network:
    """Messages between all pairs of ranks, and what may happen to them next."""

    def __init__(self) -> None:
        self.sends: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.recvs: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.on_the_wire: dict[tuple[int, int], deque[tuple[Tensor, Message]]] = defaultdict(deque)

    def events(self) -> list[Callable[[], None]]:
        """The possible next events: a send with a posted receive is read; a message that was read arrives."""
        found = []
        for pair, sends in self.sends.items():
            if sends and self.recvs[pair]:
                found.append(lambda pair=pair: self.read(pair))
        for pair, wire in self.on_the_wire.items():
            if wire:
                found.append(lambda pair=pair: self.arrive(pair))
        return found

    def read(self, pair: tuple[int, int]) -> None:
        sent, received = self.sends[pair].popleft(), self.recvs[pair].popleft()
        assert sent.tensor.shape == received.tensor.shape, "a send and a receive that do not belong together"
        self.on_the_wire[pair].append((sent.tensor.clone(), received))
        sent.over = True

    def arrive(self, pair: tuple[int, int]) -> None:
        content, received = self.on_the_wire[pair].popleft()
        received.tensor.copy_(content)
        received.over = True


class Rank:
    """A channel of one rank, and how far its algorithm has come."""

    def __init__(self, network: Network, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._network = network
        self.steps: Steps | None = None
        self.waits_for: Work | None = None

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._network.sends[self.rank, dst].append(message := Message(tensor))
        return message

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._network.recvs[src, self.rank].append(message := Message(tensor))
        tensor.fill_(-1e6)  # must not be read before the message arrives
        return message

    def can_go_on(self) -> bool:
        return self.steps is not None and (self.waits_for is None or self.waits_for.done())

    def go_on(self) -> None:
        assert self.steps is not None
        self.waits_for = next(self.steps, None)
        if self.waits_for is None:
            self.steps = None


def run(algorithm: str, rows: list[Tensor], seed: int) -> list[Tensor]:
    """All ranks' results under one schedule."""
    rng, network = random.Random(seed), Network()
    mine = [row.clone() for row in rows]
    ranks = [Rank(network, rank, len(rows)) for rank in range(len(rows))]
    for rank in ranks:
        rank.steps = ALGORITHMS[algorithm](rank, mine[rank.rank], "sum")
    late = {rng.randrange(len(rows))} if rng.random() < 0.5 else set()  # a rank that runs when all others are blocked
    while any(rank.steps is not None for rank in ranks):
        possible = [rank.go_on for rank in ranks if rank.can_go_on() and rank.rank not in late] + network.events()
        if not possible:
            assert late, f"deadlock of ranks {[rank.rank for rank in ranks if rank.steps is not None]}"
            late.clear()
            continue
        rng.choice(possible)()
    assert not any(network.sends.values()), "sent, and never received"
    assert not any(network.recvs.values()), "awaited, and never sent"
    return mine


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8, 12, 17])
def test_algorithm_gives_the_same_sum_under_any_schedule(
    algorithm: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitives, "PIECE_BYTES", 16)
    generator = torch.Generator().manual_seed(world)
    for seed, size in enumerate((1, world - 1, world + 1, 5 * world + 3, 40, 40, 40)):
        rows = [torch.randn(size, generator=generator) for _ in range(world)]
        results = [*run(algorithm, rows, seed), *run(algorithm, rows, seed + 1000)]
        torch.testing.assert_close(results[0], torch.stack(rows).sum(0))
        assert all(torch.equal(result, results[0]) for result in results)
