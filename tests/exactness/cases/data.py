"""Where the batches come from, and ranks that run out of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import gradsync
from gradsync.comm.base import Solo
from tests.exactness.cases.common import case, mlp, target
from tests.exactness.context import JOINED, STEPS, Context, mse


@case
def join_uneven_numbers_of_batches(ctx: Context) -> nn.Module:
    """Rank r has STEPS - 2r batches; the reference trains on those of the ranks that still have data."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer)
    batches = list(ctx.batches())
    with sync.join():
        for number, joined in enumerate(batches):
            parts = joined.chunk(ctx.num_ranks)
            here = [part for rank, part in enumerate(parts) if number < STEPS - 2 * rank]
            if ctx.alone:
                x = torch.cat(here)
            elif number < STEPS - 2 * ctx.rank:
                x = parts[ctx.rank]
            else:
                break
            optimizer.zero_grad()
            mse(model(x), target(x)).backward()
            optimizer.step()
            if number < STEPS - 2 * (ctx.num_ranks - 1):
                ctx.stepped(model)
    # All ranks train on together: their optimizer states must be equal by now.
    for joined in ctx.batches(5, seed=9):
        x = ctx.part(joined)
        optimizer.zero_grad()
        mse(model(x), target(x)).backward()
        optimizer.step()
        ctx.stepped(model)
    return model


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


@case
def sharded_loader(ctx: Context) -> nn.Module:
    """Four epochs of 49 samples in batches of 12: the last batch is of one sample, so most ranks have none."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    loader = gradsync.shard(Numbers(49, ctx.dtype), global_batch_size=12, seed=3, comm=ctx.comm or Solo())
    for _ in range(4):
        for x in loader:
            optimizer.zero_grad()
            mse(model(x), target(x)).backward()
            optimizer.step()
        ctx.stepped(model)
    return model


@case
def distributed_sampler(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    data = Numbers(48, ctx.dtype)
    samplers = [DistributedSampler(data, ctx.num_ranks, rank, seed=2) for rank in range(ctx.num_ranks)]
    for epoch in range(4):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        if ctx.alone:
            orders = [list(sampler) for sampler in samplers]
            size = JOINED // ctx.num_ranks
            steps = [[i for order in orders for i in order[at : at + size]] for at in range(0, len(orders[0]), size)]
            batches: Any = [data.rows[step] for step in steps]
        else:
            batches = DataLoader(data, batch_size=JOINED // ctx.num_ranks, sampler=samplers[ctx.rank])
        for x in batches:
            optimizer.zero_grad()
            mse(model(x), target(x)).backward()
            optimizer.step()
            ctx.stepped(model)
    return model


@case
def resumed(ctx: Context) -> nn.Module:
    """A run that is stopped in the middle of an accumulation, and resumed from the saved state in new objects."""
    model, optimizer, sync = None, None, None
    saved: dict[str, Any] = {}
    for number, joined in enumerate(ctx.batches(2 * STEPS)):
        if number in (0, 13):
            model = ctx.build(mlp)
            optimizer = ctx.optimizer(model.parameters())
            if saved:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            sync = ctx.sync(model, optimizer, accumulate=2)
            if saved and not ctx.alone:
                sync.load_state_dict(saved["sync"])
            if saved and ctx.alone:
                for param, grad in zip(model.parameters(), saved["grads"], strict=True):
                    param.grad = grad
        assert model is not None
        assert optimizer is not None
        x = ctx.part(joined)
        if ctx.alone:
            (mse(model(x), target(x)) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        else:
            mse(model(x), target(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 2:
            ctx.stepped(model)
        if number == 12:
            grads = [param.grad for param in model.parameters()]
            saved = {"model": model.state_dict(), "optimizer": sync.optimizer_state_dict(None), "grads": grads}
            if not ctx.alone:
                saved["sync"] = sync.state_dict()
                sync.close()
    return model
