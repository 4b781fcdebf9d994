"""``y = gain * x + before``, compiled: what a sparse codec chooses from."""

from __future__ import annotations

from typing import Any

from gradsync.compiled import numba

ALONE, IN_PLACE, SAME, APART = range(4)  # nothing before; y is there already; before lies where y goes; or elsewhere
CHUNK = 2048  # values worked on at a time: they stay in the first-level cache


@numba.njit(cache=True, nogil=True)
def compensate(x: Any, before: Any, y: Any, mode: int, gain: Any) -> None:
    """Write y. A loop for each mode: where arrays may be the same one, the compiler does one value at a time."""
    if mode == ALONE:
        for i in range(len(y)):
            y[i] = gain * x[i]
    elif mode == SAME:
        for i in range(len(y)):
            y[i] = gain * x[i] + y[i]
    elif mode == APART:
        for i in range(len(y)):
            y[i] = gain * x[i] + before[i]
