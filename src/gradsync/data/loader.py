"""``ShardedLoader``: hands out one rank's batches, keeps its position to the sample, and sets the current batch.

The batch, its number and its weight go to the worker's ``BatchSource``, from which the engines read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from gradsync.comm.base import Communicator
from gradsync.data.order import BatchSplit, IndexTensor, Indices, Order, Shares, check_same, steps_of
from gradsync.data.stream import LocalStream
from gradsync.replicas.batch_context import BatchNumber, batch_source

STATE_VERSION = 1


class StepBatch(NamedTuple):
    """One step of this rank."""

    batch: Any
    num_own: int  # samples in the batch; 0: this rank has no part in the step, and there is no batch
    num_in_step: int  # samples of all ranks


class Source(Protocol):
    """Where a rank's steps come from."""

    @property
    def dataset(self) -> Any:
        """The whole data."""
        ...

    @property
    def cut(self) -> BatchSplit:
        """How its steps are split among the ranks."""
        ...

    def steps(self, epoch: int, position: int, *, resumed: bool) -> Iterator[StepBatch]:
        """The steps of this rank from a position of an epoch on."""
        ...

    def restart(self) -> None:
        """The split has changed: the next ``steps`` reads everything anew."""
        ...

    def num_steps(self) -> int:
        """The steps of a whole epoch."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ShardedLoader:
    """This rank's part of the data, epoch after epoch; made by :func:`gradsync.shard`.

    ``len(loader)`` is the number of steps of a whole epoch, the same on every rank and also after a resume, so that a
    learning-rate schedule can be made from it. (If the last step has fewer samples than there are ranks, some ranks end
    one batch earlier and take part without data until the others are done.)

    Each ``for`` loop is an epoch, with an order of its own. A loop left early has ended its epoch: the next begins
    another. Only one iterator runs at a time: an older one raises when a newer has been started.

    >>> import gradsync
    >>> loader = gradsync.shard(range(10), batch_size=4, shuffle=False)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> len(loader), loader.epoch
    (3, 1)
    """

    def __init__(self, source: Source, shares: Shares, comm: Communicator) -> None:
        self._source = source
        self._shares = shares
        self._comm = comm
        self._epoch = 0
        self._position = 0
        self._begun = False  # a batch of this epoch has been handed out since it was started or resumed
        self._running = object()  # identifies the current iterator without keeping it alive
        self._was_moved = False  # the iterator that runs must go on from another place
        self._loop_epoch = 0  # of the loop that runs
        self._loops_to_skip = 0  # on a newcomer of an elastic run: epochs that the others have finished
        self._later_splits: list[tuple[tuple[int, int], int, int]] = []  # from where on, rank and number of ranks
        self._batches = batch_source(comm)
        self._batches.add_loader(self)

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that the next loop will begin or go on with."""
        self._take_healed_place()
        self._loops_to_skip = 0  # the script begins its loop at this epoch
        return self._epoch

    @property
    def position(self) -> int:
        """The samples of this epoch that all ranks together have been given."""
        self._take_healed_place()
        return self._position

    @property
    def parts(self) -> tuple[int, ...]:
        """The samples that each rank has in a whole step now: with ``balance=True`` they follow the ranks' speeds.

        >>> import gradsync
        >>> gradsync.shard(range(10), global_batch_size=4).parts
        (4,)
        """
        return self._shares.parts()

    def set_epoch(self, epoch: int) -> None:
        """Have the next loop run epoch ``epoch``; only needed for another epoch than the next.

        Safe in scripts written for DistributedSampler: right after a resume, ``set_epoch`` of the resumed epoch keeps
        the position.

        >>> import gradsync
        >>> loader = gradsync.shard(range(10), batch_size=5)
        >>> loader.set_epoch(7)
        >>> loader.epoch
        7
        """
        if epoch < 0:
            raise ValueError(f"epoch must be 0 or more; got {epoch=}.")
        self._take_healed_place()
        if self._loops_to_skip and epoch <= self._epoch:
            self._loops_to_skip = self._epoch - epoch
        elif epoch != self._epoch or self._begun:
            self._loops_to_skip = 0
            self._go_to(epoch, 0)

    @property
    def sampler(self) -> EpochSetter:
        """What scripts for DDP call: ``loader.sampler.set_epoch(epoch)`` is ``loader.set_epoch(epoch)``.

        >>> import gradsync
        >>> loader = gradsync.shard(range(10), batch_size=5)
        >>> loader.sampler.set_epoch(7)
        >>> loader.epoch
        7
        """
        return EpochSetter(self)

    @property
    def dataset(self) -> Any:
        """The whole data, not this rank's part: as a DataLoader's, for ``len(loader.dataset)``."""
        return self._source.dataset

    def state_dict(self) -> dict[str, Any]:
        """The position to the sample, counting what has been handed out and not what workers have prefetched.

        It does not depend on the number of workers: save it on rank 0 and load it on every rank, also on more or fewer.

        >>> import gradsync
        >>> loader = gradsync.shard(range(10), batch_size=4)
        >>> batch = next(iter(loader))
        >>> loader.state_dict()
        {'version': 1, 'epoch': 0, 'position': 4, 'seed': 0, 'shuffle': True, 'num_samples': 10}
        """
        self._take_healed_place()
        return {
            "version": STATE_VERSION,
            "epoch": self._epoch,
            "position": self._position,
            **self._source.state_dict(),
            **self._shares.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next loop go on at the sample where ``state`` was saved.

        >>> import gradsync
        >>> loader = gradsync.shard(range(10), batch_size=4, shuffle=False)
        >>> first = next(iter(loader))
        >>> resumed = gradsync.shard(range(10), batch_size=3, shuffle=False)
        >>> resumed.load_state_dict(loader.state_dict())
        >>> [batch.tolist() for batch in resumed]
        [[4, 5, 6], [7, 8, 9]]
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"the loader's state must have version {STATE_VERSION}; got {state.get('version')!r}. "
                "Pass what ShardedLoader.state_dict() returned, or load it with the gradsync that saved it."
            )
        epoch, position, num_samples = state["epoch"], state["position"], state["num_samples"]
        if epoch < 0 or position < 0 or (num_samples is not None and position > num_samples):
            raise ValueError(f"position must be from 0 to num_samples; got {epoch=} {position=} {num_samples=}.")
        self._source.load_state_dict(state)
        self._shares.load_state_dict(state)
        self._go_to(epoch, position)

    def __len__(self) -> int:
        return self._source.num_steps()

    def __iter__(self) -> Iterator[Any]:
        if torch.is_grad_enabled():
            self._take_healed_place()
        if self._loops_to_skip:
            self._loops_to_skip -= 1
            return iter(())
        if self._begun:
            self._go_to(self._epoch + 1, 0)
        self._running = object()
        self._loop_epoch = self._epoch
        self._shares.leave()
        return _EpochIterator(self, self._comm, self._running)

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._begun = False
        self._running = object()

    # -- called by an elastic run --------------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """Where it is, for a worker that joins: its state, and how many samples a step has."""
        return {**self.state_dict(), "global_batch_size": self._source.cut.global_batch_size}

    def go_to(self, place: dict[str, Any]) -> None:
        """Have the loop that runs go on from another place.

        Most often that is an earlier one of its own. A worker that the others had given up finds them in a later epoch:
        then its loop ends, those of the epochs that it has missed yield nothing, and the next one goes on there.
        """
        self._epoch, self._position = place["epoch"], place["position"]
        is_later = self._epoch > self._loop_epoch
        self._loops_to_skip = self._epoch - self._loop_epoch - 1 if is_later else 0
        self._begun = self._position > 0 and not is_later
        self._was_moved = True

    def go_on(self) -> None:
        """Have the loop that runs go on, if it was about to end: the members may not have come to its end together."""
        self._was_moved = True

    def split_again(self, rank: int, world_size: int, *, begin: tuple[int, int] | None = None) -> None:
        """Split every later step into the parts of so many ranks; the samples of a step stay the same.

        ``begin``: from this epoch and position on; see [Note: members that train apart] in elastic/membership.py.
        """
        if begin is not None:
            self._later_splits = [split for split in self._later_splits if split[0] < begin]
            self._later_splits.append((begin, rank, world_size))
            self._take_later_split()
        else:
            self._later_splits = []
            self._split(rank, world_size)

    def _take_later_split(self) -> None:
        """Split anew if the place is reached from which on that was asked for."""
        while self._later_splits and self._later_splits[0][0] <= (self._epoch, self._position):
            _, rank, world_size = self._later_splits.pop(0)
            self._split(rank, world_size)

    def _split(self, rank: int, world_size: int) -> None:
        cut = self._source.cut
        if (cut.rank, cut.world_size) != (rank, world_size):
            cut.rank, cut.world_size = rank, world_size
            self._source.restart()
            self._was_moved = True

    def _take_healed_place(self) -> None:
        """On a newcomer of an elastic run: go to where the others are, if that place is one of this loader's data.

        A script counts its epochs from the one that its loader had before. The loops of those that the others have
        finished yield nothing, so that ``for epoch in range(10)`` ends with everybody else's.
        """
        place = self._batches.healed_place
        if place is None or any(place.get(name) != value for name, value in self._source.state_dict().items()):
            return
        self._batches.healed_place = None
        self._loops_to_skip = max(0, place["epoch"] - self._epoch)
        self._source.cut.global_batch_size = place["global_batch_size"]
        self.load_state_dict({name: value for name, value in place.items() if name != "global_batch_size"})

    # -- called by the iterator ----------------------------------------------------------------------------------

    def _take_move(self) -> bool:
        """Whether the iterator must go on from another place than that of its last batch."""
        was_moved, self._was_moved = self._was_moved, False
        return was_moved

    def _steps(self) -> Iterator[StepBatch]:
        return self._source.steps(self._epoch, self._position, resumed=self._position > 0)

    def _is_running(self, token: object) -> bool:
        return self._running is token

    def _next(self, steps: Iterator[StepBatch]) -> StepBatch | None:
        self._shares.ask()
        step = next(steps, None)
        if step is not None:
            self._shares.hand_out(step.num_own)
        return step

    def _handed_out(self, num_in_step: int) -> None:
        self._begun = True
        self._position += num_in_step

    def _ended(self) -> None:
        self._go_to(self._epoch + 1, 0)

    def _ended_early(self) -> None:
        """The loop that runs goes on with the next epoch."""
        self._epoch, self._position = self._epoch + 1, 0
        self._begun = False
        self._was_moved = True


