"""An exchange of weights that runs in a thread of its own while its rank takes further steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from gradsync.errors import CollectiveFailed
from gradsync.strategies.periodic.headers import ExchangeHeader, ExchangeHeaders


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a rank has counted for a fragment before and after an exchange began: to undo it, and to repeat it."""

    due_before: int  # the step at which the exchange was due
    due_after: int
    samples_before: float  # up to its last exchange
    samples_after: float


class PendingExchange:
    """A fragment's exchange that is running, or done and not applied yet. ``apply_at``: the step after which it is.

    ``header`` and ``counters``: this rank's; None for one that was loaded from saved state.
    """

    def __init__(
        self,
        fragment: int,
        apply_at: int,
        header: ExchangeHeader | None = None,
        counters: Counters | None = None,
        *,
        is_led: bool = False,
    ) -> None:
        self.fragment = fragment
        self.apply_at = apply_at
        self.header = header
        self.counters = counters
        self.is_led = is_led  # by others: this rank has no data, and only takes part
        self.is_carried = False  # the ranks were others when it ran
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

    def renew(self) -> PendingExchange:
        """The same exchange, to be run again."""
        return PendingExchange(self.fragment, self.apply_at, self.header, self.counters, is_led=self.is_led)

    def stop(self, timeout_s: float) -> bool:
        """Wait for its thread to end, without raising; returns whether it is done.

        The thread ends by itself: its communicator was abandoned, or all ranks take part.
        """
        self.abandon(timeout_s)
        if self._thread is not None and self._thread.is_alive():
            raise CollectiveFailed(f"an exchange that overlaps with steps did not end in {timeout_s:.0f} s")
        return self.headers is not None

    def abandon(self, timeout_s: float | None) -> None:
        """Wait at most ``timeout_s`` for the thread to end, and ignore its result."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def raise_failure(self) -> None:
        """Raise the exchange's error if it has failed already: a lost peer is then reported before it is applied."""
        if self._error is not None:
            raise self._error
