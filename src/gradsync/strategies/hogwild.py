"""Lock-free training on one host: all processes update the same parameters in shared memory, and nobody waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from gradsync import spec
from gradsync.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.strategies.base import Verdict
from gradsync.strategies.commons import Commons
from gradsync.strategies.local import Local
from gradsync.training import Training


@spec.register("strategy", "hogwild")
class Hogwild(Local):
    """One copy of the parameters for all ranks of a host; every rank's optimizer changes it whenever it likes.

    There is no lock: where two ranks change the same number at the same moment, one of the two changes may be lost, and
    a forward may see a part of an update. Sparse gradients touch their own rows alone, so ranks that meet different
    rows never disturb each other: that is where it shines. Each rank's optimizer keeps its own state (momentum, second
    moments), made from its own gradients. Ranks on several hosts are refused, and so are parameters on a GPU.

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
        self._commons: Commons | None = None
        self._taus: Counter[int] = Counter()  # how often each staleness was met here
        self._updates_before = 0  # of this rank, in the run that was resumed
        self._others_seen = 0  # updates of other ranks that the gradients to come may know of
        # [Note: held] Ranks that have settled are to find the parameters as they were until each has gone on: whoever
        # is the first to step waits until all are about to, and the others may evaluate or save meanwhile.
        self._held = True

    def meet(self, training: Training) -> None:
        for name, param in training.params.items():
            if param.device.type != "cpu":
                raise ValueError(
                    f"hogwild() keeps parameters in memory that processes share; {name} is on {param.device}. "
                    "Train on the CPU, or take another strategy."
                )
        self._training = training

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        if self._commons is None:
            assert self._training is not None, "meet() comes first"
            self._commons = Commons(self._training.params, comm)

    def before_step(self, step: int) -> Verdict:
        commons = self._common()
        commons.check()
        self._go_on()
        tau = self._others_updates() - self._others_seen
        self._taus[tau] += 1
        self.recorder.stale(tau)
        return Verdict.APPLY

    def after_step(self, step: int) -> None:
        self._common().updates[self.comm.rank] += 1
        self._others_seen = self._others_updates()

    def skipped_step(self, step: int) -> None:
        self._others_seen = self._others_updates()

    def settle(self) -> None:
        """Wait until every rank is here. The parameters then stay as they are until all go on: see [Note: held]."""
        commons = self._common()
        self._go_on()
        commons.meet("settle()", everyone=True)
        self._held = True
        assert self._training is not None
        buffers = self._training.buffers
        changed = torch.tensor([buffers.changed()], dtype=torch.uint8)
        self.comm.all_reduce(changed, op="max").wait()
        if changed.item():
            total = int(commons.updates.sum())
            share = int(commons.updates[self.comm.rank]) / total if total else 1.0 / self.comm.world_size
            buffers.synchronize(share, 0)

    def join(self) -> int | None:
        self.settle()
        return None  # the parameters are the same memory, and each rank's optimizer state is its own

    def stats(self) -> dict[str, Any]:
        """``staleness``: updates of other ranks between a rank's update and its next. ``updates``: of each rank."""
        num = self._taus.total()
        return {
            "staleness": {
                "mean": sum(tau * count for tau, count in self._taus.items()) / num if num else 0.0,
                "max": max(self._taus, default=0),
                "histogram": dict(sorted(self._taus.items())),
            },
            "updates": [] if self._commons is None else self._commons.updates.tolist(),
        }

    def bytes_per_step(self) -> int:
        return 0  # nothing is sent: the memory is the same

    def state_dict(self) -> dict[str, Any]:
        """What it has counted. The parameters are the model's, and saved with it, best after ``sync.settle()``."""
        here = 0 if self._commons is None else int(self._commons.updates[self.comm.rank])
        return {"updates": self._updates_before + here, "staleness": dict(self._taus)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"updates", "staleness"}:
            raise ValueError(f"expected a state of hogwild() with updates and staleness; got {sorted(state)}.")
        self._updates_before = int(state["updates"])
        self._taus = Counter({int(tau): int(count) for tau, count in state["staleness"].items()})

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Counts of old rank q go to rank q mod ``world_size``: none is lost."""
        mine = states[rank::world_size]
        taus: Counter[int] = Counter()
        for state in mine:
            taus.update(state["staleness"])
        return {"updates": sum(state["updates"] for state in mine), "staleness": dict(taus)}

    def is_own(self, state: dict[str, Any]) -> bool:
        return True

    def close(self) -> None:
        if self._commons is not None:
            self._commons.leave()
            self._commons = None

    def _common(self) -> Commons:
        assert self._commons is not None, "attach() comes first"
        return self._commons

    def _go_on(self) -> None:
        if self._held:
            self._held = False
            self._common().meet("the first step after all were settled", everyone=False)

    def _others_updates(self) -> int:
        updates = self._common().updates
        return int(updates.sum()) - int(updates[self.comm.rank])
