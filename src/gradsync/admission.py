"""What can be kept in step: a model and an optimizer are looked at before anything is attached to them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from gradsync.replicas import plain_name


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what can't be synchronized, with a reason and a way out."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}. Several go into a ModuleList.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(f"the model is already wrapped in {type(model).__name__}. Pass its .module.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS decides by its own rank's loss how often it evaluates, so ranks would get out of step. "
            "Use another optimizer."
        )
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


def is_compiled_whole(model: nn.Module) -> bool:
    """Whether ``torch.compile`` has taken the model as one piece: then all gradients come at the end of backward."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds, and torch.compile has done so
    return model._compiled_call_impl is not None or (dynamo is not None and isinstance(model, dynamo.OptimizedModule))


def find_sparse(model: nn.Module, said: Sequence[str]) -> list[str]:
    """The names of parameters with sparse gradients: those that were said, and those of sparse embeddings."""
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
