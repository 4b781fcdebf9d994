"""What one rank trains: the model and all that goes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradsync.buffers import BufferSync
from gradsync.replicas import Stateful


@dataclass(frozen=True, kw_only=True)
class Training:
    """The engine's, and handed to a strategy once, before it is attached."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    params: Mapping[str, nn.Parameter]  # by plain name, frozen ones too
    buffers: BufferSync  # the model's buffers over the ranks, in the mode that the user asked for
    scaler: torch.amp.GradScaler | None = None
    schedules: Sequence[Stateful] = ()

    @property
    def loss_scale(self) -> float:
        """By what the scaler multiplies the loss now; 1 where there is none."""
        return float(self.scaler.get_scale()) if self.scaler is not None else 1.0

    @property
    def travelling(self) -> list[Stateful]:
        """What goes along with parameters and optimizer state when a rank takes over another's."""
        return [*self.schedules, *([self.scaler] if self.scaler is not None else [])]
