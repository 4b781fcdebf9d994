"""A communicator that records when each collective began, which thread waited for it, and when it ended.

It adds no collective of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from gradsync.comm.base import Communicator, Finished, HostExchange, ReduceOp, SourceSlice, Work
from gradsync.comm.forwarding import Forwarding
from gradsync.profiling.raw import Op

if TYPE_CHECKING:
    from gradsync.profiling.recorder import Recorder


class InstrumentedComm(Forwarding):
    """Wraps a communicator for a strategy: ``inner`` does all the work. Only collectives are recorded."""

    def __init__(self, inner: Communicator, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder
        # On other transports done() makes progress itself, which takes time.
        self._may_poll = inner.transport in ("c10d", "tcp")
        others, ranks = inner.world_size - 1, inner.world_size
        self._shares = {  # the least that a rank sends, as a fraction of the tensor that it passes
            "all_reduce": (2 * others, ranks),
            "all_gather": (others, 1),
            "reduce_scatter": (others, ranks),
            "all_to_all": (others, ranks),
            "broadcast": (others, ranks),  # only the source sends, and others may forward: the mean over ranks
        }

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        begun = self._begin("all_reduce", tensor)
        return self._started(begun, self.inner.all_reduce(tensor, op=op))

    def all_reduce_from(self, buffer: Tensor, sources: Sequence[SourceSlice]) -> Work:
        begun = self._begin("all_reduce", buffer)
        return self._started(begun, self.inner.all_reduce_from(buffer, sources))

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        begun = self._begin("all_gather", tensor)
        return self._started(begun, self.inner.all_gather(tensor, out=out))

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        begun = self._begin("reduce_scatter", tensor)
        return self._started(begun, self.inner.reduce_scatter(tensor, out=out, op=op))

    def reduce_slices(self, buffer: Tensor, sources: Sequence[SourceSlice] = ()) -> Work:
        begun = self._begin("reduce_scatter", buffer)
        return self._started(begun, self.inner.reduce_slices(buffer, sources))

    def gather_slices(self, buffer: Tensor) -> Work:
        begun = self._begin("all_gather", buffer[: buffer.numel() // self.world_size])
        return self._started(begun, self.inner.gather_slices(buffer))

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        begun = self._begin("all_to_all", tensor, sum(used) if used and self.sends_used_only else None)
        return self._started(begun, self.inner.all_to_all(tensor, out=out, own=own, used=used))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        begun = self._begin("broadcast", tensor)
        return self._started(begun, self.inner.broadcast(tensor, src))

    def reduce_per_host(self, buffer: Tensor, index: int, exchange: HostExchange) -> Work:
        begun = self._begin("all_reduce", buffer, exchange.sent_bytes)
        timed = replace(exchange, run=lambda leaders: self._timed(exchange.run(leaders), begun.bucket))
        return self._started(begun, self.inner.reduce_per_host(buffer, index, timed))

    def _timed(self, exchange: Iterator[Work], bucket: int) -> Iterator[Work]:
        """Record how long a reducer encodes and decodes in the middle of a collective."""
        recorder = self._recorder
        entered, encodes = recorder.now(), True
        for work in exchange:
            recorder.reduced_within(bucket, entered, encodes=encodes)
            yield work
            entered, encodes = recorder.now(), False
        recorder.reduced_within(bucket, entered, encodes=encodes)

    def _begin(self, name: str, tensor: Tensor, num_bytes: int | None = None) -> Op:
        times, parts = self._shares[name]
        return self._recorder.begin(name, tensor.nbytes * times // parts if num_bytes is None else num_bytes)

    def _started(self, op: Op, work: Work) -> Work:
        self._recorder.begun(op, work, finished=isinstance(work, Finished), may_poll=self._may_poll)
        return InstrumentedWork(work, op, self._recorder)


class InstrumentedWork(Work):
    """A running collective that records how long its caller waits for it."""

    def __init__(self, inner: Work, op: Op, recorder: Recorder) -> None:
        self._inner = inner
        self._op = op
        self._recorder = recorder

    def wait(self) -> None:
        recorder = self._recorder
        entered = recorder.now()
        self._inner.wait()
        recorder.waited(self._op, entered)

    def done(self) -> bool:
        recorder = self._recorder
        entered = recorder.now()
        is_done = self._inner.done()  # on some transports polling makes progress: that takes time too
        recorder.polled(self._op, entered, is_done=is_done)
        return is_done
