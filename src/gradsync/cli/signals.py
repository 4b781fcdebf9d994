"""How a worker ends when it is told to: it hears signals at once, and leaves its main thread the time for a last word.

[Note: heard in another thread] Python runs signal handlers in the main thread, between two of its instructions. A main
thread that waits inside a collective would hear nothing until the collective ends. So the number of each signal goes
through a socket (``signal.set_wakeup_fd``: written by the C handler itself) to a thread that acts on it. Blocking the
signals and ``sigwait`` would do the same, but child processes would inherit the block and could not be terminated.
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

from gradsync.cli.failures import Attempt, describe_given_up, is_ours
from gradsync.comm import current_timeout_s, lost_ranks

NEWS_PATIENCE_S = 1.0  # the launcher may see that a process is gone before its peers do
PEER_LOST_MARGIN_S = 2.0  # PeerLost is raised within timeout_s and this
CLEAN_UP_S = 30.0  # what a script that has raised already may take for its threads and exit functions
INTERRUPT_PATIENCE_S = 3.0  # a main thread that has not heard Ctrl-C by then is stuck in C


class SignalWatch:
    """Makes SIGTERM leave time for ``PeerLost``, and SIGINT end even a worker that waits in a collective.

    A script that installs a handler of its own is left alone from then on.
    """

    def __init__(self, rank: int, attempt: Attempt | None) -> None:
        self._rank = rank
        self._attempt = attempt
        self._interrupt_heard = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._held = threading.local()  # the signals that a thread had blocked before it forked
        self._exiting = False
        self.told_to_end = False  # SIGTERM has come
        self.failed = False  # the script has raised, and what is left is its clean-up

    def start(self) -> None:
        """Install the handlers; called once, by the main thread."""
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, self._on_sigint)
        os.register_at_fork(before=self._hold, after_in_parent=self._release, after_in_child=self._forget)
        threading.Thread(target=self._listen, name="gradsync-signals", daemon=True).start()

    # -- in the main thread, when it gets to it ------------------------------------------------------------------

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        pass  # the thread decides; the main thread goes on, to its own error or to its end

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self._interrupt_heard.set()
        raise KeyboardInterrupt

    # -- around a fork -------------------------------------------------------------------------------------------

    def _hold(self) -> None:
        """A signal to a child that still has our handlers would be lost, and heard here through the shared socket."""
        self._held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def _release(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._held.mask)

    def _forget(self) -> None:
        """In a forked child (a DataLoader's worker): signals mean again what they mean to any process."""
        with contextlib.suppress(ValueError):  # forked by a thread that Python does not take for the main one
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) == self._on_sigint:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        self._reader.close()
        self._writer.close()
        self._release()

    # -- in the thread -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):
            # The socket hears every signal that Python handles; what the script has made its own is the script's.
            if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                threading.Thread(target=self._end, daemon=True).start()
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) == self._on_sigint:
                threading.Thread(target=self._end_if_deaf, daemon=True).start()

    def _end(self) -> None:
        first, self.told_to_end = not self.told_to_end, True
        # A second SIGTERM means it: the launcher has been ended too, or a scheduler has lost its patience.
        if first and self._may_be_peer_lost() and self._learns_of_loss():
            if self._rank in lost_ranks():
                self._say_where_it_is(lost_ranks()[self._rank])
                self._exit()
            patience_s = CLEAN_UP_S if self.failed else current_timeout_s() + PEER_LOST_MARGIN_S
            if self._attempt is not None:
                self._attempt.write_patience_s(self._rank, patience_s)
            time.sleep(patience_s)  # the main thread raises, and ends the process, before this is over
        self._exit()

    def _exit(self) -> NoReturn:
        """End this process, and what it has started: if the launcher was killed, nobody else does.

        Whether the launcher still lives can't be asked: the kernel signals when its main thread ends, and for a moment
        the process is there with its other threads.
        """
        if self._attempt is not None and os.getpgrp() == os.getpid() and not self._exiting:
            self._exiting = True
            os.killpg(0, signal.SIGTERM)  # as torchelastic would; comes back to this process too
        os._exit(128 + signal.SIGTERM)

    def _may_be_peer_lost(self) -> bool:
        # Under our launcher a SIGTERM that does not follow from a failure means: the whole run ends. Then each peer
        # that was quicker looks lost, and waiting for the error would only delay the end.
        return self._attempt is None or self._attempt.has_failed()

    def _learns_of_loss(self) -> bool:
        end = time.monotonic() + NEWS_PATIENCE_S
        while time.monotonic() < end:
            if lost_ranks() or self.failed:
                return True
            time.sleep(0.02)
        return False

    def _say_where_it_is(self, reason: str) -> None:
        """The peers have waited for this rank in vain: where its main thread is, is what a person wants to know."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = [entry for entry in traceback.extract_stack(frame) if not is_ours(entry.filename)]
        text = "".join(["Stack (most recent call last):\n", *traceback.format_list(stack)])
        if self._attempt is not None:
            self._attempt.write_failure(self._rank, describe_given_up(reason, text, rank=self._rank))
        else:
            sys.stderr.write(text)

    def _end_if_deaf(self) -> None:
        if not self._interrupt_heard.wait(INTERRUPT_PATIENCE_S):
            os._exit(128 + signal.SIGINT)
