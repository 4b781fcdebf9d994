"""What hangs on a model and its optimizer while they are synchronized, and how it comes off again.

Nothing here keeps an engine alive but the model itself, by an anchor: the garbage collector can't see through a
parameter to its hooks, so a model that was dropped without close() would live as long as the process.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn


class Guarded(Protocol):
    """What hooks need of an engine."""

    def guard(self, event: Callable[..., Any], *args: Any) -> Any: ...


class Hooks:
    """One engine's hooks. ``remove`` leaves the model and the optimizer as they were."""

    def __init__(self, engine: Guarded, model: nn.Module) -> None:
        self._engine = weakref.ref(engine)
        self._removers: list[Callable[[], None]] = []
        self._accumulators: list[Any] = []  # autograd drops a node nobody holds, and its hooks with it
        model.__dict__["_gradsync"] = _Anchor(engine)
        self.also_remove(lambda: model.__dict__.pop("_gradsync", None))

    def also_remove(self, remover: Callable[[], Any]) -> None:
        """Have something else undone with the hooks."""
        self._removers.append(remover)

    def on_gradients(self, params: Iterable[tuple[str, nn.Parameter]], event: Callable[..., Any]) -> None:
        """Call ``event(engine, name)`` when a parameter's gradient is in ``.grad``."""
        for name, param in params:
            with _trainable(param):  # frozen ones too: nobody else would notice when all that trains is unfrozen later
                self.also_remove(param.register_post_accumulate_grad_hook(self._calling(event, name)).remove)

    def on_incoming(self, params: Iterable[nn.Parameter], event: Callable[..., Any]) -> None:
        """Call ``event(engine, grads)`` before autograd adds gradients up. Asking again changes nothing."""
        if self._accumulators:
            return
        for param in params:
            with torch.enable_grad(), _trainable(param):
                node: Any = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self._accumulators.append(node)
            self.also_remove(node.register_prehook(self._calling(event)).remove)

    def remove(self) -> None:
        for remover in self._removers:
            remover()
        self._removers.clear()
        self._accumulators.clear()

    def _calling(self, event: Callable[..., Any], *known: Any) -> Callable[..., Any]:
        reference = self._engine

        def hook(*given: Any) -> Any:
            alive = reference()
            return None if alive is None else alive.guard(event, alive, *(known or given))

        return hook


class _Anchor:
    """What keeps an engine for as long as its model lives. A copy or a pickle of the model leaves it behind."""

    def __init__(self, engine: Guarded | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _Anchor:
        return _Anchor()

    def __reduce__(self) -> tuple[type[_Anchor], tuple[()]]:
        return _Anchor, ()


@contextlib.contextmanager
def _trainable(param: nn.Parameter) -> Iterator[None]:
    """For as long as it takes to hook a parameter: torch refuses hooks on frozen ones, but keeps those it has."""
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            param.requires_grad_(False)
