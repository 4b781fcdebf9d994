"""Counter-based random numbers: a hash of a key and a position. Every rank, thread and resumed run draws the same.

There is no generator state to save and no order to keep. ``uniform`` is for stochastic rounding; the kernels compute
the same hash (``uniform`` in kernels/codecs/packing.py). ``stratified_positions`` is for random-k and for the sample of
top-k; its kernel is ``stratified_position`` in kernels/codecs/sparse.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = 2**64 - 1
_MASK32 = 2**32 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_halves(key: int) -> tuple[int, int]:
    """Two signed 32-bit integers from a key. Neighbouring keys give unrelated ones.

    >>> from gradsync.codecs.random import key_halves
    >>> key_halves(0), key_halves(1)
    ((2065550767, -501176263), (-1996333887, -1861603860))
    """
    bits = (key + 0x9E3779B97F4A7C15) & _MASK64
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK64
    bits ^= bits >> 31
    return ((bits & _MASK32) ^ 2**31) - 2**31, ((bits >> 32) ^ 2**31) - 2**31


def uniform(key: int, first: int, rows: int, width: int, device: torch.device) -> Tensor:
    """Random numbers in [0, 1), in float32, for ``rows * width`` positions beginning with ``first``.

    >>> import torch
    >>> from gradsync.codecs.random import uniform
    >>> drawn = uniform(7, 0, 100, 100, torch.device("cpu"))
    >>> abs(drawn.mean().item() - 0.5) < 0.01
    True
    """
    key_low, key_high = (half & _MASK32 for half in key_halves(key))
    bits = torch.arange(first, first + rows * width, device=device).view(rows, width) & _MASK32
    bits = (bits * 0x9E3779B1 + key_low) & _MASK32  # an overflow loses only bits that are masked out
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D & _MASK32) ^ key_high
    bits = bits ^ (bits >> 15)
    bits = bits * 0x846CA68B & _MASK32
    return (bits >> 8).to(torch.float32) * 2.0**-24


# -- stratified sampling: k distinct positions out of n, in order, with no sorting and no memory ----------------------
#
# Stratum j of k holds the positions from ``j * n // k`` to ``(j + 1) * n // k``. The one that is drawn is a hash (the
# mixing steps of SplitMix64) of the key and j only: every rank and device draws the same.


def sequence_start(key: int) -> int:
    """The counter at which a key's sequence starts: consecutive keys start far apart. A signed 64-bit integer."""
    bits = (key * _SECOND + _STEP) % 2**64
    bits = (bits ^ bits >> 31) * _FIRST % 2**64
    return _signed(bits ^ bits >> 29)


def stratified_positions(num_strata: int, numel: int, key: int, device: torch.device | str = "cpu") -> Tensor:
    """The position drawn in each stratum, as int64.

    >>> from gradsync.codecs.random import stratified_positions
    >>> stratified_positions(4, 100, key=7).tolist()
    [21, 47, 71, 96]
    """
    strata = torch.arange(num_strata, device=device)
    bits = strata * _signed(_STEP) + sequence_start(key)
    bits = (bits ^ _logical_shift_right(bits, 30)) * _signed(_FIRST)
    bits = (bits ^ _logical_shift_right(bits, 27)) * _signed(_SECOND)
    first = strata * numel // num_strata
    width = (strata + 1) * numel // num_strata - first
    return first + (_logical_shift_right(bits, 33) * width >> 31)


def _logical_shift_right(bits: Tensor, count: int) -> Tensor:
    """A right shift that fills with zeros; torch's own shift fills with the sign."""
    return bits >> count & (1 << 64 - count) - 1


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits
