"""What a rank still owes the servers: the gradients of steps that were not pushed yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Owed:
    """The sum of several steps' gradients, and of their weights.

    >>> import torch
    >>> from gradsync.strategies.owed import Owed
    >>> owed = Owed()
    >>> owed.add({"w": torch.ones(2)}, weight=4.0)
    >>> owed.add({"w": torch.ones(2)}, weight=3.0)
    >>> owed.take()
    ({'w': tensor([2., 2.])}, 7.0)
    >>> bool(owed)
    False
    """

    def __init__(self) -> None:
        self._grads: dict[str, Tensor] = {}
        self._weight = 0.0

    def __bool__(self) -> bool:
        return bool(self._grads)

    def add(self, grads: Mapping[str, Tensor], weight: float) -> None:
        """Owe a step's gradients too. They are copied."""
        for name, grad in grads.items():
            if name in self._grads:
                self._grads[name] += grad
            else:
                self._grads[name] = grad.clone()
        self._weight += weight

    def take(self) -> tuple[dict[str, Tensor], float]:
        """All that is owed, by parameter name, and its weight; nothing is owed then."""
        taken = self._grads, self._weight
        self._grads, self._weight = {}, 0.0
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"owed": _copied(self._grads), "owed_weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        self._grads, self._weight = _copied(state["owed"]), state["owed_weight"]


def _copied(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: grad.clone() for name, grad in grads.items()}
