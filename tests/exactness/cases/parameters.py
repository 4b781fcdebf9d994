"""Which parameters: unused, shared, frozen, of several dtypes and layouts, sparse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.exactness.cases.common import case, mlp, pairs, plain_loop, simple, target
from tests.exactness.context import STEPS, Context, mse


class Branching(nn.Module):
    """A trunk, two branches of which a sample takes one, a layer that is never used, and one used in some steps."""

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
        go_left = x[:, 0] > 0.9  # rare: many ranks have no such sample
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
            assert model.sometimes.weight.grad is None, "no rank used it: None, as in one process"
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
