"""The all-reduce of a small tensor in one compiled call: what the kernel must know, kept from call to call."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from gradsync.comm.base import ReduceOp
from gradsync.comm.checks import fingerprint
from gradsync.kernels.shm.collectives import (
    CHUNK,
    CHUNK_COUNT,
    COPIED_IN,
    COUNT,
    DIRECT,
    FINGERPRINT,
    FIRST_SEQUENCE,
    IN,
    ITEM_BYTES,
    KIND,
    NUM_CHUNKS,
    OUT,
    SLOT_BYTES,
    SMALL_BYTES,
    SMALL_FINGERPRINT,
    SMALL_ITEM_BYTES,
    SMALL_SUM,
    SMALL_WORDS,
    num_chunks,
)


@dataclass(frozen=True, slots=True)
class SmallAllReduce:
    """The last tensor that could be reduced in one call. Finding this out again would cost as much as the sum."""

    tensor: weakref.ref[Tensor]  # weak: its memory must not be kept alive
    address: int
    numel: int
    op: ReduceOp
    sum_rows: int
    item: int
    num_bytes: int
    num_chunks: int
    words: np.ndarray  # the arguments of `reduce_eagerly`
    words_address: int

    @classmethod
    def prepare(cls, tensor: Tensor, op: ReduceOp, sum_rows: int, item: int) -> SmallAllReduce:
        """``sum_rows``: the address of the compiled sum; ``item``: the bytes of one of its values."""
        num_bytes = tensor.nbytes
        words = np.zeros(SMALL_WORDS, np.int64)
        call = fingerprint(DIRECT, op, tensor.dtype, num_bytes // item)
        words[[SMALL_SUM, SMALL_BYTES, SMALL_ITEM_BYTES, SMALL_FINGERPRINT]] = sum_rows, num_bytes, item, call
        key = (weakref.ref(tensor), tensor.data_ptr(), tensor.numel(), op)
        return cls(*key, sum_rows, item, num_bytes, num_chunks(num_bytes), words, words.ctypes.data)

    def remaining_words(self, first: int, done: int) -> dict[int, int]:
        """The state words of the work that is left after ``done`` chunks. ``first``: the sequence number of chunk 0."""
        count, item, address = self.num_chunks, self.item, self.address
        words = {KIND: DIRECT, FIRST_SEQUENCE: first, NUM_CHUNKS: count, CHUNK: done, COPIED_IN: min(count, done + 2)}
        return words | {
            COUNT: self.num_bytes // item,
            CHUNK_COUNT: SLOT_BYTES // item,
            ITEM_BYTES: item,
            FINGERPRINT: int(self.words[SMALL_FINGERPRINT]),
            IN: address,
            OUT: address,
        }