class EpochSetter:
    """The ``sampler`` of a :class:`ShardedLoader`: it draws nothing itself, and only passes the epoch on."""

    def __init__(self, loader: ShardedLoader) -> None:
        self._loader = loader

    def set_epoch(self, epoch: int) -> None:
        """Have the loader's next loop run epoch ``epoch``."""
        self._loader.set_epoch(epoch)


class _EpochIterator:
    """One epoch's loop: hands out batches, each with its weight, and joins the others at the end."""

    def __init__(self, loader: ShardedLoader, comm: Communicator, token: object) -> None:
        self._loader = loader
        self._comm = comm
        self._token = token
        self._uneven = False
        self._has_handed_out = False  # it has set the current batch, and must clear it
        self._over = False
        self._epoch = loader._epoch
        loader._take_move()
        self._steps = loader._steps()

    def __iter__(self) -> _EpochIterator:
        return self

    def __next__(self) -> Any:
        loader, source = self._loader, batch_source(self._comm)
        while not self._over:
            if not loader._is_running(self._token):
                raise RuntimeError(
                    "this iterator is out of date: the loader was started again, resumed or sent to another epoch "
                    "since. A sharded loader has one position, so one loop at a time; make a second loader for a "
                    "second loop."
                )
            self._pass_boundary()
            if loader._epoch > self._epoch:  # the others are further on
                self.close()
                break
            step = loader._next(self._steps)
            if step is None and loader._epoch < self._epoch:  # it was moved back into the epoch before
                loader._ended_early()
                continue
            if step is not None:
                self._uneven = step.num_in_step < self._comm.world_size
                if step.num_own > 0:
                    loader._handed_out(step.num_in_step)
                    if torch.is_grad_enabled():  # a batch of an evaluation has no weight
                        self._has_handed_out = True
                        source.hand_out(step.num_own, BatchNumber(loader._epoch, loader._position))
                    return step.batch
            self._end()
        raise StopIteration

    def _pass_boundary(self) -> None:
        """Between two steps of an elastic run its members may change, and the loader's place with them."""
        boundary = batch_source(self._comm).boundary
        if boundary is not None and torch.is_grad_enabled():
            boundary.before_batch(self._loader)
            self._loader._take_later_split()
        if self._loader._take_move():
            self._steps = self._loader._steps()
            if boundary is not None:
                boundary.batches_restart()

    def _end(self) -> None:
        """This rank has no data left. In an elastic run it may be sent back, and then the loop goes on."""
        source = batch_source(self._comm)
        if torch.is_grad_enabled():
            self._clear_batch()
            # Every rank knows from arithmetic that the numbers of batches differ. In evaluation no join is needed.
            if self._uneven:
                source.end()
            if source.boundary is not None and not self._loader._was_moved:
                source.boundary.before_end()
            if self._loader._was_moved:
                return
        self.close()
        self._loader._ended()

    def close(self) -> None:
        """Leave the loop early: the current batch no longer sets the weight of gradients."""
        if not self._over:
            self._clear_batch()
        self._over = True

    def _clear_batch(self) -> None:
        if self._has_handed_out and self._loader._is_running(self._token):
            batch_source(self._comm).clear_batch()

    def __del__(self) -> None:
        if hasattr(self, "_steps"):  # else __init__ failed
            self.close()


