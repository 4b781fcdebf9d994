"""The seam for when workers talk, and about what: ``Strategy``."""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from typing import Any

from gradsync import spec
from gradsync.bucket import BUCKET_BYTES, Bucket, BucketPlan
from gradsync.comm.base import Communicator
from gradsync.header import Header, Round
from gradsync.profiling.seam import SILENT, Recording
from gradsync.slot import SparseSlot
from gradsync.training import Training


class Verdict(enum.Enum):
    """What becomes of an ``optimizer.step()``."""

    APPLY = "apply"  # the user's optimizer does it
    DISCARD = "discard"  # nobody does: the gradients are dropped
    DONE_ELSEWHERE = "done elsewhere"  # a server has done it, and the parameters are already there


class Strategy(abc.ABC):
    """When workers talk. The engine calls these in this order, and knows nothing of what they do.

    In a backward that synchronizes: ``open``, then ``on_bucket_ready`` for every bucket in plan order, ``advance`` as
    often as it likes in between, ``on_sparse``, ``after_backward``. Then ``before_step`` and ``after_step`` around the
    optimizer's step: once for each synchronizing backward, however often the loop calls ``step()``.

    >>> import gradsync
    >>> class Noisy(gradsync.AllReduce):                       # a strategy of one's own
    ...     def after_step(self, step: int) -> None:
    ...         print("stepped after backward", step)
    >>> gradsync.spec.register("strategy", "noisy")(Noisy).__name__
    'Noisy'
    """

    # Whether the gradients of the backward to come are averaged over the ranks. Where not, they stay this rank's own,
    # and the engine starts no collective by itself: see local.py. It may change from step to step, on all ranks alike.
    together: bool = True
    steps_itself: bool = False  # before_step() reads the gradients: so a closure of optimizer.step() is run before it
    bucket_bytes: int = BUCKET_BYTES  # how large it likes its buckets, unless the user says
    wanted_bucket_bytes: int | None = None  # once said, on all ranks after the same step, they are made this large
    reads_fresh_gradients: bool = False  # where autograd put them, by `slot.source`; else they are in the bucket
    reads_small_gradients: bool = False  # and so the small ones
    recorder: Recording = SILENT  # whom to tell what happens when

    def __init__(self) -> None:
        self.plan: BucketPlan
        self.comm: Communicator

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        """Take the plan (again after it has changed) and a communicator of one's own."""
        self.plan = plan
        self.comm = comm

    def meet(self, training: Training) -> None:  # noqa: B027 - most need no more than gradients
        """See the model, and the optimizer whose step it may take over (``DONE_ELSEWHERE``); refuse what it can't do.

        Comes once, before ``attach``.
        """

    @abc.abstractmethod
    def open(self, header: Header) -> None:
        """The first gradient of a synchronizing backward is here. Must not block."""

    @abc.abstractmethod
    def round(self, *, block: bool) -> Round | None:
        """What all ranks said at ``open``; None while unknown and not ``block``."""

    @abc.abstractmethod
    def on_bucket_ready(self, bucket: Bucket) -> None:
        """A bucket is sealed: its gradients are this rank's share of the mean. Must not block."""

    @abc.abstractmethod
    def on_sparse(self, slots: Sequence[SparseSlot], factor: float) -> None:
        """The end of backward: reduce the sparse gradients, each to be multiplied by ``factor`` first. May block."""

    def advance(self) -> None:  # noqa: B027 - one that has nothing to move on does nothing
        """Move on what is under way. Called often during backward. Must not block."""

    @abc.abstractmethod
    def after_backward(self) -> None:
        """Wait for what must be exact before ``step()``."""

    def before_step(self, step: int) -> Verdict:
        """Decide what becomes of an ``optimizer.step()``."""
        return Verdict.APPLY

    def after_step(self, step: int) -> None:  # noqa: B027
        """The optimizer has stepped."""

    def skipped_step(self, step: int) -> None:
        """A ``GradScaler`` met inf, on this rank at least, and left the step out: ``before_step`` was not called."""
        self.after_step(step)

    def settle(self) -> None:  # noqa: B027 - replicas that are always in step are settled
        """Bring the replicas together now, whatever is pending. All ranks call it. Blocks."""

    def join(self) -> int | None:
        """This rank has no data left: keep the others company until none has. Blocks. Not asked while ``together``.

        Returns the rank whose parameters, buffers and optimizer state all then take over, or None to leave them.
        """
        return None

    def stats(self) -> dict[str, Any]:
        """What there is to know of it beyond what every strategy tells, for ``sync.stats()``."""
        return {}

    @abc.abstractmethod
    def bytes_per_step(self) -> int:
        """What this rank puts on the wire in a step."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, keyed by parameter name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state; got {sorted(state)}. Saved by another strategy?")

    def codecs(self) -> dict[str, str]:
        """For each parameter the codec that it travels by, as a spec; empty where there is none."""
        return {}

    def close(self) -> None:  # noqa: B027 - most hold nothing beyond the buckets
        """Let go of what a backward that came to no end has left under way. Does not wait for peers."""

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """This rank's state, made of those that all ranks of a run with another number of them have saved."""
        return states[0]

    def is_own(self, state: dict[str, Any]) -> bool:
        """Whether a saved state holds something that is one rank's alone."""
        return False


spec.declare("strategy", Strategy)
