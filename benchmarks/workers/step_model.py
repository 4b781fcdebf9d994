"""The models of bench_step and bench_versions, each with a batch that suits one thread.

It imports nothing of gradsync, so bench_versions can use it with any version.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS, BATCH, TOKENS = 4096, 128, 512, 4, 8, 4, 64
GPT2_VOCABULARY, GPT2_CONTEXT, GPT2_WIDTH, GPT2_LAYERS, GPT2_HEADS, GPT2_TOKENS = 50257, 1024, 768, 12, 12, 64
IMAGES, IMAGE_SIZE, NUM_CLASSES = 4, 32, 10
STAGE_WIDTHS, BLOCKS_PER_STAGE = (32, 64, 128), 8


@dataclass(frozen=True)
class Batch:
    """What one rank trains on, step after step."""

    inputs: Tensor
    targets: Tensor

    def loss(self, module: nn.Module) -> Tensor:
        """The mean cross-entropy of the module's logits, which are in the last dimension."""
        logits: Tensor = module(self.inputs)
        return nn.functional.cross_entropy(logits.flatten(0, -2), self.targets.flatten())


def next_token_batch(tokens: Tensor) -> Batch:
    """Each token of a row predicts the next."""
    return Batch(tokens[:, :-1], tokens[:, 1:])


class Transformer(nn.Module):
    """A pre-norm language model; by default 16.9 M parameters: 68 MB of gradients against 256 tokens of compute."""

    def __init__(
        self,
        *,
        vocabulary: int = VOCABULARY,
        context: int = CONTEXT,
        width: int = WIDTH,
        layers: int = LAYERS,
        heads: int = HEADS,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        # Dropout would make the variants compute different things; it is no part of what is measured.
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width) if tied else nn.Identity()
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
            nn.init.normal_(
                self.tokens.weight, std=0.02
            )  # GPT-2's; with torch's own, of 1, the logits are far too large

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each position."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        logits: Tensor = self.head(self.norm(self.blocks(hidden, mask=mask, is_causal=True)))
        return logits


def gpt2() -> nn.Module:
    """A transformer of GPT-2's shape: 124 M parameters in 148 tensors, the head tied to the embedding."""
    return Transformer(
        vocabulary=GPT2_VOCABULARY,
        context=GPT2_CONTEXT,
        width=GPT2_WIDTH,
        layers=GPT2_LAYERS,
        heads=GPT2_HEADS,
        tied=True,
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut: 6 tensors, or 9 where the width changes."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        stride = 1 if width_in == width else 2
        self.body = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            convolution = nn.Conv2d(width_in, width, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of half the image's size where the width changes."""
        return torch.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for small images: 3.0 M parameters in 155 tensors, most of them of a few hundred bytes."""

    def __init__(self) -> None:
        super().__init__()
        first = STAGE_WIDTHS[0]
        self.stem = nn.Sequential(nn.Conv2d(3, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
        widths = [width for width in STAGE_WIDTHS for _ in range(BLOCKS_PER_STAGE)]
        self.blocks = nn.Sequential(
            *(ResidualBlock(before, width) for before, width in zip([first, *widths], widths, strict=False))
        )
        self.head = nn.Linear(STAGE_WIDTHS[-1], NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """The logits of each image's class."""
        logits: Tensor = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        return logits


def tiny() -> nn.Module:
    """A perceptron that computes next to nothing."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))


def _tokens(vocabulary: int, rows: int, length: int) -> Callable[[torch.Generator], Batch]:
    return lambda data: next_token_batch(torch.randint(vocabulary, (rows, length + 1), generator=data))


def _labelled(*shape: int) -> Callable[[torch.Generator], Batch]:
    def make(data: torch.Generator) -> Batch:
        return Batch(torch.randn(shape, generator=data), torch.randint(NUM_CLASSES, shape[:1], generator=data))

    return make


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model to train, and a batch of one rank for it."""

    title: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]


MODELS: dict[str, Workload] = {
    "gpt": Workload(title="transformer", build=Transformer, make_batch=_tokens(VOCABULARY, BATCH, TOKENS)),
    "resnet": Workload(title="ResNet", build=ResNet, make_batch=_labelled(IMAGES, 3, IMAGE_SIZE, IMAGE_SIZE)),
    "gpt2": Workload(title="GPT-2", build=gpt2, make_batch=_tokens(GPT2_VOCABULARY, 1, GPT2_TOKENS)),
    "tiny": Workload(title="perceptron", build=tiny, make_batch=_labelled(4, 16)),
}
