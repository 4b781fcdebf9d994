"""Making replicas equal: checking that all ranks hold the same model, and copying one rank's state to the others."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gradsync.buckets.bucket import MIB
from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object, broadcast_object
from gradsync.comm.readback import HostValue
from gradsync.errors import OutOfStep

CHUNK_BYTES = 32 * MIB  # copies go in chunks: large enough for the wire, small enough not to need the model twice


class Stateful(Protocol):
    """An optimizer, a GradScaler, a learning-rate schedule."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def describe(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    *,
    structure_only: bool = False,
) -> dict[str, str]:
    """Everything that all ranks must agree on, one line each, in the same order on all ranks.

    ``structure_only``: without what a rank can receive from another, the optimizer's state and hyperparameters.
    """
    lines = {f"setting {name}": str(value) for name, value in settings.items()}
    for name, param in model.named_parameters():
        kind = f"{_shown(param)}{'' if param.requires_grad else ', frozen'}"
        lines[f"parameter {plain_name(name)}"] = kind
    for name, buffer in model.named_buffers():
        lines[f"buffer {plain_name(name)}"] = _shown(buffer)
    lines["optimizer class"] = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        lines[f"optimizer param_groups[{index}]['params']"] = f"{len(group['params'])} parameters"
    if structure_only:
        return lines
    lines["optimizer state"] = "empty" if not optimizer.state else f"of {len(optimizer.state)} parameters"
    return lines | describe_hyperparameters(optimizer)


def describe_hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The optimizer's hyperparameters, one line each, in an order that does not depend on how its groups were made."""
    return {
        f"optimizer param_groups[{index}][{key!r}]": repr(_comparable(group[key]))
        for index, group in enumerate(optimizer.param_groups)
        for key in sorted(group)
        if key != "params"
    }


def check_agreement(comm: Communicator, lines: Mapping[str, str]) -> None:
    """Raise OutOfStep, on every rank, naming the first thing that differs and the rank where it does. Blocks."""
    if comm.world_size == 1:
        return
    digest = hashlib.sha256(json.dumps(list(lines.items())).encode()).hexdigest()
    if len(set(all_gather_object(comm, digest))) == 1:
        return
    difference = find_difference(comm, lines)
    assert difference is not None, "the digests differ, so a line does"
    raise OutOfStep(f"ranks differ in {difference}.")


def find_difference(comm: Communicator, lines: Mapping[str, str]) -> str | None:
    """The first line that differs between the ranks, with both values; None if all are equal. Blocks."""
    everyone = all_gather_object(comm, list(lines.items()))
    first = everyone[0]
    for rank, other in enumerate(everyone[1:], start=1):
        for (name, value), (other_name, other_value) in zip(first, other, strict=False):
            if name != other_name:
                return f"what they hold: rank {rank} has {other_name} ({other_value}) where rank 0 has {name}"
            if value != other_value:
                return f"{name}: rank {rank} has {other_value}, rank 0 has {value}"
        if len(first) != len(other):
            more, fewer, extra = (0, rank, first) if len(first) > len(other) else (rank, 0, other)
            return f"what they hold: rank {more} has {extra[min(len(first), len(other))][0]}, rank {fewer} has not"
    return None


def copy_tensors(comm: Communicator, tensors: Iterable[Tensor], src: int) -> None:
    """Overwrite every rank's tensors with those of rank ``src``, in flat chunks. Blocks."""
    if comm.world_size == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for group in by_kind.values():
            for chunk in _chunks(group):
                flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
                comm.broadcast(flat, src).wait()
                if comm.rank != src:
                    for tensor, part in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
                        # .data: a buffer that a retained graph has saved may be overwritten with equal values
                        tensor.data.copy_(part.view(tensor.shape))


def copy_training_state(
    comm: Communicator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Sequence[Stateful],
    src: int,
) -> None:
    """Give every rank the parameters, buffers, optimizer state and ``others`` (scaler, schedules) of ``src``."""
    copy_tensors(comm, [*model.parameters(), *model.buffers()], src)
    stateful: list[Stateful] = [optimizer, *others]
    received = broadcast_object(comm, [sharable(one.state_dict()) for one in stateful], src)
    if comm.rank != src:
        for one, state in zip(stateful, received, strict=True):
            one.load_state_dict({**one.state_dict(), **state})


def copy_hyperparameters(
    comm: Communicator, optimizer: torch.optim.Optimizer, others: Sequence[Stateful], src: int
) -> None:
    """Give every rank the optimizer's hyperparameters and the state of ``others`` (scaler, schedules) of ``src``."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    received = broadcast_object(comm, [groups, *(sharable(one.state_dict()) for one in others)], src)
    if comm.rank != src:
        for group, values in zip(optimizer.param_groups, received[0], strict=True):
            group.update(values)
        for one, state in zip(others, received[1:], strict=True):
            one.load_state_dict({**one.state_dict(), **state})


def hyperparameter_checksum(optimizer: torch.optim.Optimizer) -> int:
    """A checksum of the optimizer's hyperparameters: ranks with different learning rates have different ones."""
    values = [[(k, _comparable(g[k])) for k in sorted(g) if k != "params"] for g in optimizer.param_groups]
    return zlib.crc32(repr(values).encode())


class HyperparameterChecksum:
    """As ``hyperparameter_checksum``, for every step: it does not wait for a GPU.

    A learning rate that is a tensor on a GPU counts as it was one step before: see [Note: read one step later] in
    comm/readback.py.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._on_device: dict[tuple[int, str], HostValue] = {}
        self.take()  # the first time it blocks for tensors on a GPU

    def take(self) -> int:
        """The checksum for the step that begins."""
        values = [
            [(key, self._comparable(index, key, group[key])) for key in sorted(group) if key != "params"]
            for index, group in enumerate(self._optimizer.param_groups)
        ]
        return zlib.crc32(repr(values).encode())

    def _comparable(self, index: int, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.is_cpu:
            return _comparable(value)
        values = self._on_device.setdefault((index, key), HostValue()).recent(value)
        return values[0] if len(values) == 1 else values


_PLAIN = {type(None), bool, int, float, str}


def _comparable(value: Any) -> Any:
    """A value whose ``repr`` is the same on two ranks that hold the same: many objects show their address in theirs."""
    if type(value) in _PLAIN:  # most: this runs at every step
        return value
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else value.tolist()
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()  # plain numbers: numpy's own show their type
    if isinstance(value, tuple | list):
        return [_comparable(item) for item in value]
    if isinstance(value, Mapping):
        return sorted((str(key), _comparable(item)) for key, item in value.items())
    return getattr(value, "__qualname__", type(value).__qualname__)


def plain_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` puts before it, so that saved state fits with and without.

    >>> from gradsync.replicas.agreement import plain_name
    >>> plain_name("_orig_mod.block.weight")
    'block.weight'
    """
    return name.replace("_orig_mod.", "")


def sharable(state: dict[str, Any]) -> dict[str, Any]:
    """A state without what only its own rank can have: the functions that a schedule may hold."""
    return {key: value for key, value in state.items() if not callable(value) and not _holds_functions(value)}


def _holds_functions(value: Any) -> bool:
    return isinstance(value, list) and any(callable(item) for item in value)


def _chunks(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    chunk: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if chunk and num_bytes + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append(tensor)
        num_bytes += tensor.nbytes
    if chunk:
        yield chunk


def _shown(tensor: Tensor) -> str:
    # Strides count too: a gradient has the memory order of its parameter, and sums go by position in memory.
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}"
