"""A rank that does nothing but mix its values with the others', and a graph that is directed and uneven."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator, run_ranks
from gradsync.gossip import Topology


@spec.register("topology", "test_lopsided")
class Lopsided(Topology):
    """Directed, and some get more than others: all push to the next, and the first to the third as well."""

    def targets(self, place: int, size: int, step: int) -> list[int]:
        ahead = {(place + 1) % size} | ({2 % size} if place == 0 else set())
        return sorted(ahead - {place})


class Trial:
    """One rank's model of a few values, of which it has its own, and a loop that only mixes them."""

    def __init__(
        self, comm: Communicator, strategy: str, values: Tensor, *, dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        self.model = nn.Linear(len(values), 1, bias=False, dtype=dtype)
        with torch.no_grad():
            self.model.weight.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.sync = gradsync.synchronize(self.model, self.optimizer, strategy, comm=comm, **options)
        with torch.no_grad():
            self.model.weight.copy_(values)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.model.weight.sum().backward()
            self.optimizer.step()

    @property
    def values(self) -> Tensor:
        return self.model.weight.detach()[0].clone()

    def stats(self, key: str) -> Any:
        return self.sync.stats()[key]


def mixed(
    world: int, strategy: str, steps: int, *, numel: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor], list[dict[str, Any]]]:
    """What all began with, what each has after some steps, and its statistics."""
    start = torch.randn(world, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(comm: Communicator) -> tuple[Tensor, dict[str, Any]]:
        trial = Trial(comm, strategy, start[comm.rank], dtype=dtype)
        with trial.sync:
            trial.step(steps)
            return trial.values, trial.sync.stats()

    outcomes = run_ranks(world, run)
    return start, [values for values, _ in outcomes], [stats for _, stats in outcomes]
