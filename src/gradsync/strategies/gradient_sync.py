"""How gradients are averaged during a backward: ``GradientSync``, which the engine asks a strategy for.

A strategy whose gradients stay with their rank has none. ``ReducerSync`` exchanges the header, and reduces every bucket
by a reducer while backward still runs; ``ForwardingSync`` is the base of those that only watch another one.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from gradsync.buckets.bucket import Bucket, BucketPlan
from gradsync.buckets.slot import SparseSlot
from gradsync.comm.base import Communicator
from gradsync.errors import NonFiniteGradient
from gradsync.profiling.interface import NOT_RECORDING, Recording
from gradsync.reducers.background import make_driver
from gradsync.reducers.base import Driver, Reducer
from gradsync.reducers.sparse import sum_sparse
from gradsync.replicas.header import Header, HeaderExchange, StepHeaders


class GradientSync(abc.ABC):
    """Averages the gradients of one synchronizing backward after the other.

    The engine calls ``begin_step`` at the first gradient, ``launch`` for every bucket in plan order, ``advance`` as
    often as it likes in between, ``reduce_sparse`` where the model has sparse gradients, ``finish``, and ``end_step``.

    [Note: a backward is undone or kept] A lost peer may interrupt a backward anywhere between ``begin_step`` and
    ``end_step``. ``discard`` then undoes it: the state is bit for bit what it was before. If another rank has ended the
    backward, this one keeps it instead, by ``accept``. Both need buckets that ``may_roll_back``. A communicator that
    has lost a peer may still write to the tensors that it was given, so ``attach`` comes before the next backward.
    """

    @abc.abstractmethod
    def begin_step(self, header: Header) -> None:
        """The first gradient of a synchronizing backward is here: send the header. Must not block."""

    @abc.abstractmethod
    def headers(self, *, block: bool) -> StepHeaders | None:
        """What the headers of all ranks give; None while they have not arrived and ``block`` is False."""

    @abc.abstractmethod
    def launch(self, bucket: Bucket) -> None:
        """A bucket is finalized: its gradients are this rank's share of the mean. Must not block."""

    @abc.abstractmethod
    def advance(self) -> None:
        """Start collectives that can start by now. Called often during backward. Must not block."""

    @abc.abstractmethod
    def reduce_sparse(self, slots: Sequence[SparseSlot], factor: float) -> None:
        """The end of backward: reduce the sparse gradients, each to be multiplied by ``factor`` first. May block."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait until every bucket holds the mean."""

    def end_step(self) -> None:  # noqa: B027 - where nothing is kept, nothing is committed
        """The backward has ended on this rank, with all that follows ``finish``: ``discard`` no longer undoes it."""

    def discard(self) -> None:  # noqa: B027 - where nothing is kept, nothing is dropped
        """Undo a backward that has not ended: see [Note: a backward is undone or kept]. Does not wait for peers.

        When it returns, no thread of that backward reads or writes this rank's state any more.
        """

    def accept(self, shared: dict[str, Any]) -> list[str]:
        """Keep a backward that has not ended here, but on another rank: ``shared`` is the shared state of that rank.

        The other rank has received all that this one has sent, so this rank's residuals are those of the new state.
        Returns the parameters whose residual is dropped instead: there this rank has not sent everything.
        """
        return []


