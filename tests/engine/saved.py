"""Reading what synchronizers have saved."""

from __future__ import annotations

from typing import Any

from gradsync.engine.saved_state import unpack


def strategy_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    """What the strategy of each rank in a synchronizer's state keeps, in rank order."""
    ranks = sorted(int(label.removeprefix("rank")) for label in state["own"])
    return [unpack(state, rank)["strategy_state"] for rank in ranks]


def strategy_state(state: dict[str, Any]) -> dict[str, Any]:
    """What the strategy keeps in a synchronizer's state of a single rank."""
    (found,) = strategy_states(state)
    return found
