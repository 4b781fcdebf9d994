"""``diverging``: a strategy for tests of partitions, whose replicas may differ from side to side.

Within a side it is ``allreduce``. When sides meet, it writes down what it had, what it got, and its share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import gradsync
from gradsync.comm.base import Communicator
from gradsync.replicas.training import Training

folder: Path | None = None  # to write to
uid = ""


@gradsync.spec.register("strategy", "diverging")
class Diverging(gradsync.AllReduce):
    def setup(self, training: Training) -> None:
        super().setup(training)
        self._training = training

    def diverge_obstacle(self) -> str:
        return ""

    def merge_sides(self, comm: Communicator, share: float) -> float:
        params = [*self._training.model.parameters()]
        states = [self._training.optimizer.state[param] for param in params]
        momenta = [value for state in states for _, value in sorted(state.items())]
        record: dict[str, Any] = {"share": share, "before": [param.detach().clone() for param in params]}
        moved = 0.0
        with torch.no_grad():
            for tensor in [*params, *momenta]:
                mean = share * tensor
                comm.all_reduce(mean).wait()
                if any(tensor is param for param in params):
                    moved += float((tensor - mean).square().sum())
                tensor.copy_(mean)
        record |= {"after": [param.detach().clone() for param in params], "world_size": comm.world_size}
        if folder is not None:
            torch.save(record, folder / f"merge.{uid}")
        return moved**0.5