class ReducerSync(GradientSync):
    """Exchanges the header and reduces every bucket by ``reducer``. ``attach`` comes before the first step."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.recorder: Recording = NOT_RECORDING
        self._exchange: HeaderExchange | None = None
        self._driver: Driver | None = None
        self._settled = True  # the reducer knows the outcome of the last step
        self._ended = True  # no backward is between begin_step() and end_step()

    def attach(self, plan: BucketPlan, comm: Communicator, recorder: Recording) -> None:
        """Take the plan (again after it has changed) and attach the reducer to it."""
        self.settle()
        self.plan = plan
        self.recorder = recorder
        self.reducer.attach(plan, comm)
        self._comm = recorder.instrument(comm)

    def settle(self) -> None:
        """End the last step: the reducer commits its changes, or drops them if a mean was not finite.

        On a CPU this is a part of ``end_step``. On a GPU it comes at the first gradient of the next step, or when the
        state is saved: see [Note: read one step later] in comm/readback.py. Blocks until the GPU has passed the step.
        """
        if self._settled:
            return
        self._settled = self._ended = True
        nonfinite = self.reducer.nonfinite
        self.reducer.end_step(finite=not nonfinite)
        if nonfinite and not any(bucket.may_overflow for bucket in self.plan.buckets):
            raise NonFiniteGradient(
                f"the gradient of {nonfinite[0]} has NaN or inf on some rank, and so has its mean now on all of them"
                + (f" (and {len(set(nonfinite)) - 1} more parameters)" if len(set(nonfinite)) > 1 else "")
                + ". With 16-bit losses use a GradScaler, and tell it: synchronize(..., scaler=scaler). Otherwise "
                "torch.autograd.set_detect_anomaly(True) shows where it arises."
            )

    def state_dict(self) -> dict[str, Any]:
        """The reducer's state, with the last step settled."""
        self.settle()
        return self.reducer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the reducer's state; the outcome of a step before it no longer matters."""
        if not self._settled:
            self._settled = True
            self.reducer.end_step(finite=False)
        self.reducer.load_state_dict(state)

    def abandon(self) -> None:
        """Drop what a backward that did not end has left running. Does not wait for peers."""
        if self._driver is not None:
            self._driver.abandon()
            self._driver = None

    def discard(self) -> None:
        self.abandon()
        self._exchange = None
        if not self._ended:
            self._settled = self._ended = True
            self.reducer.discard()

    def accept(self, shared: dict[str, Any]) -> list[str]:
        if self._ended:
            return []
        sent = range(len(self.plan.buckets)) if self._driver is None else self._driver.sent
        unsent = [slot.name for bucket in self.plan.buckets if bucket.index not in sent for slot in bucket.slots]
        self.abandon()
        self._exchange = None
        self._settled = self._ended = True
        return self.reducer.accept(shared, unsent)

    def begin_step(self, header: Header) -> None:
        self.abandon()
        self._exchange = HeaderExchange(header, self._comm)
        self.settle()
        self._ended = False
        on_cpu = all(bucket.device.type == "cpu" for bucket in self.plan.buckets)
        num_buckets = len(self.plan.buckets)
        self._driver = make_driver(self.reducer, self._comm, num_buckets, on_cpu=on_cpu, recorder=self.recorder)

    def headers(self, *, block: bool) -> StepHeaders | None:
        assert self._exchange is not None, "begin_step() comes first"
        return self._exchange.wait() if block else self._exchange.poll()

    def launch(self, bucket: Bucket) -> None:
        assert self._driver is not None, "begin_step() comes first"
        self._driver.add(bucket)

    def advance(self) -> None:
        if self._driver is not None:
            self._driver.advance()

    def reduce_sparse(self, slots: Sequence[SparseSlot], factor: float) -> None:
        assert self._driver is not None, "begin_step() comes first"
        self._driver.drain()  # its collectives and these must come in one order on all ranks
        sum_sparse(slots, factor, self._comm)

    def drain(self) -> None:
        """Wait until every bucket is reduced."""
        assert self._driver is not None, "begin_step() comes first"
        self._driver.drain()

    def finish(self) -> None:
        self.drain()
        self._driver = self._exchange = None
        self._settled = False
        if not self.reducer.outcome.is_known:
            self.reducer.outcome.start_reading()
        elif self.reducer.nonfinite:
            self.settle()

    def end_step(self) -> None:
        self._ended = True
        if self.reducer.outcome.is_known:
            self.settle()


class ForwardingSync(GradientSync):
    """Forwards every call to another gradient sync: the base of classes that only observe some of the calls."""

    def __init__(self, inner: GradientSync) -> None:
        self.inner = inner

    def begin_step(self, header: Header) -> None:
        self.inner.begin_step(header)

    def headers(self, *, block: bool) -> StepHeaders | None:
        return self.inner.headers(block=block)

    def launch(self, bucket: Bucket) -> None:
        self.inner.launch(bucket)

    def advance(self) -> None:
        self.inner.advance()

    def reduce_sparse(self, slots: Sequence[SparseSlot], factor: float) -> None:
        self.inner.reduce_sparse(slots, factor)

    def finish(self) -> None:
        self.inner.finish()

    def end_step(self) -> None:
        self.inner.end_step()

    def discard(self) -> None:
        self.inner.discard()

    def accept(self, shared: dict[str, Any]) -> list[str]:
        return self.inner.accept(shared)
