"""The training step of bench_step and bench_versions. It imports nothing of gradsync, so it works with any version."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS, BATCH, TOKENS = 4096, 128, 512, 4, 8, 4, 64


class Transformer(nn.Module):
    """A pre-norm language model of 16.9 M parameters: 68 MB of gradients against 256 tokens of compute."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        # Dropout would make the variants compute different things; it is no part of what is measured.
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        logits: Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits


def step_of(module: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Callable[[], None]:
    """One whole training step: each token of a row predicts the next."""

    def step() -> None:
        optimizer.zero_grad()
        logits = module(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def time_block(step: Callable[[], None], comm: Any, *, steps: int) -> list[float]:
    """Time `steps` steps, after an untimed one that warms caches and connections: each on its slowest rank."""
    gc.collect()
    comm.barrier()
    step()
    comm.barrier()
    taken_s = torch.zeros(steps, dtype=torch.float64)
    for index in range(steps):
        start = time.perf_counter()
        step()
        taken_s[index] = time.perf_counter() - start
    comm.all_reduce(taken_s, op="max").wait()
    return [float(seconds) for seconds in taken_s]


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """Rotate, and reverse every other round: each variant comes as often before another as after it."""
    turn = number // 2 % len(names)
    rotated = [*names[turn:], *names[:turn]]
    return rotated if number % 2 == 0 else rotated[::-1]