class MapSource:
    """Steps of data that has an index: the order is cut, and a DataLoader fetches this rank's part."""

    def __init__(self, dataset: Any, order: Order, cut: BatchSplit, shares: Shares, options: dict[str, Any]) -> None:
        self._order = order
        self.cut = cut
        self._shares = shares
        self._batches = _LocalBatchSampler(cut, shares)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._batches, **options)

    @property
    def dataset(self) -> Any:
        return self._loader.dataset

    def steps(self, epoch: int, position: int, *, resumed: bool) -> Iterator[StepBatch]:
        indices, first = self._order.begin(epoch, resumed=resumed), self._shares.next_step
        self._batches.begin(indices, position, first)
        return self._hand_out(indices, position, first, iter(self._loader))

    def _hand_out(self, indices: Indices, position: int, first: int, batches: Iterator[Any]) -> Iterator[StepBatch]:
        for number, step in steps_of(self.cut, indices, position, first):
            own = self._shares.own(number, len(step))
            num_own = own.stop - own.start
            yield StepBatch(next(batches) if num_own else None, num_own, len(step))
            position += len(step)
            indices.release(position)  # it was handed out
        next(batches, None)  # there is none, but a DataLoader ends its workers only when asked for it

    def restart(self) -> None:
        return None  # the batch sampler lists steps by the split that holds when it is iterated over

    def num_steps(self) -> int:
        return self.cut.num_steps(self._order.num_samples())

    def state_dict(self) -> dict[str, Any]:
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order.load_state_dict(state)


