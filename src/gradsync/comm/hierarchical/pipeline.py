"""The pipeline of hierarchical collectives: each has a stage within the host, one between hosts, one within the host.

[Note: three stages, one order] Each stage has a communicator of its own: shared memory for *up*, torch.distributed for
*across*, shared memory for *down*. On each communicator all ranks must start the same stages in the same order. They
are started in the order of the calls: a collective starts a stage only when the one before it has started that stage.
A slow stage may delay the next collective; it never changes the order.

Nothing is started by a callback or by a thread. Every call of a collective, ``done()`` or ``wait()`` advances
everything under way. So does waiting for another group: a peer may wait for this rank's part there before it comes
here.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from gradsync.comm.base import Communicator, Finished, HostExchange, Work
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.shm.communicator import PEER_CHECK_S, Shm
from gradsync.comm.shm.spin import DEDICATED_CORES
from gradsync.errors import PeerLost

# Nothing wakes a rank when data comes over the network. While it waits it sleeps a twentieth of the time waited so far.
SHORTEST_SLEEP_S, LONGEST_SLEEP_S, SLEEP_FRACTION = 0.00005, 0.005, 0.05

READY, UP, ACROSS, DOWN, COMPLETE = range(5)

_BUSY: weakref.WeakSet[Pipeline] = weakref.WeakSet()  # this process's pipelines that have work under way


Stage = Callable[[], Work]  # starts the stage
NOTHING = Finished()


class PipelinedWork(Work):
    """A collective, or a chunk of one, in up to three stages.

    It starts when ``after`` is complete, whose staging memory it reuses.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        call: Call,
        *,
        up: Stage | None = None,
        across: Stage | None = None,
        down: Stage | None = None,
        after: PipelinedWork | None = None,
    ) -> None:
        self._pipeline = pipeline
        self.call = call
        self.stage = READY
        self.error: BaseException | None = None
        self._after = after
        self._work: Work = NOTHING  # of the current stage
        self._stages: tuple[Stage | None, ...] = (up, across, down)

    def done(self) -> bool:
        if self.stage != COMPLETE:
            self._pipeline.progress()
        return self.stage == COMPLETE

    def wait(self) -> None:
        if not self.done():
            self._pipeline.finish(self)
        if self.error is not None:
            raise self.error

    def advance(self, ahead: int) -> None:
        """Advance as far as possible, but not beyond the stage ``ahead``: that of the work before it in the queue."""
        if self._after is not None and self._after.stage != COMPLETE:
            return
        self._after = None  # or every earlier work would be kept alive
        while self.stage < ahead and self._work.done():
            self._work.wait()  # returns at once, or raises the error
            self.stage += 1
            if self.stage < COMPLETE:
                start = self._stages[self.stage - UP]
                self._work = NOTHING if start is None else start()
            else:
                self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Become complete, and release the tensors."""
        self.stage, self.error = COMPLETE, error
        self._work, self._stages, self._after = NOTHING, (), None


class Passthrough(Work):
    """Work of a single communicator, outside the pipeline. ``shm``: that communicator, if it is shared memory."""

    def __init__(self, pipeline: Pipeline, call: Call, work: Work, shm: Shm | None = None) -> None:
        self._pipeline = pipeline
        self.call = call
        self.shm = shm
        self._work = work

    def done(self) -> bool:
        self._pipeline.progress()
        return self._work.done()

    def wait(self) -> None:
        if not self.done():
            self._pipeline.finish(self)
        self._work.wait()


class ExchangeOfLeaders(Work):
    """The collectives of an exchange between hosts, one after the other; started by the calls that poll it.

    All leaders must start the collectives of several exchanges in one order: the first one of an exchange comes when
    the last one of the exchange before it has started.
    """

    def __init__(self, exchange: HostExchange, leaders: Communicator, before: ExchangeOfLeaders | None) -> None:
        self._collectives = exchange.run(leaders)
        self._to_start = exchange.num_collectives
        self._work: Work | None = NOTHING  # the last one that was started; None: all are done
        self._before = before

    def done(self) -> bool:
        if self._before is not None and self._before._to_start > 0:
            return False
        self._before = None  # or every earlier exchange would be kept alive
        while self._work is not None and self._work.done():
            self._work.wait()  # returns at once, or raises the error
            self._work = next(self._collectives, None)
            self._to_start -= self._work is not None
            assert self._to_start >= 0, "an exchange yields as many collectives as it says"
        return self._work is None

    def wait(self) -> None:
        while not self.done():
            time.sleep(SHORTEST_SLEEP_S)


class Pipeline:
    """The collectives of one communicator that are under way, the oldest first.

    ``up`` and ``down``: the communicators within the host, if it has other ranks.
    """

    def __init__(self, guard: CollectiveGuard, up: Shm | None, down: Shm | None) -> None:
        self.broken: BaseException | None = None
        self._guard = guard
        self._up, self._down = up, down
        self._spin_policy = DEDICATED_CORES if up is None else up.spin_policy
        self._lock = threading.RLock()
        self._queue: deque[PipelinedWork] = deque()

    def start(self, works: Sequence[PipelinedWork]) -> Work:
        """Append works to the queue; returns the last one, which is complete when all are."""
        with self._lock:
            self._queue.extend(works)
            _BUSY.add(self)
            self.progress()
        return works[-1]

    def progress(self) -> None:
        """Advance as far as possible without blocking. Errors are raised by ``wait()``."""
        with self._lock:
            try:
                self._advance_all()
            except BaseException as error:
                self.abort(self._diagnose(error))
                if not isinstance(error, Exception):  # Ctrl-C, which no work may swallow
                    raise
            if not self._queue:
                _BUSY.discard(self)

    def _advance_all(self) -> None:
        ahead = COMPLETE
        for work in self._queue:
            work.advance(ahead)
            ahead = work.stage
            if ahead == READY:
                break  # so are those behind it
        while self._queue and self._queue[0].stage == COMPLETE:
            self._queue.popleft()

    def _diagnose(self, error: BaseException) -> BaseException:
        """The error to raise for a failed stage. It knows only its own ranks, and the cause may be on another host."""
        try:
            self._guard.raise_if_lost(self._queue[0].call)
        except PeerLost as lost:
            return lost
        return error

    def abort(self, error: BaseException) -> None:
        """End everything under way with an error. The ranks no longer agree on the order: no collective can follow."""
        with self._lock:
            self.broken = self.broken or error
            while self._queue:
                self._queue.popleft().end(self.broken)

    def retract_pending(self) -> None:
        """Tell the peers, as this rank leaves, that the work it started will not advance any more."""
        with self._lock:
            if self._queue:
                self._guard.retract(self._queue[0].call)

    # -- waiting --------------------------------------------------------------------------------------------------

    def finish(self, work: PipelinedWork | Passthrough) -> None:
        """Block until a work is complete: poll, then yield the core, then sleep for short times."""
        tries = 0
        began_s = work.call.started_s = time.monotonic()
        try:
            while not work.done():
                for other in list(_BUSY):
                    other.try_progress()
                tries += 1
                if (shm := self._shm_of_oldest()) is not None:
                    shm.progress(spins=self._spin_policy.spins)
                if tries < self._spin_policy.yields:
                    os.sched_yield()
                else:
                    self._sleep(work, time.monotonic() - began_s)
                    self._guard.check(work.call)
                    if self.broken is not None:
                        raise self.broken
        except Exception as error:
            self.abort(error)
            raise

    def try_progress(self) -> None:
        """Make progress, unless another thread is doing so."""
        if self._lock.acquire(blocking=False):
            try:
                self.progress()
            finally:
                self._lock.release()

    def _shm_of_oldest(self) -> Shm | None:
        with self._lock:
            return {UP: self._up, DOWN: self._down}.get(self._queue[0].stage) if self._queue else None

    def _sleep(self, work: PipelinedWork | Passthrough, waited_s: float) -> None:
        """Sleep until a peer on this host wakes this rank. Sleep shortly if data from other hosts is awaited too."""
        with self._lock:
            only_local = all(queued.stage != ACROSS for queued in self._queue)
        shm = self._shm_of_oldest() or self._up
        if isinstance(work, Passthrough):
            shm, only_local = work.shm or shm, only_local and work.shm is not None
        limit_s = min(LONGEST_SLEEP_S, max(SHORTEST_SLEEP_S, waited_s * SLEEP_FRACTION))
        if shm is None:
            time.sleep(limit_s)
        else:
            shm.sleep_until_woken(PEER_CHECK_S if only_local and len(_BUSY) <= 1 else limit_s, work.done)
