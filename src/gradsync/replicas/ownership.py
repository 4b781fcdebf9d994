"""Which engine owns which parameters: two engines on one parameter would average its gradient twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from gradsync.replicas.batch_context import BatchContext

_CLAIMED = WeakIdKeyDictionary()  # parameters
_CONTEXTS: weakref.WeakKeyDictionary[nn.Module, BatchContext] = weakref.WeakKeyDictionary()

DROP_WRAPPER = (
    "Drop DistributedDataParallel everywhere: construct no DDP(model), and pass and call the model itself. "
    "gradsync averages the gradients; two that do would average them twice, or race for them."
)


def claim(model: nn.Module, params: Mapping[str, Parameter], context: BatchContext) -> Callable[[], None]:
    """Mark a model as one engine's; returns a function that releases it. Refuses parameters of another engine.

    >>> import torch
    >>> from gradsync.replicas.ownership import claim, context_of
    >>> from gradsync.replicas.batch_context import BatchContext, batch_source
    >>> from gradsync.comm.base import Solo
    >>> layer, context = torch.nn.Linear(1, 1), BatchContext(batch_source(Solo()))
    >>> release = claim(layer, dict(layer.named_parameters()), context)
    >>> context_of(layer) is context
    True
    >>> release()
    """
    for name, param in params.items():
        if param in _CLAIMED:
            raise ValueError(
                f"parameter {name} is already kept in step by another synchronizer: it would be averaged twice. "
                "Close that one first."
            )
    _refuse_wrapped(params)
    for param in params.values():
        _CLAIMED[param] = True
    modules = [module for module in model.modules() if module not in _CONTEXTS]
    for module in modules:
        _CONTEXTS[module] = context

    def release() -> None:
        for param in params.values():
            _CLAIMED.pop(param, None)
        for module in modules:
            _CONTEXTS.pop(module, None)

    return release


def context_of(module: nn.Module) -> BatchContext | None:
    """The batch context of the synchronizer that keeps this module in step, if any."""
    return _CONTEXTS.get(module)


def _refuse_wrapped(params: Mapping[str, Parameter]) -> None:
    """Refuse parameters that a DistributedDataParallel already averages.

    Nothing on a module tells that it was wrapped, so all objects are searched. Only once per attach, and only where
    torch.distributed runs, without which there can be no such wrapper.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    names = {id(param): name for name, param in params.items()}
    gc.collect()  # a wrapper that was dropped averages nothing, but may wait in a cycle
    for wrapper in gc.get_objects():
        # By __mro__: isinstance() would ask DistributedDataParallel's abstract base, which takes a microsecond each.
        if DistributedDataParallel not in type(wrapper).__mro__ or "module" not in wrapper.__dict__.get("_modules", {}):
            continue
        shared = [names[id(param)] for param in wrapper.parameters() if id(param) in names]
        if shared:
            raise ValueError(
                f"parameter {shared[0]} is already averaged by a {type(wrapper).__name__} that was made around it. "
                + DROP_WRAPPER
            )


def _refuse_wrapping(wrapper: nn.Module, name: str, inner: nn.Module | None) -> None:
    """The other way round: a DistributedDataParallel is being made around what a synchronizer keeps in step."""
    if name == "module" and inner is not None and isinstance(wrapper, DistributedDataParallel):
        for own_name, param in inner.named_parameters():
            if param in _CLAIMED:
                raise ValueError(
                    f"parameter {own_name} is already kept in step by gradsync.synchronize(). {DROP_WRAPPER}"
                )


register_module_module_registration_hook(_refuse_wrapping)
