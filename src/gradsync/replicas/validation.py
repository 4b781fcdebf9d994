"""Checks of a model and an optimizer before anything is attached to them: what can't be synchronized is refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from gradsync.replicas.agreement import plain_name
from gradsync.replicas.buffers import ModuleTree
from gradsync.replicas.ownership import DROP_WRAPPER


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what can't be synchronized, with a reason and a way out."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}. Several go into a ModuleList.")
    _check_optimizer(optimizer)
    _check_wrappers(model)
    for name, param in model.named_parameters():
        if param.device.type == "meta" or isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name} has no data yet. Materialise it (or run a forward) on all ranks first.")
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to synchronize.")
    known = {id(param) for param in model.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:3])
        raise ValueError(
            f"the optimizer has {len(strangers)} parameter(s) that are not the model's (shapes {shapes}): nobody would "
            "average their gradients. Make them part of the model, or put several models into one ModuleList."
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    inner = getattr(optimizer, "optimizer", None)
    fix = f" It wraps a {type(inner).__name__}: pass that, `{kind}.optimizer`." if inner is not None else ""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {kind}.{fix}")
    # A wrapper that calls itself an Optimizer but never was set up as one has no step hooks.
    if getattr(optimizer, "_optimizer_step_pre_hooks", None) is None:
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer with step hooks of its own; {kind} has none."
            + (fix or " Pass the optimizer inside it.")
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS decides by its own rank's loss how often it evaluates, so ranks would get out of step. "
            "Use another optimizer."
        )


def _check_wrappers(model: nn.Module) -> None:
    """Refuse models that a wrapper already synchronizes, or whose parameters are sharded."""
    for name, module in model.named_modules():
        where = f"{name} of the model" if name else "the model"
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(f"{where} is wrapped in {type(module).__name__}. {DROP_WRAPPER}")
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"{where} is wrapped in DataParallel, which copies it at every forward. Drop the wrapper: pass and "
                "call the model itself, with one worker per device."
            )
        if any(kind.__name__ in _SHARDING and kind.__module__.startswith("torch.") for kind in type(module).__mro__):
            raise ValueError(
                f"{where} is sharded by FSDP, which averages gradients itself and does not run the hooks that gradsync "
                "needs. Use FSDP without gradsync, or gradsync on the model as it was before fully_shard()."
            )
    for name, param in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in type(param.data).__mro__):
            raise ValueError(
                f"parameter {name} is a DTensor: a part of a tensor that other ranks hold the rest of (tensor or fully "
                "sharded parallelism). synchronize() takes plain parameters, of which every rank has the whole."
            )


_SHARDING = ("FSDPModule", "FullyShardedDataParallel")  # by name: importing them takes a second


class ParameterMonitor:
    """Notices when the model has other parameters than those that are synchronized.

    >>> import torch
    >>> from gradsync.replicas.validation import ParameterMonitor
    >>> layer = torch.nn.Linear(2, 1)
    >>> watch = ParameterMonitor(layer)
    >>> layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)
    <All keys matched successfully>
    >>> watch.find_new_parameter()
    'weight'
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tree = ModuleTree(model)
        self._known = {id(param): param for param in model.parameters()}  # held, so that no other gets its id

    def find_new_parameter(self) -> str | None:
        """The name of a trained parameter that the model did not have before; None where there is none."""
        strangers = {id(param) for param in self._tree.parameters() if id(param) not in self._known}
        if not strangers:  # nearly always: this runs at every step
            return None
        found = [name for name, p in self._model.named_parameters() if id(p) in strangers and p.requires_grad]
        return plain_name(found[0]) if found else None


def is_compiled_whole(model: nn.Module) -> bool:
    """Whether ``torch.compile`` has taken the model as one piece: then all gradients come at the end of backward."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds, and torch.compile has done so
    return model._compiled_call_impl is not None or (dynamo is not None and isinstance(model, dynamo.OptimizedModule))


def find_sparse(model: nn.Module, said: Sequence[str]) -> list[str]:
    """The names of parameters with sparse gradients: those that the user names, and those of sparse embeddings."""
    names = {id(param): plain_name(name) for name, param in model.named_parameters()}
    unknown = sorted(set(said) - set(names.values()))
    if unknown:
        raise ValueError(
            f"sparse names {unknown[0]!r}, which the model does not have; it has {sorted(names.values())}."
        )
    found = [
        names[id(module.weight)]
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    ]
    return sorted({*said, *found})
