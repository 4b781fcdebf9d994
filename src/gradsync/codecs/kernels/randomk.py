"""Random-k on the CPU: the values at drawn positions, taken while the residual is written."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.codecs.kernels.residual import CHUNK, compensate
from gradsync.codecs.kernels.strata import drawn
from gradsync.compiled import numba

SET, ADD, ZERO = range(3)  # what scatter does with a value
LARGEST = float(np.finfo(np.float32).max)


@numba.njit(cache=True, nogil=True)
def select(
    x: Any, before: Any, after: Any, mode: int, gain: Any, keep_rest: bool, start: int, scale: Any, values: Any
) -> None:
    """Write the drawn values of y, times ``scale``; ``after`` is y less what they say, if there is one to keep."""
    numel, num = len(x), len(values)
    together = max(1, CHUNK * num // numel)  # strata that fit the first-level cache
    for begin in range(0, num, together):
        end = min(begin + together, num)
        if keep_rest:
            first, last = begin * numel // num, end * numel // num
            compensate(x[first:last], before[first:last], after[first:last], mode, gain)
        for stratum in range(begin, end):
            where = drawn(stratum, num, numel, start)
            y = after[where] if keep_rest else gain * x[where]
            value = np.float64(y) * scale
            # What is finite stays so; the residual keeps what is beyond the largest float32.
            values[stratum] = min(max(value, -LARGEST), LARGEST) if np.isfinite(value) else value
            if keep_rest:
                after[where] = y - values[stratum] if np.isfinite(values[stratum]) else 0


@numba.njit(cache=True, nogil=True)
def scatter(values: Any, out: Any, gain: Any, how: int, start: int) -> bool:
    """Write ``gain`` times the values to where they belong, and zero elsewhere; or add them; or put zeros there."""
    numel, num = len(out), len(values)
    cleared, finite = 0, True
    for stratum in range(num):
        where = drawn(stratum, num, numel, start)
        if how == ZERO:
            out[where] = 0
            continue
        value = gain * values[stratum]
        finite &= np.isfinite(value)
        if how == ADD:
            out[where] += value
            continue
        while cleared <= where:  # just ahead of what is written: the line is then in the cache
            end = min(cleared + CHUNK, numel)
            out[cleared:end] = 0
            cleared = end
        out[where] = value
    if how == SET:
        out[cleared:] = 0
    return finite
