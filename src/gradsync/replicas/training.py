"""What one rank trains: the model, its optimizer, buffers, scaler and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradsync.comm.readback import HostValue
from gradsync.replicas.agreement import Stateful
from gradsync.replicas.buffers import BufferSync


@dataclass(frozen=True, kw_only=True)
class Training:
    """Owned by the engine; a strategy sees it once, in ``setup``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    params: Mapping[str, nn.Parameter]  # by plain name, frozen ones too
    buffers: BufferSync  # the model's buffers over the ranks, in the mode that the user asked for
    scaler: torch.amp.GradScaler | None = None
    schedules: Sequence[Stateful] = ()
    _host_scale: HostValue = field(default_factory=HostValue, init=False, repr=False)

    @property
    def loss_scale(self) -> float:
        """The factor by which the scaler multiplies the loss now; 1 without a scaler.

        Blocks until a GPU has passed the scaler's last ``update()``, and no longer if ``follow_loss_scale`` was called
        after that.
        """
        if self.scaler is None:
            return 1.0
        scale = self._scale_on_device()
        return float(self.scaler.get_scale()) if scale is None else self._host_scale.current(scale)[0]

    def follow_loss_scale(self) -> None:
        """Start to copy the scale from a GPU to the host, after it may have changed. Does not block."""
        scale = self._scale_on_device()
        if scale is not None:
            self._host_scale.follow(scale)

    def _scale_on_device(self) -> Tensor | None:
        """The scaler's tensor if it is on a GPU, where ``get_scale()`` would stall; else None."""
        if self.scaler is None or not self.scaler.is_enabled():
            return None
        scale = self.scaler._get_scale_async()
        return None if scale is None or scale.is_cpu else scale

    def check_all_optimized(self, strategy: str) -> None:
        """Refuse trained parameters that the optimizer does not have, for strategies that act around its steps."""
        optimized = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        left_out = [name for name, param in self.params.items() if param.requires_grad and id(param) not in optimized]
        if left_out:
            raise ValueError(
                f"{strategy} acts around the steps of the optimizer that it is given, and that one does not have "
                f"{len(left_out)} trained parameter(s) of the model (the first: {left_out[0]}). With two optimizers "
                "the other's parameters would never be exchanged. Put all into one optimizer, as parameter groups; "
                "freeze what is not trained (requires_grad_(False)); or use allreduce, which works with any number of "
                "optimizers."
            )

    @property
    def copied_with_state(self) -> list[Stateful]:
        """Objects whose state is copied together with parameters and optimizer state when a rank receives another's."""
        return [*self.schedules, *([self.scaler] if self.scaler is not None else [])]
