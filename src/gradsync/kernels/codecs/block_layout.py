"""The block layout of blockwise codecs: constants that kernels and torch code share. This does not import Numba."""

from __future__ import annotations

import torch

LARGEST_BLOCK = 4096  # values: the size of the kernels' scratch
WORDS = 8  # 32-bit words of codes in a vector: a full block has a multiple of that
# Codecs with at least this many levels keep the residual of a block whose gradient is zero: the block is not sent.
ELISION_MIN_LEVELS = 7
SUMS = 64  # partial sums of a mean: value i is added to sum i % 64


def scale_limit(dtype: torch.dtype, levels: int) -> float:
    """The largest scale that does not overflow when it is multiplied with the largest code."""
    limit = torch.tensor(torch.finfo(dtype).max, dtype=dtype) / max(levels, 1)
    while (limit * levels).isinf():
        limit = torch.nextafter(limit, torch.zeros_like(limit))
    return float(limit)
