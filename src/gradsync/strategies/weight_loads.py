"""Finds out whether weights were loaded into the model between two steps, for strategies that keep copies of them.

[Note: loaded weights] One rule holds for all strategies: weights that ``load_state_dict`` of the model, or of a part of
it, puts into the parameters between two steps, on all ranks alike, are the weights that training continues from. A
strategy that keeps weights elsewhere (an anchor, a server) asks a ``LoadWatcher`` before each step, and updates its
copies. Weights that are loaded and put back before the next step (an averaged model, for an evaluation) count as
unchanged: the bits before and after are compared.
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LoadedWeights:
    """The parameters whose bits were changed by loading, and a digest of their new values."""

    names: tuple[str, ...]
    digest: int  # 48 bits, above 0: a float64 holds it exactly


class LoadWatcher:
    """Watches a model for ``load_state_dict`` until ``remove``. It costs nothing while nothing is loaded.

    >>> import torch
    >>> from gradsync.strategies.weight_loads import LoadWatcher
    >>> model = torch.nn.Linear(2, 1)
    >>> saved = {name: value.clone() for name, value in model.state_dict().items()}
    >>> watcher = LoadWatcher(model, dict(model.named_parameters()))
    >>> watcher.take_changes() is None
    True
    >>> _ = model.load_state_dict({name: value + 1 for name, value in saved.items()})
    >>> watcher.take_changes().names
    ('weight', 'bias')
    >>> watcher.remove()
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor]) -> None:
        self.was_loaded = False  # since the last ``take_changes``, whatever the values
        self._params = params
        self._before: dict[str, bytes] = {}
        self._hooks = [_WatchedHooks.of(module) for module in model.modules()]
        for hooks in self._hooks:
            hooks.watchers.add(self)

    def on_load(self, *_: Any) -> None:
        """Called before something is loaded: keeps digests of the current values."""
        if not self.was_loaded:
            self.was_loaded, self._before = True, self._digests()

    def take_changes(self) -> LoadedWeights | None:
        """What was loaded since the last call, or None if no weight has changed."""
        if not self.was_loaded:
            return None
        before, now = self._before, self._digests()
        self.reset()
        names = tuple(name for name in now if now[name] != before[name])
        if not names:
            return None
        whole = hashlib.blake2b(b"".join(name.encode() + now[name] for name in names), digest_size=6)
        return LoadedWeights(names, int.from_bytes(whole.digest(), "big") | 1)

    def _digests(self) -> dict[str, bytes]:
        return {name: _digest(param) for name, param in self._params.items()}

    def reset(self) -> None:
        """Ignore what was loaded so far."""
        self.was_loaded, self._before = False, {}

    def remove(self) -> None:
        """Stop watching."""
        for hooks in self._hooks:
            hooks.watchers.discard(self)
        self._hooks = []


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    bits: Any = flat.view(torch.uint8).numpy()
    return hashlib.blake2b(bits, digest_size=16).digest()


class _WatchedHooks(MutableMapping[int, Callable[..., Any]]):
    """Takes the place of a module's dict of load-state-dict pre-hooks, and also calls its watchers.

    Watchers are not among the hooks, so copies and pickles of the module are without them. The module's own dict still
    holds its hooks. A hook's handle refers weakly to the dict or to this object, whichever the module had when the hook
    was registered; so this object stays with the module, and keeps the dict alive.
    """

    def __init__(self, hooks: MutableMapping[int, Callable[..., Any]]) -> None:
        self.watchers = weakref.WeakSet[LoadWatcher]()  # weak: the model must not keep a strategy alive
        self._hooks = hooks

    @classmethod
    def of(cls, module: nn.Module) -> _WatchedHooks:
        present: Any = module._load_state_dict_pre_hooks
        hooks: _WatchedHooks = present if isinstance(present, cls) else cls(present)
        setattr(module, "_load_state_dict_pre_hooks", hooks)  # noqa: B010  # torch declares a dict
        return hooks

    def values(self) -> Any:
        """What torch calls before it loads."""
        return [*(watcher.on_load for watcher in self.watchers), *self._hooks.values()]

    def __getitem__(self, key: int) -> Callable[..., Any]:
        return self._hooks[key]

    def __setitem__(self, key: int, hook: Callable[..., Any]) -> None:
        self._hooks[key] = hook

    def __delitem__(self, key: int) -> None:
        del self._hooks[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self._hooks)

    def __len__(self) -> int:
        return len(self._hooks)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self._hooks,), 0)  # pickles as the module's own dict, which the handles refer to
