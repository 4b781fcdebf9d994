"""Accumulates the gradients of several steps into one push, for ``push_every`` above 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class GradientAccumulator:
    """The sum of the gradients that were not pushed yet, and of their weights.

    >>> import torch
    >>> from gradsync.strategies.parameter_server.accumulator import GradientAccumulator
    >>> accumulator = GradientAccumulator()
    >>> accumulator.add({"w": torch.ones(2)}, weight=4.0)
    >>> accumulator.add({"w": torch.ones(2)}, weight=3.0)
    >>> accumulator.take()
    ({'w': tensor([2., 2.])}, 7.0)
    >>> bool(accumulator)
    False
    """

    def __init__(self) -> None:
        self._grads: dict[str, Tensor] = {}
        self._weight = 0.0

    def __bool__(self) -> bool:
        return bool(self._grads)

    def add(self, grads: Mapping[str, Tensor], weight: float) -> None:
        """Add one step's gradients. They are copied."""
        for name, grad in grads.items():
            if name in self._grads:
                self._grads[name] = (
                    self._grads[name].to(grad.device).add_(grad)
                )  # after load_state_dict the sum may be on another device
            else:
                self._grads[name] = grad.clone()
        self._weight += weight

    def take(self) -> tuple[dict[str, Tensor], float]:
        """Return the sum, by parameter name, and its weight; and start again from zero."""
        taken = self._grads, self._weight
        self._grads, self._weight = {}, 0.0
        return taken

    def state_dict(self) -> dict[str, Any]:
        """A copy of the sum."""
        return {"owed": _copied(self._grads), "owed_weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        self._grads, self._weight = _copied(state["owed"]), state["owed_weight"]


def _copied(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: grad.clone() for name, grad in grads.items()}
