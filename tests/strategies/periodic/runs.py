"""A small model and its training loop, for tests of the strategies that exchange weights every n-th step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator

STREAMED = (
    "diloco(every=6, outer_lr=0.8, outer_momentum=0.5, outer_warmup=2, fragments=2, overlap=2, "
    "codec={'*.weight': 'int4'})"
)


def build(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6)).to(dtype)
    seeded = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=seeded))
    return model


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)
    loss: Tensor = (model(x) - x.flip(1)).square().mean()
    return loss


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def params_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one, other, strict=True))


def train(
    comm: Communicator,
    strategy: str,
    steps: int,
    state: dict[str, Any] | None = None,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    weights: Callable[[int], float] | None = None,
    settle: bool = False,
) -> dict[str, Any]:
    """Train on this rank's own data; with ``state``, resume from it. ``history``: the weights after each step."""
    model = build()
    optimizer = make(model)
    history = []
    with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync:
        if state is not None:
            for part, name in ((model, "model"), (optimizer, "optimizer"), (sync, "sync")):
                part.load_state_dict(state[name])
        for step in range(0 if state is None else state["at"], steps):
            if weights is not None:
                sync.set_weight(weights(comm.rank))
            step_once(model, optimizer, comm.rank, step)
            history.append(params_of(model))
        if settle:
            sync.settle()
        saved = {"optimizer": optimizer.state_dict(), "sync": sync.state_dict(), "stats": sync.stats()}
        saved["model"] = {name: value.clone() for name, value in model.state_dict().items()}
        return {**saved, "at": steps, "history": history}


def anchors(outcome: dict[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = outcome["sync"]["strategy_state"]["exchange"]["anchors"]
    return found
