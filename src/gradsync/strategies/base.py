"""The interface for when workers communicate, and about what: ``Strategy``."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradsync import spec
from gradsync.buckets.bucket import BUCKET_BYTES, BucketPlan
from gradsync.comm.base import Communicator
from gradsync.elastic.session import Session
from gradsync.profiling.interface import NOT_RECORDING, Recording
from gradsync.replicas.header import Header
from gradsync.replicas.training import Training
from gradsync.strategies.gradient_sync import GradientSync


class Verdict(enum.Enum):
    """What becomes of an ``optimizer.step()``."""

    APPLY = "apply"  # the user's optimizer does it
    DISCARD = "discard"  # no optimizer does it: the gradients are dropped
    DONE_ELSEWHERE = "done elsewhere"  # a server has done it, and the parameters are already there


OwnStep = Callable[[int], Verdict]


class Placement(enum.Enum):
    """Where a part of a strategy's state is saved."""

    SHARED = "shared"  # it is the same on every rank
    OWN = "own"  # it is one rank's alone; its keys, and the shapes of its tensors, are there from the start
    VARYING = "varying"  # it is one rank's alone, and its keys come and go: it is saved as one entry


class Strategy(abc.ABC):
    """When workers communicate, and about what. The engine calls these methods, and knows nothing of what they do.

    At the start ``setup``, then ``attach``. In every synchronizing backward the engine asks for ``gradient_sync``: it
    averages the gradients over the ranks while backward runs. Where there is none the gradients stay with their rank,
    and ``end_local_backward`` is called. Then ``before_step`` and ``after_step`` around the optimizer's step: once for
    each synchronizing backward, however often the loop calls ``step()``.

    >>> import gradsync
    >>> @gradsync.spec.register("strategy", "noisy")
    ... class Noisy(gradsync.AllReduce):
    ...     def after_step(self, step: int) -> None:
    ...         print("stepped after backward", step)
    >>> gradsync.spec.parse("noisy", "strategy").after_step(7)
    stepped after backward 7
    """

    bucket_bytes: int = BUCKET_BYTES  # the size of its buckets, unless the user sets bucket_bytes
    wanted_bucket_bytes: int | None = None  # set on all ranks after the same step: buckets are made this large
    slices_buckets: bool = False  # every rank owns a slice of each bucket, and its gradients may be the mean only there
    recorder: Recording = NOT_RECORDING  # records the times of events
    elastic_session: Session | None = None  # of the elastic run that it is part of
    undoable: bool = False  # a lost peer may interrupt it, and it goes on with others: see discard_step()
    change_agreed: bool = False  # set on all ranks alike: the members of the elastic run change before the next step

    def __init__(self) -> None:
        self.plan: BucketPlan
        self.comm: Communicator

    def setup(self, training: Training) -> None:  # noqa: B027 - most need no more than gradients
        """Receive the model and the optimizer, whose step it may take over; refuse what it can't do.

        Called once, before ``attach``.
        """

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        """Take the plan and a communicator of its own; again after the plan has changed, or the ranks.

        What this rank keeps for itself stays, by parameter name: residuals are shares of a mean, and right for any
        number of ranks. What depends on who the ranks are, such as buffers, is made anew.
        """
        self.plan = plan
        self.comm = comm

    def bucket_bytes_on(self, comm: Communicator) -> int:
        """The default size of its buckets on a transport."""
        return self.bucket_bytes

    @abc.abstractmethod
    def gradient_sync(self, step: int) -> GradientSync | None:
        """The object that averages the gradients of this step's backward; None: they stay with their rank.

        The answer may change from step to step, on all ranks alike. It may be called before ``attach``.
        """

    def end_local_backward(self, header: Header) -> None:  # noqa: B027 - called only where there is no gradient sync
        """A synchronizing backward whose gradients stay with this rank has ended; ``header``: its weight and scale."""

    def own_step(self) -> OwnStep | None:
        """A function that may do the optimizer's step in its place; None: this strategy never does.

        It takes the step's number and is called where ``before_step`` would be, with the gradients there: a closure
        of ``optimizer.step()`` is run before it.
        """
        return None

    def before_step(self, step: int) -> Verdict:
        """Decide what becomes of an ``optimizer.step()``."""
        return Verdict.APPLY

    def after_step(self, step: int) -> None:  # noqa: B027
        """The optimizer has stepped."""

    def skipped_step(self, step: int) -> None:
        """A ``GradScaler`` found inf, on this rank at least, and skipped the step: ``before_step`` was not called."""
        self.after_step(step)

    # -- a lost peer: see [Note: a backward is undone or kept] in gradient_sync.py ---------------------------------

    def elastic_obstacle(self) -> str:
        """Why workers can't leave and join while it runs; empty if they can."""
        if self.gradient_sync(0) is not None and type(self).discard_step is Strategy.discard_step:
            return f"{type(self).__name__} has a gradient sync, and no discard_step() that undoes a backward of it"
        return ""

    def discard_step(self) -> None:  # noqa: B027 - a strategy without a gradient sync has nothing to undo
        """Undo what a backward, or an exchange, that a lost peer has interrupted did here. Does not wait for peers.

        ``attach`` with another communicator comes next.
        """

    def accept_step(self, shared: dict[str, Any]) -> list[str]:
        """Keep a backward that was interrupted here, and has ended on another rank, whose ``shared_state()`` is given.

        Returns the parameters whose residual could not be kept. ``attach`` comes next, as after ``discard_step``.
        """
        return []

    def commit_number(self, step: int) -> int:
        """How far this rank is, to compare it with others after a loss; ``step``: the backwards that it has ended.

        Ranks with the same number have committed the same. Strategies whose ranks train apart count exchanges, from
        ``APART`` on: see [Note: members that train apart] in elastic/membership.py.
        """
        return step

    def agree_again(self) -> None:  # noqa: B027 - most have agreed when they were made
        """After ``attach`` with other ranks: agree on what ranks decide alike. All ranks call it. Blocks."""

    def retry_exchange(self) -> None:  # noqa: B027 - an interrupted backward is run again by the training loop
        """Do what a lost peer has interrupted outside of backwards again, after ``attach`` with other ranks. Blocks.

        Each rank calls it in its own time, where it was interrupted; also one that was not in an exchange.
        """

    def steps_since_exchange(self) -> int:
        """The last steps that other ranks know nothing of: what is lost with this one."""
        return 0

    def state_for_newcomer(self) -> dict[str, Any]:
        """What a worker that joins needs of this strategy's state, for its ``join_run``."""
        return self.state_dict()

    def join_run(self, state: dict[str, Any]) -> None:
        """Begin in the middle of a run, with what ``state_for_newcomer`` has returned on another rank."""
        # As rank 1 of 2, of which rank 0 has all: a newcomer has no residual of its own.
        self.load_state_dict(self.redistribute([state], 1, 2))

    # -- a partition, where both sides go on ----------------------------------------------------------------------

    def diverge_obstacle(self) -> str:
        """Why the two sides of a partition may not both go on; empty if they may, and ``merge_sides`` merges them."""
        return (
            f"the replicas of {type(self).__name__} are equal after every step, and those of two sides that both go on "
            "would not be"
        )

    def merge_sides(self, comm: Communicator, share: float) -> float:
        """Merge the states of two sides that have both gone on, after ``attach``. All ranks call it. Blocks.

        ``share``: by how much this rank's state counts; the shares of all ranks sum to 1. Returns how far the state
        that its side has shared has moved: the norm of the difference.
        """
        raise ValueError(f"two sides can't be merged: {self.diverge_obstacle()}.")

    def shared_state(self) -> dict[str, Any]:
        """The part of ``state_dict()`` that is the same on every rank."""
        return _shared_part(self.state_dict(), (), self.placement)

    def settle(self) -> None:  # noqa: B027 - replicas that are always in step are settled
        """Bring the replicas together now, whatever is pending. All ranks call it. Blocks."""

    def join(self) -> int | None:
        """This rank has no data left: take part until no rank has. Blocks. Called only where there is no gradient sync.

        Returns the rank whose parameters, buffers and optimizer state all then take over, or None to leave them.
        """
        return None

    def joined(self) -> None:  # noqa: B027
        """No rank has data left, and all hold the same state again where one has given it to the others."""

    def agree_on_inf(self, found: Tensor) -> None:  # noqa: B027 - where all ranks have the same mean, they agree
        """A ``GradScaler`` has looked for inf among the gradients: make ``found`` 1 if it is 1 on any rank. Blocks."""

    def clip_grad_norm(
        self, params: Sequence[nn.Parameter], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        """Scale the gradients down to a norm of at most ``max_norm``; returns the norm that they had."""
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer, dst: int | None) -> dict[str, Any]:
        """The optimizer's whole state, on rank ``dst`` at least (None: on all). Blocks if it is on several ranks."""
        return optimizer.state_dict()

    def stats(self) -> dict[str, Any]:
        """The strategy's own statistics, for ``sync.stats()``, beyond those that all strategies have."""
        return {}

    @abc.abstractmethod
    def bytes_per_step(self) -> int:
        """The bytes that this rank sends in a step."""

    def state_dict(self) -> dict[str, Any]:
        """The state that must survive a restart, keyed by parameter name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state; got {sorted(state)}. Saved by another strategy?")

    def codecs(self) -> dict[str, str]:
        """The codec of each parameter, as a spec; empty without codecs."""
        return {}

    def close(self) -> None:  # noqa: B027 - most hold nothing beyond the buckets
        """Drop what a backward that did not end has left running. Does not wait for peers."""

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """This rank's state, made from the states that all ranks of a run with another world size have saved."""
        return states[0]

    def placement(self, path: tuple[str, ...]) -> Placement:
        """Where the part of ``state_dict()`` under these keys is saved; called for every dict and value from the top.

        Default: OWN. Each rank saves its own part, and loads it again.
        """
        return Placement.OWN


spec.declare("strategy", Strategy)


def _shared_part(
    tree: Mapping[str, Any], path: tuple[str, ...], place: Callable[[tuple[str, ...]], Placement]
) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    for key, value in tree.items():
        placement = place((*path, key))
        if isinstance(value, Mapping) and placement is not Placement.VARYING:
            shared[key] = _shared_part(value, (*path, key), place)
        elif placement is Placement.SHARED:
            shared[key] = value
    return shared


def reducer_placement(path: tuple[str, ...]) -> Placement:
    """Where a part of a reducer's state is saved: what is under "own" belongs to one rank, the rest is shared."""
    return Placement.OWN if path[:1] == ("own",) else Placement.SHARED
