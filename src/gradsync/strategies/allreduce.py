"""Exact synchronous training: gradients are averaged over all ranks while backward still runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync import spec
from gradsync.bucket import Bucket, SparseSlot
from gradsync.header import Header, HeaderExchange, Round
from gradsync.reducers.allreduce import Plain
from gradsync.reducers.base import Driver, Reducer
from gradsync.reducers.sparse import sum_sparse
from gradsync.strategies.base import Strategy


@spec.register("strategy", "allreduce")
class AllReduce(Strategy):
    """N workers on shards of a batch equal one process on the whole batch, to float rounding: the default.

    ``reducer``: how a bucket becomes its mean; plain (exact) unless said.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = gradsync.synchronize(model, optimizer, strategy="allreduce")
    >>> sync.close()
    """

    def __init__(self, *, reducer: Reducer | str | None = None) -> None:
        super().__init__()
        self.reducer: Reducer = Plain() if reducer is None else spec.resolve(reducer, "reducer")
        self._exchange: HeaderExchange | None = None
        self._driver: Driver | None = None

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs."""
        return {"reducer": None if type(self.reducer) is Plain else self.reducer}

    def open(self, header: Header) -> None:
        self._exchange = HeaderExchange(header, self.comm)
        self._driver = Driver(self.reducer, self.comm, len(self.plan.buckets))

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
        sum_sparse(slots, factor, self.comm)

    def after_backward(self) -> None:
        assert self._driver is not None, "open() comes first"
        self._driver.drain()
        self._driver = self._exchange = None

    def bytes_per_step(self) -> int:
        return sum(self.reducer.bytes_sent(bucket, self.comm.world_size) for bucket in self.plan.buckets)

    def state_dict(self) -> dict[str, Any]:
        return {"reducer": self.reducer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reducer.load_state_dict(state.get("reducer", {}))
