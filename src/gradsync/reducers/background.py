"""A driver with a thread of its own, for reducers of several stages.

Between the hooks of two gradients tens of milliseconds can pass. A collective that has come back in the meantime must
be answered at once, or the wire stands still until the next hook; so a thread waits for it instead. It is still one
walk over one sequence: see [Note: one fixed sequence].
"""

from __future__ import annotations

import queue
import threading

from gradsync.bucket import Bucket
from gradsync.comm.base import Communicator
from gradsync.profiling.seam import SILENT, Recording
from gradsync.reducers.base import Driver, Reducer

POLL_S = 0.001  # while no bucket is ready: how often to look whether a collective has come back


class BackgroundDriver(Driver):
    """Starts and finishes collectives in a thread, which ends with ``drain``.

    Nobody else may start collectives on the communicator between the first ``add`` and the end of ``drain``. A bucket's
    stages come one after the other, before the next bucket's: nothing waits for a bucket that is not ready yet.
    """

    def __init__(self, reducer: Reducer, comm: Communicator, num_buckets: int, recorder: Recording = SILENT) -> None:
        super().__init__(reducer, comm, num_buckets, recorder)
        self._num_buckets = num_buckets
        self._num_stages = reducer.stages(comm.world_size)
        self._arrivals: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, bucket: Bucket) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradsync-driver", daemon=True)
            self._thread.start()
        self._arrivals.put(bucket)

    def advance(self) -> None:
        """Nothing to do: the thread goes on by itself."""

    def drain(self) -> None:
        if self._thread is not None:
            entered = self._recorder.now()
            self._thread.join()  # every collective that it waits for has a timeout
            self._recorder.joined(entered)
            self._thread = None
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        self._arrivals.put(None)

    def _run(self) -> None:
        self._recorder.beside()
        try:
            for index in range(self._num_buckets):
                bucket = self._await(index)
                if bucket is None:
                    return
                generator = self._reducer.reduce(bucket, self._comm)
                work = self._resume(index, generator)
                for _ in range(1, self._num_stages):
                    work.wait()
                    work = self._resume(index, generator)
                self._running[index] = (generator, work)
            while self._running:
                self._finish(next(iter(self._running)))
        except BaseException as error:  # raised again by drain()
            self._error = error

    def _await(self, index: int) -> Bucket | None:
        """The bucket, once it is ready; meanwhile others may be finished. None if it will not come."""
        while index not in self._ready:
            try:
                bucket = self._arrivals.get(timeout=POLL_S if self._running else None)
            except queue.Empty:
                for running, (_, work) in list(self._running.items()):
                    if work.done():
                        self._finish(running)
                continue
            if bucket is None:
                return None
            self._ready[bucket.index] = bucket
        return self._ready[index]


def drive(
    reducer: Reducer, comm: Communicator, num_buckets: int, *, on_cpu: bool, recorder: Recording = SILENT
) -> Driver:
    """A driver with a thread where that pays: on CUDA the stream waits, and one stage is started by the hooks."""
    kind = BackgroundDriver if on_cpu and reducer.stages(comm.world_size) > 1 and comm.world_size > 1 else Driver
    return kind(reducer, comm, num_buckets, recorder)
