"""An exchange of weights that runs in a thread of its own while its rank takes further steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

from gradsync.strategies.periodic.headers import ExchangeHeaders


class PendingExchange:
    """A fragment's exchange that is running, or done and not applied yet. ``apply_at``: the step after which it is."""

    def __init__(self, fragment: int, apply_at: int) -> None:
        self.fragment = fragment
        self.apply_at = apply_at
        self.headers: ExchangeHeaders | None = None  # known once it is done
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], ExchangeHeaders]) -> None:
        """Run ``work``, which returns the headers, in a thread of its own."""

        def run() -> None:
            try:
                self.headers = work()
            except BaseException as error:  # raised again in the training thread
                self._error = error

        self._thread = threading.Thread(target=run, name="gradsync-exchange", daemon=True)
        self._thread.start()

    def wait(self) -> ExchangeHeaders:
        """Block until it is done; raise its error if it failed. Its collectives have the communicator's timeout."""
        self.abandon(None)
        self.raise_failure()
        assert self.headers is not None, "the exchange is done"
        return self.headers

    def abandon(self, timeout_s: float | None) -> None:
        """Wait at most ``timeout_s`` for the thread to end, and ignore its result."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def raise_failure(self) -> None:
        """Raise the exchange's error if it has failed already: a lost peer is then reported before it is applied."""
        if self._error is not None:
            raise self._error
