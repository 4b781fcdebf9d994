"""What an all-reduce in one call must know of a tensor."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gradsync.comm.base import ReduceOp
from gradsync.comm.shm_kernels import (
    COUNT,
    DIRECT,
    FIRST,
    IN,
    ITEM,
    KIND,
    NUM_TURNS,
    OUT,
    PUT,
    SLOT_BYTES,
    SMALL_BYTES,
    SMALL_ITEM,
    SMALL_SUM,
    SMALL_WORDS,
    TURN,
    WIDTH,
    num_turns,
)


@dataclass(frozen=True, slots=True)
class Small:
    """What was found of the last tensor that could be reduced in one call: asking again would cost as much as that."""

    tensor: weakref.ref[Tensor]  # weakly: its memory is not to be kept
    address: int
    numel: int
    op: ReduceOp
    sum_rows: int
    item: int
    num_bytes: int
    turns: int
    words: np.ndarray  # as the kernel reads it
    where: int  # the words' address

    @classmethod
    def of(cls, tensor: Tensor, op: ReduceOp, sum_rows: int, item: int) -> Small:
        """``item``: the bytes of what the compiled sum at ``sum_rows`` sums."""
        num_bytes = tensor.nbytes
        words = np.zeros(SMALL_WORDS, np.int64)
        words[[SMALL_SUM, SMALL_BYTES, SMALL_ITEM]] = sum_rows, num_bytes, item
        seen = (weakref.ref(tensor), tensor.data_ptr(), tensor.numel(), op)
        return cls(*seen, sum_rows, item, num_bytes, num_turns(num_bytes), words, words.ctypes.data)

    def rest(self, first: int, taken: int) -> dict[int, int]:
        """The words of the work that is left after so many of its turns, the first of which is number ``first``."""
        turns, item, address = self.turns, self.item, self.address
        words = {KIND: DIRECT, FIRST: first, NUM_TURNS: turns, TURN: taken, PUT: min(turns, taken + 2)}
        return words | {
            COUNT: self.num_bytes // item,
            WIDTH: SLOT_BYTES // item,
            ITEM: item,
            IN: address,
            OUT: address,
        }
