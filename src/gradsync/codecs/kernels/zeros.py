"""Counting zeros, in a few microseconds less than it takes numpy to look at what it was given."""

from __future__ import annotations

import numpy as np

from gradsync.codecs.kernels.lanes import get, pointer
from gradsync.compiled import numba, quick


@numba.njit("i8(i8, i8, i8)", nogil=True, cache=True)
def _count_zeros(address: int, count: int, item: int) -> int:
    zeros = 0
    if item == 4:
        singles = pointer(address, np.int32)
        for i in range(count):
            zeros += get(singles, i) == 0
    else:
        doubles = pointer(address, np.int64)
        for i in range(count):
            zeros += get(doubles, i) == 0
    return zeros


count_zeros = quick(_count_zeros)  # (address, count, bytes of each: 4 or 8): of floats that are never -0.0
