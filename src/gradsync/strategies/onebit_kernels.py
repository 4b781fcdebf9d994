"""The two passes of 1-bit Adam over a model, for float32 on a CPU, each in one walk through memory.

torch's walks take twice as long to make a momentum, and seven times as long to step. The results are the same up to
rounding: torch multiplies and adds in one operation.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradsync.codecs.kernels.lanes import get, pointer, put
from gradsync.compiled import numba, quick


def blend(out: Tensor, gradient: Tensor, momentum: Tensor, *, gain: float, keep: float, alpha: float) -> None:
    """Write ``gradient * gain * keep + alpha * momentum`` to ``out``, which may be the gradient."""
    _blend(out.data_ptr(), gradient.data_ptr(), momentum.data_ptr(), out.numel(), gain, keep, alpha)


def step(
    param: Tensor,
    momentum: Tensor,
    average: Tensor,
    variance: Tensor,
    *,
    correction: float,
    eps: float,
    decay: float,
    rate: float,
) -> None:
    """Adam's step with a momentum that is given, and its copy to ``average``: ``rate`` is what it is multiplied by."""
    _step(
        param.data_ptr(),
        momentum.data_ptr(),
        average.data_ptr(),
        variance.data_ptr(),
        param.numel(),
        correction,
        eps,
        decay,
        rate,
    )


@numba.njit("void(i8, i8, i8, i8, f4, f4, f4)", nogil=True, cache=True)
def _blend_all(out: int, gradient: int, momentum: int, count: int, gain: float, keep: float, alpha: float) -> None:
    there, here, gathered = pointer(out, np.float32), pointer(gradient, np.float32), pointer(momentum, np.float32)
    for i in range(count):
        put(there, i, get(here, i) * gain * keep + get(gathered, i) * alpha)


@numba.njit("void(i8, i8, i8, i8, i8, f4, f4, f4, f4)", nogil=True, cache=True, error_model="numpy")
def _step_all(
    param: int,
    momentum: int,
    average: int,
    variance: int,
    count: int,
    correction: float,
    eps: float,
    decay: float,
    rate: float,
) -> None:
    values, said = pointer(param, np.float32), pointer(momentum, np.float32)
    kept, squares = pointer(average, np.float32), pointer(variance, np.float32)
    for i in range(count):
        moved = get(said, i)
        root = np.sqrt(get(squares, i) / correction) + eps
        put(kept, i, moved)
        put(values, i, get(values, i) * decay + rate * moved / root)


_blend, _step = quick(_blend_all), quick(_step_all)
