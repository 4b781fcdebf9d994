"""Scratch memory that codecs use during a call: allocated once per thread, grown on demand, never zeroed."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class _ThreadScratch(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_scratch = _ThreadScratch()


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A flat, uninitialized tensor. The next call with this name in this thread may return the same memory.

    >>> import torch
    >>> from gradsync.codecs.scratch import scratch
    >>> a, b = scratch("example", 10, torch.float32), scratch("example", 7, torch.float32)
    >>> a.data_ptr() == b.data_ptr(), b.shape
    (True, torch.Size([7]))
    """
    place = (name, dtype, torch.device(device))
    tensor = _scratch.tensors.get(place)
    if tensor is None or tensor.numel() < numel:
        tensor = _scratch.tensors[place] = torch.empty(numel, dtype=dtype, device=device)
    return tensor[:numel]
