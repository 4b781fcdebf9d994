"""The kernels of random-k: ``select`` (values at random positions, and the residual, in one pass) and ``scatter``."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.kernels.base import numba
from gradsync.kernels.codecs.sparse import CHUNK, compensate, stratified_position

SET, ADD, ZERO = range(3)  # what scatter does with a value
LARGEST = float(np.finfo(np.float32).max)


@numba.njit(cache=True, nogil=True)
def select(
    x: Any, before: Any, after: Any, mode: int, gain: Any, keep_residual: bool, start: int, scale: Any, values: Any
) -> None:
    """Write the chosen values of y, times ``scale``; write the rest of y to ``after`` if ``keep_residual``."""
    numel, num = len(x), len(values)
    strata_per_chunk = max(1, CHUNK * num // numel)  # these fit into the L1 cache
    for begin in range(0, num, strata_per_chunk):
        end = min(begin + strata_per_chunk, num)
        if keep_residual:
            first, last = begin * numel // num, end * numel // num
            compensate(x[first:last], before[first:last], after[first:last], mode, gain)
        for stratum in range(begin, end):
            where = stratified_position(stratum, num, numel, start)
            y = after[where] if keep_residual else gain * x[where]
            value = np.float64(y) * scale
            # Finite values stay finite: the residual keeps what exceeds the largest float32.
            values[stratum] = min(max(value, -LARGEST), LARGEST) if np.isfinite(value) else value
            if keep_residual:
                after[where] = y - values[stratum] if np.isfinite(values[stratum]) else 0


@numba.njit(cache=True, nogil=True)
def scatter(values: Any, out: Any, gain: Any, op: int, start: int) -> bool:
    """SET: write ``gain`` times the values to their positions, 0 elsewhere. ADD: add them. ZERO: write 0 there."""
    numel, num = len(out), len(values)
    cleared, finite = 0, True
    for stratum in range(num):
        where = stratified_position(stratum, num, numel, start)
        if op == ZERO:
            out[where] = 0
            continue
        value = gain * values[stratum]
        finite &= np.isfinite(value)
        if op == ADD:
            out[where] += value
            continue
        while cleared <= where:  # zero just ahead of the writes: the line is then in the cache
            end = min(cleared + CHUNK, numel)
            out[cleared:end] = 0
            cleared = end
        out[where] = value
    if op == SET:
        out[cleared:] = 0
    return finite
