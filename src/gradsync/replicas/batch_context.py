"""The batch that a backward belongs to: its weight and number, shared by the data loader and the engines.

Each worker has one ``BatchSource``. The loader of :func:`gradsync.shard` writes to it which batch it has handed out,
and when the data has ended; engines add how long they waited for other ranks, so that the loader can distinguish a slow
worker from one that waits. Each synchronizer has one ``BatchContext``: the weight and number that its user has set for
the next backward; by default those of the source.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from gradsync.comm.base import Communicator, Worker

Reference = Callable[[], Callable[[], None] | None]


class BatchNumber(NamedTuple):
    """Which batch a backward is of: the same on every rank that trains on its part of it."""

    epoch: int
    position: int  # the loader's position behind the batch, in samples of all ranks; or what set_batch() was given

    def __str__(self) -> str:
        if self == NO_BATCH:
            return "none (it is outside of any loop over a sharded loader)"
        if self.epoch < 0:
            return f"number {self.position}"
        return f"the one that ends at sample {self.position} of epoch {self.epoch}"


NO_BATCH = BatchNumber(-1, -1)


class Rewindable(Protocol):
    """A loader whose position can be set while it is being iterated over: that of :func:`gradsync.shard`."""

    def place(self) -> dict[str, Any]:
        """Where it is, in a form that any rank can go on from, with any number of ranks."""
        ...

    def go_to(self, place: dict[str, Any]) -> None:
        """Have the loop that runs go on from another place."""
        ...

    def go_on(self) -> None:
        """Have the loop that runs go on, if it was about to end."""
        ...

    def split_again(self, rank: int, world_size: int, *, begin: tuple[int, int] | None = None) -> None:
        """Split every later step into the parts of so many ranks; ``begin``: from this epoch and position on."""
        ...


class StepBoundary(Protocol):
    """What happens between two steps of an elastic run: see engine/survival.py."""

    def before_batch(self, loader: Rewindable) -> None:
        """A training loop asks for its next batch. The members may change here, and the loader's place with them."""
        ...

    def batches_restart(self) -> None:
        """The loader is about to read its first batch from a place that was set."""
        ...

    def before_end(self) -> None:
        """A training loop has no batch left. All ranks come here before any goes on: the last step is committed."""
        ...


class BatchSource:
    """One worker's current batch, and the callbacks for the end of its data."""

    def __init__(self) -> None:
        self.batch_weight = 1.0  # samples in the batch that was last handed out; 1 when no sharded loader runs
        self.batch_number = NO_BATCH  # of the batch that was last handed out
        self.waited_s = 0.0  # how long collectives have kept this worker from its work so far
        self.wait_unseen_on = ""  # a device on which the host does not wait, so it can't measure this; empty: none
        self.boundary: StepBoundary | None = None  # in an elastic run
        self.in_step_block = False  # `with sync.step():` is open
        self.healed_place: dict[str, Any] | None = None  # of a newcomer's loader, until a loader takes it
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        # Weak references: the data must not keep a model alive that was dropped without close().
        self._joiners: list[Reference] = []
        self._companions: list[Reference] = []
        self._open_blocks: list[Callable[[], None]] = []

    def hand_out(self, num_samples: int, number: BatchNumber) -> None:
        """A sharded loader has handed out a batch: the next backwards are of it."""
        self.batch_weight, self.batch_number = float(num_samples), number

    def clear_batch(self) -> None:
        """There is no current batch any more."""
        self.batch_weight, self.batch_number = 1.0, NO_BATCH

    def add_loader(self, loader: Rewindable) -> None:
        """Tell a loader when the number of ranks changes."""
        self._loaders.add(loader)

    def split_again(
        self, rank: int, world_size: int, *, trained: Rewindable | None = None, begin: tuple[int, int] | None = None
    ) -> None:
        """An elastic run has other members: every loader splits its steps among them.

        ``trained``: the loader that is being trained from; it does so from the place ``begin`` on.
        """
        for loader in list(self._loaders):
            loader.split_again(rank, world_size, begin=begin if loader is trained else None)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as time in which this worker waits for others."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - start_s

    def subscribe(self, join: Callable[[], None]) -> Callable[[], None]:
        """Have ``join`` called at the end of this worker's data; returns a function that undoes it.

        ``join`` keeps taking part in the other ranks' steps, with weight zero, until they have no data either.
        """
        return _remember(self._joiners, join)

    def subscribe_companion(self, join: Callable[[], None]) -> Callable[[], None]:
        """As ``subscribe``, for an object with collectives of its own besides the synchronizers': SyncBatchNorm.

        It is called at the end of ``with sync.join():`` too, whichever synchronizer that is.
        """
        return _remember(self._companions, join)

    def end(self) -> None:
        """Tell every synchronizer that this worker has no data left; returns when no rank has any."""
        self.clear_batch()
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


class BatchContext:
    """The weight and number of one synchronizer's next backward: set by its user, else those of the loader's batch.

    One per synchronizer: with two models, what is set for one must not apply to the other.
    """

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self.user_weight: float | None = None
        self.user_number: BatchNumber | None = None

    @property
    def weight(self) -> float:
        return self._source.batch_weight if self.user_weight is None else self.user_weight

    @property
    def number(self) -> BatchNumber:
        return self._source.batch_number if self.user_number is None else self.user_number

    def clear(self) -> None:
        """A backward has ended: what was set applied to it alone."""
        self.user_weight = self.user_number = None


_SOURCES: weakref.WeakKeyDictionary[Worker, BatchSource] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def batch_source(comm: Communicator) -> BatchSource:
    """The one source of the worker that this communicator, or one that it was split from, belongs to.

    >>> from gradsync.comm.base import Solo
    >>> comm = Solo()
    >>> batch_source(comm) is batch_source(comm.clone())
    True
    """
    with _LOCK:
        return _SOURCES.setdefault(comm.worker, BatchSource())


def _remember(joiners: list[Reference], join: Callable[[], None]) -> Callable[[], None]:
    """Keep a method by a weak reference, anything else by a strong one; returns a function that removes it."""
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
