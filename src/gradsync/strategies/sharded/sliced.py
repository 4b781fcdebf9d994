"""The reducer of a sharded optimizer: each rank gets its own slice of every bucket's sum, and not the rest."""

from __future__ import annotations

from collections.abc import Iterator

from gradsync.buckets.bucket import Bucket
from gradsync.comm.base import Communicator, Work
from gradsync.reducers.plain import Plain


class Sliced(Plain):
    """Exact: one reduce-scatter per bucket, half of what an all-reduce sends. It has no spec: it is for ``sharded``.

    While ``whole`` is set, buckets are reduced as a whole, by an all-reduce. All ranks set it alike.

    >>> from gradsync.strategies.sharded.sliced import Sliced
    >>> Sliced().whole
    False
    """

    def __init__(self) -> None:
        super().__init__()
        self.whole = False

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        if self.whole:
            yield from super().reduce(bucket, comm)
            return
        sources = [slot.source_slice() for slot in bucket.slots if slot.external is not None]
        work = comm.reduce_slices(bucket.storage, sources)
        bucket.release()
        yield work

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        return (world_size - 1) * bucket.num_bytes // world_size
