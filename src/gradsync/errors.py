"""The exceptions and warnings of gradsync.

Mistakes of the user are ``ValueError`` and ``TypeError``; what the environment does to a run is a ``GradSyncError``::

    GradSyncError
    ├── PeerLost          a rank died, left or fell silent
    ├── OutOfStep         ranks are at different places of the run: other models, other steps, other settings
    ├── CollectiveFailed  the transport reported an error, and every peer is alive
    ├── NonFiniteGradient a compressed gradient has NaN or inf, and no GradScaler looks for it
    ├── Unreachable       nothing answers at the address of a parameter server or of a gossip member
    ├── ServerLost        a parameter server was reached and is gone, and its shard with it
    ├── RefusedByServer   a parameter server refuses this worker
    ├── StoreUnreachable  the launcher's store, by which an elastic run agrees on its members, does not answer
    ├── Partitioned       this worker is cut off from the others, and has waited for as long as it may
    ├── ConnectionLost    the peer of a message is gone; internal (messaging/sockets.py)
    └── Malformed         a message that can't be parsed; internal (messaging/format.py)

    GradSyncWarning (UserWarning)
    └── SameDataWarning   every rank computed the same gradient: they read the same data
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any


class GradSyncError(Exception):
    """The base of all errors that are not the user's own mistake.

    >>> import gradsync
    >>> issubclass(gradsync.PeerLost, gradsync.GradSyncError)
    True
    """


class PeerLost(GradSyncError):
    """A peer died, left or fell silent; raised on every survivor within ``timeout_s`` + 2 s.

    >>> import gradsync
    >>> print(gradsync.PeerLost(rank=3, step=120, after_s=5.0, reason="its process is gone"))
    rank 3 was lost at step 120, noticed after 5.0 s: its process is gone
    """

    def __init__(
        self,
        *,
        rank: int | tuple[int, ...],
        reason: str,
        after_s: float,
        step: int | None = None,
        during: str = "",
    ) -> None:
        self.ranks: tuple[int, ...] = (rank,) if isinstance(rank, int) else rank
        self.rank: int = self.ranks[0]  # the first of them: most often the only one
        self.step = step
        self.after_s = after_s
        self.reason = reason
        self.during = during
        super().__init__(rank, step, after_s, reason)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle by their positional arguments, of which there are none.
        kept: dict[str, Any] = {
            "reason": self.reason,
            "after_s": self.after_s,
            "step": self.step,
            "during": self.during,
        }
        return functools.partial(PeerLost, rank=self.ranks, **kept), ()

    def __str__(self) -> str:
        who = f"rank {self.rank} was" if len(self.ranks) == 1 else f"ranks {_listed(self.ranks)} were"
        at = f" at step {self.step}" if self.step is not None else ""
        during = f" in {self.during}" if self.during else ""
        return f"{who} lost{at}{during}, noticed after {self.after_s:.1f} s: {self.reason}"


class OutOfStep(GradSyncError):
    """The ranks are not at the same place of the same run: other models, other steps or other settings.

    Every rank raises it with the same text, which names the first difference and the rank.

    >>> import gradsync
    >>> raise gradsync.OutOfStep("rank 1 has accumulate=2, rank 0 has accumulate=1")
    Traceback (most recent call last):
        ...
    gradsync.errors.OutOfStep: rank 1 has accumulate=2, rank 0 has accumulate=1
    """


class CollectiveFailed(GradSyncError):
    """The transport reported an error in a collective although every peer is alive.

    >>> import gradsync
    >>> isinstance(gradsync.CollectiveFailed("all_reduce: connection refused"), gradsync.GradSyncError)
    True
    """


class NonFiniteGradient(GradSyncError):
    """A gradient that was to be compressed has NaN or inf: its mean is not finite on any rank.

    Every rank raises it, and names the same parameter.

    >>> import gradsync
    >>> issubclass(gradsync.NonFiniteGradient, gradsync.GradSyncError)
    True
    """


class Unreachable(GradSyncError):
    """Nothing answers at an address, or it refuses this process. No data was lost: there was no connection yet.

    >>> import gradsync
    >>> issubclass(gradsync.Unreachable, gradsync.GradSyncError)
    True
    """


class ServerLost(GradSyncError):
    """A parameter server that was reached is gone, and its shard of the parameters with it.

    Attributes:
        shard: its number.
        address: of its server.
        names: the parameters in it.
        why: the reason.

    >>> import gradsync
    >>> print(gradsync.ServerLost(1, "tcp://10.0.0.3:5555", ["fc.weight"], "its process or its host is gone"))
    shard 1 (1 parameters: fc.weight) was lost with its server at tcp://10.0.0.3:5555: its process or its host is ...
    """

    def __init__(self, shard: int, address: str, names: Sequence[str], why: str) -> None:
        self.shard = shard
        self.address = address
        self.names = tuple(names)
        self.why = why
        super().__init__(shard, address, names, why)

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (", ..." if len(self.names) > 3 else "")
        return (
            f"shard {self.shard} ({len(self.names)} parameters: {shown}) was lost with its server at {self.address}: "
            f"{self.why}. With mirrors=1 a copy would have taken over; with snapshots a restarted server goes on."
        )


class RefusedByServer(GradSyncError):
    """A parameter server does not do what it was asked: it runs another job, or has another run's weights.

    >>> import gradsync
    >>> issubclass(gradsync.RefusedByServer, gradsync.GradSyncError)
    True
    """


class StoreUnreachable(GradSyncError):
    """The launcher's store, by which the workers of an elastic run agree on their members, does not answer.

    >>> import gradsync
    >>> issubclass(gradsync.StoreUnreachable, gradsync.GradSyncError)
    True
    """


class Partitioned(GradSyncError):
    """This worker of an elastic run is cut off from the others, and has waited for ``partition_timeout_s``.

    >>> import gradsync
    >>> issubclass(gradsync.Partitioned, gradsync.GradSyncError)
    True
    """


class GradSyncWarning(UserWarning):
    """The root of gradsync's warnings, to filter them by.

    >>> import gradsync, warnings
    >>> warnings.simplefilter("error", gradsync.GradSyncWarning)  # in CI: a warning ends the run
    >>> warnings.resetwarnings()
    """


class SameDataWarning(GradSyncWarning):
    """Every rank computed the same gradient for several steps: most likely all of them read the same data.

    >>> import gradsync
    >>> issubclass(gradsync.SameDataWarning, gradsync.GradSyncWarning)
    True
    """


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(rank) for rank in ranks)
