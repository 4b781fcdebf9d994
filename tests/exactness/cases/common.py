"""What cases share: how one is registered, the usual model, and the usual loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.exactness.context import STEPS, Context, mse

CASES: dict[str, Callable[[Context], Any]] = {}


def case(fn: Callable[[Context], Any]) -> Callable[[Context], Any]:
    CASES[fn.__name__] = fn
    return fn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def target(x: Tensor) -> Tensor:
    return torch.stack([x.sum(1), x.square().mean(1), x[:, 0] * x[:, 1]], dim=1)


def plain_loop(ctx: Context, model: nn.Module, optimizer: torch.optim.Optimizer, **zero: Any) -> nn.Module:
    for joined in ctx.batches():
        x = ctx.part(joined)
        optimizer.zero_grad(**zero)
        mse(model(x), target(x)).backward()
        optimizer.step()
        ctx.stepped(model)
    return model


def simple(ctx: Context, make: Callable[[], nn.Module] = mlp, **options: Any) -> nn.Module:
    model = ctx.build(make)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer, **options)
    return plain_loop(ctx, model, optimizer)


def pairs(ctx: Context) -> list[tuple[Tensor, Tensor]]:
    batches = list(ctx.batches(2 * STEPS))
    return list(zip(batches[::2], batches[1::2], strict=True))
