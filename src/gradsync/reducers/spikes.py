"""Limiting residuals after a spike: a step whose gradients are far larger than those of all steps before.

[Note: spikes] In exact training, a finite gradient of 1e28 on one rank costs one bad step, which is clipped or skipped.
With a codec, the residual then holds the encoding error of 1e28. That is far larger than any later gradient, and
dominates the following steps until it is sent. So the largest magnitude in a step's payloads is compared with that of
the steps before. This is cheap: it reads only scales, or the values that were kept. After a step that is more than
``SPIKE`` times larger, the values of a residual above ``BOUND`` times the typical magnitude are dropped, and a warning
names their parameters. All ranks read the same payloads, so all of them decide the same.
"""

from __future__ import annotations

import importlib
import math
import warnings
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradsync.errors import GradSyncWarning

SPIKE = 1e6  # times the typical magnitude: higher => larger spikes stay in the residuals
BOUND = 1e3  # times the typical magnitude: the limit of a residual after a spike
DECAY = 0.9  # of the typical magnitude, at each step of smaller gradients
GROWTH = 1e3  # of the typical magnitude, at a spike: a lasting change becomes typical after a few steps

_KINDS = {torch.float32: 0, torch.bfloat16: 1}  # see kernels/spikes.py


class TypicalMagnitude:
    """The magnitude of the last steps' gradients, estimated from their payloads.

    >>> from gradsync.reducers.spikes import TypicalMagnitude
    >>> typical = TypicalMagnitude()
    >>> [typical.observe(peak) for peak in (0.5, 2.0, 1e28, 1.0)]
    [None, None, 2000.0, None]
    """

    def __init__(self) -> None:
        self.magnitude = 0.0  # 0: not known yet

    def observe(self, peak: float) -> float | None:
        """Update the estimate with a step's largest magnitude. Returns the limit for residuals if it is a spike."""
        if peak == 0.0 or not math.isfinite(peak):
            return None
        if self.magnitude == 0.0 or peak <= SPIKE * self.magnitude:
            self.magnitude = max(peak, DECAY * self.magnitude)
            return None
        bound = BOUND * self.magnitude
        self.magnitude *= GROWTH
        return bound

    def follow(self, magnitude: float) -> float | None:
        """Take over the estimate of a rank that has observed one step more. Returns what ``observe`` would."""
        bound = BOUND * self.magnitude if magnitude == GROWTH * self.magnitude > 0.0 else None
        self.magnitude = magnitude
        return bound


def peak_magnitude(views: Sequence[Tensor]) -> float:
    """The largest magnitude in several tensors; NaN or inf if there is one. Blocks for those on a GPU."""
    table = array("q")
    peak = 0.0
    for view in views:
        entry = table_entry(view)
        if entry is not None:
            table.extend(entry)
        elif view.numel():
            peak = max(peak, float(view.abs().amax()))
    return max(peak, peak_in_table(table))


def peak_on_device(views: Sequence[Tensor]) -> Tensor | None:
    """The largest magnitude in tensors of one GPU, as a tensor there; None if they are empty. Does not block."""
    filled = [view for view in views if view.numel()]
    return torch.stack(list(torch._foreach_norm(filled, math.inf))).amax() if filled else None


def table_entry(view: Tensor) -> tuple[int, int, int] | None:
    """A tensor as an entry of the kernel's table: address, number of values, kind. None if the kernel can't read it."""
    kind = _KINDS.get(view.dtype) if view.is_cpu else None
    return None if kind is None else (view.data_ptr(), view.numel(), kind)


def compile_kernels() -> None:
    """Compile at attach, and not in the middle of the first step, while other ranks wait."""
    importlib.import_module("gradsync.kernels.spikes")


def peak_in_table(table: array[int]) -> float:
    """As ``peak_magnitude``, for a table of entries."""
    if not table:
        return 0.0
    from gradsync.kernels.spikes import FIELDS, peak_magnitude_bits  # Numba takes a second to import

    start, size = table.buffer_info()
    return float(np.int32(peak_magnitude_bits(start, size // FIELDS)).view(np.float32))


def drop_beyond(values: Tensor, bound: float) -> bool:
    """Set values of a larger magnitude than ``bound`` to zero, in place; returns whether there were any."""
    beyond = values.abs() > bound
    if not bool(beyond.any()):
        return False
    values.masked_fill_(beyond, 0.0)
    return True


def warn_dropped(names: Sequence[str]) -> None:
    """Warn that values of these parameters' residuals were dropped."""
    if names:
        warnings.warn(
            f"the gradient of {names[0]}"
            + (f" (and of {len(names) - 1} more parameters)" if len(names) > 1 else "")
            + f" was, on some rank, more than {SPIKE:.0e} times larger than those of the steps before. Its encoding "
            "error, which would dominate the next steps, is dropped. Look at this step's batch; "
            "torch.nn.utils.clip_grad_norm_ keeps such a step from moving the weights.",
            GradSyncWarning,
            stacklevel=3,
        )
