"""Which sample goes where: the order of an epoch, and the arithmetic that cuts it into steps and parts.

Nothing here depends on the number of workers but the cut within a step, so a run may go on with more or fewer of them.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import operator
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gradsync.comm.base import Communicator


def part_of(num_samples: int, world_size: int, rank: int) -> slice:
    """Rank ``rank``'s contiguous part of ``num_samples``, split as evenly as can be: the first ranks get one more.

    >>> [part_of(8, 3, rank) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
    """
    share, extra = divmod(num_samples, world_size)
    start = rank * share + min(rank, extra)
    return slice(start, start + share + (rank < extra))


@functools.lru_cache(maxsize=64)
def parts_by_speed(num_samples: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """How many samples each rank gets, so that the last to be done with its own is done as early as can be.

    Every rank gets at least one while there are enough. With equal speeds it is the split of :func:`part_of`.

    >>> parts_by_speed(26, (4.0, 4.0, 4.0, 1.0))
    (8, 8, 8, 2)
    >>> parts_by_speed(8, (1.0, 1.0, 1.0))
    (3, 3, 2)
    """
    world_size, total = len(speeds), sum(speeds)
    parts = [0] * world_size
    if num_samples >= world_size:
        # Most samples at once: these are no more than any rank gets in the end.
        parts = [max(1, int((num_samples - world_size) * (speed / total))) for speed in speeds]
    # The rest one by one, each to whoever would be done with it first.
    waiting = [((num + 1) / speed, rank) for rank, (num, speed) in enumerate(zip(parts, speeds, strict=True))]
    heapq.heapify(waiting)
    for _ in range(num_samples - sum(parts)):
        _, rank = waiting[0]
        parts[rank] += 1
        heapq.heapreplace(waiting, ((parts[rank] + 1) / speeds[rank], rank))
    return tuple(parts)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How samples are cut into steps, and a step into the parts of the ranks."""

    global_batch_size: int  # samples of one step over all ranks
    world_size: int
    rank: int
    drop_last: bool

    def num_steps(self, num_samples: int) -> int:
        """The steps that ``num_samples`` make, the same number on every rank."""
        full, rest = divmod(num_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def bounds(self, step: int, num_samples: int) -> tuple[int, int]:
        """Where step ``step`` begins and ends among ``num_samples``."""
        start = step * self.global_batch_size
        return start, min(start + self.global_batch_size, num_samples)

    def own(self, num_in_step: int) -> slice:
        """This rank's part of a step of ``num_in_step`` samples: empty for some when there are fewer than ranks."""
        return part_of(num_in_step, self.world_size, self.rank)


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


class Even:
    """The same share for all ranks, at every step."""

    next_step = 0

    def __init__(self, cut: Cut) -> None:
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
        slices = [part_of(cut.global_batch_size, cut.world_size, rank) for rank in range(cut.world_size)]
        return tuple(part.stop - part.start for part in slices)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: shares that a balanced loader has saved change no sample of any step."""


class Order(Protocol):
    """Where the indices of an epoch come from."""

    def num_samples(self) -> int:
        """The samples of an epoch."""
        ...

    def indices(self, epoch: int, *, resumed: bool) -> Tensor:
        """The epoch's indices, the same on every rank; ``resumed``: those that the loaded state was saved under."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it takes to have the same indices again."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the state was saved under the same order, and take over what it holds."""
        ...


class Seeded:
    """A permutation made from (seed, epoch), or no permutation at all: any rank can work it out alone."""

    def __init__(self, num_samples: int, *, shuffle: bool, seed: int) -> None:
        self._num_samples = num_samples
        self._shuffle = shuffle
        self._seed = seed

    def num_samples(self) -> int:
        return self._num_samples

    def indices(self, epoch: int, *, resumed: bool) -> Tensor:
        if not self._shuffle:
            return torch.arange(self._num_samples)
        # Hashed and not added: seed 0 in epoch 1 must not be seed 1 in epoch 0.
        digest = hashlib.blake2b(f"{self._seed}:{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.randperm(self._num_samples, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "num_samples": self._num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_same(state, self.state_dict())


class Drawn:
    """What the user's own sampler yields: drawn on rank 0 and told to the others, so that all agree.

    Its random state is the sampler's own business; the indices of the epoch under way are in the state.
    """

    def __init__(self, sampler: Iterable[int], comm: Communicator) -> None:
        self._sampler = sampler
        self._comm = comm.clone()  # drawing must not mix with the collectives of a step
        self._indices = torch.empty(0, dtype=torch.int64)

    def num_samples(self) -> int:
        if len(self._indices):
            return len(self._indices)
        if isinstance(self._sampler, Sized):
            return len(self._sampler)
        raise TypeError(f"{type(self._sampler).__name__} has no len(), so the length of an epoch is not known yet.")

    def indices(self, epoch: int, *, resumed: bool) -> Tensor:
        if not resumed:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            self._indices = self._draw()
        return self._indices

    def state_dict(self) -> dict[str, Any]:
        return {"seed": None, "shuffle": None, "num_samples": len(self._indices), "order": self._indices.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "order" not in state:
            raise ValueError(
                "the state must be of a loader with a sampler of its own, as this one has; got one of a seeded order "
                f"(seed={state['seed']}). Shard the same DataLoader that the state was saved from."
            )
        self._indices = torch.as_tensor(state["order"], dtype=torch.int64).clone()

    def _draw(self) -> Tensor:
        """Have rank 0 draw; blocks until its indices are here."""
        drawn = torch.empty(0, dtype=torch.int64)
        problem = ""
        if self._comm.rank == 0:
            # A failure on rank 0 alone would leave the others waiting, so it is told like a result.
            try:
                drawn = torch.tensor([operator.index(index) for index in self._sampler], dtype=torch.int64)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        size = torch.tensor([-1 if problem else len(drawn)])
        self._comm.broadcast(size).wait()
        if size.item() < 0:
            told = problem or "see the error there"
            raise ValueError(f"a sampler must yield one int a sample; {self._sampler!r} failed on rank 0: {told}.")
        if size.item() == 0:
            raise ValueError(f"a sampler must yield at least one index an epoch; {self._sampler!r} yielded none.")
        if self._comm.rank != 0:
            drawn = torch.empty(int(size.item()), dtype=torch.int64)
        self._comm.broadcast(drawn).wait()
        return drawn


def check_same(saved: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse a state of other data or another order: resuming it would silently give other samples."""
    for name, expected in here.items():
        if saved.get(name) != expected:
            raise ValueError(
                f"the loader's state was saved with {name}={saved.get(name)!r}, this loader has {name}={expected!r}: "
                f"its position would mean other samples. Make the loader with {name}={saved.get(name)!r}"
                + (" (the same data)." if name == "num_samples" else ".")
            )
