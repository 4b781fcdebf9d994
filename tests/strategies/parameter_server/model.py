"""A model for tests of the parameter server, with its batches and loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two layers, of which one is used by even steps only, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)  # one before a norm would have noise for a gradient
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 2)
        self.sometimes = nn.Linear(8, 2, bias=False)
        self.double()
        seeded = torch.Generator().manual_seed(0)  # not torch's own, which ranks that are threads share
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.4 * torch.randn(param.shape, generator=seeded))

    def forward(self, x: Tensor, step: int) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)))
        out: Tensor = self.second(hidden)
        return out + self.sometimes(hidden) if step % 2 == 0 else out


def batch(step: int, rank: int, samples: int = 6) -> Tensor:
    return torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step * 100 + rank))


def loss_of(model: nn.Module, x: Tensor, step: int) -> Tensor:
    loss: Tensor = (model(x, step) - x[:, :2]).square().mean()
    return loss
