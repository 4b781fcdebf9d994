"""The optimizers of bench_step, and how many bytes of state they keep on a rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
}


def make_plain(params: Iterable[nn.Parameter], name: str) -> torch.optim.Optimizer:
    """An optimizer that keeps the state of all parameters on every rank."""
    kind, settings = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer = kind(params, **settings)
    return optimizer


def make_zero(params: Iterable[nn.Parameter], name: str) -> torch.optim.Optimizer:
    """The ZeroRedundancyOptimizer of torch: each rank steps some of the parameters and broadcasts them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it compiles, and warns

    kind, settings = OPTIMIZERS[name]
    return ZeroRedundancyOptimizer(params, optimizer_class=kind, **settings)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of the tensors that this rank keeps per parameter, such as Adam's two moments.

    >>> weight = nn.Parameter(torch.zeros(10))
    >>> weight.grad = torch.ones(10)
    >>> optimizer = make_plain([weight], "adamw")
    >>> optimizer.step()
    >>> state_bytes(optimizer)  # two moments of 10 values, and the number of steps
    84
    """
    own: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer keeps its part there
    values = [value for state in own.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))
