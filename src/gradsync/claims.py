"""Whose parameters these are: two engines on one parameter would average its gradient twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

_CLAIMED = WeakIdKeyDictionary()


def claim(params: Mapping[str, Parameter]) -> Callable[[], None]:
    """Mark the parameters as an engine's; returns what undoes it. Refuses any that already are.

    >>> import torch
    >>> from gradsync.claims import claim
    >>> params = {"weight": torch.nn.Parameter(torch.ones(1))}
    >>> release = claim(params)
    >>> release()
    """
    for name, param in params.items():
        if param in _CLAIMED:
            raise ValueError(
                f"parameter {name} is already kept in step by another synchronizer: it would be averaged twice. "
                "Close that one first."
            )
    for param in params.values():
        _CLAIMED[param] = True

    def release() -> None:
        for param in params.values():
            _CLAIMED.pop(param, None)

    return release
