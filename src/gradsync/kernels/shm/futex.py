"""Linux futexes on a word of shared memory: a process sleeps until another one wakes it."""

from __future__ import annotations

import ctypes
import platform

_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "arm64": 98, "riscv64": 98, "ppc64le": 221}
# (Little-endian machines only: the word is the low half of a 64-bit one.)
WAIT, WAKE = 0, 1  # without the private flag: the word is shared between processes


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall  # ctypes releases the interpreter lock while it sleeps
NUMBER = _NUMBERS.get(platform.machine())


def available() -> bool:
    """Whether the number of the futex system call is known for this machine."""
    return NUMBER is not None


def wait(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at ``address`` equals ``value``, until woken or until ``timeout_s`` has passed."""
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _syscall(NUMBER, ctypes.c_void_p(address), WAIT, ctypes.c_uint32(value), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at ``address``."""
    _syscall(NUMBER, ctypes.c_void_p(address), WAKE, 0x7FFFFFFF, None, None, 0)
