"""One position drawn in each of equal strata: k distinct ones out of n, in order, with no sorting and no memory.

Stratum j of k holds the positions from ``j * n // k`` to ``(j + 1) * n // k``. Which of them is drawn comes from a
counter-based hash (the mixing steps of SplitMix64) of the key and j alone: every rank and device draws the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def start_of(key: int) -> int:
    """Where a key's sequence begins: keys that follow each other begin far apart. A signed number of 64 bits."""
    bits = (key * _SECOND + _STEP) % 2**64
    bits = (bits ^ bits >> 31) * _FIRST % 2**64
    return _signed(bits ^ bits >> 29)


def positions(num_strata: int, numel: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """The position drawn in each stratum, as int64.

    >>> from gradsync.codecs.strata import positions
    >>> positions(4, 100, key=7).tolist()
    [21, 47, 71, 96]
    """
    strata = torch.arange(num_strata, device=device)
    bits = strata * _signed(_STEP) + start_of(key)
    bits = (bits ^ _shifted(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _shifted(bits, 27)) * _signed(_SECOND)
    first = strata * numel // num_strata
    width = (strata + 1) * numel // num_strata - first
    return first + (_shifted(bits, 33) * width >> 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shifted right, with zeros from the left: torch's own shift brings in the sign."""
    return bits >> count & (1 << 64 - count) - 1


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
