"""The plain reducer: one all-reduce a bucket, flags included."""

from __future__ import annotations

from collections.abc import Iterator

from gradsync import spec
from gradsync.bucket import Bucket
from gradsync.comm.base import Communicator, Work
from gradsync.reducers.base import Reducer


@spec.register("reducer", "plain")
class Plain(Reducer):
    """Exact: sums the buckets as they are.

    >>> from gradsync.reducers.allreduce import Plain
    >>> Plain().num_stages
    1
    """

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        yield comm.all_reduce(bucket.storage)

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        return 2 * (world_size - 1) * bucket.num_bytes // world_size  # what a ring sends: the least there is
