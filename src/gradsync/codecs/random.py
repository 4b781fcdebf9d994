"""Random numbers that come from a key and a position alone: any rank, any thread and any resumed run draws the same.

No state to save, and no order to keep: each value is hashed by itself. The kernels have the same hash (``mixed`` in
kernels/lanes.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

_64 = 2**64 - 1
_32 = 2**32 - 1


def halves(key: int) -> tuple[int, int]:
    """Two signed whole numbers of 32 bits from a key: keys that are neighbours give unlike ones.

    >>> from gradsync.codecs.random import halves
    >>> halves(0), halves(1)
    ((2065550767, -501176263), (-1996333887, -1861603860))
    """
    bits = (key + 0x9E3779B97F4A7C15) & _64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _64
    bits ^= bits >> 31
    return ((bits & _32) ^ 2**31) - 2**31, ((bits >> 32) ^ 2**31) - 2**31


def uniform(key: int, first: int, rows: int, width: int, device: torch.device) -> Tensor:
    """Numbers from 0 up to 1, in float32, for ``rows`` times ``width`` positions from ``first`` on.

    >>> import torch
    >>> from gradsync.codecs.random import uniform
    >>> drawn = uniform(7, 0, 100, 100, torch.device("cpu"))
    >>> abs(drawn.mean().item() - 0.5) < 0.01
    True
    """
    one, other = (half & _32 for half in halves(key))
    bits = torch.arange(first, first + rows * width, device=device).view(rows, width) & _32
    bits = (bits * 0x9E3779B1 + one) & _32  # a product that is too large loses only bits that are masked away
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D & _32) ^ other
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B & _32
    return (bits >> 8).to(torch.float32) * 2.0**-24
