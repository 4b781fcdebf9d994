"""Memory in few large pages: a core that walks through it has far fewer addresses to look up.

A worker walks through all gradients several times a step. In pages of 4 KB looking their addresses up took a fifth of
that, in a virtual machine. The kernel puts memory on large pages only where it lies at a multiple of their size, and
shared memory only if it is asked to.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25  # from Linux 6.1 on; kernels that do not know it refuse, and the pages stay small

_libc = ctypes.CDLL(None, use_errno=True)
_word = ctypes.c_size_t
_libc.mmap.restype = _word
_libc.mmap.argtypes = [_word, _word, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [_word, _word]
_libc.madvise.argtypes = [_word, _word, ctypes.c_int]
_FAILED = _word(-1).value


def map_shared(descriptor: int, num_bytes: int) -> Any:
    """Map a file from its beginning on, shared, at an address that large pages can have.

    It is unmapped when nobody holds the buffer, or a tensor of it, any more.
    """
    room_bytes = num_bytes + LARGE_PAGE
    no_access = 0
    room = _map(0, room_bytes, no_access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-room // LARGE_PAGE) * LARGE_PAGE
    try:
        _map(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(room, room_bytes)
        raise
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    # Not at exit: threads that still write to it then would bring the process down.
    weakref.finalize(buffer, _libc.munmap, room, room_bytes).atexit = False
    return buffer


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of zeros; where it is large, and for a CPU, on large pages.

    >>> import torch
    >>> from gradsync.comm.large_pages import zeros
    >>> t = zeros(1 << 20, torch.float32, torch.device("cpu"))
    >>> t.shape, bool(t.any()), t.data_ptr() % (2 << 20)
    (torch.Size([1048576]), False, 0)
    """
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < LARGE_PAGE:
        return torch.zeros(numel, dtype=dtype, device=device)
    whole = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    room = torch.empty(whole + LARGE_PAGE, dtype=torch.uint8)
    start = -room.data_ptr() % LARGE_PAGE
    made = room[start : start + num_bytes].view(dtype).zero_()
    use_large_pages(made.data_ptr(), whole)
    return made


def use_large_pages(address: int, num_bytes: int) -> None:
    """Put what lies in whole large pages on such, as far as the kernel can. What is in them stays."""
    end = address + num_bytes
    for page in range(-(-address // LARGE_PAGE) * LARGE_PAGE, end - LARGE_PAGE + 1, LARGE_PAGE):
        _libc.madvise(page, LARGE_PAGE, _MADV_COLLAPSE)


def _map(address: int, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    got: int = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if got == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: {num_bytes} bytes of shared memory can't be mapped")
    return got
