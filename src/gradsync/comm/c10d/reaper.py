"""The reaper: a thread that destroys the process groups of worlds that are over.

Destroying a Gloo group joins its threads, which run the collectives that are under way. A collective between ranks that
are alive ends only when all of them take part, or at its timeout. So a caller that must go on hands the group over.

[Note: how pending works end] Gloo has no call that aborts a collective. But a receive whose ``wait()`` times out closes
all connections of its group, and then every collective under way fails at once. The reaper makes such a receive, with a
tag that nothing else uses.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

NEVER_SENT_TAG = 0x7EAF  # of a receive that no rank sends anything for
AT_ONCE = timedelta(milliseconds=1)
POLL_S = 0.002
EXIT_S = 2.0  # how long the groups may take to end when the process exits


@dataclass
class _Doomed:
    """A group to destroy, and the works of it that may be under way."""

    group: dist.ProcessGroup | None
    works: list[dist.Work]
    ends_s: float  # it is destroyed by then, whatever is under way

    def close_connections(self) -> None:
        """End the works under way: see [Note: how pending works end]."""
        group = self.group
        assert group is not None, "it is not destroyed yet"
        for device in group._device_types:
            if device.type != "cpu":
                with contextlib.suppress(RuntimeError):
                    group._get_backend(device).abort()
        if group.size() > 1:
            with contextlib.suppress(RuntimeError):  # it times out: that is what it is for
                group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), NEVER_SENT_TAG).wait(AT_ONCE)

    def is_busy(self) -> bool:
        """Whether works are under way."""
        self.works = [work for work in self.works if not work.is_completed()]
        return bool(self.works)

    def destroy(self) -> None:
        """Drop the last reference, which joins the group's threads. torch does that without Python's lock."""
        self.works = []
        self.group = None

    def leak(self) -> None:
        """Never destroy it: the process ends, and must not wait for it."""
        for thing in (self.group, *self.works):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class _Reaper:
    """The thread, which starts with the first group that it gets."""

    def __init__(self) -> None:
        self._doomed: queue.SimpleQueue[_Doomed | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pending: list[_Doomed] = []

    def add(self, doomed: _Doomed) -> None:
        """Destroy a group in the thread. Does not block."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradsync-reaper", daemon=True)
                self._thread.start()
        self._doomed.put(doomed)

    def _run(self) -> None:
        stopped = False
        while not (stopped and not self._pending):
            for doomed in self._take():
                if doomed is None:
                    stopped = True
                    continue
                if doomed.is_busy():
                    doomed.close_connections()
                self._pending.append(doomed)
                del doomed
            self._destroy_idle()

    def _take(self) -> list[_Doomed | None]:
        """The groups that have come; waits for the next one, but not for long while works are under way."""
        taken: list[_Doomed | None] = []
        with contextlib.suppress(queue.Empty):
            taken.append(self._doomed.get(timeout=POLL_S if self._pending else None))
            while True:
                taken.append(self._doomed.get_nowait())
        return taken

    def _destroy_idle(self) -> None:
        now_s = time.monotonic()
        for doomed in list(self._pending):
            if not doomed.is_busy() or now_s > doomed.ends_s:
                doomed.destroy()
                self._pending.remove(doomed)

    def stop(self) -> None:
        """Destroy what can be destroyed soon; leave the rest to the end of the process."""
        if self._thread is None:
            return
        self._doomed.put(None)
        self._thread.join(EXIT_S)
        for doomed in self._pending:
            doomed.leak()


_reaper = _Reaper()


def reap(group: dist.ProcessGroup, works: Sequence[dist.Work], *, timeout_s: float) -> None:
    """Destroy a group that this process uses no more, in a thread. Does not block.

    It is destroyed when ``works`` have completed or failed, which closing its connections brings about, at the latest
    after ``timeout_s``. ``works``: those that may be under way.
    """
    _reaper.add(_Doomed(group, list(works), time.monotonic() + timeout_s))


@atexit.register
def _stop_at_exit() -> None:
    # A thread that returns from C while the interpreter shuts down aborts the process.
    _reaper.stop()


def _forget_thread() -> None:
    """In a forked child, which has none of its parent's threads, nor those of the groups: destroying one would hang."""
    global _reaper
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_reaper))
    _reaper = _Reaper()


os.register_at_fork(after_in_child=_forget_thread)
