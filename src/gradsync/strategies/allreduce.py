"""Exact synchronous training: gradients are averaged over all ranks while backward still runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync import spec
from gradsync.bucket import Bucket, BucketPlan
from gradsync.comm.base import Communicator
from gradsync.errors import NonFiniteGradient
from gradsync.header import Header, HeaderExchange, Round
from gradsync.reducers.allreduce import Plain
from gradsync.reducers.background import drive
from gradsync.reducers.base import Driver, Reducer
from gradsync.reducers.compressed import Compressed
from gradsync.reducers.rules import CodecRule
from gradsync.reducers.sparse import sum_sparse
from gradsync.slot import SparseSlot
from gradsync.strategies.base import Strategy


@spec.register("strategy", "allreduce")
class AllReduce(Strategy):
    """N workers on shards of a batch equal one process on the whole batch, to float rounding: the default.

    ``reducer``: how a bucket becomes its mean; plain (exact) unless said. ``codec``: short for
    ``reducer=compressed(codec=...)``: N workers then equal one process only on average, over the steps.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = gradsync.synchronize(model, optimizer, strategy="allreduce")
    >>> sync.close()
    """

    def __init__(self, *, codec: CodecRule | None = None, reducer: Reducer | str | None = None) -> None:
        super().__init__()
        if codec is not None and reducer is not None:
            raise ValueError(
                "codec= and reducer= both say how a bucket becomes its mean; got both. "
                "Give the codec to the reducer: reducer=compressed(codec=...)."
            )
        self._codec = codec
        self.reducer: Reducer = Plain()
        if codec is not None:
            self.reducer = Compressed(codec)
        elif reducer is not None:
            self.reducer = spec.resolve(reducer, "reducer")
        self.bucket_bytes = self.reducer.bucket_bytes
        self._exchange: HeaderExchange | None = None
        self._driver: Driver | None = None

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs."""
        if self._codec is not None and isinstance(self.reducer, Compressed):
            return {"codec": self.reducer.rules.written()}
        return {"reducer": None if type(self.reducer) is Plain else self.reducer}

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self.reducer.attach(plan, comm)
        self.reads_fresh_gradients = self.reducer.reads_fresh_gradients and comm.world_size > 1
        self.reads_small_gradients = self.reducer.reads_small_gradients and comm.world_size > 1
        self._watched = self.recorder.watch(comm)

    def close(self) -> None:
        if self._driver is not None:
            self._driver.abandon()
            self._driver = None

    def open(self, header: Header) -> None:
        self.close()
        self._exchange = HeaderExchange(header, self._watched)
        on_cpu = all(bucket.device.type == "cpu" for bucket in self.plan.buckets)
        num_buckets = len(self.plan.buckets)
        self._driver = drive(self.reducer, self._watched, num_buckets, on_cpu=on_cpu, recorder=self.recorder)

    def round(self, *, block: bool) -> Round | None:
        assert self._exchange is not None, "open() comes first"
        return self._exchange.wait() if block else self._exchange.poll()

    def on_bucket_ready(self, bucket: Bucket) -> None:
        assert self._driver is not None, "open() comes first"
        self._driver.add(bucket)

    def advance(self) -> None:
        if self._driver is not None:
            self._driver.advance()

    def on_sparse(self, slots: Sequence[SparseSlot], factor: float) -> None:
        assert self._driver is not None, "open() comes first"
        self._driver.drain()  # its collectives and these must come in one order on all ranks
        sum_sparse(slots, factor, self._watched)

    def after_backward(self) -> None:
        assert self._driver is not None, "open() comes first"
        self._driver.drain()
        self._driver = self._exchange = None
        spoilt = self.reducer.nonfinite
        self.reducer.end_step(finite=not spoilt)
        if spoilt and not any(bucket.may_overflow for bucket in self.plan.buckets):
            raise NonFiniteGradient(
                f"the gradient of {spoilt[0]} has NaN or inf on some rank, and so has its mean now on all of them"
                + (f" (and {len(set(spoilt)) - 1} more parameters)" if len(set(spoilt)) > 1 else "")
                + ". With 16-bit losses use a GradScaler, and tell it: synchronize(..., scaler=scaler). Otherwise "
                "torch.autograd.set_detect_anomaly(True) shows where it arises."
            )

    def bytes_per_step(self) -> int:
        return sum(self.reducer.bytes_sent(bucket, self.comm.world_size) for bucket in self.plan.buckets)

    def codecs(self) -> dict[str, str]:
        return self.reducer.codecs()

    def state_dict(self) -> dict[str, Any]:
        return {"reducer": self.reducer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reducer.load_state_dict(state.get("reducer", {}))

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        return {"reducer": self.reducer.redistribute([state["reducer"] for state in states], rank, world_size)}

    def is_own(self, state: dict[str, Any]) -> bool:
        return any(state["reducer"].get("own", {}).values())
