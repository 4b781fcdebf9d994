"""Callbacks for every synchronizer that is made in this process: how ``gradsync compare`` follows a user's script."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsync.synchronize import Synchronizer

Observer = Callable[["Synchronizer"], None]

_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Call a function with every synchronizer that is made from now on; returns a function that ends it."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def announce(sync: Synchronizer) -> None:
    """Call all observers."""
    for observer in list(_observers):
        observer(sync)
