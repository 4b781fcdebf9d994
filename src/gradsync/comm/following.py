"""``Following``: the communicator that users and loaders hold in an elastic run, while the world changes behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync.comm.base import DEFAULT_TIMEOUT_S, Communicator, Worker
from gradsync.comm.failure.heartbeat import Heartbeat
from gradsync.comm.forwarding import Forwarding

_OF_THE_WORLD = ("inner", "rank", "world_size")


class Following(Forwarding):
    """Forwards every call to the communicator of the present world; ``replace`` sets it.

    Rank, world size, transport and all other attributes are those of the present world; asking for them, or starting a
    collective, before the first one is set raises ValueError. ``worker`` is the same object in all worlds: the
    communicators that it follows are made with it. Clones and splits are those of the present world, and end with it.

    >>> import torch
    >>> from gradsync.comm.base import Solo
    >>> from gradsync.comm.following import Following
    >>> comm = Following()
    >>> comm.replace(Solo(worker=comm.worker))
    >>> comm.all_reduce(torch.ones(2)).wait()
    >>> comm.rank, comm.world_size
    (0, 1)
    """

    members_may_change = True
    compares_calls = True  # the worlds' communicators are for users, so they compare calls

    def __init__(self, *, worker: Worker | None = None) -> None:
        Communicator.__init__(self, 0, 1, timeout_s=DEFAULT_TIMEOUT_S, worker=worker)
        del self.rank, self.world_size  # of no world yet: __getattr__ says so

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_WORLD:
            raise ValueError(
                f"{name} is not known yet: this worker is in no world of its elastic run. "
                "Expected replace() with the communicator of an epoch first."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def expect(self, *, rank: int, world_size: int, timeout_s: float) -> None:
        """Before the first world: set the rank, the world size and the timeout that this worker will most likely have.

        For scripts and loaders that ask before the worker has joined. Collectives still raise.
        """
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s

    def replace(self, inner: Communicator) -> None:
        """Forward to this communicator from now on. The one before is not closed."""
        if inner.worker is not self.worker:
            raise ValueError(
                "the communicator must be of the same worker: expected one made with worker=following.worker "
                f"(as connect_members takes it); got {inner!r} of another worker."
            )
        self.forward_to(inner)

    @property
    def heartbeat(self) -> Heartbeat | None:
        return self.inner.heartbeat if "inner" in vars(self) else None

    def unchecked(self) -> Communicator:
        return self.inner.unchecked()

    def clone(self) -> Communicator:
        return self.inner.clone()

    def abandon(self) -> None:
        self.inner.abandon()

    def reconfigure(self, generation: str, handles: Sequence[str], *, timeout_s: float | None = None) -> Communicator:
        """Follow the new world. Returns this communicator."""
        self.replace(self.inner.reconfigure(generation, handles, timeout_s=timeout_s))
        return self

    def __repr__(self) -> str:
        return f"Following({self.__dict__.get('inner')!r})"
