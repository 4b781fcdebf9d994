"""``ReadWatcher``: calls a function before a module's parameters are read, so that it can wait for their values.

[Note: who reads parameters] A module's forward hook is not enough: attention reads the weight of its output layer
without calling that layer, and so do tied weights. All of these get a parameter from its module's dict, as
``state_dict()``, ``parameters()`` and ``load_state_dict()`` do. So that dict is watched; and the forward hooks too, for
modules that keep a list of their parameters besides (recurrent layers). What no watcher sees is a parameter that a
script got earlier and has kept, and code that ``torch.compile`` has made: it reads the memory itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn import Parameter


def compiled_code_is_in_use() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # every optimizer imports it; it counts what it has compiled
    return dynamo is not None and bool(dynamo.counters.get("frames"))


OnRead = Callable[[Iterable[Parameter | None]], None]


class ReadWatcher:
    """Calls ``on_read(params)`` before parameters of a model are read, until ``remove``.

    The model refers to it weakly. Copies and pickles of the model are without it.

    >>> import torch
    >>> from gradsync.strategies.sharded.reads import ReadWatcher
    >>> model = torch.nn.Linear(2, 1)
    >>> watcher = ReadWatcher(model, lambda params: print("read", [tuple(param.shape) for param in params]))
    >>> _ = model.bias
    read [(1,)]
    >>> watcher.remove()
    >>> _ = model.bias
    """

    def __init__(self, model: nn.Module, on_read: OnRead) -> None:
        self._on_read = on_read
        self._modules = [module for module in model.modules() if module._parameters or module is model]
        reference = weakref.ref(self)
        self._hooks = []
        for module in self._modules:
            params = _WatchedParameters(module._parameters)
            params.watcher = reference
            module._parameters = params
            self._hooks.append(module.register_forward_pre_hook(_BeforeForward(reference), prepend=True))

    def read(self, params: Iterable[Parameter | None]) -> None:
        """Called before these parameters are read."""
        self._on_read(params)

    def remove(self) -> None:
        """Stop watching: the modules are as they were."""
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            if isinstance(module._parameters, _WatchedParameters):
                module._parameters = dict(dict.items(module._parameters))
        self._modules, self._hooks = [], []


class _BeforeForward:
    """A forward pre-hook. A copy or a pickle of it does nothing."""

    def __init__(self, watcher: weakref.ref[ReadWatcher] | None = None) -> None:
        self._watcher = watcher

    def __call__(self, module: nn.Module, args: Any) -> None:
        watcher = None if self._watcher is None else self._watcher()
        if watcher is not None:
            watcher.read(dict.values(module._parameters))

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeForward, ()


class _WatchedParameters(dict[str, Parameter | None]):
    """A module's dict of parameters that tells a watcher before it gives them out. It copies as a plain dict."""

    watcher: weakref.ref[ReadWatcher]

    def _tell(self, params: Iterable[Parameter | None]) -> None:
        watcher = self.watcher()
        if watcher is not None:
            watcher.read(params)

    def __getitem__(self, name: str) -> Parameter | None:
        param = super().__getitem__(name)
        self._tell((param,))
        return param

    def get(self, name: str, default: Any = None) -> Any:
        self._tell((super().get(name),))
        return super().get(name, default)

    def values(self) -> Any:
        self._tell(super().values())
        return super().values()

    def items(self) -> Any:
        self._tell(super().values())
        return super().items()

    def copy(self) -> dict[str, Parameter | None]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)
