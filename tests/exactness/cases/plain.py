"""The default, buckets of several sizes, and what users do between backward and step."""

from __future__ import annotations

import torch
from torch import nn

from tests.exactness.cases.common import case, mlp, plain_loop, simple, target
from tests.exactness.context import STEPS, Context, mse


@case
def default(ctx: Context) -> nn.Module:
    return simple(ctx)


@case
def many_buckets(ctx: Context) -> nn.Module:
    return simple(ctx, bucket_bytes=600, first_bucket_bytes=100)


@case
def one_bucket(ctx: Context) -> nn.Module:
    return simple(ctx, bucket_bytes=1 << 20, first_bucket_bytes=1 << 20)


@case
def zero_grad_in_place(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    return plain_loop(ctx, model, optimizer, set_to_none=False)


@case
def clipping_and_user_hooks(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer)
    for joined in ctx.batches():
        x = ctx.part(joined)
        optimizer.zero_grad()
        mse(model(x), 10 * target(x)).backward()
        sync.clip_grad_norm_(0.5)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.add_(0.01)  # a user's noise, on the mean
        optimizer.step()
        ctx.stepped(model)
    return model


@case
def param_groups_and_schedule(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    groups = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    optimizer = ctx.optimizer(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    ctx.sync(model, optimizer)
    for joined in ctx.batches():
        x = ctx.part(joined)
        optimizer.zero_grad()
        mse(model(x), target(x)).backward()
        optimizer.step()
        schedule.step()
        ctx.stepped(model)
    return model
