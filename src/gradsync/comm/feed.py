"""What the data loader tells the synchronizers of its worker, so that weights and ``join`` need no line of the user's.

:func:`gradsync.shard` writes, engines read; the other way goes only how long they have waited for other ranks, so that
a loader can tell a slow worker from one that waits. The feed hangs on the communicator, because that is the one
object that the loader and the synchronizers of a worker already share.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator

Reference = Callable[[], Callable[[], None] | None]


class Feed:
    """The weight of the batch in hand, and who must be told when this worker's data has ended."""

    def __init__(self) -> None:
        self.batch_weight = 1.0  # samples in the batch that was last handed out; 1 when no sharded loader runs
        self.said_weight: float | None = None  # what set_weight() said for the backward to come
        self.waited_s = 0.0  # how long collectives have kept this worker from its work so far
        self.wait_unseen_on = ""  # a device on which the host does not wait, and so can't tell; empty: none
        # Weakly: a model that is dropped without close() must not be kept by its data.
        self._joiners: list[Reference] = []
        self._companions: list[Reference] = []
        self._open_blocks: list[Callable[[], None]] = []

    @property
    def weight(self) -> float:
        """The weight of the backward to come: what ``set_weight`` said, else the samples of the batch in hand."""
        return self.batch_weight if self.said_weight is None else self.said_weight

    @weight.setter
    def weight(self, samples: float) -> None:
        self.batch_weight = float(samples)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as time in which this worker waits for others."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - start_s

    def subscribe(self, join: Callable[[], None]) -> Callable[[], None]:
        """Have ``join`` called at the end of this worker's data; returns what undoes it.

        ``join`` keeps taking part in the other ranks' steps, with weight zero, until they have no data either.
        """
        return _remember(self._joiners, join)

    def accompany(self, join: Callable[[], None]) -> Callable[[], None]:
        """As ``subscribe``, for what has collectives of its own beside any synchronizer's: SyncBatchNorm.

        It is called at the end of ``with sync.join():`` too, whichever synchronizer that is.
        """
        return _remember(self._companions, join)

    def end(self) -> None:
        """Tell every synchronizer that this worker has no data left; returns when no rank has any."""
        self.weight = 1.0
        _run_together(_alive([*self._joiners, *self._companions]))

    @contextlib.contextmanager
    def joining(self, join: Callable[[], None]) -> Iterator[None]:
        """Call ``join`` at the end of the block, together with those of the blocks around it.

        With two models, `with a.join(), b.join():`, the others' next collective may be of either. So the inner block's
        end runs both, and the outer one's finds it done.
        """
        self._open_blocks.append(join)
        try:
            yield
        except BaseException:
            self._open_blocks.remove(join)
            raise
        if join in self._open_blocks:
            together, self._open_blocks = self._open_blocks, []
            _run_together([*together, *_alive(self._companions)])


def _remember(joiners: list[Reference], join: Callable[[], None]) -> Callable[[], None]:
    """Keep a method weakly, and anything else as it is; returns what forgets it."""
    reference: Reference = weakref.WeakMethod(join) if inspect.ismethod(join) else lambda: join
    joiners.append(reference)
    return lambda: joiners.remove(reference) if reference in joiners else None


def _alive(joiners: list[Reference]) -> list[Callable[[], None]]:
    return [join for reference in joiners if (join := reference()) is not None]


def _run_together(joiners: list[Callable[[], None]]) -> None:
    """Call each, in a thread of its own but for the first; raise the first error."""
    errors: list[BaseException] = []

    def run(join: Callable[[], None]) -> None:
        try:
            join()
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(join,), daemon=True) for join in joiners[1:]]
    for thread in threads:
        thread.start()
    for join in joiners[:1]:
        run(join)
    for thread in threads:
        thread.join()  # bounded: every collective in there has the communicator's timeout
    if errors:
        raise errors[0]
