"""The communication pattern of a strategy's spec: what it sends, how often, and whether the step waits for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import Parameter

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.buckets.slot import SMALL_BYTES
from gradsync.comm.base import Solo
from gradsync.reducers.base import Reducer
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.reducers.plain import Plain
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.onebit_adam import OneBitAdam
from gradsync.strategies.sharded.strategy import Sharded

Kind = Literal["gradients", "periodic", "server", "gossip", "shared", "unknown"]


@dataclass(frozen=True)
class CommPattern:
    """What a strategy communicates, as far as the cost model distinguishes strategies.

    >>> from gradsync.advisor.comm_pattern import comm_pattern_of
    >>> comm_pattern_of("allreduce(codec=int8)").reducer_text, comm_pattern_of("allreduce").exact
    ('compressed(codec=int8)', True)
    """

    strategy: str
    kind: Kind
    reducer_text: str = "plain"
    exact: bool = False
    every: int = 1  # steps from one exchange to the next; higher => a smaller share of each step
    fragments: int = 1  # the model is sent in this many parts, one after the other
    overlap: int = 0  # steps that are computed while a fragment is sent

    @property
    def is_plain(self) -> bool:
        return self.reducer_text == "plain"

    @property
    def copies_gradients(self) -> bool:
        """Whether gradients are copied into buckets. Else they are read where autograd put them, or stay there."""
        if self.kind != "gradients":
            return False
        return self.strategy.startswith("onebit_adam") or not _reads_in_place(self.make_reducer())

    @property
    def family(self) -> str:
        """The name of the strategy, with that of the codec or reducer if it has one, for rules of thumb."""
        name = self.strategy.partition("(")[0]
        return name if self.is_plain else f"{name}+{self._codec_name()}"

    def _codec_name(self) -> str:
        reducer = self.make_reducer()
        if isinstance(reducer, Compressed):
            return spec.render(reducer.rules.patterns[0][1]).partition("(")[0]
        return self.reducer_text.partition("(")[0]

    def make_reducer(self) -> Reducer:
        """A new reducer, not attached to any plan."""
        made = spec.parse(self.reducer_text, "reducer")
        assert isinstance(made, Reducer), "only reducers are registered as such"
        return made


@functools.lru_cache(maxsize=256)
def comm_pattern_of(text: str) -> CommPattern:
    """Read a strategy's spec. Raises ``SpecError`` for anything else; the kind of a foreign strategy is "unknown"."""
    strategy = spec.parse(text, "strategy")
    name = text.partition("(")[0].strip()
    if isinstance(strategy, OneBitAdam):
        return CommPattern(text, "gradients", spec.render(strategy._compressed))
    if name == "auto":
        return CommPattern(text, "gradients", exact=True)
    if isinstance(strategy, Sharded):
        reducer = _reducer_text(strategy)
        return CommPattern(text, "gradients", reducer, exact=reducer == "plain")
    if isinstance(strategy, AllReduce):
        plain = type(strategy.reducer) is Plain
        return CommPattern(text, "gradients", spec.render(strategy.reducer), exact=plain)
    reducer = _reducer_text(strategy)
    if name in ("local_sgd", "diloco"):
        overlap = int(getattr(strategy, "_overlap", 0))
        return CommPattern(
            text, "periodic", reducer, every=strategy.every, fragments=strategy.fragments, overlap=overlap
        )
    if name == "parameter_server":
        return CommPattern(
            text, "server", reducer, exact=getattr(strategy, "staleness", None) == 0 and reducer == "plain"
        )
    if name == "gossip":
        return CommPattern(text, "gossip", reducer)
    if name == "hogwild":
        return CommPattern(text, "shared", reducer)
    return CommPattern(text, "unknown", reducer)


def _reducer_text(strategy: Any) -> str:
    """The spec of a strategy's reducer, from the strategy's own ``codec=`` or ``reducer=`` argument."""
    given: dict[str, Any] = dict(getattr(strategy, "spec_arguments", dict)())
    if given.get("reducer") is not None:
        return given["reducer"] if isinstance(given["reducer"], str) else spec.render(given["reducer"])
    codec = given.get("codec")
    return "plain" if codec is None else spec.render(Compressed(codec))


def _reads_in_place(reducer: Reducer) -> bool:
    """Whether a reducer reads a large gradient where autograd put it, on any transport."""
    param = Parameter(torch.empty(SMALL_BYTES))
    (bucket,) = BucketPlan([["sample"]], [], {"sample": param}, Solo()).buckets
    return reducer.in_place_range(bucket.slots[0], Solo()) is not None
