"""The plain reducer: one all-reduce a bucket, flags included."""

from __future__ import annotations

from collections.abc import Iterator

from gradsync import spec
from gradsync.bucket import Bucket, BucketPlan
from gradsync.comm.base import Communicator, Work
from gradsync.reducers.base import Reducer


@spec.register("reducer", "plain")
class Plain(Reducer):
    """Exact: sums the buckets as they are.

    >>> from gradsync.reducers.allreduce import Plain
    >>> Plain().num_stages
    1
    """

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self.reads_fresh_gradients = False
        for bucket in plan.buckets:
            first, end = comm.own_part(bucket.storage)
            self.reads_fresh_gradients |= end > first
            for slot in bucket.slots:
                slot.keep_only(first, end)

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        work = comm.all_reduce_lent(bucket.storage, [slot.loan() for slot in bucket.slots if slot.fresh is not None])
        bucket.release()
        yield work

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        return 2 * (world_size - 1) * bucket.num_bytes // world_size  # what a ring sends: the least there is
