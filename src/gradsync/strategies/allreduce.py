"""Exact synchronous training: gradients are averaged over all ranks while backward still runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.reducers.base import Reducer
from gradsync.reducers.codec_rules import CodecRule
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.reducers.plain import Plain
from gradsync.replicas.header import reduced_sizes
from gradsync.strategies.base import Placement, Strategy, reducer_placement
from gradsync.strategies.gradient_sync import GradientSync, ReducerSync


@spec.register("strategy", "allreduce")
class AllReduce(Strategy):
    """N workers on shards of a batch equal one process on the whole batch, to float rounding: the default.

    ``reducer``: how a bucket becomes its mean; default: plain, which is exact. ``codec``: short for
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
        self.sync = ReducerSync(self.reducer)

    def spec_arguments(self) -> dict[str, Any]:
        """The arguments for its spec."""
        if self._codec is not None and isinstance(self.reducer, Compressed):
            return {"codec": self.reducer.rules.as_argument()}
        return {"reducer": None if type(self.reducer) is Plain else self.reducer}

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self.sync.attach(plan, comm, self.recorder)

    def gradient_sync(self, step: int) -> GradientSync:
        return self.sync

    def discard_step(self) -> None:
        self.sync.discard()

    def accept_step(self, shared: dict[str, Any]) -> list[str]:
        return self.sync.accept(shared["reducer"])

    def close(self) -> None:
        self.sync.abandon()

    def bucket_bytes_on(self, comm: Communicator) -> int:
        return self.reducer.bucket_bytes_on(comm)

    def bytes_per_step(self) -> int:
        return self._bytes_per_step(self.reducer)

    def _bytes_per_step(self, reducer: Reducer) -> int:
        sent = sum(reducer.bytes_sent_on(bucket, self.comm) for bucket in self.plan.buckets)
        return header_bytes(self.comm.world_size) + sent

    def codecs(self) -> dict[str, str]:
        return self.reducer.codecs()

    def state_dict(self) -> dict[str, Any]:
        return {"reducer": self.sync.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sync.load_state_dict(state.get("reducer", {}))

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        return {"reducer": self.reducer.redistribute([state["reducer"] for state in states], rank, world_size)}

    def placement(self, path: tuple[str, ...]) -> Placement:
        return reducer_placement(path[1:]) if path[0] == "reducer" else Placement.OWN


def header_bytes(world_size: int) -> int:
    """The bytes of headers that a rank sends in a step, at the least: those of two all-reduces."""
    sizes = [numel * torch.float64.itemsize for numel in reduced_sizes(world_size)]
    return sum(num_bytes * 2 * (world_size - 1) // world_size for num_bytes in sizes)
