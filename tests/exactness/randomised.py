"""Random small models and loops, from a seed: what no named case has thought of."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.exactness.cases.common import target
from tests.exactness.context import Context, mse

STEPS = 6
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, torch.sigmoid, torch.sin, lambda x: x)


@dataclass(frozen=True)
class Recipe:
    """Everything that is random about a run, drawn from one seed."""

    seed: int
    widths: tuple[int, ...]
    ties: tuple[int, ...]  # layer i > 0 of equal width shares the weight of layer 1
    frozen: tuple[int, ...]
    skipped_when: tuple[int, ...]  # layer i is skipped, depending on the first value of a rank's part
    activations: tuple[int, ...]
    num_backwards: int
    by_no_sync: bool
    weighted: bool
    set_to_none: bool
    clip: bool
    bucket_bytes: int

    @staticmethod
    def draw(seed: int) -> Recipe:
        rng = random.Random(seed)
        depth = rng.randint(1, 5)
        width = rng.choice([1, 3, 8, 17])
        widths = tuple(width if rng.random() < 0.7 else rng.randint(1, 20) for _ in range(depth))
        layers = range(1, depth)
        return Recipe(
            seed=seed,
            widths=widths,
            ties=tuple(i for i in layers if rng.random() < 0.3),
            frozen=tuple(i for i in range(depth) if rng.random() < 0.15),
            skipped_when=tuple(i for i in layers if rng.random() < 0.3),
            activations=tuple(rng.randrange(len(ACTIVATIONS)) for _ in range(depth)),
            num_backwards=rng.choice([1, 1, 2, 3]),
            by_no_sync=rng.random() < 0.5,
            weighted=rng.random() < 0.6,
            set_to_none=rng.random() < 0.6,
            clip=rng.random() < 0.3,
            bucket_bytes=rng.choice([1, 100, 1000, 1 << 20]),
        )

    def weight(self, step: int, backward: int, rank: int) -> float:
        if not self.weighted:
            return 1.0
        drawn = random.Random(f"{self.seed}/{step}/{backward}/{rank}")
        return float(drawn.choice([0, 1, 2, 3, 7, 0.5]))


class RandomModel(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        sizes = [6, *recipe.widths]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.head = nn.Linear(sizes[-1], 3)
        for index in recipe.ties:
            if self.layers[index].weight.shape == self.layers[1].weight.shape:
                self.layers[index].weight = self.layers[1].weight
        for index in recipe.frozen:
            self.layers[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        recipe, h = self.recipe, x
        for index, layer in enumerate(self.layers):
            can_skip = index in recipe.skipped_when and layer.in_features == layer.out_features
            if not (can_skip and float(x[0, index]) > 0):
                h = ACTIVATIONS[recipe.activations[index]](layer(h))
        return self.head(h)


def random_case(seed: int) -> Callable[[Context], nn.Module]:
    recipe = Recipe.draw(seed)

    def run(ctx: Context) -> nn.Module:
        model = ctx.build(lambda: RandomModel(recipe), seed=seed)
        optimizer = ctx.optimizer(model.parameters())
        k = recipe.num_backwards
        sync = ctx.sync(
            model,
            optimizer,
            accumulate=1 if recipe.by_no_sync else k,
            bucket_bytes=recipe.bucket_bytes,
            first_bucket_bytes=max(1, recipe.bucket_bytes // 4),
        )
        batches = list(ctx.batches(STEPS * k, seed=seed))
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=recipe.set_to_none)
            window = batches[step * k : (step + 1) * k]
            total = sum(recipe.weight(step, j, r) for j in range(k) for r in range(ctx.num_ranks))
            for j, joined in enumerate(window):
                parts = joined.chunk(ctx.num_ranks)
                if ctx.alone:
                    for rank, part in enumerate(parts):
                        share = recipe.weight(step, j, rank) / total if total else 0.0
                        (share * mse(model(part), target(part))).backward()
                    continue
                part = parts[ctx.rank]
                loss = mse(model(part), target(part))
                if recipe.weighted:
                    sync.set_weight(recipe.weight(step, j, ctx.rank))
                if recipe.by_no_sync and j < k - 1:
                    with sync.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            if recipe.clip:
                sync.clip_grad_norm_(0.5)
            optimizer.step()
            ctx.stepped(model)
        return model

    return run
