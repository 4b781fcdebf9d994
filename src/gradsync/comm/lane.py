"""Lanes: how all-reduces that are made of many messages move on, several of them at once in one group.

[Note: one lane, one order] Messages between two ranks match in the order in which they are started, so two ranks that
moved two all-reduces on in different orders would add the one's values to the other's. Hence each group has one lane.
Only its oldest all-reduce has messages under way; the next one starts its first when the oldest is over. All ranks make
their calls in the same order, so the messages between any two of them are the same sequence at both ends. And nobody
else's messages use that sequence: a lane has a group of its own, or letters with a tag of their own (c10d.py).

[Note: who moves a lane] Not only who waits: a rank that computes, or waits for something else, would hold up the
others, and two ranks that wait for two groups in opposite orders would wait for ever. So a lane moves by itself. Gloo's
messages can only be waited for, so there a thread walks through the steps (``DrivenLane``). Other transports move when
they are asked: whoever calls ``done()`` or ``wait()`` asks, and so does a thread, every millisecond (``PolledLane``).
"""

from __future__ import annotations

import abc
import os
import threading
import time
from collections import deque
from typing import Protocol, runtime_checkable

import torch

from gradsync.comm.base import Finished, Work
from gradsync.comm.letters import in_a_thread
from gradsync.comm.steps import Port, Steps

LOOK_S = 0.05  # how often a blocked rank looks whether a peer is lost
TICK_S = 0.001  # how often lanes that nobody asks about are looked after


@runtime_checkable
class Letters(Port, Protocol):
    """A port of one collective, whose messages can be waited for, without a timeout, but not asked."""

    def check(self, waiting_since_s: float) -> None:
        """For a rank that waits, now and then: raise if a peer is lost, or if the wait has been too long."""

    def retract(self) -> None:
        """Say, as this rank leaves, that it never finished the collective."""


class Moving(Work):
    """An all-reduce in a lane."""

    def __init__(self, lane: Lane, port: Port, steps: Steps) -> None:
        self._lane = lane
        self.port = port
        self.steps = steps
        self.message: Work = Finished()  # that the next step waits for
        self.over = threading.Event()
        self.error: BaseException | None = None

    def done(self) -> bool:
        if not self.over.is_set():
            self._lane.move()
        return self.over.is_set()

    def wait(self) -> None:
        since_s = time.monotonic()
        while not self.done():
            try:
                self._lane.block(self, since_s)
            except Exception as error:
                self._lane.break_off(error)
        if self.error is not None:
            raise self.error


class Lane(abc.ABC):
    """The all-reduces of one group that are under way, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[Moving] = deque()
        self._broken: BaseException | None = None

    def start(self, port: Port, steps: Steps) -> Work:
        """Have the steps, which use ``port``, done after all that was started before. Returns at once."""
        work = Moving(self, port, steps)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._queue.append(work)
        self._begin()
        return work

    def break_off(self, error: BaseException) -> None:
        """Give up all that is under way: whoever waits for it raises ``error``."""
        with self._lock:
            self._end(error)

    def give_up(self) -> None:
        """As this rank leaves: say that what it began moves on no more."""
        oldest = self.oldest
        if oldest is not None and isinstance(oldest.port, Letters):
            oldest.port.retract()

    @property
    def oldest(self) -> Moving | None:
        """The work that has messages under way."""
        with self._lock:
            return self._queue[0] if self._queue else None

    def _end(self, error: BaseException) -> None:
        # The ranks no longer agree on how far the sequence of messages has come: nothing can follow.
        self._broken = self._broken or error
        while self._queue:
            work = self._queue.popleft()
            work.error = self._broken
            work.over.set()

    @abc.abstractmethod
    def _begin(self) -> None:
        """There is work. Does not block."""

    @abc.abstractmethod
    def move(self) -> None:
        """Go on, if that takes somebody who asks. Does not block."""

    @abc.abstractmethod
    def block(self, work: Moving, since_s: float) -> None:
        """Wait a while for something to happen; raise if a peer is lost."""


class DrivenLane(Lane):
    """A lane of letters: a thread walks through the steps for as long as there is work."""

    def __init__(self) -> None:
        super().__init__()
        self._has_driver = False

    def _begin(self) -> None:
        with self._lock:
            has_driver, self._has_driver = self._has_driver, True
        if not has_driver:
            in_a_thread(self._drive)

    def _drive(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._has_driver = False
                    return
                work = self._queue[0]
            try:
                self._walk(work)
            except Exception as error:
                self.break_off(error)
            with self._lock:
                if self._queue and self._queue[0] is work:  # it was not given up meanwhile
                    self._queue.popleft().over.set()

    def _walk(self, work: Moving) -> None:
        with torch.inference_mode():  # not autograd's business, and right for tensors of that mode too
            for message in work.steps:
                message.wait()
                if work.over.is_set():  # given up, though the message has come after all
                    return

    def move(self) -> None:
        return None

    def block(self, work: Moving, since_s: float) -> None:
        assert isinstance(work.port, Letters), "only letters come into this lane"
        if not work.over.wait(LOOK_S):
            work.port.check(since_s)


class PolledLane(Lane):
    """A lane whose messages move when they are asked. A message that does not come has the transport's own timeout."""

    def _begin(self) -> None:
        self.move()
        if self.oldest is not None:
            _ticker.look_after(self)

    def move(self) -> None:
        with self._lock, torch.inference_mode():
            try:
                while self._queue and _advance(self._queue[0]):
                    self._queue.popleft().over.set()
            except BaseException as error:
                self._end(error)
                if not isinstance(error, Exception):  # Ctrl-C, which is not the work's to keep
                    raise

    def block(self, work: Moving, since_s: float) -> None:
        oldest = self.oldest
        if oldest is not None:
            oldest.message.wait()


def _advance(work: Moving) -> bool:
    """Go on as far as the messages that have come let it; True when it is over."""
    while work.message.done():
        work.message.wait()  # returns at once, or raises what went wrong
        following = next(work.steps, None)
        if following is None:
            return True
        work.message = following
    return False


class _Ticker:
    """The thread that looks after polled lanes."""

    def __init__(self) -> None:
        self._busy: set[PolledLane] = set()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    def look_after(self, lane: PolledLane) -> None:
        """Move a lane on, now and then, until nothing is left in it."""
        with self._news:
            self._busy.add(lane)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradsync-lanes", daemon=True)
                self._thread.start()
            self._news.notify()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._busy:
                    self._news.wait()
                busy = list(self._busy)
            for lane in busy:
                lane.move()
                with self._news:
                    if lane.oldest is None:
                        self._busy.discard(lane)
            time.sleep(TICK_S)


_ticker = _Ticker()


def _forget_thread() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _ticker
    _ticker = _Ticker()


os.register_at_fork(after_in_child=_forget_thread)
