"""The learning rate of ranks that step on their own: what a rank's own, smaller batch asks for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

Rate = Literal["same", "sqrt", "alone"]

RATES: dict[str, Callable[[int], float]] = {  # by what the rate is multiplied where so many ranks are apart
    "same": lambda num_ranks: 1.0,
    "sqrt": math.sqrt,
    "alone": lambda num_ranks: 1.0 / math.sqrt(num_ranks),
}
ADAPTIVE = (torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)


class InnerRate:
    """Multiplies the learning rate for the length of a step.

    [Note: shorter steps] Adam and its like divide by the root of the squared gradients, which are larger for a rank's
    own, smaller batch: where noise rules, by √n. So the mean of n ranks' steps is shorter by that than the step of one
    process on the joined batch; "sqrt" makes up for it, where ranks meet so often that their noise is averaged out.

    [Note: more noise] Where they are apart for long it is not: each is where its own noise has taken it. A rate that
    was chosen for the joined batch is then too high by √n; "alone" takes it down to what a rank's own batch bears.

    [Note: the first steps] Adam's are as long as any, though it knows next to nothing of the gradients yet. One process
    shakes that off. Ranks that are apart carry it, each in its own direction, to where they meet and beyond: into the
    outer momentum. A warm-up of the inner rate leaves it out.
    """

    def __init__(self, rate: Rate | None, warmup: int = 0) -> None:
        """``rate``: None is "alone" for Adam and its like, and "same" with no warm-up for others."""
        if rate is not None and rate not in RATES:
            raise ValueError(f"rate must be one of {', '.join(RATES)}; got {rate!r}.")
        self.rate = rate
        self._warmup = warmup
        self._factor: Callable[[int], float] = RATES["same"]
        self._optimizer: torch.optim.Optimizer | None = None
        self._asked: list[Any] = []  # the learning rates as the user's loop has set them, during a step

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn whose rates they are; refuses an optimizer whose steps do not depend on the batch's size."""
        is_adaptive = isinstance(optimizer, ADAPTIVE)
        if self.rate in ("sqrt", "alone") and not is_adaptive:
            raise ValueError(
                f"rate={self.rate!r} goes with Adam and its like; got {type(optimizer).__name__}, whose steps are "
                "not shorter for a smaller batch. Leave rate out."
            )
        self._optimizer = optimizer
        self._factor = RATES[self.rate or ("alone" if is_adaptive else "same")]
        if self.rate is None and not is_adaptive:
            self._warmup = 0

    def scale_for(self, num_ranks: int, step: int) -> None:
        """Before a step, counted from 0: set what so many ranks that are apart step with."""
        factor = self._factor(num_ranks)
        if num_ranks > 1 and step < self._warmup:
            factor *= (step + 1) / self._warmup
        if factor == 1.0 or self._optimizer is None:
            return
        self.restore()
        self._asked = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def restore(self) -> None:
        """After it: the user's schedule is to find its own rates."""
        if self._optimizer is not None:
            for group, asked in zip(self._optimizer.param_groups, self._asked, strict=False):
                group["lr"] = asked
        self._asked = []
