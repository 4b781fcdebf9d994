"""Which rank gets which sample: the order of an epoch, and how it is split into steps and a step into parts.

Only the split within a step depends on the number of workers, so a run may go on with more or fewer of them.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import operator
from array import array
from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from gradsync.comm.base import Communicator

BLOCK = 1 << 16  # indices that are drawn together where an epoch is too long to be drawn whole
MAX_DRAWN_AT_ONCE = 1 << 22  # samples of an epoch whose order is drawn, and saved, whole


def even_part(num_samples: int, world_size: int, rank: int) -> slice:
    """Rank ``rank``'s contiguous part of ``num_samples``, split as evenly as can be: the first ranks get one more.

    >>> [even_part(8, 3, rank) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
    """
    share, extra = divmod(num_samples, world_size)
    start = rank * share + min(rank, extra)
    return slice(start, start + share + (rank < extra))


@functools.lru_cache(maxsize=64)
def split_by_speed(num_samples: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """How many samples each rank gets, so that the slowest rank ends as early as possible.

    Every rank gets at least one while there are enough. With equal speeds it is the split of :func:`even_part`.

    >>> split_by_speed(26, (4.0, 4.0, 4.0, 1.0))
    (8, 8, 8, 2)
    >>> split_by_speed(8, (1.0, 1.0, 1.0))
    (3, 3, 2)
    """
    world_size, total = len(speeds), sum(speeds)
    parts = [0] * world_size
    if num_samples >= world_size:
        # Most samples at once: these are no more than any rank gets in the end.
        parts = [max(1, int((num_samples - world_size) * (speed / total))) for speed in speeds]
    # The rest one by one, each to the rank that would end first with it.
    waiting = [((num + 1) / speed, rank) for rank, (num, speed) in enumerate(zip(parts, speeds, strict=True))]
    heapq.heapify(waiting)
    for _ in range(num_samples - sum(parts)):
        _, rank = waiting[0]
        parts[rank] += 1
        heapq.heapreplace(waiting, ((parts[rank] + 1) / speeds[rank], rank))
    return tuple(parts)


@dataclass(kw_only=True)
class BatchSplit:
    """How samples are split into steps, and a step into the parts of the ranks.

    All parts of one loader share it. In an elastic run the loader changes it between two steps.
    """

    global_batch_size: int  # samples of one step over all ranks
    world_size: int
    rank: int
    drop_last: bool

    def num_steps(self, num_samples: int) -> int:
        """The steps that ``num_samples`` make, the same number on every rank."""
        full, rest = divmod(num_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def own(self, num_in_step: int) -> slice:
        """This rank's part of a step of ``num_in_step`` samples: empty for some when there are fewer than ranks."""
        return even_part(num_in_step, self.world_size, self.rank)


class Shares(Protocol):
    """How much of a step each rank gets. Steps have numbers, over all epochs, that all ranks know."""

    next_step: int

    def ask(self) -> None:
        """Note that the next step is asked for."""
        ...

    def hand_out(self, num_own: int) -> None:
        """Note that it is handed out, with so many samples for this rank."""
        ...

    def leave(self) -> None:
        """Note that a loop has ended."""
        ...

    def own(self, step: int, num_in_step: int) -> slice:
        """This rank's part of a step; its number is at least ``next_step``."""
        ...

    def parts(self) -> tuple[int, ...]:
        """The samples that each rank has in a whole step now."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class EvenShares:
    """The same share for all ranks, at every step."""

    next_step = 0

    def __init__(self, cut: BatchSplit) -> None:
        self._cut = cut

    def ask(self) -> None:
        return None

    def hand_out(self, num_own: int) -> None:
        return None

    def leave(self) -> None:
        return None

    def own(self, step: int, num_in_step: int) -> slice:
        return self._cut.own(num_in_step)

    def parts(self) -> tuple[int, ...]:
        cut = self._cut
        slices = [even_part(cut.global_batch_size, cut.world_size, rank) for rank in range(cut.world_size)]
        return tuple(part.stop - part.start for part in slices)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: shares that a balanced loader has saved change no sample of any step."""


class Indices(Protocol):
    """The indices of one epoch, in their order, the same on every rank."""

    def take(self, start: int, count: int) -> Tensor:
        """Those from ``start`` on: ``count`` of them, fewer or none at the end. May block until they are drawn."""
        ...

    def release(self, start: int) -> None:
        """Those before ``start`` are not asked for any more."""
        ...


class IndexTensor:
    """Indices that are all at hand."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices

    def take(self, start: int, count: int) -> Tensor:
        return self.indices[start : start + count]

    def release(self, start: int) -> None:
        return None


class Order(Protocol):
    """Where the indices of an epoch come from."""

    def num_samples(self) -> int:
        """The samples of an epoch."""
        ...

    def begin(self, epoch: int, *, resumed: bool) -> Indices:
        """The epoch's indices; ``resumed``: those that the loaded state was saved under."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it takes to have the same indices again."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the state was saved under the same order, and take over what it holds."""
        ...


def _generator(*parts: int) -> torch.Generator:
    """Numbers from a seed, an epoch and so on. Hashed, not added: seed 0 in epoch 1 is not seed 1 in epoch 0."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


class SeededOrder:
    """A permutation made from (seed, epoch), or no permutation at all: any rank can compute it alone."""

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._seed = seed

    def num_samples(self) -> int:
        return self._num_samples

    def begin(self, epoch: int, *, resumed: bool) -> Indices:
        if not self._shuffle:
            return IndexTensor(torch.arange(self._num_samples))
        return IndexTensor(torch.randperm(self._num_samples, generator=_generator(self._seed, epoch)))

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "num_samples": self._num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same(state, self.state_dict())


def steps_of(cut: BatchSplit, indices: Indices, position: int, first: int) -> Iterator[tuple[int, Tensor]]:
    """The steps from a position of an epoch on: their numbers, from ``first``, and their samples over all ranks."""
    number = first
    while len(step := indices.take(position, cut.global_batch_size)):
        if len(step) < cut.global_batch_size and cut.drop_last:
            return
        yield number, step
        number, position = number + 1, position + len(step)


class ReplacementOrder:
    """Random indices with replacement: an epoch of any length. Any rank can compute any part of it alone."""

    def __init__(self, num_rows: int, num_samples: int, *, seed: int) -> None:
        self._num_rows = num_rows
        self._num_samples = num_samples
        self._seed = seed

    def num_samples(self) -> int:
        return self._num_samples

    def begin(self, epoch: int, *, resumed: bool) -> Indices:
        return _ReplacementEpoch(self._num_rows, self._num_samples, self._seed, epoch)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "shuffle": "with replacement",
            "num_samples": self._num_samples,
            "num_rows": self._num_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same(state, self.state_dict())


class _ReplacementEpoch:
    """Each block of indices comes from the seed, the epoch and its number: any position is computed directly."""

    def __init__(self, num_rows: int, num_samples: int, seed: int, epoch: int) -> None:
        self._num_rows = num_rows
        self._num_samples = num_samples
        self._seed = seed
        self._epoch = epoch
        self._blocks: dict[int, Tensor] = {}

    def take(self, start: int, count: int) -> Tensor:
        end = min(start + count, self._num_samples)
        numbers = range(start // BLOCK, -(-end // BLOCK)) if end > start else range(0)
        parts = [self._block(number)[max(start - number * BLOCK, 0) : end - number * BLOCK] for number in numbers]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def release(self, start: int) -> None:
        for number in [number for number in self._blocks if (number + 1) * BLOCK <= start]:
            del self._blocks[number]

    def _block(self, number: int) -> Tensor:
        if number not in self._blocks:
            generator = _generator(self._seed, self._epoch, number)
            self._blocks[number] = torch.randint(self._num_rows, (BLOCK,), generator=generator)
        return self._blocks[number]


class SamplerOrder:
    """What the user's own sampler yields: drawn on rank 0 and broadcast, so that all ranks agree.

    The sampler's random state is not saved; the indices of the current epoch are. Of an epoch of more than
    ``MAX_DRAWN_AT_ONCE`` samples, or of an endless one, only those are saved that were drawn and not handed out yet: a
    resumed loader begins with these, then skips as many of the sampler's as came before, and goes on.
    """

    def __init__(self, sampler: Iterable[int], comm: Communicator) -> None:
        self._sampler = sampler
        self._comm = comm.unchecked().clone()  # drawing must not mix with the collectives of a step
        self._epoch = _SamplerEpoch(self, torch.empty(0, dtype=torch.int64), 0, ended=True)

    def num_samples(self) -> int:
        if self._epoch.ended and self._epoch.end:
            return self._epoch.end
        if isinstance(self._sampler, Sized):
            return len(self._sampler)
        raise TypeError(f"{type(self._sampler).__name__} has no len(), so the length of an epoch is not known yet.")

    def begin(self, epoch: int, *, resumed: bool) -> Indices:
        if hasattr(self._sampler, "set_epoch") and not (resumed and self._epoch.ended):
            self._sampler.set_epoch(epoch)
        if resumed:
            return self._epoch
        self._epoch = _SamplerEpoch(self, torch.empty(0, dtype=torch.int64), 0, ended=False)
        self._epoch.draw(MAX_DRAWN_AT_ONCE)
        if self._epoch.end == 0:
            raise ValueError(f"a sampler must yield at least one index an epoch; {self._sampler!r} yielded none.")
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        epoch = self._epoch
        return {
            "seed": None,
            "shuffle": None,
            "num_samples": epoch.end if epoch.ended else None,
            "order": epoch.kept.numpy().tobytes(),  # as one entry: see engine/saved_state.py
            "order_start": epoch.start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "order" not in state:
            raise ValueError(
                "the state must be of a loader with a sampler of its own, as this one has; got one of a seeded order "
                f"(seed={state['seed']}). Shard the same DataLoader that the state was saved from."
            )
        saved = state["order"]
        if isinstance(saved, bytes):
            saved = array("q", saved)
        kept = torch.tensor(saved, dtype=torch.int64) if not isinstance(saved, Tensor) else saved.clone()
        ended = state["num_samples"] is not None
        self._epoch = _SamplerEpoch(self, kept, int(state.get("order_start", 0)), ended=ended)

    def next_indices(self, epoch: _SamplerEpoch, count: int) -> tuple[Tensor, bool]:
        """The next ``count`` indices of an epoch, and whether it has ended. All ranks call it. Blocks."""
        drawn = torch.empty(0, dtype=torch.int64)
        problem = ""
        if self._comm.rank == 0:
            # A failure on rank 0 alone would leave the others waiting, so it is broadcast like a result.
            try:
                if epoch.iterator is None:
                    epoch.iterator = islice(self._sampler, epoch.end, None)  # a resumed one passes over the first
                drawn = torch.tensor(
                    [operator.index(index) for index in islice(epoch.iterator, count)], dtype=torch.int64
                )
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        size = torch.tensor([-1 if problem else len(drawn)])
        self._comm.broadcast(size).wait()
        if size.item() < 0:
            reason = problem or "see the error there"
            raise ValueError(f"a sampler must yield one int a sample; {self._sampler!r} failed on rank 0: {reason}.")
        if self._comm.rank != 0:
            drawn = torch.empty(int(size.item()), dtype=torch.int64)
        if len(drawn):
            self._comm.broadcast(drawn).wait()
        return drawn, len(drawn) < count


class _SamplerEpoch:
    """Indices that are drawn as they are asked for, in blocks, and kept until they are released."""

    def __init__(self, order: SamplerOrder, kept: Tensor, start: int, *, ended: bool) -> None:
        self._order = order
        self.iterator: Iterator[int] | None = None  # rank 0's, from the first draw on
        self.kept = kept
        self.start = start  # of the first one kept
        self.ended = ended  # all are drawn

    @property
    def end(self) -> int:
        """How many have been drawn in this epoch so far."""
        return self.start + len(self.kept)

    def take(self, start: int, count: int) -> Tensor:
        assert start >= self.start, "they were released"
        while start + count > self.end and not self.ended:
            self.draw(max(BLOCK, start + count - self.end))
        return self.kept[start - self.start : start - self.start + count]

    def release(self, start: int) -> None:
        if not self.ended and start - self.start >= BLOCK:  # else the whole epoch is in the state
            self.kept, self.start = self.kept[start - self.start :].clone(), start

    def draw(self, count: int) -> None:
        drawn, self.ended = self._order.next_indices(self, count)
        self.kept = torch.cat([self.kept, drawn])


def check_same(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a state of other data or another order: resuming it would silently give other samples."""
    for name, expected in here.items():
        if saved.get(name) != expected:
            raise ValueError(
                f"the loader's state was saved with {name}={saved.get(name)!r}, this loader has {name}={expected!r}: "
                f"its position would mean other samples. Make the loader with {name}={saved.get(name)!r}"
                + (" (the same data)." if name == "num_samples" else ".")
            )
