"""An exchange of weights that goes on in a thread of its own while its rank takes further steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gradsync.strategies.attendance import Attendance


class Flight:
    """A fragment's exchange that is under way, or done and not landed yet."""

    def __init__(self, fragment: int, lands_at: int) -> None:
        self.fragment = fragment
        self.lands_at = lands_at
        self.attendance: Attendance | None = None  # known once it is done
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], Attendance]) -> None:
        """Do ``work``, which gives the attendance, in a thread of its own."""

        def run() -> None:
            try:
                self.attendance = work()
            except BaseException as error:  # raised again in the training's own thread
                self._error = error

        self._thread = threading.Thread(target=run, name="gradsync-exchange", daemon=True)
        self._thread.start()

    def wait(self) -> Attendance:
        """Block until it is done; raise what went wrong. Every collective in it has the communicator's timeout."""
        self.abandon(None)
        self.raise_failure()
        assert self.attendance is not None, "it is done"
        return self.attendance

    def abandon(self, timeout_s: float | None) -> None:
        """Give it some time to end by itself; what became of it is of no interest any more."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def raise_failure(self) -> None:
        """Raise at once what has gone wrong so far: a lost peer need not be found at the landing only."""
        if self._error is not None:
            raise self._error
