"""What an exactness case runs in: one rank of N with gradsync, or one plain process on the joined batch without it."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator

STEPS = 20
JOINED = 12  # samples in a joined batch: whole parts for 1, 2, 3 and 4 ranks

_RNG = threading.Lock()  # ranks that are threads share torch's generator

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


class Plain:
    """Stands where the synchronizer would, in the reference run without gradsync."""

    synchronized = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    join = no_sync

    def set_weight(self, weight: float) -> None:
        pass

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def optimizer_state_dict(self, dst: int | None) -> dict[str, Any]:
        return self._optimizer.state_dict()


@dataclass
class Context:
    """One rank's run of a case. With ``comm`` None it is the reference: one process, everything joined."""

    comm: Communicator | None
    optimizer_name: str
    dtype: torch.dtype
    num_ranks: int  # of the run; the reference knows it too, because some loops depend on it
    strategy: str = "allreduce"
    digests: list[str] = field(default_factory=list)
    syncs: list[gradsync.Synchronizer] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.comm.rank if self.comm is not None else 0

    @property
    def world(self) -> int:
        return self.comm.world_size if self.comm is not None else 1

    @property
    def alone(self) -> bool:
        return self.comm is None

    def build(self, make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
        # The ranks start from different parameters: synchronize() must give them rank 0's.
        with _RNG, torch.random.fork_rng():
            torch.manual_seed(seed + 1000 * self.rank)
            return make().to(self.dtype)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer_name](params)

    def sync(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        if self.comm is None:
            return Plain(model, optimizer)
        # Small buckets, so that small models have two or three.
        options = {"strategy": self.strategy, "bucket_bytes": 8000, "first_bucket_bytes": 500, **options}
        sync = gradsync.synchronize(model, optimizer, comm=self.comm, **options)
        self.syncs.append(sync)
        return sync

    def batches(self, count: int = STEPS, *shape: int, seed: int = 1) -> Iterator[Tensor]:
        """Joined batches, the same on every rank and in the reference."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            yield torch.randn(JOINED, *(shape or (6,)), generator=generator, dtype=torch.float64).to(self.dtype)

    def part(self, joined: Tensor) -> Tensor:
        """This rank's even share."""
        size = len(joined) // self.world
        return joined[self.rank * size : (self.rank + 1) * size]

    def uneven(self, joined: Tensor) -> Tensor:
        """This rank's share where the last rank has one sample, and the first the most."""
        if self.alone:
            return joined
        sizes = [1] * self.world
        sizes[0] += len(joined) - self.world
        return joined.split(sizes)[self.rank]

    def stepped(self, *models: nn.Module) -> None:
        """Remember the bits of all parameters after a step."""
        digest = hashlib.sha256()
        for model in models:
            for param in model.parameters():
                digest.update(param.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.digests.append(digest.hexdigest())


@dataclass
class Outcome:
    """What a case left: its parameters by name, and the bits after every step."""

    params: dict[str, Tensor] = field(repr=False)
    digests: list[str] = field(repr=False)


def run_case(case: Callable[[Context], Any], context: Context) -> Outcome:
    models = case(context)
    models = models if isinstance(models, tuple) else (models,)
    for sync in context.syncs:
        sync.close()
    named = {
        f"{index}.{name}": param.detach().clone()
        for index, model in enumerate(models)
        for name, param in model.named_parameters()
    }
    return Outcome(named, context.digests)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()
