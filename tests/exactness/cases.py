"""The exactness suite's named cases: each trains a small model the same way in one process and on N ranks.

A case gets a Context, runs its loop, and returns its model(s). What a rank sees is its part of the joined batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import gradsync
from gradsync.comm.base import Solo
from tests.exactness.context import JOINED, STEPS, Context, mse

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
    ctx.sync(model, optimizer)
    for joined in ctx.batches():
        x = ctx.part(joined)
        optimizer.zero_grad()
        mse(model(x), 10 * target(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
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


# -- accumulation and weights -------------------------------------------------------------------------------------


def pairs(ctx: Context) -> list[tuple[Tensor, Tensor]]:
    batches = list(ctx.batches(2 * STEPS))
    return list(zip(batches[::2], batches[1::2], strict=True))


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
    ctx.sync(model, optimizer, accumulate=3)
    for number, joined in enumerate(ctx.batches(3 * STEPS)):
        x = ctx.part(joined)
        if not ctx.alone:
            optimizer.zero_grad()
            mse(model(x), target(x)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            if number % 3 == 0:
                optimizer.zero_grad()
            (mse(model(x), target(x)) / 3).backward()
            if number % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
                sync.set_weight(mask.sum())  # may be 0: nothing to learn from here, and the mean of nothing is NaN
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


# -- which parameters ---------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """A trunk, two branches of which a sample may take one, a part nobody uses, and one used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)
        self.never = nn.Linear(8, 3)
        self.sometimes = nn.Linear(8, 3)

    def forward(self, x: Tensor, also: bool) -> Tensor:
        h = torch.tanh(self.trunk(x))
        out = x.new_zeros(len(x), 3)
        go_left = x[:, 0] > 0.9  # seldom: many a rank sees none
        if bool(go_left.any()):
            out = out + self.left(h) * go_left[:, None]
        if not bool(go_left.all()):
            out = out + self.right(h) * ~go_left[:, None]
        return out + self.sometimes(h) if also else out


def branching_loop(ctx: Context, set_to_none: bool) -> nn.Module:
    model = ctx.build(Branching)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    for number, joined in enumerate(ctx.batches()):
        x = ctx.part(joined)
        optimizer.zero_grad(set_to_none=set_to_none)
        mse(model(x, number % 3 == 1), target(x)).backward()
        assert model.never.weight.grad is None
        if set_to_none and number % 3 != 1:
            assert model.sometimes.weight.grad is None, "nobody used it: None, as in one process"
        optimizer.step()
        ctx.stepped(model)
    return model


@case
def unused_parameters(ctx: Context) -> nn.Module:
    return branching_loop(ctx, set_to_none=True)


@case
def unused_parameters_zeroed(ctx: Context) -> nn.Module:
    return branching_loop(ctx, set_to_none=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 10)
        self.middle = nn.Linear(10, 10)
        self.decode = nn.Linear(10, 6)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().T.clone())
        self.again = nn.Linear(6, 10)
        self.again.weight = self.encode.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.middle(torch.tanh(self.encode(x))))
        return self.head(torch.tanh(F.linear(h + self.again(x), self.encode.weight.T)))


@case
def shared_parameters(ctx: Context) -> nn.Module:
    return simple(ctx, Tied)


@case
def frozen_then_thawed(ctx: Context) -> nn.Module:
    model = ctx.build(mlp)
    model[0].requires_grad_(False)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    for number, joined in enumerate(ctx.batches()):
        if number == 6:
            model[0].requires_grad_(True)
        if number == 12:
            model[2].requires_grad_(False)
        x = ctx.part(joined)
        optimizer.zero_grad()
        mse(model(x), target(x)).backward()
        optimizer.step()
        ctx.stepped(model)
    return model


@case
def frozen_within_an_accumulation(ctx: Context) -> nn.Module:
    """The plan changes while gradients are gathered: they move along."""
    model = ctx.build(mlp)
    model[0].requires_grad_(False)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer, accumulate=2)
    for number, joined in enumerate(ctx.batches(2 * STEPS)):
        if number in (7, 21):
            model[0].requires_grad_(number == 7)
        x = ctx.part(joined)
        if number % 2 == 0:
            optimizer.zero_grad()
        (mse(model(x), target(x)) / (2 if ctx.alone else 1)).backward()
        if number % 2:
            optimizer.step()
            ctx.stepped(model)
    return model


