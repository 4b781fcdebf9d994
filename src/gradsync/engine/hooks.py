"""The hooks of one engine on a model and its optimizer: how they are registered and removed.

Hooks refer to the engine weakly; only the model keeps it alive, by an anchor. The garbage collector can't see through a
parameter to its hooks, so with strong references a model that was dropped without close() would never be freed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
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
        self._last: dict[str, tuple[nn.Parameter, int]] = {}  # by name: the parameter, and the id of our hook there
        self._accumulators: list[Any] = []  # autograd drops a node that nothing refers to, and its hooks with it
        model.__dict__["_gradsync"] = _Anchor(engine)
        self.also_remove(lambda: model.__dict__.pop("_gradsync", None))

    def also_remove(self, remover: Callable[[], Any]) -> None:
        """Call ``remover`` too when the hooks are removed."""
        self._removers.append(remover)

    def on_gradients(self, params: Iterable[tuple[str, nn.Parameter]], event: Callable[..., Any]) -> None:
        """Call ``event(engine, name)`` when a parameter's gradient is in ``.grad``, after every other such hook."""
        for name, param in params:
            if not _can_train(param):
                continue
            with _trainable(param):  # frozen ones too: they may be unfrozen later
                handle = param.register_post_accumulate_grad_hook(self._bind(event, name))
            self._last[name] = (param, handle.id)
            self.also_remove(handle.remove)

    def move_behind_user_hooks(self) -> set[str]:
        """Move our hooks behind those that were registered after them; returns the parameters that have such hooks.

        A user's hook that changes ``.grad`` must run before the gradient is averaged. Afterwards it would change one
        rank's mean, and write into a bucket that is being sent.
        """
        overtaken = set()
        for name, (param, own) in self._last.items():
            hooks: Any = param._post_accumulate_grad_hooks
            if hooks is not None and own in hooks and next(reversed(hooks)) != own:
                hooks[own] = hooks.pop(own)
                overtaken.add(name)
        return overtaken

    def on_incoming(self, params: Iterable[nn.Parameter], event: Callable[..., Any]) -> None:
        """Call ``event(engine, grads)`` before autograd adds gradients up. Asking again changes nothing."""
        if self._accumulators:
            return
        for param in params:
            if not _can_train(param):
                continue
            with torch.enable_grad(), _trainable(param):
                node: Any = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self._accumulators.append(node)
            self.also_remove(node.register_prehook(self._bind(event)).remove)

    def remove(self) -> None:
        for remover in self._removers:
            remover()
        self._removers.clear()
        self._accumulators.clear()
        self._last.clear()

    def _bind(self, event: Callable[..., Any], *known: Any) -> Callable[..., Any]:
        reference = self._engine

        def hook(*given: Any) -> Any:
            alive = reference()
            return None if alive is None else alive.guard(event, alive, *(known or given))

        return hook


class _Anchor:
    """Keeps an engine alive for as long as its model lives. A copy or a pickle of the model does not include it."""

    def __init__(self, engine: Guarded | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _Anchor:
        return _Anchor()

    def __reduce__(self) -> tuple[type[OrderedDict[Any, Any]], tuple[()]]:
        # Nothing of gradsync: a saved model must load where gradsync is not installed, and under weights_only.
        return OrderedDict, ()


def _can_train(param: nn.Parameter) -> bool:
    """Whether a parameter can ever have a gradient: integers can't."""
    return param.is_floating_point() or param.is_complex()


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
