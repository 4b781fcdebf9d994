"""Who wants to know of every synchronizer that begins in this process: launchers that look over a script's shoulder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradsync.synchronize import Synchronizer

Observer = Callable[["Synchronizer"], None]

_observers: list[Observer] = []


def observe(observer: Observer) -> Callable[[], None]:
    """Have a function called with every synchronizer from now on; returns what ends it."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def announce(sync: Synchronizer) -> None:
    """Tell all who want to know."""
    for observer in list(_observers):
        observer(sync)
