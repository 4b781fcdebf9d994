"""A synchronizer's saved state: one rank's, or those of all ranks, of which each finds its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradsync import spec
from gradsync.strategies.base import Strategy

VERSION = 2


def own_state(
    saved: dict[str, Any] | Sequence[dict[str, Any]], strategy: Strategy, *, rank: int, world_size: int
) -> dict[str, Any]:
    """What this rank is to load of what was saved. Refuses what is another strategy's, or another rank's alone."""
    states = [saved] if isinstance(saved, dict) else list(saved)
    for state in states:
        if state.get("version") != VERSION:
            raise ValueError(f"expected a gradsync state of version {VERSION}; got {state.get('version')!r}.")
        if state["strategy"] != spec.render(strategy):
            raise ValueError(
                f"the state was saved by {state['strategy']!r}; this synchronizer runs {spec.render(strategy)!r}."
            )
    if isinstance(saved, dict):
        _check_own(saved, strategy, rank, world_size)
        return saved
    _check_complete(states)
    chosen = states[rank % len(states)]
    if len(states) != world_size:
        merged = strategy.redistribute([state["strategy_state"] for state in states], rank, world_size)
        chosen = {**chosen, "strategy_state": merged}
    return chosen


def _check_own(state: dict[str, Any], strategy: Strategy, rank: int, world_size: int) -> None:
    saved = (state["rank"], state["world_size"])
    if strategy.is_own(state["strategy_state"]) and saved != (rank, world_size):
        raise ValueError(
            f"the state is that of rank {saved[0]} of {saved[1]}, and what its codec still owes is its own; this "
            f"is rank {rank} of {world_size}. Save and load the states of all ranks: sync.gather_state_dict()."
        )


def _check_complete(states: Sequence[dict[str, Any]]) -> None:
    expected = states[0]["world_size"] if states else 1
    if [state["rank"] for state in states] != list(range(expected)):
        raise ValueError(
            f"expected the states of ranks 0 to {expected - 1}, in this order; got those of "
            f"{[state['rank'] for state in states]}."
        )
