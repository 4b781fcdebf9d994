"""A process-wide request to leave the run in order: set by signal handling, looked at by the training loop's engine.

A worker of an elastic run that is told to end (SIGTERM: a scheduler takes its machine back, its launcher has ended)
finishes its step first, and tells the others that it leaves. The signal's thread calls :func:`request_leave`; the
engine calls :func:`leave_requested` between two steps.

[Note: told together] When a whole run is told to end, its workers learn of it one after the other. If the first asked
for a change at once, the others would go on without it for a step or two. So it waits a moment, while training goes on.
"""

from __future__ import annotations

import threading
import time

TOGETHER_S = 0.25  # longer => workers that are told to end a little later leave in the same step

_lock = threading.Lock()
_reason: str | None = None
_requested_s = 0.0
_is_watched = False


def request_leave(reason: str) -> None:
    """Ask this process to leave the run; from any thread. Of several requests the first reason is kept."""
    global _reason, _requested_s
    with _lock:
        if _reason is None:
            _requested_s = time.monotonic()
            _reason = reason


def leave_requested() -> str | None:
    """Why this process was asked to leave; None if it was not. Does not block.

    >>> from gradsync.elastic.leave import leave_requested
    >>> leave_requested() is None
    True
    """
    global _is_watched
    _is_watched = True
    return _reason


def leave_is_due() -> bool:
    """Whether it is time to ask the others for a change, so that this process can leave: see [Note: told together]."""
    return leave_requested() is not None and time.monotonic() - _requested_s > TOGETHER_S


def is_watched() -> bool:
    """Whether anything in this process has ever asked :func:`leave_requested`.

    Until then (the script still imports, reads its data, or never trains) nothing would come of a request, and a
    process that is told to end need not wait.
    """
    return _is_watched
