"""For tests of gossip: a rank that only mixes its values with other ranks, and a directed, uneven topology."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator
from gradsync.strategies.gossip import Topology
from gradsync.testing import run_ranks


@spec.register("topology", "test_lopsided")
class Lopsided(Topology):
    """Directed and uneven: every member pushes to the next, and the first pushes to the third as well."""

    def targets(self, place: int, size: int, step: int) -> list[int]:
        ahead = {(place + 1) % size} | ({2 % size} if place == 0 else set())
        return sorted(ahead - {place})


class Trial:
    """One rank's model, with a few values of its own, and a training loop that only mixes them."""

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
    """The values at the start, the values of each rank after some steps, and each rank's statistics."""
    start = torch.randn(world, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(comm: Communicator) -> tuple[Tensor, dict[str, Any]]:
        trial = Trial(comm, strategy, start[comm.rank], dtype=dtype)
        with trial.sync:
            trial.step(steps)
            return trial.values, trial.sync.stats()

    outcomes = run_ranks(world, run)
    return start, [values for values, _ in outcomes], [stats for _, stats in outcomes]
