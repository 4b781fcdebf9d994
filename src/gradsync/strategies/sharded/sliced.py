"""The reducers of a sharded optimizer: each rank gets its own slice of every bucket's sum, and not the rest."""

from __future__ import annotations

from collections.abc import Iterator

from gradsync.buckets.bucket import Bucket, BucketPlan
from gradsync.buckets.slot import Slot
from gradsync.codecs.base import Codec
from gradsync.codecs.dense import Dense
from gradsync.comm.base import Communicator, Finished, Work
from gradsync.reducers.base import Reducer
from gradsync.reducers.compressed.reducer import Compressed, own_values
from gradsync.reducers.compressed.rows import PayloadRows
from gradsync.reducers.compressed.shards import slice_bucket
from gradsync.reducers.plain import Plain


class SlicedReducer(Reducer):
    """While ``whole`` is set, buckets are reduced as a whole, as under ``allreduce``. All ranks set it alike."""

    whole = False

    def must_be_whole(self, comm: Communicator) -> bool:
        """Whether it can't reduce slices on this communicator."""
        return False


class Sliced(SlicedReducer, Plain):
    """Exact: one reduce-scatter per bucket, half of what an all-reduce sends. It has no spec: it is for ``sharded``.

    >>> from gradsync.strategies.sharded.sliced import Sliced
    >>> Sliced().whole
    False
    """

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


class SlicedCodes(SlicedReducer, Compressed):
    """Each rank sends every other rank the codes of that rank's slice, with error feedback, and sums its own.

    The sums are not sent, so they are not encoded either: half the codes that ``Compressed`` sends, and one rounding
    less. It has no spec: it is for ``sharded``.

    >>> from gradsync.strategies.sharded.sliced import SlicedCodes
    >>> SlicedCodes("int8").whole
    False
    """

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self._slice_rows: dict[int, PayloadRows] = {}

    def must_be_whole(self, comm: Communicator) -> bool:
        # Where codes cross between hosts once per host, its leader has the sum. On a GPU, slices would have to be read
        # on the host for all ranks to agree on whether they are finite.
        return self._sums_hosts(comm) or any(not slot.flat.is_cpu for slot in self.slots.values())

    def reduce(self, bucket: Bucket, comm: Communicator) -> Iterator[Work]:
        if self.whole or comm.world_size == 1:
            yield from super().reduce(bucket, comm)
            return
        rows, here = self._slice_rows_of(bucket, comm.world_size), comm.rank
        others = [rank for rank in range(comm.world_size) if rank != here]
        for rank in others:
            self._encode_shard(rows, rows.send_rows[rank], rank, bucket, comm)
        yield comm.all_to_all(rows.send, out=rows.recv, own=False, used=rows.elide_zero_blocks(comm))
        received = [rows.recv_rows[rank] for rank in others]
        for row in received:
            rows.elisions[here].restore(row)
        payloads = zip(*(rows.payloads(row, here) for row in received), strict=True)
        for piece, theirs in zip(rows.shards.pieces[here], payloads, strict=False):
            task = self._task(piece, bucket, comm)
            self._finish_piece(task, finite=self._feedback.sum_shard(task, own_values(piece), theirs))
        self._track_peak(rows, [(row, here) for row in received])
        bucket.release()
        yield from [Finished()] * (self.stages_on(comm) - 1)  # a whole bucket takes as many

    def _slice_rows_of(self, bucket: Bucket, world_size: int) -> PayloadRows:
        codecs = {slot.name: self._codec_of(slot) for slot in bucket.slots}
        rows = self._slice_rows.get(bucket.index)
        if rows is None or rows.codecs != codecs:
            shards = slice_bucket(bucket, codecs, world_size)
            rows = self._slice_rows[bucket.index] = PayloadRows(codecs, shards, world_size, bucket.device)
        return rows

    def _codec_of(self, slot: Slot) -> Codec:
        codec = self._codecs_by_name[slot.name].at(self._steps)
        return Dense() if isinstance(codec, Dense) else codec

    def bytes_sent(self, bucket: Bucket, world_size: int) -> int:
        if self.whole or world_size == 1:
            return super().bytes_sent(bucket, world_size)
        return self._slice_rows_of(bucket, world_size).last_bytes_sent
