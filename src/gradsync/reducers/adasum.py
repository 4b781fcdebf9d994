"""Adasum: gradients that agree are averaged, gradients that have nothing in common are added.

Of two gradients a and b the part that they share is counted once:

    adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

for each parameter by itself. Equal gradients give just that gradient, orthogonal ones their sum. So the step grows with
what the ranks have to say, and the learning rate of one rank stays right for many.

[Note: the tree] It is no sum: the order matters a little. Ranks are paired by a tree in rank order: at each level the
first with the second, the third with the fourth, and so on; one that is left over goes up as it is. For five ranks:
((0 1)(2 3)) 4.

[Note: shards] Every rank gets everyone's values of its own shard of the bucket, and does the whole tree there. Only the
products a·b, |a|² and |b|² need all of a parameter, so at each level the shards' parts of them are summed: three
numbers a parameter and pair. A rank so sends about 2 (n - 1) / n buckets, whatever n is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradsync import spec
from gradsync.bucket import Bucket, BucketPlan
from gradsync.comm.base import Communicator, Finished, Work
from gradsync.reducers.base import Reducer


class _Desk:
    """What one bucket needs on its way, kept from step to step."""

    def __init__(self, bucket: Bucket, world_size: int, rank: int) -> None:
        self.bucket = bucket
        numel = bucket.storage.numel()
        self.width = -(-numel // world_size)
        shape = (world_size, self.width)
        self.given = torch.zeros(shape, dtype=bucket.storage.dtype, device=bucket.device)
        self.got = torch.zeros_like(self.given)
        # In between all is done in float64: a shard of it is small, and a product of many values needs it.
        self.values = torch.zeros(shape, dtype=torch.float64, device=bucket.device)
        self.scratch = torch.zeros(self.width, dtype=torch.float64, device=bucket.device)
        self.pieces = [
            (slot.index, first, end)
            for slot in bucket.slots
            for first, end in [self._within(slot.flat, bucket, rank)]
            if first < end
        ]
        start = bucket.buffer.numel() - rank * self.width
        self.flags = (max(0, min(start, self.width)), max(0, min(numel - rank * self.width, self.width)))
        self.products = torch.zeros(world_size // 2, len(bucket.slots), 3, dtype=torch.float64, device=bucket.device)

    def _within(self, flat: Tensor, bucket: Bucket, rank: int) -> tuple[int, int]:
        """A parameter's part of this rank's shard: from, to."""
        start = int(flat.storage_offset() - bucket.storage.storage_offset()) - rank * self.width
        return max(0, start), min(self.width, start + flat.numel())


@spec.register("reducer", "adasum")
class Adasum(Reducer):
    """Adds up what is different in the ranks' gradients, and averages what is alike: see [Note: the tree].

    A rank's gradient counts as it is, whatever its weight; a rank without data (weight zero) is left out. Scale the
    learning rate as for one rank.

    >>> from gradsync.reducers.adasum import Adasum
    >>> [Adasum().stages(world_size) for world_size in (1, 2, 5, 8)]  # one there, one a level, one back
    [2, 3, 5, 5]
    """

    num_stages = 3  # of two ranks
    reads_fresh_gradients = True

    def __init__(self) -> None:
        super().__init__()
        self._desks: dict[int, _Desk] = {}

    def stages(self, world_size: int) -> int:
        return 2 + (world_size - 1).bit_length()

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self._desks.clear()

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        if comm.world_size == 1:
            yield from [Finished()] * self.stages(1)
            return
        desk = self._desk_of(bucket, comm)
        self._fill(desk, bucket)
        yield comm.all_to_all(desk.given, out=desk.got)
        desk.values.copy_(desk.got)
        places = list(range(comm.world_size))  # the rows of `values` that are still to be combined
        while len(places) > 1:
            pairs = list(zip(places[::2], places[1::2], strict=False))
            products = desk.products[: len(pairs)]
            for (a, b), out in zip(pairs, products, strict=True):
                _multiply(desk, desk.values[a], desk.values[b], out=out)
            yield comm.all_reduce(products)
            for (a, b), product in zip(pairs, products, strict=True):
                _combine(desk, desk.values[a], desk.values[b], product)
            places = places[::2]
        desk.given[0].copy_(desk.values[0])
        yield comm.all_gather(desk.given[0], out=desk.got)
        self._take(desk, bucket)

    def _fill(self, desk: _Desk, bucket: Bucket) -> None:
        """What a rank found itself, not its share of a mean. Of a rank without data zeros: adasum(a, 0) = a."""
        flat, numel = desk.given.view(-1), bucket.buffer.numel()
        flat[: bucket.storage.numel()].copy_(bucket.storage)
        if bucket.factor not in (0.0, 1.0):
            flat[:numel].div_(bucket.factor)
        for slot in bucket.slots:
            if slot.fresh is not None:  # not multiplied yet, so there is nothing to undo, and no rounding
                start = slot.start
                flat[start : start + slot.flat.numel()].copy_(slot.source)

    def _take(self, desk: _Desk, bucket: Bucket) -> None:
        bucket.storage.copy_(desk.got.view(-1)[: bucket.storage.numel()])
        if not _is_finite(bucket.buffer):
            self.nonfinite += [slot.name for slot in bucket.slots if not _is_finite(slot.flat)]

    def _desk_of(self, bucket: Bucket, comm: Communicator) -> _Desk:
        desk = self._desks.get(bucket.index)
        if desk is None or desk.bucket is not bucket or desk.given.shape[0] != comm.world_size:
            desk = self._desks[bucket.index] = _Desk(bucket, comm.world_size, comm.rank)
        return desk

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        if world_size == 1:
            return 0
        row_bytes = -(-bucket.storage.numel() // world_size) * bucket.storage.element_size()
        total, places = 2 * (world_size - 1) * row_bytes, world_size
        while places > 1:
            total += 2 * (world_size - 1) * (places // 2) * len(bucket.slots) * 3 * 8 // world_size
            places -= places // 2
        return total


def _multiply(desk: _Desk, a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """This shard's part of a·b, |a|² and |b|², for each parameter.

    All three are summed up in one place: in BLAS the order of a sum depends on where its values lie, and then equal
    gradients would not give equal products.
    """
    out.zero_()
    for index, first, end in desk.pieces:
        one, other, scratch = a[first:end], b[first:end], desk.scratch[first:end]
        for place, (x, y) in enumerate(((one, other), (one, one), (other, other))):
            torch.sum(torch.mul(x, y, out=scratch), 0, out=out[index, place])


def _combine(desk: _Desk, a: Tensor, b: Tensor, products: Tensor) -> None:
    """Overwrite ``a`` with adasum(a, b), and its flags with their sum."""
    gains = _gains(products).tolist()
    for index, first, end in desk.pieces:
        gain_a, gain_b = gains[index]
        scaled = torch.mul(b[first:end], gain_b, out=desk.scratch[first:end])
        torch.add(scaled, a[first:end], alpha=gain_a, out=a[first:end])
    first, end = desk.flags
    a[first:end] += b[first:end]


def _gains(products: Tensor) -> Tensor:
    """What a and b are multiplied by. One that is zero leaves the other as it is; NaN goes through."""
    along, squares = products[:, :1], products[:, 1:]
    return 1.0 - along / torch.where(squares == 0.0, 1.0, 2.0 * squares)


def _is_finite(values: Tensor) -> bool:
    return values.numel() == 0 or bool(torch.linalg.vector_norm(values, torch.inf).isfinite())
