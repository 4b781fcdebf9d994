"""One position drawn in each of equal strata, compiled; ``codecs/strata.py`` draws the same with torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.compiled import numba

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_30, _27, _33 = np.uint64(30), np.uint64(27), np.uint64(33)


@numba.njit(cache=True, nogil=True, inline="always")
def drawn(stratum: int, num_strata: int, numel: int, start: Any) -> Any:
    """The position drawn in a stratum; ``start`` is ``strata.start_of(key)``."""
    bits = np.uint64(start) + np.uint64(stratum) * np.uint64(_STEP)
    bits = (bits ^ (bits >> _30)) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> _27)) * np.uint64(_SECOND)
    first = stratum * numel // num_strata
    width = (stratum + 1) * numel // num_strata - first
    return first + ((np.int64(bits >> _33) * width) >> 31)
