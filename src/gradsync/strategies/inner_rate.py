"""The learning rate of ranks that step on their own: what makes up for a rank's own, smaller batch."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

Rate = Literal["same", "sqrt"]

RATES = ("same", "sqrt")
ADAPTIVE = (torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)


class InnerRate:
    """Multiplies the learning rate for the length of a step.

    [Note: shorter steps] Adam and its like divide by the root of the squared gradients, which are larger for a rank's
    own, smaller batch: where noise rules, by √n. So the mean of n ranks' steps is shorter by that than the step of one
    process on the joined batch; "sqrt" makes up for it.
    """

    def __init__(self, rate: Rate) -> None:
        if rate not in RATES:
            raise ValueError(f"rate must be one of {', '.join(RATES)}; got {rate!r}.")
        self.rate = rate
        self._optimizer: torch.optim.Optimizer | None = None
        self._asked: list[Any] = []  # the learning rates as the user's loop has set them, during a step

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn whose rates they are; refuses an optimizer whose steps do not depend on the batch's size."""
        if self.rate == "sqrt" and not isinstance(optimizer, ADAPTIVE):
            raise ValueError(
                f"rate='sqrt' goes with Adam and its like; got {type(optimizer).__name__}, whose steps are "
                "not shorter for a smaller batch. Leave rate out."
            )
        self._optimizer = optimizer

    def raise_for(self, num_ranks: int) -> None:
        """Before a step: set what so many ranks that are apart step with."""
        if self.rate == "same" or self._optimizer is None:
            return
        self.restore()
        self._asked = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * math.sqrt(num_ranks)

    def restore(self) -> None:
        """After it: the user's schedule is to find its own rates."""
        if self._optimizer is not None:
            for group, asked in zip(self._optimizer.param_groups, self._asked, strict=False):
                group["lr"] = asked
        self._asked = []
