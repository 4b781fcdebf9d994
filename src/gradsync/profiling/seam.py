"""The seam between what trains and who takes notes: ``Recording``, of which every call does nothing.

Engines, strategies and drivers hold one and tell it what happens as it happens. They never ask whether anybody listens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync.comm.base import Communicator
from gradsync.header import NOTHING_TOLD, Header, Told


class Recording:
    """Takes no notes. :class:`gradsync.profiling.Recorder` does.

    >>> from gradsync.profiling.seam import SILENT
    >>> SILENT.now()
    0
    """

    # -- an engine tells ------------------------------------------------------------------------------------------

    def now(self) -> int:
        """A mark to give back to ``hooked`` or ``spent``."""
        return 0

    def hooked(self, entered: int, name: str = "") -> None:
        """A hook of autograd's, begun at ``entered``, is at its end. ``name``: the parameter whose gradient came."""

    def planned(self, buckets: Sequence[Any]) -> None:
        """These buckets (:class:`gradsync.bucket.Bucket`) are what is filled from now on."""

    def opened(self, step: int, *, has_data: bool) -> None:
        """A synchronizing backward has given its first gradient."""

    def ready(self, bucket: int) -> None:
        """The last gradient of a bucket is in."""

    def ended_backward(self) -> None:
        """Autograd is done; the engine completes what is left."""

    def ended_step(self, headers: Sequence[Header], *, weight: float) -> None:
        """The synchronizing backward returns. ``headers``: what all ranks said at its beginning."""

    def told(self) -> Told:
        """What this rank's next header says of its last step."""
        return NOTHING_TOLD

    def optimized(self, entered: int) -> None:
        """The optimizer's step, begun at ``entered``, is over."""

    def spent(self, entered: int) -> None:
        """Since ``entered``, at the end of a backward, the engine has talked to other ranks itself: of buffers."""

    def met(self, entered: int) -> None:
        """Since ``entered``, around the optimizer's step, a strategy has talked to other ranks."""

    def stale(self, steps: float) -> None:
        """How old, in steps, the parameters are that this step is computed with."""

    # -- a strategy and its driver tell ---------------------------------------------------------------------------

    def watch(self, comm: Communicator) -> Communicator:
        """``comm``, with each collective noted."""
        return comm

    def resume(self, bucket: int) -> None:
        """A reducer goes on with a bucket..."""

    def pause(self) -> None:
        """...until its next collective, or its end."""

    def beside(self) -> None:
        """The calling thread reduces, beside the one that trains."""

    def joined(self, entered: int) -> None:
        """Since ``entered`` the thread that trains has waited for the one beside it."""


SILENT = Recording()
