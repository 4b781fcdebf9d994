"""The memory of this process: its resident set, and the peak since a chosen moment. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

KIB = 1 << 10


class PeakMemory:
    """Measures by how much the resident set grows at most, from the call of the constructor.

    >>> grown = PeakMemory()
    >>> block = bytearray(64 << 20)
    >>> del block
    >>> grown.num_bytes() > 50 << 20
    True
    """

    def __init__(self) -> None:
        gc.collect()
        with contextlib.suppress(AttributeError):  # other C libraries than glibc give memory back by themselves
            ctypes.CDLL(None).malloc_trim(0)  # else freed memory that the process kept hides what is allocated next
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM) to the present size
        self._before = _status_bytes("VmRSS")

    def num_bytes(self) -> int:
        """The peak since then, less what the process had then. Pages of shared memory count where they were touched."""
        return max(0, _status_bytes("VmHWM") - self._before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * KIB
    raise AssertionError(f"/proc/self/status has no {field}")
