"""Hogwild: lock-free training on one host. All processes update the same parameters in shared memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.replicas.training import Training
from gradsync.strategies.base import Placement, Verdict
from gradsync.strategies.local import Local
from gradsync.strategies.shared_parameters import SharedParameters


@spec.register("strategy", "hogwild")
class Hogwild(Local):
    """One copy of the parameters for all ranks of a host; every rank's optimizer changes it at any time.

    There is no lock: where two ranks change the same number at the same moment, one of the two changes may be lost, and
    a forward may see a part of an update. Sparse gradients touch only their own rows, so ranks with different rows do
    not disturb each other: this is the case that Hogwild is best at. Each rank's optimizer keeps its own state
    (momentum, second moments), made from its own gradients. Ranks on several hosts are refused, and so are parameters
    on a GPU.

    >>> import gradsync, torch
    >>> model = torch.nn.EmbeddingBag(100, 4, sparse=True)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradsync.synchronize(model, optimizer, "hogwild") as sync:
    ...     model(torch.tensor([[1, 5]])).sum().backward()
    ...     optimizer.step()
    ...     sync.stats()["staleness"]
    {'mean': 0.0, 'max': 0, 'histogram': {0: 1}}
    """

    def __init__(self) -> None:
        super().__init__()
        self._training: Training | None = None
        self._shared: SharedParameters | None = None
        self._staleness_counts: Counter[int] = Counter()  # by staleness: how many steps of this rank had it
        self._updates_before = 0  # of this rank, in the run that was resumed
        self._others_seen = 0  # updates of other ranks before the current forward
        # [Note: settled] After settle() a rank may evaluate or save, so the parameters must not change meanwhile: the
        # next step of every rank first waits, in a barrier, until all ranks are about to step.
        self._settled = True

    def setup(self, training: Training) -> None:
        super().setup(training)
        for name, param in training.params.items():
            if param.device.type != "cpu":
                raise ValueError(
                    f"hogwild() keeps parameters in memory that processes share; {name} is on {param.device}. "
                    "Train on the CPU, or use another strategy."
                )
        self._training = training

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        if self._shared is None:
            assert self._training is not None, "setup() comes first"
            self._shared = SharedParameters(self._training.params, comm)

    def before_step(self, step: int) -> Verdict:
        shared = self._shared_parameters()
        shared.check()
        self._resume()
        tau = self._others_updates() - self._others_seen
        self._staleness_counts[tau] += 1
        self.recorder.set_staleness(tau)
        return Verdict.APPLY

    def after_step(self, step: int) -> None:
        self._shared_parameters().updates[self.comm.rank] += 1
        self._others_seen = self._others_updates()

    def skipped_step(self, step: int) -> None:
        self._others_seen = self._others_updates()

    def settle(self) -> None:
        """Block until every rank is here. The parameters then stay unchanged until all go on: see [Note: settled]."""
        shared = self._shared_parameters()
        self._resume()
        shared.barrier("settle()", require_all=True)
        self._settled = True
        assert self._training is not None
        buffers = self._training.buffers
        changed = torch.tensor([buffers.changed()], dtype=torch.uint8)
        self.comm.all_reduce(changed, op="max").wait()
        if changed.item():
            total = int(shared.updates.sum())
            share = int(shared.updates[self.comm.rank]) / total if total else 1.0 / self.comm.world_size
            buffers.synchronize(share, 0)

    def join(self) -> int | None:
        self.settle()
        return None  # the parameters are the same memory, and each rank's optimizer state is its own

    def elastic_obstacle(self) -> str:
        return "its memory is shared by the workers of the start, who go on by themselves if one dies: use --keep-going"

    def stats(self) -> dict[str, Any]:
        """``staleness``: updates by other ranks between this rank's update and its next. ``updates``: by rank."""
        num = self._staleness_counts.total()
        return {
            "staleness": {
                "mean": sum(tau * count for tau, count in self._staleness_counts.items()) / num if num else 0.0,
                "max": max(self._staleness_counts, default=0),
                "histogram": dict(sorted(self._staleness_counts.items())),
            },
            "updates": [] if self._shared is None else self._shared.updates.tolist(),
        }

    def bytes_per_step(self) -> int:
        return 0  # nothing is sent: the memory is the same

    def state_dict(self) -> dict[str, Any]:
        """The counts. The parameters belong to the model and are saved with it, best after ``sync.settle()``."""
        here = 0 if self._shared is None else int(self._shared.updates[self.comm.rank])
        return {"updates": self._updates_before + here, "staleness": dict(self._staleness_counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"updates", "staleness"}:
            raise ValueError(f"expected a state of hogwild() with updates and staleness; got {sorted(state)}.")
        self._updates_before = int(state["updates"])
        self._staleness_counts = Counter({int(tau): int(count) for tau, count in state["staleness"].items()})

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The counts of old rank q go to rank q mod ``world_size``, so that none is lost."""
        mine = states[rank::world_size]
        taus: Counter[int] = Counter()
        for state in mine:
            taus.update(state["staleness"])
        return {"updates": sum(state["updates"] for state in mine), "staleness": dict(taus)}

    def placement(self, path: tuple[str, ...]) -> Placement:
        return Placement.VARYING if path == ("staleness",) else Placement.OWN

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _shared_parameters(self) -> SharedParameters:
        assert self._shared is not None, "attach() comes first"
        return self._shared

    def _resume(self) -> None:
        if self._settled:
            self._settled = False
            self._shared_parameters().barrier("the first step after all were settled", require_all=False)

    def _others_updates(self) -> int:
        updates = self._shared_parameters().updates
        return int(updates.sum()) - int(updates[self.comm.rank])
