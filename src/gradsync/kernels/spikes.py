"""The largest magnitude in several arrays, in one compiled call: see reducers/spikes.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.kernels.base import numba, without_dispatch
from gradsync.kernels.block_ops import inlined
from gradsync.kernels.pointers import get, larger_int, magnitude_bits, pointer

FIELDS = 3  # of a table entry: the array's address, its number of values, and their kind: 0 float32, 1 bfloat16


@inlined
def _max_of_float32(address: int, count: int) -> Any:
    values = pointer(address, np.float32)
    found = magnitude_bits(get(values, 0))
    for i in range(count):
        found = larger_int(found, magnitude_bits(get(values, i)))
    return found


@inlined
def _max_of_bfloat16(address: int, count: int) -> Any:
    """A bfloat16 is the upper half of a float32, and ordered by its bits without the sign."""
    values = pointer(address, np.uint16)
    found: Any = np.uint16(0)
    for i in range(count):
        found = max(found, np.uint16(get(values, i) & np.uint16(0x7FFF)))
    return np.int32(found) << np.int32(16)


@numba.njit("i8(i8, i8)", nogil=True, cache=True)
def _peak_magnitude_bits(table_address: int, num_entries: int) -> Any:
    found: Any = 0
    table = pointer(table_address, np.int64)
    for entry in range(0, num_entries * FIELDS, FIELDS):
        address, count, kind = get(table, entry), get(table, entry + 1), get(table, entry + 2)
        if count > 0 and kind == 0:
            found = max(found, np.int64(_max_of_float32(address, count)))
        elif count > 0:
            found = max(found, np.int64(_max_of_bfloat16(address, count)))
    return found


# (address of the table, number of entries) -> the bits of the largest magnitude, as those of a float32
peak_magnitude_bits = without_dispatch(_peak_magnitude_bits)
