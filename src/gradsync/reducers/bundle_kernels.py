"""A bundle's two acts in one compiled call each. In torch's they are four or five, each a cold start after a GEMM."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradsync.codecs.kernels.lanes import get, pointer, put
from gradsync.compiled import numba, quick

GIVEN = 4  # words for each part that is given: from which address, how many values, to which place, and how
TAKEN = 2  # words for each run that is taken: to which address, and how many values
AS_IT_IS, UNSCALED, WEIGHTED = range(3)  # how: flags, shares of the mean, and what must still become one


class Movers:
    """Moves some slots and flags of float32 between their places in a bucket and in payloads, where they lie in runs.

    Args:
        runs: those of slots in the order of the payload, then the flags.
        slots: each one's values, inside of a run, in the same order.
    """

    def __init__(self, runs: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
        self._taken = array("q", [word for run in runs for word in (run.data_ptr(), run.numel())])
        self._given = array("q")
        first = 0  # of a run, in the payload
        left = list(slots)
        for run in runs[:-1]:
            start, end = run.data_ptr(), run.data_ptr() + run.nbytes
            while left and start <= left[0].data_ptr() < end:
                slot = left.pop(0)
                self._given.extend((0, slot.numel(), first + (slot.data_ptr() - start) // slot.itemsize, UNSCALED))
            first += run.numel()
        assert not left, "every slot lies in a run"
        self._given.extend((runs[-1].data_ptr(), runs[-1].numel(), first, AS_IT_IS))

    def give(self, sources: Sequence[tuple[int, bool]], to: int, weight: float, unscale: float) -> None:
        """Write each slot's values to an address; those that are said to need it, times the weight."""
        table = self._given
        for part, (source, weighted) in enumerate(sources):
            table[GIVEN * part] = source
            table[GIVEN * part + 3] = WEIGHTED if weighted else UNSCALED
        _give_all(table.buffer_info()[0], len(table) // GIVEN, to, weight, unscale)

    def take_sum(self, rows: Sequence[int], scale: float) -> bool:
        """Write the sum of what lies at some addresses, the gradients times ``scale``; say whether it is all finite."""
        starts, runs = array("q", rows), self._taken
        finite: bool = _sum_all(starts.buffer_info()[0], len(starts), runs.buffer_info()[0], len(runs) // TAKEN, scale)
        return finite


@numba.njit("void(i8, i8, i8, f4, f4)", nogil=True, cache=True)
def _give(parts: int, num_parts: int, to: int, weight: float, unscale: float) -> None:
    table, values = pointer(parts, np.int64), pointer(to, np.float32)
    for part in range(num_parts):
        source = pointer(get(table, part * GIVEN), np.float32)
        count, first, how = get(table, part * GIVEN + 1), get(table, part * GIVEN + 2), get(table, part * GIVEN + 3)
        one = weight if how == WEIGHTED else np.float32(1)
        other = np.float32(1) if how == AS_IT_IS else unscale
        for i in range(count):
            put(values, first + i, get(source, i) * one * other)


@numba.njit("b1(i8, i8, i8, i8, f4)", nogil=True, cache=True)
def _sum(rows: int, num_rows: int, runs: int, num_runs: int, scale: float) -> bool:
    starts, table = pointer(rows, np.int64), pointer(runs, np.int64)
    done, finite = 0, True
    for run in range(num_runs):
        out, count = pointer(get(table, run * TAKEN), np.float32), get(table, run * TAKEN + 1)
        factor = scale if run < num_runs - 1 else np.float32(1)  # the last run are the flags
        for i in range(count):
            total = get(pointer(get(starts, 0), np.float32), done + i)
            for row in range(1, num_rows):
                total += get(pointer(get(starts, row), np.float32), done + i)
            finite = finite and abs(total) < np.float32(np.inf)
            put(out, i, total * factor)
        done += count
    return finite


_give_all, _sum_all = quick(_give), quick(_sum)
