"""torch's own ways: checkpointing, compiling, closures, scaling, two models, batch norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsync
from tests.exactness.cases.common import case, mlp, plain_loop, simple, target
from tests.exactness.context import STEPS, Context, mse


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.last(h)


@case
def activation_checkpointing(ctx: Context) -> nn.Module:
    return simple(ctx, Checkpointed)


@case
def compiled_whole(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    model = model if ctx.alone else torch.compile(model, backend="aot_eager")
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    plain_loop(ctx, model, optimizer)
    return model if ctx.alone else model._orig_mod


@case
def compiled_by_block(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    if not ctx.alone:
        for block in model:
            block.compile(backend="aot_eager")
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    return plain_loop(ctx, model, optimizer)


@case
def closures(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    for joined in ctx.batches():
        x = ctx.part(joined)

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = mse(model(x), target(x))
            loss.backward()
            return loss

        optimizer.step(closure)
        ctx.stepped(model)
    return model


def scaled_loop(ctx: Context, k: int) -> nn.Module:
    """A GradScaler; in some steps one rank has an inf."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    sync = ctx.sync(model, optimizer, scaler=scaler, accumulate=k)
    for number, joined in enumerate(ctx.batches(k * STEPS)):
        x = ctx.part(joined)
        first, last = number % k == 0, number % k == k - 1
        step = number // k
        if first or not ctx.alone:
            optimizer.zero_grad()
        loss = mse(model(x), target(x)) / (k if ctx.alone else 1)
        if step % 7 == 5 and ctx.rank == ctx.world - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if last or not ctx.alone:
            scaler.unscale_(optimizer)
            sync.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
        if last:
            ctx.stepped(model)
    return model


@case
def grad_scaler(ctx: Context) -> nn.Module:
    return scaled_loop(ctx, 1)


@case
def grad_scaler_under_accumulation(ctx: Context) -> nn.Module:
    return scaled_loop(ctx, 3)


@case
def gan(ctx: Context) -> tuple[nn.Module, nn.Module]:
    """Two models, two optimizers; the generator's backward runs through the discriminator too."""
    generator = ctx.build(lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)), seed=1)
    judge = ctx.build(lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), seed=2)
    g_optimizer, d_optimizer = ctx.optimizer(generator.parameters()), ctx.optimizer(judge.parameters())
    ctx.sync(generator, g_optimizer)
    ctx.sync(judge, d_optimizer)
    noises = ctx.batches(STEPS, 4, seed=5)
    for joined, joined_noise in zip(ctx.batches(), noises, strict=True):
        real, noise = ctx.part(joined), ctx.part(joined_noise)
        d_optimizer.zero_grad()
        (F.softplus(judge(generator(noise).detach())).mean() + F.softplus(-judge(real)).mean()).backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        F.softplus(-judge(generator(noise))).mean().backward()
        g_optimizer.step()
        ctx.stepped(generator, judge)
    return generator, judge


class Normalised(nn.Module):
    """No bias before a norm: its gradient would be rounding noise around zero, which Adam divides by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Linear(8, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.Tanh(),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def normalised_loop(ctx: Context, *, uneven: bool) -> nn.Module:
    model = ctx.build(Normalised)
    if not ctx.alone:
        model = gradsync.SyncBatchNorm.convert(model, comm=ctx.comm)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer)
    for joined in ctx.batches():
        x = ctx.uneven(joined) if uneven else ctx.part(joined)
        optimizer.zero_grad()
        if uneven:
            sync.set_weight(len(x))
        mse(model(x), target(x)).backward()
        optimizer.step()
        ctx.stepped(model)
    # The running statistics belong to the outcome as the parameters do.
    for name, buffer in list(model.named_buffers()):
        if buffer.is_floating_point():
            model.register_parameter(name.replace(".", "_"), nn.Parameter(buffer.clone()))
    return model


@case
def sync_batch_norm(ctx: Context) -> nn.Module:
    return normalised_loop(ctx, uneven=False)


@case
def sync_batch_norm_uneven(ctx: Context) -> nn.Module:
    return normalised_loop(ctx, uneven=True)


@case
def sync_batch_norm_under_join(ctx: Context) -> nn.Module:
    """Rank r has two batches fewer than rank r - 1: its layers take part in the others' statistics with no sample."""
    model = ctx.build(Normalised)
    if not ctx.alone:
        model = gradsync.SyncBatchNorm.convert(model, comm=ctx.comm)
    optimizer = ctx.optimizer(model.parameters())
    sync = ctx.sync(model, optimizer)
    with sync.join():
        for number, joined in enumerate(ctx.batches()):
            parts = [part for rank, part in enumerate(joined.chunk(ctx.num_ranks)) if number < STEPS - 2 * rank]
            if not ctx.alone and ctx.rank >= len(parts):
                break
            x = torch.cat(parts) if ctx.alone else parts[ctx.rank]
            optimizer.zero_grad()
            mse(model(x), target(x)).backward()
            optimizer.step()
    ctx.stepped(model)
    return model
