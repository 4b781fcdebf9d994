"""What the kernels of top-k and random-k share: compensation with the residual, and stratified sampling.

``compensate`` computes ``y = gain * x + before``, the values from which a sparse codec chooses. ``stratified_position``
is the same draw as ``stratified_positions`` in codecs/random.py, for one stratum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.kernels.base import numba

NO_RESIDUAL, IN_PLACE, SAME_BUFFER, SEPARATE = range(4)  # no `before`; y is already computed; `before` is y; it is not
CHUNK = 2048  # values worked on at a time: they stay in the L1 cache


@numba.njit(cache=True, nogil=True)
def compensate(x: Any, before: Any, y: Any, mode: int, gain: Any) -> None:
    """Write y. Each mode has its own loop, because LLVM does not vectorize where arrays may alias."""
    if mode == NO_RESIDUAL:
        for i in range(len(y)):
            y[i] = gain * x[i]
    elif mode == SAME_BUFFER:
        for i in range(len(y)):
            y[i] = gain * x[i] + y[i]
    elif mode == SEPARATE:
        for i in range(len(y)):
            y[i] = gain * x[i] + before[i]


_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_30, _27, _33 = np.uint64(30), np.uint64(27), np.uint64(33)


@numba.njit(cache=True, nogil=True, inline="always")
def stratified_position(stratum: int, num_strata: int, numel: int, start: Any) -> Any:
    """The position drawn in a stratum; ``start`` is ``sequence_start(key)`` of codecs/random.py."""
    bits = np.uint64(start) + np.uint64(stratum) * np.uint64(_STEP)
    bits = (bits ^ (bits >> _30)) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> _27)) * np.uint64(_SECOND)
    first = stratum * numel // num_strata
    width = (stratum + 1) * numel // num_strata - first
    return first + ((np.int64(bits >> _33) * width) >> 31)
