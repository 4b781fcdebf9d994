"""What a strategy's spec means for time and bytes: what travels, how often, and whether the step waits for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from gradsync import spec
from gradsync.reducers.allreduce import Plain
from gradsync.reducers.base import Reducer
from gradsync.reducers.compressed import Compressed
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.onebit_adam import OneBitAdam

Kind = Literal["gradients", "periodic", "server", "gossip", "shared", "unknown"]


@dataclass(frozen=True)
class Meaning:
    """What a strategy does, as far as the cost model tells strategies apart.

    >>> from gradsync.advisor.meaning import meaning_of
    >>> meaning_of("allreduce(codec=int8)").reducer_text, meaning_of("allreduce").exact
    ('compressed(codec=int8)', True)
    """

    strategy: str
    kind: Kind
    reducer_text: str = "plain"
    exact: bool = False
    every: int = 1  # steps from one exchange to the next; longer => less of it in a step
    fragments: int = 1  # in which the model is sent, one after the other
    overlap: int = 0  # steps that go on while a fragment is sent

    @property
    def is_plain(self) -> bool:
        return self.reducer_text == "plain"

    @property
    def reads_fresh_gradients(self) -> bool:
        """Whether gradients are not copied into buckets: read where they lie, or left there."""
        if self.kind != "gradients":
            return True
        return self.make_reducer().reads_fresh_gradients and not self.strategy.startswith("onebit_adam")

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
        """A reducer of its own, not attached to anything."""
        made = spec.parse(self.reducer_text, "reducer")
        assert isinstance(made, Reducer), "only reducers are registered as such"
        return made


@functools.lru_cache(maxsize=256)
def meaning_of(text: str) -> Meaning:
    """Read a strategy's spec. Raises ``SpecError`` for anything else; a strategy that nobody knows is "unknown"."""
    strategy = spec.parse(text, "strategy")
    name = text.partition("(")[0].strip()
    if isinstance(strategy, OneBitAdam):
        return Meaning(text, "gradients", spec.render(strategy._compressed))
    if name == "auto":
        return Meaning(text, "gradients", exact=True)
    if isinstance(strategy, AllReduce):
        plain = type(strategy.reducer) is Plain
        return Meaning(text, "gradients", spec.render(strategy.reducer), exact=plain)
    reducer = _reducer_text(strategy)
    if name in ("local_sgd", "diloco"):
        overlap = int(getattr(strategy, "_overlap", 0))
        return Meaning(text, "periodic", reducer, every=strategy.every, fragments=strategy.fragments, overlap=overlap)
    if name == "parameter_server":
        return Meaning(text, "server", reducer, exact=getattr(strategy, "staleness", None) == 0 and reducer == "plain")
    if name == "gossip":
        return Meaning(text, "gossip", reducer)
    if name == "hogwild":
        return Meaning(text, "shared", reducer)
    return Meaning(text, "unknown", reducer)


def _reducer_text(strategy: Any) -> str:
    """The reducer of a strategy that takes ``codec=`` or ``reducer=``, by what it says of its own arguments."""
    given: dict[str, Any] = dict(getattr(strategy, "spec_arguments", dict)())
    if given.get("reducer") is not None:
        return given["reducer"] if isinstance(given["reducer"], str) else spec.render(given["reducer"])
    codec = given.get("codec")
    return "plain" if codec is None else spec.render(Compressed(codec))
