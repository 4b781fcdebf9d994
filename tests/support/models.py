"""Small models that tests share."""

from __future__ import annotations

import torch
from torch import nn


def build(seed: int = 0) -> nn.Sequential:
    """The same model for the same seed, also when ranks that are threads build theirs at once."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(seed)  # its own: torch's is shared by the threads
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.4 * torch.randn(param.shape, generator=generator))
    return model