class _LocalBatchSampler:
    """The DataLoader's batch sampler: lists this rank's part of each step, as the loader asks for it."""

    def __init__(self, cut: BatchSplit, shares: Shares) -> None:
        self._cut = cut
        self._shares = shares
        self._from: tuple[Indices, int, int] = (IndexTensor(torch.empty(0, dtype=torch.int64)), 0, 0)

    def begin(self, indices: Indices, position: int, first: int) -> None:
        """Have the next iterator list the steps from a position of an epoch on; ``first``: the number of the first."""
        self._from = indices, position, first

    def __iter__(self) -> Iterator[list[int]]:
        for number, step in steps_of(self._cut, *self._from):
            own = step[self._shares.own(number, len(step))].tolist()
            if own:
                yield own


class StreamSource:
    """Steps of data without an index: every rank reads it all and keeps its part."""

    def __init__(self, part: LocalStream, loader: DataLoader[Any], cut: BatchSplit) -> None:
        self._part = part
        self._loader = loader
        self.cut = cut

    @property
    def dataset(self) -> Any:
        return self._part.stream

    def steps(self, epoch: int, position: int, *, resumed: bool) -> Iterator[StepBatch]:
        self._part.begin_at(position)
        return (StepBatch(*step) for step in self._loader)

    def restart(self) -> None:
        self._loader._iterator = None  # persistent workers have a copy of the old split

    def num_steps(self) -> int:
        if isinstance(self._part.stream, Sized):
            return self.cut.num_steps(len(self._part.stream))
        raise TypeError(f"{type(self._part.stream).__name__} has no len(), so the number of steps is not known.")

    def state_dict(self) -> dict[str, Any]:
        return {"seed": None, "shuffle": False, "num_samples": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same(state, self.state_dict())
