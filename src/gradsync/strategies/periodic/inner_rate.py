"""Scaling of the inner learning rate, for ranks that step on their own, smaller batches between exchanges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch

Rate = Literal["same", "sqrt", "alone"]

RATES: dict[str, Callable[[int], float]] = {  # the factor for the learning rate, by the number of ranks
    "same": lambda num_ranks: 1.0,
    "sqrt": math.sqrt,
    "alone": lambda num_ranks: 1.0 / math.sqrt(num_ranks),
}
ADAPTIVE = (torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)


class InnerRate:
    """Multiplies the learning rate for the duration of a step.

    [Note: shorter steps] Adam and its like divide by the root of the mean squared gradients, which are larger for a
    rank's own, smaller batch: by √n where noise dominates. So the mean of n ranks' steps is shorter by that factor than
    the step of one process on the joined batch. "sqrt" makes up for it, if ranks exchange so often that their noise is
    averaged out.

    [Note: more noise] If they exchange rarely it is not averaged out: each rank has followed its own noise. A rate that
    was chosen for the joined batch is then too high by √n. "alone" divides it by √n, as a rank's own batch needs.

    [Note: the first steps] Adam's first steps are as long as any, though its estimate of the squared gradients is poor.
    A single process recovers from that. Ranks that step alone carry the error, each in its own direction, into the
    exchange and from there into the outer momentum. A warm-up of the inner rate avoids it.
    """

    def __init__(self, rate: Rate | None, warmup: int = 0) -> None:
        """``rate``: None is "alone" for Adam and its like, and "same" with no warm-up for others."""
        if rate is not None and rate not in RATES:
            raise ValueError(f"rate must be one of {', '.join(RATES)}; got {rate!r}.")
        self.rate = rate
        self._warmup = warmup
        self._factor: Callable[[int], float] = RATES["same"]
        self._optimizer: torch.optim.Optimizer | None = None
        self._original_rates: list[Any] = []  # during a step: the learning rates as the user's loop has set them

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Scale this optimizer's rates; refuses one whose steps do not depend on the batch's size."""
        is_adaptive = isinstance(optimizer, ADAPTIVE)
        if self.rate in ("sqrt", "alone") and not is_adaptive:
            raise ValueError(
                f"rate={self.rate!r} requires an optimizer like Adam; got {type(optimizer).__name__}, whose steps are "
                "not shorter for a smaller batch. Leave rate out."
            )
        self._optimizer = optimizer
        self._factor = RATES[self.rate or ("alone" if is_adaptive else "same")]
        if self.rate is None and not is_adaptive:
            self._warmup = 0

    def scale(self, num_ranks: int, step: int) -> None:
        """Before a step, counted from 0: set the learning rates for ``num_ranks`` ranks that step on their own."""
        factor = self._factor(num_ranks)
        if num_ranks > 1 and step < self._warmup:
            factor *= (step + 1) / self._warmup
        if factor == 1.0 or self._optimizer is None:
            return
        self.restore()
        self._original_rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def restore(self) -> None:
        """After a step: set the learning rates back, so that the user's schedule finds its own."""
        if self._optimizer is not None:
            for group, original in zip(self._optimizer.param_groups, self._original_rates, strict=False):
                group["lr"] = original
        self._original_rates = []
