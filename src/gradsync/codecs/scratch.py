"""Room that a codec needs during a call: made once for each thread, grown when more is asked for, never zeroed."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class _Rooms(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_rooms = _Rooms()


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A flat tensor with whatever is in it; the next call with this name, in this thread, may hand it out again.

    >>> import torch
    >>> from gradsync.codecs.scratch import scratch
    >>> a, b = scratch("example", 10, torch.float32), scratch("example", 7, torch.float32)
    >>> a.data_ptr() == b.data_ptr(), b.shape
    (True, torch.Size([7]))
    """
    place = (name, dtype, torch.device(device))
    room = _rooms.tensors.get(place)
    if room is None or room.numel() < numel:
        room = _rooms.tensors[place] = torch.empty(numel, dtype=dtype, device=device)
    return room[:numel]
