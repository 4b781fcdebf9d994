"""The interface between training and recording: ``Recording``, whose methods all do nothing.

The engine, strategies and reducer drivers hold one and call its methods as events happen. They never check whether a
recorder listens: ``NOT_RECORDING`` ignores every event, :class:`gradsync.profiling.Recorder` records it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync.comm.base import Communicator
from gradsync.profiling.record import Change
from gradsync.replicas.header import NO_TIMING, PreviousStepTiming, StepHeaders


class Recording:
    """Ignores every event. :class:`gradsync.profiling.Recorder` overrides the methods to record them.

    >>> from gradsync.profiling.interface import NOT_RECORDING
    >>> NOT_RECORDING.now()
    0
    """

    # -- called by the engine -------------------------------------------------------------------------------------

    def now(self) -> int:
        """The current time as a mark, to be passed back as ``entered`` of a later call."""
        return 0

    def grad_hook_ended(self, entered: int, name: str = "") -> None:
        """An autograd hook that began at ``entered`` ends. ``name``: the parameter whose gradient is ready."""

    def buckets_planned(self, buckets: Sequence[Any]) -> None:
        """From now on these buckets (:class:`gradsync.buckets.bucket.Bucket`) are filled."""

    def backward_started(self, step: int, *, has_data: bool) -> None:
        """A synchronizing backward has produced its first gradient."""

    def bucket_ready(self, bucket: int) -> None:
        """A bucket has its last gradient."""

    def backward_ended(self) -> None:
        """Autograd has finished; the engine now completes the remaining buckets."""

    def step_ended(self, headers: StepHeaders | None, *, weight: float) -> None:
        """The synchronizing backward returns. ``headers``: what all ranks' gave; None where ranks exchange none."""

    def previous_step(self) -> PreviousStepTiming:
        """The timing of this rank's last step, for its next step header."""
        return NO_TIMING

    def optimizer_stepped(self, entered: int) -> None:
        """The optimizer's step, begun at ``entered``, has ended."""

    def engine_communicated(self, entered: int) -> None:
        """Since ``entered``, at the end of a backward, the engine itself has communicated, to synchronize buffers."""

    def strategy_communicated(self, entered: int) -> None:
        """Since ``entered``, around the optimizer's step, the strategy has communicated."""

    def set_staleness(self, steps: float) -> None:
        """Set the age, in steps, of the parameters that this step is computed with."""

    def step_interrupted(self, step: int) -> None:
        """In an elastic run a peer was lost, and the step under way is void."""

    def members_changed(self, change: Change) -> None:
        """An elastic run goes on with other members. ``ranks_changed`` came before."""

    def ranks_changed(self, comm: Communicator) -> None:
        """An elastic run goes on with these ranks, and the step under way was dropped. Blocks: every rank calls it."""

    # -- called by a strategy and its reducer driver --------------------------------------------------------------

    def instrument(self, comm: Communicator) -> Communicator:
        """``comm``, wrapped so that each collective is recorded."""
        return comm

    def reducer_resumed(self, bucket: int) -> None:
        """A reducer continues with a bucket..."""

    def reducer_paused(self) -> None:
        """...and has come to its next collective, or to its end."""

    def background_thread_started(self) -> None:
        """The calling thread is a background thread that reduces buckets while the training thread goes on."""

    def background_thread_joined(self, entered: int) -> None:
        """Since ``entered`` the training thread has waited for the background thread."""


NOT_RECORDING = Recording()
