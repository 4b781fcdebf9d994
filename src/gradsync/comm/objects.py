"""Sending plain objects between ranks: nested dicts, lists, numbers, text, bytes and tensors. As JSON, not pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator

_TENSOR, _TUPLE, _PAIRS, _BYTES = "__tensor__", "__tuple__", "__pairs__", "__bytes__"


def broadcast_object(comm: Communicator, value: Any, src: int) -> Any:
    """The ``value`` of rank ``src``, on every rank; the others' ``value`` is not read. Blocks."""
    tensors: list[Tensor] = []
    text = json.dumps(_pack(value, tensors)).encode() if comm.rank == src else b""
    length = torch.tensor([len(text)])
    comm.broadcast(length, src).wait()
    payload = _as_bytes(text, int(length))
    comm.broadcast(payload, src).wait()
    tree = json.loads(bytes(payload.tolist()))
    if comm.rank != src:
        tensors = [_empty(kind) for kind in _kinds(tree)]
    sent = [tensor.detach().contiguous() for tensor in tensors]
    for work in [comm.broadcast(tensor, src) for tensor in sent]:
        work.wait()
    return value if comm.rank == src else _unpack(tree, iter(sent))


def check_plain(value: Any) -> None:
    """Raise TypeError for a value that is not of plain objects and tensors, and can neither be sent nor saved."""
    _pack(value, [])


def send_object(comm: Communicator, value: Any, dst: int) -> None:
    """Send a value to rank ``dst``, which calls :func:`recv_object`. Blocks until it is sent."""
    tensors: list[Tensor] = []
    text = json.dumps(_pack(value, tensors)).encode()
    for tensor in (torch.tensor([len(text)]), _as_bytes(text, len(text)), *tensors):
        comm.send(tensor.detach().contiguous(), dst).wait()


def recv_object(comm: Communicator, src: int) -> Any:
    """The value that rank ``src`` sends by :func:`send_object`. Blocks until it has arrived."""
    length = torch.empty(1, dtype=torch.int64)
    comm.recv(length, src).wait()
    text = torch.empty(int(length), dtype=torch.uint8)
    comm.recv(text, src).wait()
    tree = json.loads(text.numpy().tobytes())
    tensors = [_empty(kind) for kind in _kinds(tree)]
    for tensor in tensors:
        comm.recv(tensor, src).wait()
    return _unpack(tree, iter(tensors))


def all_gather_object(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's ``value`` (without tensors), in rank order. Blocks."""
    text = json.dumps(_pack(value, [])).encode()
    lengths = torch.empty(comm.world_size, 1, dtype=torch.int64)
    comm.all_gather(torch.tensor([len(text)]), out=lengths).wait()
    longest = int(lengths.max())
    rows = torch.empty(comm.world_size, longest, dtype=torch.uint8)
    comm.all_gather(_as_bytes(text, longest), out=rows).wait()
    return [
        _unpack(json.loads(bytes(row[: int(length)].tolist())), iter(()))
        for row, length in zip(rows, lengths, strict=True)
    ]


def _as_bytes(text: bytes, length: int) -> Tensor:
    padded = bytearray(text.ljust(length, b" "))
    return torch.frombuffer(padded, dtype=torch.uint8).clone() if padded else torch.empty(0, dtype=torch.uint8)


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: [list(value.shape), str(value.dtype).removeprefix("torch."), str(value.device)]}
    if isinstance(value, bytes):
        return {_BYTES: _pack(_as_bytes(value, len(value)), tensors)}
    if isinstance(value, dict):
        # JSON's keys are text: as pairs, an optimizer's integer keys stay integers.
        return {_PAIRS: [[_pack(key, tensors), _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"only dicts, lists, tuples, numbers, text, bytes and tensors are shared; got {type(value).__name__}."
    )


def _unpack(tree: Any, tensors: Any) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return next(tensors)
    if _BYTES in tree:
        return next(tensors).numpy().tobytes()
    if _TUPLE in tree:
        return tuple(_unpack(item, tensors) for item in tree[_TUPLE])
    return {_unpack(key, tensors): _unpack(item, tensors) for key, item in tree[_PAIRS]}


def _kinds(tree: Any) -> list[Any]:
    """The tensors of a tree, in the order in which they were packed."""
    if isinstance(tree, list):
        return [kind for item in tree for kind in _kinds(item)]
    if isinstance(tree, dict):
        inner = next(iter(tree.values()))
        return [inner] if _TENSOR in tree else _kinds(inner)
    return []


def _empty(kind: list[Any]) -> Tensor:
    shape, dtype, device = kind
    # A peer's cuda:3 may not exist here: its tensors come to this rank's current device.
    return torch.empty(shape, dtype=getattr(torch, dtype), device="cuda" if device.startswith("cuda") else device)
