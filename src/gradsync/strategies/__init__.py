"""Strategies: when workers communicate, and about what. ``resolve_strategy`` turns a name or a spec into one."""

from __future__ import annotations

import logging

from gradsync import spec
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.auto import Auto
from gradsync.strategies.base import Placement, Strategy, Verdict
from gradsync.strategies.gossip.strategy import Gossip
from gradsync.strategies.hogwild import Hogwild
from gradsync.strategies.onebit_adam import OneBitAdam
from gradsync.strategies.parameter_server.strategy import ParameterServer
from gradsync.strategies.periodic.diloco import DiLoCo
from gradsync.strategies.periodic.local_sgd import LocalSGD
from gradsync.strategies.sharded.strategy import Sharded

__all__ = [
    "AllReduce",
    "Auto",
    "DiLoCo",
    "Gossip",
    "Hogwild",
    "LocalSGD",
    "OneBitAdam",
    "ParameterServer",
    "Placement",
    "Sharded",
    "Strategy",
    "Verdict",
    "override_strategy",
    "resolve_strategy",
]

log = logging.getLogger("gradsync")

_override: str | None = None


def override_strategy(text: str | None) -> None:
    """Have every later ``synchronize`` use this spec, whatever the script says: ``gradsync run --sync``."""
    global _override
    if text is not None:
        spec.parse(text, "strategy")
    _override = text


def resolve_strategy(strategy: Strategy | str) -> Strategy:
    """The strategy that a script asked for, or the one that the launcher put in its place."""
    if _override is not None:
        log.info("--sync %s takes the place of %s", _override, strategy)
    chosen = spec.resolve(strategy if _override is None else _override, "strategy")
    assert isinstance(chosen, Strategy), "only strategies are registered as such"
    return chosen
