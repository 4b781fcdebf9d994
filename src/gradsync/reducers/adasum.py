"""Adasum: gradients that agree are averaged, orthogonal gradients are added.

The common part of two gradients a and b is counted once:

    adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

for each parameter separately. Equal gradients give that gradient, orthogonal ones their sum. So the step grows with the
diversity of the ranks' gradients, and the learning rate of one rank stays right for many.

[Note: the tree] Adasum is not associative: the order matters a little. Ranks are combined by a tree in rank order: at
each level the first with the second, the third with the fourth, and so on; an odd one moves up unchanged. For five
ranks: ((0 1)(2 3)) 4.

[Note: shards] Every rank receives all ranks' values of its own shard of the bucket, and computes the whole tree for
that shard. Only the products a·b, |a|² and |b|² need all of a parameter, so at each level the shards' parts of them are
all-reduced: three numbers for each parameter and pair. So a rank sends about 2 (n - 1) / n buckets for any n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradsync import spec
from gradsync.buckets.bucket import Bucket, BucketPlan
from gradsync.buckets.slot import Slot
from gradsync.comm.base import Communicator, Finished, Work
from gradsync.reducers.base import Reducer


class _BucketState:
    """The buffers of one bucket, reused in every step."""

    def __init__(self, bucket: Bucket, world_size: int, rank: int) -> None:
        self.bucket = bucket
        numel = bucket.storage.numel()
        self.width = -(-numel // world_size)
        shape = (world_size, self.width)
        self.send = torch.zeros(shape, dtype=bucket.storage.dtype, device=bucket.device)
        self.recv = torch.zeros_like(self.send)
        # The tree is computed in float64: dot products of many values need it, and a shard is small.
        self.values = torch.zeros(shape, dtype=torch.float64, device=bucket.device)
        self.scratch = torch.zeros(self.width, dtype=torch.float64, device=bucket.device)
        self.slot_ranges = [
            (slot.index, first, end)
            for slot in bucket.slots
            for first, end in [self._range_in_shard(slot.flat, bucket, rank)]
            if first < end
        ]
        start = bucket.buffer.numel() - rank * self.width
        self.flag_range = (max(0, min(start, self.width)), max(0, min(numel - rank * self.width, self.width)))
        self.products = torch.zeros(world_size // 2, len(bucket.slots), 3, dtype=torch.float64, device=bucket.device)

    def _range_in_shard(self, flat: Tensor, bucket: Bucket, rank: int) -> tuple[int, int]:
        """The range (from, to) of a parameter within this rank's shard."""
        start = int(flat.storage_offset() - bucket.storage.storage_offset()) - rank * self.width
        return max(0, start), min(self.width, start + flat.numel())


