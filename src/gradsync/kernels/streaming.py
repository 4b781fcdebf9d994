"""Copying gradients, and sums of them, to their bucket with streaming stores, which bypass the cache.

A normal store first fetches the cache line that it overwrites. A bucket is no longer in the cache when the next
backward fills it, so that fetch is wasted: a third of the copy's memory traffic. Streaming stores avoid it: measured,
they are twice as fast where two workers share the memory, and reading the bucket afterwards is not slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsync.kernels.base import VECTOR_BYTES, fence, intrinsic, ir, numba, types, without_dispatch


class _Vectors:
    """Builds LLVM instructions for vectors of one dtype, that of the factor."""

    def __init__(self, factor: Any) -> None:
        self.lanes = VECTOR_BYTES // (4 if factor == types.float32 else 8)
        self._kind = ir.VectorType(ir.FloatType() if factor == types.float32 else ir.DoubleType(), self.lanes)

    def pointer(self, builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, self._kind.as_pointer())

    def load_scaled(self, builder: Any, start: Any, factor: Any) -> Any:
        """The values at an address, which need not be aligned, times a factor."""
        factors = ir.Constant(self._kind, ir.Undefined)
        for lane in range(self.lanes):
            factors = builder.insert_element(factors, factor, ir.Constant(ir.IntType(32), lane))
        return builder.fmul(builder.load(self.pointer(builder, start), align=VECTOR_BYTES // self.lanes), factors)

    def stream(self, builder: Any, values: Any, to: Any) -> None:
        store = builder.store(values, self.pointer(builder, to), align=VECTOR_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@intrinsic
def stream_scaled(typing_context: Any, to: Any, start: Any, factor: Any) -> Any:
    """Write one vector of values times ``factor``; ``to`` is aligned to a vector."""
    vectors = _Vectors(factor)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors.stream(builder, vectors.load_scaled(builder, args[1], args[2]), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, factor), generate


@intrinsic
def stream_sum(typing_context: Any, to: Any, other: Any, start: Any, factor: Any) -> Any:
    """Add one vector of values times ``factor`` to that at ``other``; also write the sum to ``to``, past the cache.

    Both are aligned to a vector. The product is rounded before it is added, as if it had been stored in between.
    """
    vectors = _Vectors(factor)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        there = vectors.pointer(builder, args[1])
        values = vectors.load_scaled(builder, args[2], args[3])
        total = builder.fadd(values, builder.load(there, align=VECTOR_BYTES))
        builder.store(total, there, align=VECTOR_BYTES)
        vectors.stream(builder, total, args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, factor), generate


def _stream_all(to: int, start: int, num_vectors: int, factor: float) -> None:
    for index in range(num_vectors):
        stream_scaled(to + index * VECTOR_BYTES, start + index * VECTOR_BYTES, factor)
    fence()


_STREAMED: dict[torch.dtype, Any] = {
    torch.float32: without_dispatch(numba.njit("void(i8, i8, i8, f4)", nogil=True, cache=True)(_stream_all)),
    torch.float64: without_dispatch(numba.njit("void(i8, i8, i8, f8)", nogil=True, cache=True)(_stream_all)),
}


def scale_into(out: Tensor, values: Tensor, factor: float) -> None:
    """Write ``values * factor`` to ``out``, of the same shape and dtype, on the CPU: the same bits as ``torch.mul``."""
    if not _can_stream(out, values):
        torch.mul(values, factor, out=out)
        return
    num_vectors = out.nbytes // VECTOR_BYTES
    _STREAMED[out.dtype](out.data_ptr(), values.data_ptr(), num_vectors, factor)
    done = num_vectors * VECTOR_BYTES // out.itemsize
    if done < out.numel():
        torch.mul(values.view(-1)[done:], factor, out=out.view(-1)[done:])


def _can_stream(out: Tensor, values: Tensor) -> bool:
    return (
        out.dtype in _STREAMED and out.is_contiguous() and values.is_contiguous() and out.data_ptr() % VECTOR_BYTES == 0
    )
