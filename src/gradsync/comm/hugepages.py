"""Memory on huge pages of 2 MB, which need far fewer TLB entries: for buckets and shared memory.

A worker reads all gradients several times a step. With pages of 4 KB, TLB misses took a fifth of that time in a virtual
machine. The kernel uses huge pages only for memory that is aligned to their size, and for shared memory only on
request (``madvise``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25  # since Linux 6.1; older kernels return an error, and the pages stay small

_libc = ctypes.CDLL(None, use_errno=True)
_word = ctypes.c_size_t
_libc.mmap.restype = _word
_libc.mmap.argtypes = [_word, _word, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [_word, _word]
_libc.madvise.argtypes = [_word, _word, ctypes.c_int]
_FAILED = _word(-1).value


def map_shared(descriptor: int, num_bytes: int) -> Any:
    """Map a file from its beginning on, shared, at an address that is aligned for huge pages.

    It is unmapped when the buffer, and the last tensor made of it, are gone.
    """
    reserved_bytes = num_bytes + HUGE_PAGE_BYTES
    no_access = 0
    reserved = _map(0, reserved_bytes, no_access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _map(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(reserved, reserved_bytes)
        raise
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    # Not at exit: threads that still write to it then would crash the process.
    weakref.finalize(buffer, _libc.munmap, reserved, reserved_bytes).atexit = False
    return buffer


def zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of zeros; a large one on the CPU is on huge pages.

    >>> import torch
    >>> from gradsync.comm.hugepages import zeros
    >>> t = zeros(1 << 20, torch.float32, torch.device("cpu"))
    >>> t.shape, bool(t.any()), t.data_ptr() % (2 << 20)
    (torch.Size([1048576]), False, 0)
    """
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(numel, dtype=dtype, device=device)
    whole = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    reserved = torch.empty(whole + HUGE_PAGE_BYTES, dtype=torch.uint8)
    start = -reserved.data_ptr() % HUGE_PAGE_BYTES
    made = reserved[start : start + num_bytes].view(dtype).zero_()
    use_huge_pages(made.data_ptr(), whole)
    return made


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Move memory to huge pages, as far as it fills whole ones and the kernel can. Its contents stay."""
    end = address + num_bytes
    for page in range(-(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
        _libc.madvise(page, HUGE_PAGE_BYTES, _MADV_COLLAPSE)


def _map(address: int, num_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    got: int = _libc.mmap(address, num_bytes, protection, flags, descriptor, 0)
    if got == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: {num_bytes} bytes of shared memory can't be mapped")
    return got