@spec.register("reducer", "adasum")
class Adasum(Reducer):
    """Adds the parts in which the ranks' gradients differ, and averages the common part: see [Note: the tree].

    Weights are ignored: each rank's own gradient counts once. A rank without data (weight zero) is left out. Use the
    learning rate of one rank.

    >>> from gradsync.reducers.adasum import Adasum
    >>> [Adasum().stages(world_size) for world_size in (1, 2, 5, 8)]  # all-to-all, one per level, all-gather
    [2, 3, 5, 5]
    """

    num_stages = 3  # for two ranks

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[int, _BucketState] = {}

    def stages(self, world_size: int) -> int:
        return 2 + (world_size - 1).bit_length()

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self._states.clear()

    def in_place_range(self, slot: Slot, comm: Communicator) -> tuple[int, int] | None:
        return None if slot.is_small else (0, slot.flat.numel())

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        if comm.world_size == 1:
            yield from [Finished()] * self.stages(1)
            return
        state = self._state_of(bucket, comm)
        self._load_gradients(state, bucket)
        yield comm.all_to_all(state.send, out=state.recv)
        state.values.copy_(state.recv)
        remaining = list(range(comm.world_size))  # the rows of `values` that are still to be combined
        while len(remaining) > 1:
            pairs = list(zip(remaining[::2], remaining[1::2], strict=False))
            products = state.products[: len(pairs)]
            for (a, b), out in zip(pairs, products, strict=True):
                _dot_products(state, state.values[a], state.values[b], out=out)
            yield comm.all_reduce(products)
            for (a, b), product in zip(pairs, products, strict=True):
                _combine(state, state.values[a], state.values[b], product)
            remaining = remaining[::2]
        state.send[0].copy_(state.values[0])
        yield comm.all_gather(state.send[0], out=state.recv)
        self._store_result(state, bucket)

    def _load_gradients(self, state: _BucketState, bucket: Bucket) -> None:
        """Fill ``send`` with the rank's own, unweighted gradients; zeros for no data, because adasum(a, 0) = a."""
        flat, numel = state.send.view(-1), bucket.buffer.numel()
        flat[: bucket.storage.numel()].copy_(bucket.storage)
        if bucket.factor not in (0.0, 1.0):
            flat[:numel].div_(bucket.factor)
        for slot in bucket.slots:
            if slot.external is not None:  # not multiplied yet, so there is nothing to undo, and no rounding
                start = slot.start
                flat[start : start + slot.flat.numel()].copy_(slot.source)

    def _store_result(self, state: _BucketState, bucket: Bucket) -> None:
        bucket.storage.copy_(state.recv.view(-1)[: bucket.storage.numel()])
        slots = bucket.slots
        self.outcome.add_tensors([s.name for s in slots], [s.flat for s in slots], whole=bucket.buffer)

    def _state_of(self, bucket: Bucket, comm: Communicator) -> _BucketState:
        state = self._states.get(bucket.index)
        if state is None or state.bucket is not bucket or state.send.shape[0] != comm.world_size:
            state = self._states[bucket.index] = _BucketState(bucket, comm.world_size, comm.rank)
        return state

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        if world_size == 1:
            return 0
        row_bytes = -(-bucket.storage.numel() // world_size) * bucket.storage.element_size()
        total, remaining = 2 * (world_size - 1) * row_bytes, world_size
        while remaining > 1:
            total += 2 * (world_size - 1) * (remaining // 2) * len(bucket.slots) * 3 * 8 // world_size
            remaining -= remaining // 2
        return total


def _dot_products(state: _BucketState, a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """This shard's part of a·b, |a|² and |b|², for each parameter.

    All three products are summed in the same scratch memory: the order of a BLAS sum depends on the alignment of its
    values, so equal gradients at different addresses would not give equal products.
    """
    out.zero_()
    for index, first, end in state.slot_ranges:
        one, other, scratch = a[first:end], b[first:end], state.scratch[first:end]
        for place, (x, y) in enumerate(((one, other), (one, one), (other, other))):
            torch.sum(torch.mul(x, y, out=scratch), 0, out=out[index, place])


def _combine(state: _BucketState, a: Tensor, b: Tensor, products: Tensor) -> None:
    """Overwrite ``a`` with adasum(a, b), and its flags with their sum."""
    coefficients = _coefficients(products)
    if a.is_cpu:
        _add_scaled(state, a, b, coefficients.tolist())
    else:
        _add_scaled_on_device(state, a, b, coefficients)
    first, end = state.flag_range
    a[first:end] += b[first:end]


def _add_scaled(state: _BucketState, a: Tensor, b: Tensor, coefficients: Sequence[tuple[float, float]]) -> None:
    for index, first, end in state.slot_ranges:
        coef_a, coef_b = coefficients[index]
        scaled = torch.mul(b[first:end], coef_b, out=state.scratch[first:end])
        torch.add(scaled, a[first:end], alpha=coef_a, out=a[first:end])


def _add_scaled_on_device(state: _BucketState, a: Tensor, b: Tensor, coefficients: Tensor) -> None:
    """As ``_add_scaled``, for coefficients that stay on a GPU: the host does not wait for them."""
    for index, first, end in state.slot_ranges:
        scaled = torch.mul(b[first:end], coefficients[index, 1], out=state.scratch[first:end])
        torch.addcmul(scaled, a[first:end], coefficients[index, 0], out=a[first:end])


def _coefficients(products: Tensor) -> Tensor:
    """The factors of a and b. If one of them is zero, the other is unchanged; NaN is propagated."""
    dots, squares = products[:, :1], products[:, 1:]
    return 1.0 - dots / torch.where(squares == 0.0, 1.0, 2.0 * squares)
