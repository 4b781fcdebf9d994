"""Signal handling in a worker: it acts on signals at once, and gives its main thread time to raise its own error.

[Note: signal thread] Python runs signal handlers in the main thread, between two of its instructions. A main thread
that waits inside a collective would not run them until the collective ends. So the number of each signal goes through
a socket (``signal.set_wakeup_fd``: written by the C handler itself) to a thread that acts on it. Blocking the signals
and ``sigwait`` would do the same, but child processes would inherit the block and could not be terminated.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import NoReturn

from gradsync.cli.launch.failures import Attempt, given_up_report, is_launcher_frame
from gradsync.comm import current_timeout_s, lost_ranks
from gradsync.elastic.leave import is_watched, request_leave

LOSS_NEWS_S = 1.0  # the launcher may notice the end of a process this much before its peers do
PEER_LOST_MARGIN_S = 2.0  # PeerLost is raised within timeout_s plus this
CLEAN_UP_S = 30.0  # the time for the threads and exit functions of a script that has raised already
SAME_REQUEST_S = 1.0  # a scheduler signals the worker and the launcher, which passes it on: that is one request
INTERRUPT_GRACE_S = 3.0  # a main thread that has not handled Ctrl-C by then is stuck in C


class WorkerSignals:
    """A worker's signal handlers: SIGTERM leaves time for ``PeerLost``, SIGINT ends it even within a collective.

    A signal for which the script installs a handler of its own is left to the script.

    ``leave_grace_s``: in an elastic run, the time that SIGTERM leaves for the worker to leave the run in order.
    """

    def __init__(self, rank: int, attempt: Attempt | None, *, leave_grace_s: float | None = None) -> None:
        self._rank = rank
        self._attempt = attempt
        self._leave_grace_s = leave_grace_s
        self._told_at_s = 0.0  # when the first SIGTERM arrived
        self._interrupt_handled = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._blocked_before = threading.local()  # the signals that a thread had blocked before it forked
        self._exiting = False
        self.told_to_end = False  # SIGTERM has arrived
        self.failed = False  # the script has raised, and only its clean-up remains

    def start(self) -> None:
        """Install the handlers; called once, by the main thread."""
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, self._on_sigint)
        os.register_at_fork(
            before=self._block_signals, after_in_parent=self._unblock_signals, after_in_child=self._reset_in_child
        )
        threading.Thread(target=self._listen, name="gradsync-signals", daemon=True).start()

    # -- handlers, in the main thread ----------------------------------------------------------------------------

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        pass  # the thread decides; the main thread goes on, to its own error or to its end

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self._interrupt_handled.set()
        raise KeyboardInterrupt

    # -- around a fork -------------------------------------------------------------------------------------------

    def _block_signals(self) -> None:
        """Block signals: one to a child that still has our handlers would be lost there, and handled here instead."""
        self._blocked_before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def _unblock_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked_before.mask)

    def _reset_in_child(self) -> None:
        """In a forked child (a DataLoader's worker): restore the default handlers."""
        with contextlib.suppress(ValueError):  # forked by a thread that Python does not consider the main one
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) == self._on_sigint:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        self._reader.close()
        self._writer.close()
        self._unblock_signals()

    # -- in the signal thread ------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):
            # The socket gets every signal that Python handles; those with a handler of the script's are the script's.
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                threading.Thread(target=self._end, daemon=True).start()
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) == self._on_sigint:
                threading.Thread(target=self._exit_if_interrupt_unhandled, daemon=True).start()

    def _end(self) -> None:
        first, self.told_to_end = not self.told_to_end, True
        if self._leave_grace_s is not None:
            self._leave(first, self._leave_grace_s)
            return
        # A second SIGTERM ends the worker at once: the launcher was ended too, or a scheduler's grace period is over.
        if first and self._may_be_peer_lost() and self._sees_lost_peer():
            if self._rank in lost_ranks():
                self._report_stack(lost_ranks()[self._rank])
                self._exit()
            grace_s = CLEAN_UP_S if self.failed else current_timeout_s() + PEER_LOST_MARGIN_S
            if self._attempt is not None:
                self._attempt.write_grace_s(self._rank, grace_s)
            time.sleep(grace_s)  # meanwhile the main thread raises, and ends the process
        self._exit()

    def _leave(self, first: bool, grace_s: float) -> None:
        """In an elastic run: leave it in order. What does not come to that in time ends."""
        now_s = time.monotonic()
        if not first and now_s - self._told_at_s < SAME_REQUEST_S:
            return
        if first:
            self._told_at_s = now_s
            request_leave("it was told to end")  # by SIGTERM, which it also gets when its launcher ends
            if is_watched() and not self.failed:
                time.sleep(grace_s)  # meanwhile the main thread finishes its step, leaves, and ends the process
        self._exit()

    def _exit(self) -> NoReturn:
        """End this process and its children: if the launcher was killed, nothing else ends them.

        Whether the launcher is still alive can't be checked: the kernel signals when its main thread ends, and for a
        moment the process still exists with its other threads.
        """
        if self._attempt is not None and os.getpgrp() == os.getpid() and not self._exiting:
            self._exiting = True
            os.killpg(0, signal.SIGTERM)  # as torchelastic would; comes back to this process too
        os._exit(128 + signal.SIGTERM)

    def _may_be_peer_lost(self) -> bool:
        # Under our launcher a SIGTERM without a failure means that the whole run ends. Then every peer that ended
        # sooner looks lost, and waiting for the error would only delay the end.
        return self._attempt is None or self._attempt.has_failed()

    def _sees_lost_peer(self) -> bool:
        end = time.monotonic() + LOSS_NEWS_S
        while time.monotonic() < end:
            if lost_ranks() or self.failed:
                return True
            time.sleep(0.02)
        return False

    def _report_stack(self, reason: str) -> None:
        """Report the main thread's stack: the peers have timed out on this rank, so it shows where this rank hangs."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = [entry for entry in traceback.extract_stack(frame) if not is_launcher_frame(entry.filename)]
        text = "".join(["Stack (most recent call last):\n", *traceback.format_list(stack)])
        if self._attempt is not None:
            self._attempt.write_failure(self._rank, given_up_report(reason, text, rank=self._rank))
        else:
            sys.stderr.write(text)

    def _exit_if_interrupt_unhandled(self) -> None:
        if not self._interrupt_handled.wait(INTERRUPT_GRACE_S):
            os._exit(128 + signal.SIGINT)
