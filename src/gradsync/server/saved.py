"""The state of all shards in one: by parameter name, so that another number of servers can take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradsync.comm.messages import Json, Message
from gradsync.server.shard import SEP

KEYS = {"params", "optimizer", "policy", "clocks", "versions"}


def gathered(answers: Sequence[Message]) -> dict[str, Any]:
    """What the shards have told, as one state."""
    params: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    policy: dict[str, Tensor] = {}
    for answer in answers:
        for place, tensor in answer.tensors.items():
            kind, _, rest = place.partition(SEP)
            if kind == "param":
                params[rest] = tensor.clone()
                optimizer.setdefault(rest, {})
            elif kind == "state":
                name, _, key = rest.partition(SEP)
                optimizer.setdefault(name, {})[key] = tensor.clone()
            else:
                policy[rest] = tensor.clone()
        for name, key, value in answer.fields["told"]["plain"]:
            optimizer.setdefault(name, {})[key] = value
    return {
        "params": params,
        "optimizer": optimizer,
        "policy": policy,
        "clocks": dict(answers[0].fields["clocks"]),
        "versions": [int(answer.fields["told"]["version"]) for answer in answers],
    }


def scattered(
    state: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> list[tuple[dict[str, Json], dict[str, Tensor]]]:
    """For each shard what it is to load."""
    if set(state) != KEYS:
        raise ValueError(f"the state of servers has {', '.join(sorted(KEYS))}; got {sorted(state)}.")
    expected = {name for shard in names for name in shard}
    if set(state["params"]) != expected:
        raise ValueError(
            f"the state is of other parameters: it lacks {sorted(expected - set(state['params']))[:3]} and has "
            f"{sorted(set(state['params']) - expected)[:3]} more."
        )
    parts = []
    for number, shard in enumerate(names):
        tensors = {f"param{SEP}{name}": state["params"][name] for name in shard}
        plain: list[list[Json]] = []
        for name in shard:
            for key, value in state["optimizer"].get(name, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"state{SEP}{name}{SEP}{key}"] = value
                else:
                    plain.append([name, key, value])
        for key, tensor in state["policy"].items():
            if any(key.endswith(f"/{name}") for name in shard):
                tensors[f"policy{SEP}{key}"] = tensor
        same_number = len(state["versions"]) == len(names)
        version = state["versions"][number] if same_number else max(state["versions"])
        told = {"version": version, "filled": True, "plain": plain, "read_at": [], "taus": [], "dropped": 0}
        parts.append(({"told": told, "clocks": dict(state["clocks"])}, tensors))
    return parts
