"""Copying a bucket's small parameters to a payload and back, in one compiled call each.

torch would need four or five calls each, and every one would start with cold caches after a matrix product.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradsync.kernels.base import numba, without_dispatch
from gradsync.kernels.pointers import get, pointer, put

WRITE_FIELDS = 4  # of each part that is written: source address, number of values, position in the payload, operation
READ_FIELDS = 2  # of each run that is read: target address, number of values
# Operations: on flags; on gradients that are multiplied with the rank's weight; on gradients that are not yet.
UNCHANGED, UNSCALE, WEIGH_AND_UNSCALE = range(3)


class SmallParameterKernels:
    """Copies slots and flags of float32 between a bucket and payloads. Adjacent slots form one *run*.

    Args:
        runs: the runs of slots in the order of the payload, then the flags.
        slots: each slot's values, which lie inside a run, in the same order.
    """

    def __init__(self, runs: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        self._runs = array("q", [word for run in runs for word in (run.data_ptr(), run.numel())])
        self._parts = array("q")
        first = 0  # the run's position in the payload
        remaining = list(slots)
        for run in runs[:-1]:
            start, end = run.data_ptr(), run.data_ptr() + run.nbytes
            while remaining and start <= remaining[0].data_ptr() < end:
                slot = remaining.pop(0)
                self._parts.extend((0, slot.numel(), first + (slot.data_ptr() - start) // slot.itemsize, UNSCALE))
            first += run.numel()
        assert not remaining, "every slot lies in a run"
        self._parts.extend((runs[-1].data_ptr(), runs[-1].numel(), first, UNCHANGED))

    def write(self, sources: Sequence[tuple[int, bool]], to: int, weight: float, unscale: float) -> None:
        """Write each slot's values to the payload at an address.

        ``sources``: each slot's address, and whether its values must still be multiplied with ``weight``.
        """
        table = self._parts
        for part, (source, weighted) in enumerate(sources):
            table[WRITE_FIELDS * part] = source
            table[WRITE_FIELDS * part + 3] = WEIGH_AND_UNSCALE if weighted else UNSCALE
        _write_parts(table.buffer_info()[0], len(table) // WRITE_FIELDS, to, weight, unscale)

    def read_sum(self, rows: Sequence[int], scale: float) -> bool:
        """Write the sum of the payloads at some addresses, gradients times ``scale``; returns if all is finite."""
        starts, runs = array("q", rows), self._runs
        finite: bool = _read_sums(
            starts.buffer_info()[0], len(starts), runs.buffer_info()[0], len(runs) // READ_FIELDS, scale
        )
        return finite


@numba.njit("void(i8, i8, i8, f4, f4)", nogil=True, cache=True)
def _write(parts: int, num_parts: int, to: int, weight: float, unscale: float) -> None:
    table, values = pointer(parts, np.int64), pointer(to, np.float32)
    for part in range(num_parts):
        source = pointer(get(table, part * WRITE_FIELDS), np.float32)
        count, first, op = (
            get(table, part * WRITE_FIELDS + 1),
            get(table, part * WRITE_FIELDS + 2),
            get(table, part * WRITE_FIELDS + 3),
        )
        factor = weight if op == WEIGH_AND_UNSCALE else np.float32(1)
        unscale_factor = np.float32(1) if op == UNCHANGED else unscale
        for i in range(count):
            put(values, first + i, get(source, i) * factor * unscale_factor)


@numba.njit("b1(i8, i8, i8, i8, f4)", nogil=True, cache=True)
def _read_sum(rows: int, num_rows: int, runs: int, num_runs: int, scale: float) -> bool:
    starts, table = pointer(rows, np.int64), pointer(runs, np.int64)
    done, finite = 0, True
    for run in range(num_runs):
        out, count = pointer(get(table, run * READ_FIELDS), np.float32), get(table, run * READ_FIELDS + 1)
        factor = scale if run < num_runs - 1 else np.float32(1)  # the last run is the flags
        for i in range(count):
            total = get(pointer(get(starts, 0), np.float32), done + i)
            for row in range(1, num_rows):
                total += get(pointer(get(starts, row), np.float32), done + i)
            finite = finite and abs(total) < np.float32(np.inf)
            put(out, i, total * factor)
        done += count
    return finite


_write_parts, _read_sums = without_dispatch(_write), without_dispatch(_read_sum)
