"""The plain reducer: one all-reduce per bucket, flags included."""

from __future__ import annotations

from collections.abc import Iterator

from gradsync import spec
from gradsync.buckets.bucket import Bucket
from gradsync.buckets.slot import Slot
from gradsync.comm.base import Communicator, Work
from gradsync.reducers.base import Reducer


@spec.register("reducer", "plain")
class Plain(Reducer):
    """Exact: sums the buckets as they are.

    >>> from gradsync.reducers.plain import Plain
    >>> Plain().num_stages
    1
    """

    def bucket_bytes_on(self, comm: Communicator) -> int:
        return comm.bucket_bytes or self.bucket_bytes

    def in_place_range(self, slot: Slot, comm: Communicator) -> tuple[int, int] | None:
        """The slot's part of the range that this rank sums: there the transport can read its values in place."""
        if slot.is_small:
            return None
        first, end = comm.owned_range(slot.bucket.storage)
        first, end = max(first - slot.start, 0), min(end - slot.start, slot.flat.numel())
        return (first, end) if first < end else None

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        sources = [slot.source_slice() for slot in bucket.slots if slot.external is not None]
        work = comm.all_reduce_from(bucket.storage, sources)
        bucket.release()
        yield work

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        return 2 * (world_size - 1) * bucket.num_bytes // world_size  # what a ring sends: the minimum
