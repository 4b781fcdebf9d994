"""Gradient accumulation, weights, and several backwards."""

from __future__ import annotations

import torch
from torch import nn

from tests.exactness.cases.common import case, mlp, pairs, target
from tests.exactness.context import JOINED, STEPS, Context, mse


@case
def no_sync(ctx: Context) -> nn.Module:
    """Three backwards a step: the mean over them."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer)
    batches = list(ctx.batches(3 * STEPS))
    for first in range(0, len(batches), 3):
        optimizer.zero_grad()
        for number, joined in enumerate(batches[first : first + 3]):
            x = ctx.part(joined)
            loss = mse(model(x), target(x)) / (3 if ctx.alone else 1)
            if number < 2:
                with sync.no_sync():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        ctx.stepped(model)
    return model


@case
def no_sync_as_sum(ctx: Context) -> nn.Module:
    """As DDP's users write it: they divide the loss, and gradients add up."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer, accumulation="sum")
    for joined, second in pairs(ctx):
        optimizer.zero_grad(set_to_none=False)
        x, y = ctx.part(joined), ctx.part(second)
        with sync.no_sync():
            (mse(model(x), target(x)) / 2).backward()
        (mse(model(y), target(y)) / 2).backward()
        optimizer.step()
        ctx.stepped(model)
    return model


@case
def accumulate(ctx: Context) -> nn.Module:
    """accumulate=3 under a loop that clips, steps and zeroes after every backward."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer, accumulate=3)
    for number, joined in enumerate(ctx.batches(3 * STEPS)):
        x = ctx.part(joined)
        if not ctx.alone:
            optimizer.zero_grad()
            mse(model(x), target(x)).backward()
            sync.clip_grad_norm_(1.0)
            optimizer.step()
        else:
            if number % 3 == 0:
                optimizer.zero_grad()
            (mse(model(x), target(x)) / 3).backward()
            if number % 3 == 2:
                sync.clip_grad_norm_(1.0)
                optimizer.step()
        if number % 3 == 2:
            ctx.stepped(model)
    return model


@case
def uneven_weights(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer)
    for joined in ctx.batches():
        x = ctx.uneven(joined)
        optimizer.zero_grad()
        sync.set_weight(len(x))
        mse(model(x), target(x)).backward()
        optimizer.step()
        ctx.stepped(model)
    return model


@case
def token_weights_under_accumulation(ctx: Context) -> nn.Module:
    """Every backward of every rank has its own number of tokens; the reference is the mean over all tokens."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer, accumulate=2)
    generator = torch.Generator().manual_seed(7)
    batches = list(ctx.batches(2 * STEPS))
    for first in range(0, len(batches), 2):
        pair = batches[first : first + 2]
        masks = [(torch.rand(JOINED, generator=generator) < 0.6).to(ctx.dtype) for _ in pair]
        total = sum(mask.sum() for mask in masks)
        optimizer.zero_grad()
        for joined, joined_mask in zip(pair, masks, strict=True):
            x, mask = ctx.part(joined), ctx.part(joined_mask)
            each = (model(x) - target(x)).square().mean(1) * mask
            if ctx.alone:
                (each.sum() / total).backward()
            else:
                sync.set_weight(mask.sum())  # may be 0: this rank then has no tokens, and its mean is NaN
                (each.sum() / mask.sum()).backward()
        optimizer.step()
        ctx.stepped(model)
    return model


@case
def several_backwards(ctx: Context) -> nn.Module:
    """Two losses, a backward each, one step: gradients add up, as in one process."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    for joined in ctx.batches():
        x = ctx.part(joined)
        optimizer.zero_grad()
        output = model(x)
        mse(output, target(x)).backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
        ctx.stepped(model)
    return model


@case
def backward_onto_an_earlier_mean(ctx: Context) -> nn.Module:
    """A synchronized gradient stays, and a whole accumulation is added to it."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer)
    for joined, second in pairs(ctx):
        x, y = ctx.part(joined), ctx.part(second)
        half = 0.5 if ctx.alone else 1.0
        optimizer.zero_grad()
        mse(model(x), target(x)).backward()
        with sync.no_sync():
            (half * model(x).square().mean()).backward()
        (half * model(y).square().mean()).backward()
        optimizer.step()
        ctx.stepped(model)
    return model
