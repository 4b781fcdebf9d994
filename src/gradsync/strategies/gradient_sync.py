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
    often as it likes in between, ``reduce_sparse`` where the model has sparse gradients, and ``finish``.
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


class ReducerSync(GradientSync):
    """Exchanges the header and reduces every bucket by ``reducer``. ``attach`` comes before the first step."""

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.recorder: Recording = NOT_RECORDING
        self._exchange: HeaderExchange | None = None
        self._driver: Driver | None = None
        self._settled = True  # the reducer knows the outcome of the last step

    def attach(self, plan: BucketPlan, comm: Communicator, recorder: Recording) -> None:
        """Take the plan (again after it has changed) and attach the reducer to it."""
        self.settle()
        self.plan = plan
        self.recorder = recorder
        self.reducer.attach(plan, comm)
        self._comm = recorder.instrument(comm)

    def settle(self) -> None:
        """End the last step: the reducer commits its changes, or drops them if a mean was not finite.

        On a CPU this is a part of ``finish``. On a GPU it comes at the first gradient of the next step, or when the
        state is saved: see [Note: read one step later] in comm/readback.py. Blocks until the GPU has passed the step.
        """
        if self._settled:
            return
        self._settled = True
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

    def begin_step(self, header: Header) -> None:
        self.abandon()
        self._exchange = HeaderExchange(header, self._comm)
        self.settle()
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
        if self.reducer.outcome.is_known:
            self.settle()
        else:
            self.reducer.outcome.start_reading()


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
