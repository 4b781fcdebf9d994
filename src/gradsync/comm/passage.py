"""Collectives that go up within a host, across between hosts, and down within a host again, several at once.

[Note: three roads, one order] Each of the three has a communicator of its own: shared memory up, torch.distributed
across, shared memory down. On each of them all its ranks must start the same stages in the same order. They are started
in the order of the calls: a collective goes across when the one before it has, and down when the one before it has.
How far each has come may hold the next one up; it never changes the order. Nothing is started by a callback or by a
thread: whoever calls, asks or waits moves everything on, and so does who waits for another group (a peer may wait for
this rank's part there before it comes here).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from gradsync.comm.base import Finished, Work
from gradsync.comm.shm import NAP_S, Shm
from gradsync.comm.spinning import ALONE
from gradsync.comm.watch import Call, Watch
from gradsync.errors import PeerLost

# No bell rings when something comes over the wire. A rank that waits for it sleeps a twentieth of what it has waited.
SHORTEST_NAP_S, LONGEST_NAP_S, NAP_PART = 0.00005, 0.005, 0.05

READY, UP, ACROSS, DOWN, OVER = range(5)

_BUSY: weakref.WeakSet[Roads] = weakref.WeakSet()  # those of this process that have passages under way


Stage = Callable[[], Work]  # starts it
NOTHING = Finished()


class Passage(Work):
    """A collective, or a piece of one: its stages. It begins when ``after`` is over, whose memory it uses again."""

    def __init__(
        self,
        roads: Roads,
        call: Call,
        *,
        up: Stage | None = None,
        across: Stage | None = None,
        down: Stage | None = None,
        after: Passage | None = None,
    ) -> None:
        self._roads = roads
        self.call = call
        self.stage = READY
        self.error: BaseException | None = None
        self._after = after
        self._work: Work = NOTHING  # of this stage
        self._stages: tuple[Stage | None, ...] = (up, across, down)

    def done(self) -> bool:
        if self.stage != OVER:
            self._roads.move()
        return self.stage == OVER

    def wait(self) -> None:
        if not self.done():
            self._roads.finish(self)
        if self.error is not None:
            raise self.error

    def advance(self, ahead: int) -> None:
        """Go on as far as it can, but not beyond the stage of the one ``ahead``."""
        if self._after is not None and self._after.stage != OVER:
            return
        self._after = None  # else all that ever went before would be remembered
        while self.stage < ahead and self._work.done():
            self._work.wait()  # returns at once, or raises what went wrong
            self.stage += 1
            if self.stage < OVER:
                start = self._stages[self.stage - UP]
                self._work = NOTHING if start is None else start()
            else:
                self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Be over, and let go of the tensors."""
        self.stage, self.error = OVER, error
        self._work, self._stages, self._after = NOTHING, (), None


class Aside(Work):
    """Work that takes no passage. ``bell``: the shared memory that it goes through, if it does."""

    def __init__(self, roads: Roads, call: Call, work: Work, bell: Shm | None = None) -> None:
        self._roads = roads
        self.call = call
        self.bell = bell
        self._work = work

    def done(self) -> bool:
        self._roads.move()
        return self._work.done()

    def wait(self) -> None:
        if not self.done():
            self._roads.finish(self)
        self._work.wait()


class Followed(Work):
    """Work whose result is put in place by ``then``, which starts nothing."""

    def __init__(self, work: Work, then: Callable[[], object]) -> None:
        self._work = work
        self._then: Callable[[], object] | None = then

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.wait()
        then, self._then = self._then, None
        if then is not None:
            with torch.inference_mode():  # not autograd's business, and right for tensors of inference mode too
                then()


class Roads:
    """The passages of one communicator that are under way, the oldest first.

    ``up`` and ``down``: where they go within the host, if other ranks are there.
    """

    def __init__(self, watch: Watch, up: Shm | None, down: Shm | None) -> None:
        self.broken: BaseException | None = None
        self._watch = watch
        self._up, self._down = up, down
        self._spinning = ALONE if up is None else up.spinning
        self._lock = threading.RLock()
        self._queue: deque[Passage] = deque()

    def start(self, passages: Sequence[Passage]) -> Work:
        """Send some on their way; returns the last, which is over when all are."""
        with self._lock:
            self._queue.extend(passages)
            _BUSY.add(self)
            self.move()
        return passages[-1]

    def move(self) -> None:
        """Go on as far as possible. Does not block; what goes wrong is raised by ``wait()``."""
        with self._lock:
            try:
                self._walk()
            except BaseException as error:
                self.break_off(self._verdict(error))
                if not isinstance(error, Exception):  # Ctrl-C, which is not the work's to keep
                    raise
            if not self._queue:
                _BUSY.discard(self)

    def _walk(self) -> None:
        ahead = OVER
        for passage in self._queue:
            passage.advance(ahead)
            ahead = passage.stage
            if ahead == READY:
                break  # and so are those behind it
        while self._queue and self._queue[0].stage == OVER:
            self._queue.popleft()

    def _verdict(self, error: BaseException) -> BaseException:
        """What to say of a stage's failure: it knows its few ranks only, and the cause may be on another host."""
        try:
            self._watch.raise_if_lost(self._queue[0].call)
        except PeerLost as lost:
            return lost
        return error

    def break_off(self, error: BaseException) -> None:
        """Give up all that is under way. The ranks no longer agree on how far they have come: nothing can follow."""
        with self._lock:
            self.broken = self.broken or error
            while self._queue:
                self._queue.popleft().end(self.broken)

    def give_up(self) -> None:
        """As this rank leaves: say that what it began moves on no more."""
        with self._lock:
            if self._queue:
                self._watch.retract(self._queue[0].call)

    # -- waiting --------------------------------------------------------------------------------------------------

    def finish(self, work: Passage | Aside) -> None:
        """Block until a work is over: look again and again, offer the core to others, then sleep for moments."""
        tries = 0
        began_s = work.call.started_s = time.monotonic()
        try:
            while not work.done():
                for other in list(_BUSY):
                    other.move_if_free()
                tries += 1
                if (shm := self._where_the_oldest_is()) is not None:
                    shm.progress(spins=self._spinning.spins)
                if tries < self._spinning.yields:
                    os.sched_yield()
                else:
                    self._nap(work, time.monotonic() - began_s)
                    self._watch.check(work.call)
                    if self.broken is not None:
                        raise self.broken
        except Exception as error:
            self.break_off(error)
            raise

    def move_if_free(self) -> None:
        """Move on, unless another thread is about it."""
        if self._lock.acquire(blocking=False):
            try:
                self.move()
            finally:
                self._lock.release()

    def _where_the_oldest_is(self) -> Shm | None:
        with self._lock:
            return {UP: self._up, DOWN: self._down}.get(self._queue[0].stage) if self._queue else None

    def _nap(self, work: Passage | Aside, waited_s: float) -> None:
        """Sleep until a peer on this host rings, or for a moment where something may come that does not ring."""
        with self._lock:
            rings = all(passage.stage != ACROSS for passage in self._queue)
        bell = self._where_the_oldest_is() or self._up
        if isinstance(work, Aside):
            bell, rings = work.bell or bell, rings and work.bell is not None
        limit_s = min(LONGEST_NAP_S, max(SHORTEST_NAP_S, waited_s * NAP_PART))
        if bell is None:
            time.sleep(limit_s)
        else:
            bell.nap(NAP_S if rings and len(_BUSY) <= 1 else limit_s, work.done)