class TwoPrecisions(nn.Module):
    """A part in the run's precision and one always in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 12)
        self.high = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(torch.tanh(self.low(x)).double()).to(x.dtype)


@case
def several_dtypes(ctx: Context) -> nn.Module:
    model = ctx.build(TwoPrecisions)
    model.high.double()
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    return plain_loop(ctx, model, optimizer)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=True)
        self.bag = nn.EmbeddingBag(30, 6, sparse=True, mode="sum")
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, use_bag: bool) -> Tensor:
        ids = (x.abs() * 20).long() % 50
        h = self.table(ids).mean(1)
        if use_bag:
            h = h + self.bag(ids % 30)
        return self.head(h)


@case
def sparse_embeddings(ctx: Context) -> nn.Module:
    model = ctx.build(Words)
    # Momentum and AdamW take no sparse gradients, in one process neither.
    sparse = [*model.table.parameters(), *model.bag.parameters()]
    optimizer = (
        torch.optim.SGD(sparse, lr=0.1) if ctx.optimizer_name == "sgd" else torch.optim.SparseAdam(sparse, lr=0.01)
    )
    head = ctx.optimizer(model.head.parameters())
    ctx.sync(model, head)
    for number, joined in enumerate(ctx.batches()):
        optimizer.zero_grad()
        head.zero_grad()
        x = ctx.part(joined)
        mse(model(x, number % 2 == 1), target(x)).backward()
        assert number % 2 == 1 or model.bag.weight.grad is None
        optimizer.step()
        head.step()
        ctx.stepped(model)
    return model


@case
def sparse_embeddings_accumulated(ctx: Context) -> nn.Module:
    model = ctx.build(Words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = ctx.sync(model, optimizer)
    for joined, second in pairs(ctx):
        optimizer.zero_grad()
        x, y = ctx.uneven(joined), ctx.part(second)
        total = len(joined) + len(second)
        with sync.no_sync():
            sync.set_weight(len(x))
            (mse(model(x, True), target(x)) * (len(x) / total if ctx.alone else 1)).backward()
        sync.set_weight(len(y))
        (mse(model(y, False), target(y)) * (len(y) / total if ctx.alone else 1)).backward()
        optimizer.step()
        ctx.stepped(model)
    return model


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


@case
def channels_last(ctx: Context) -> nn.Module:
    model = ctx.build(Convolutions).to(memory_format=torch.channels_last)
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    for joined in ctx.batches(STEPS, 2, 5, 5):
        x = ctx.part(joined).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        mse(model(x), target(x.flatten(1))).backward()
        optimizer.step()
        ctx.stepped(model)
    return model


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs().to(x.dtype)


@case
def complex_parameters(ctx: Context) -> nn.Module:
    model = Complex()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        model.weight.copy_(torch.randn(6, 3, dtype=torch.complex128, generator=generator))
    optimizer = ctx.optimizer(model.parameters())
    ctx.sync(model, optimizer)
    return plain_loop(ctx, model, optimizer)


# -- the ways of torch --------------------------------------------------------------------------------------------


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
    """A GradScaler that meets an inf now and then, on one rank only."""
    model = ctx.build(mlp)
    optimizer = ctx.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    ctx.sync(model, optimizer, scaler=scaler, accumulate=k)
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
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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


# -- data ---------------------------------------------------------------------------------------------------------


@case
def join_uneven_numbers_of_batches(ctx: Context) -> nn.Module:
    """Rank r has STEPS - 2r batches; the reference trains on what the ranks still had."""
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
    # The optimizer state must have come along: go on together.
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
    """Stopped in the middle of an accumulation, and gone on from what was saved, in new objects."""
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
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "grads": grads}
            if not ctx.alone:
                saved["sync"] = sync.state_dict()
                sync.close()
    return model
