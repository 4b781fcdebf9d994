"""A driver with a background thread, for reducers of several stages; ``make_driver`` chooses between the two drivers.

Tens of milliseconds can pass between the hooks of two gradients. When a collective finishes in the meantime, the next
stage must start at once, or the network is idle until the next hook; so a thread waits for it. The order of collectives
is still the plan's: see [Note: one fixed sequence] in base.py.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from gradsync.buckets.bucket import Bucket
from gradsync.comm.base import Communicator, Work
from gradsync.profiling.interface import NOT_RECORDING, Recording
from gradsync.reducers.base import Driver, Reducer

POLL_S = 0.001  # while no bucket is ready: how often to check whether a collective has finished


class _Abandoned(Exception):
    """The backward was abandoned: its thread must not run a reducer any more."""


class BackgroundDriver(Driver):
    """Starts and finishes collectives in a thread, which ends with ``drain``.

    No other thread may start collectives on the communicator between the first ``add`` and the end of ``drain``. All
    stages of a bucket come before those of the next bucket: no stage waits for a bucket that is not ready yet.
    """

    def __init__(
        self, reducer: Reducer, comm: Communicator, num_buckets: int, recorder: Recording = NOT_RECORDING
    ) -> None:
        super().__init__(reducer, comm, num_buckets, recorder)
        self._num_buckets = num_buckets
        self._ready_queue: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._computing = threading.Lock()  # held while a reducer runs: between two collectives, never in a wait
        self._is_abandoned = False

    def add(self, bucket: Bucket) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradsync-driver", daemon=True)
            self._thread.start()
        self._ready_queue.put(bucket)

    def advance(self) -> None:
        """Does nothing: the thread makes progress by itself."""

    def drain(self) -> None:
        if self._thread is not None:
            entered = self._recorder.now()
            self._thread.join()  # every collective that it waits for has a timeout
            self._recorder.background_thread_joined(entered)
            self._thread = None
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """See ``Driver.abandon``. The thread may be in a wait for a peer still: it ends after that."""
        self._ready_queue.put(None)
        with self._computing:
            self._is_abandoned = True

    def _resume(self, index: int, generator: Iterator[Work]) -> Work:
        with self._computing:
            self._check_abandoned()
            return super()._resume(index, generator)

    def _run_to_end(self, index: int, generator: Iterator[Work]) -> None:
        with self._computing:
            self._check_abandoned()
            super()._run_to_end(index, generator)

    def _check_abandoned(self) -> None:
        if self._is_abandoned:
            raise _Abandoned

    def _run(self) -> None:
        self._recorder.background_thread_started()
        try:
            for index in range(self._num_buckets):
                bucket = self._wait_for(index)
                if bucket is None:
                    return
                generator = self._reducer.reduce(bucket, self._comm)
                work = self._resume(index, generator)
                for _ in range(1, self._num_stages):
                    work.wait()
                    work = self._resume(index, generator)
                self._running[index] = (generator, work)
                self.sent.add(index)
            while self._running:
                self._finish(next(iter(self._running)))
        except BaseException as error:  # raised again by drain()
            self._error = error

    def _wait_for(self, index: int) -> Bucket | None:
        """Wait until a bucket is ready, and finish others meanwhile. None if the backward was abandoned."""
        while index not in self._ready:
            try:
                bucket = self._ready_queue.get(timeout=POLL_S if self._running else None)
            except queue.Empty:
                for running, (_, work) in list(self._running.items()):
                    if work.done():
                        self._finish(running)
                continue
            if bucket is None:
                return None
            self._ready[bucket.index] = bucket
        return self._ready[index]


def make_driver(
    reducer: Reducer, comm: Communicator, num_buckets: int, *, on_cpu: bool, recorder: Recording = NOT_RECORDING
) -> Driver:
    """A driver with a thread for several stages on a CPU, else one without.

    On a GPU the stream waits instead of a thread, and single-stage reducers are started by the hooks.
    """
    kind = BackgroundDriver if on_cpu and reducer.stages_on(comm) > 1 and comm.world_size > 1 else Driver
    return kind(reducer, comm, num_buckets, recorder)
