"""What one rank trains: the model and all that goes with it, for strategies that look beyond gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gradsync.buffers import BufferSync
from gradsync.replicas import Stateful


@dataclass(frozen=True, kw_only=True)
class Training:
    """Handed to a strategy once, before it is attached."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    params: Mapping[str, nn.Parameter]  # by plain name, frozen ones too
    buffers: BufferSync  # the model's buffers over the ranks, in the mode that the user asked for
    scaler: torch.amp.GradScaler | None = None
    schedules: Sequence[Stateful] = ()
