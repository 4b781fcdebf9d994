"""Executors: they run the all-reduces of one group, which are made of many messages, one after the other.

[Note: one executor, one order] Messages between two ranks match in the order in which they are started, so two ranks
that ran two all-reduces in different orders would add the one's values to the other's. Hence each group has one
executor. Only its oldest all-reduce has messages under way; the next one starts its first message when the oldest is
over. All ranks make their calls in the same order, so the messages between any two of them are the same sequence at
both ends. No other messages use that sequence: an executor has a group of its own, or messages with a tag of their own
(c10d/communicator.py).

[Note: progress without a waiting caller] If only a rank that waits made progress, a rank that computes, or waits for
something else, would delay the others, and two ranks that wait for two groups in opposite orders would deadlock. So
executors run in the background. Gloo's messages can only be waited for, so there a thread runs the steps
(``ThreadExecutor``). The messages of other transports are polled: by ``done()`` and ``wait()``, and by a thread, every
millisecond (``PollingExecutor``).
"""

from __future__ import annotations

import abc
import os
import threading
import time
from collections import deque
from typing import Protocol, runtime_checkable

import torch

from gradsync.comm.allreduce.primitives import Channel, Steps
from gradsync.comm.background import CHECK_INTERVAL_S, run_in_thread
from gradsync.comm.base import Finished, Work

POLL_INTERVAL_S = 0.001  # how often the background thread polls


@runtime_checkable
class BlockingChannel(Channel, Protocol):
    """A channel of one collective, whose messages can be waited for, without a timeout, but not polled."""

    def check(self, waiting_since_s: float) -> None:
        """Called from time to time by a rank that waits: raise if a peer is lost, or the wait has been too long."""

    def retract(self) -> None:
        """Record, as this rank leaves, that it never finished the collective."""


class RunningCollective(Work):
    """An all-reduce in an executor."""

    def __init__(self, executor: Executor, channel: Channel, steps: Steps) -> None:
        self._executor = executor
        self.channel = channel
        self.steps = steps
        self.message: Work = Finished()  # the message that the next step needs
        self.over = threading.Event()
        self.error: BaseException | None = None

    def done(self) -> bool:
        if not self.over.is_set():
            self._executor.poll()
        return self.over.is_set()

    def wait(self) -> None:
        since_s = time.monotonic()
        while not self.done():
            try:
                self._executor.block(self, since_s)
            except Exception as error:
                self._executor.abort(error)
        if self.error is not None:
            raise self.error


class Executor(abc.ABC):
    """Runs the all-reduces of one group, the oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[RunningCollective] = deque()
        self._broken: BaseException | None = None

    def start(self, channel: Channel, steps: Steps) -> Work:
        """Run the steps, which use ``channel``, after all that was started before. Returns at once."""
        work = RunningCollective(self, channel, steps)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._queue.append(work)
        self._on_start()
        return work

    def abort(self, error: BaseException) -> None:
        """Abort all that is under way: ``wait()`` of every such work raises ``error``."""
        with self._lock:
            self._end(error)

    def retract(self) -> None:
        """Record, as this rank leaves, that it will not finish what it began."""
        oldest = self.oldest
        if oldest is not None and isinstance(oldest.channel, BlockingChannel):
            oldest.channel.retract()

    @property
    def oldest(self) -> RunningCollective | None:
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
    def _on_start(self) -> None:
        """Called when work was added to the queue. Does not block."""

    @abc.abstractmethod
    def poll(self) -> None:
        """Make progress, if that takes a caller. Does not block."""

    @abc.abstractmethod
    def block(self, work: RunningCollective, since_s: float) -> None:
        """Wait a while for something to happen; raise if a peer is lost."""


class ThreadExecutor(Executor):
    """Runs over ``BlockingChannel``s: a thread runs the steps for as long as there is work."""

    def __init__(self) -> None:
        super().__init__()
        self._has_thread = False

    def _on_start(self) -> None:
        with self._lock:
            has_thread, self._has_thread = self._has_thread, True
        if not has_thread:
            run_in_thread(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._has_thread = False
                    return
                work = self._queue[0]
            try:
                self._run_steps(work)
            except Exception as error:
                self.abort(error)
            with self._lock:
                if self._queue and self._queue[0] is work:  # it was not aborted meanwhile
                    self._queue.popleft().over.set()

    def _run_steps(self, work: RunningCollective) -> None:
        with torch.inference_mode():  # autograd does not record it, and it may write tensors made in inference mode
            for message in work.steps:
                message.wait()
                if work.over.is_set():  # aborted, though the message has arrived after all
                    return

    def poll(self) -> None:
        return None

    def block(self, work: RunningCollective, since_s: float) -> None:
        assert isinstance(work.channel, BlockingChannel), "this executor runs over blocking channels only"
        if not work.over.wait(CHECK_INTERVAL_S):
            work.channel.check(since_s)


class PollingExecutor(Executor):
    """Makes progress when it is polled. A message that does not arrive has the transport's own timeout."""

    def _on_start(self) -> None:
        self.poll()
        if self.oldest is not None:
            poll_in_background(self)

    def poll(self) -> None:
        with self._lock, torch.inference_mode():
            try:
                while self._queue and _advance(self._queue[0]):
                    self._queue.popleft().over.set()
            except BaseException as error:
                self._end(error)
                if not isinstance(error, Exception):  # Ctrl-C: the caller's, not only the work's
                    raise

    def block(self, work: RunningCollective, since_s: float) -> None:
        oldest = self.oldest
        if oldest is not None:
            oldest.message.wait()


def _advance(work: RunningCollective) -> bool:
    """Run the steps whose messages have arrived; True when the collective is over."""
    while work.message.done():
        work.message.wait()  # returns at once, or raises what went wrong
        following = next(work.steps, None)
        if following is None:
            return True
        work.message = following
    return False


class Pollable(Protocol):
    """Something that makes progress when it is polled."""

    def poll(self) -> None:
        """Make progress. Does not block for long, and does not raise."""

    @property
    def oldest(self) -> object | None:
        """What is under way; None when there is nothing left to do."""


class _Poller:
    """The thread that polls in the background."""

    def __init__(self) -> None:
        self._busy: set[Pollable] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, pollable: Pollable) -> None:
        """Poll it, every ``POLL_INTERVAL_S``, until nothing is left in it."""
        with self._changed:
            self._busy.add(pollable)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradsync-poller", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._busy:
                    self._changed.wait()
                busy = list(self._busy)
            for pollable in busy:
                pollable.poll()
                if pollable.oldest is None:
                    self._remove(pollable)
            time.sleep(POLL_INTERVAL_S)

    def _remove(self, pollable: Pollable) -> None:
        # `oldest` takes the executor's lock, so it is never read with the condition held: the thread that holds the
        # executor's lock may be calling `add`. Work that came meanwhile was queued before `add` was called for it, so
        # reading `oldest` a second time finds it.
        with self._changed:
            self._busy.discard(pollable)
        if pollable.oldest is not None:
            self.add(pollable)


_poller = _Poller()


def poll_in_background(pollable: Pollable) -> None:
    """Have a thread poll it, every ``POLL_INTERVAL_S``, until nothing is left in it."""
    _poller.add(pollable)


def _forget_thread() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _poller
    _poller = _Poller()


os.register_at_fork(after_in_child=_forget_thread)
