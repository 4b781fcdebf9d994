"""The state of all shards merged into one, by parameter name, so that any number of servers can load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradsync.messaging.format import Json, Message
from gradsync.strategies.parameter_server.server.shard import SEP

KEYS = {"params", "optimizer", "policy", "clocks", "versions"}


def merge_shard_states(replies: Sequence[Message]) -> dict[str, Any]:
    """Merge the shards' "state" replies into one state."""
    params: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    policy: dict[str, Tensor] = {}
    for reply in replies:
        for key, tensor in reply.tensors.items():
            kind, _, rest = key.partition(SEP)
            if kind == "param":
                params[rest] = tensor.clone()
                optimizer.setdefault(rest, {})
            elif kind == "state":
                name, _, entry = rest.partition(SEP)
                optimizer.setdefault(name, {})[entry] = tensor.clone()
            else:
                policy[rest] = tensor.clone()
        for name, entry, value in reply.fields["metadata"]["plain"]:
            optimizer.setdefault(name, {})[entry] = value
    return {
        "params": params,
        "optimizer": optimizer,
        "policy": policy,
        "clocks": dict(replies[0].fields["clocks"]),
        "versions": [int(reply.fields["metadata"]["version"]) for reply in replies],
    }


def split_state(
    state: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> list[tuple[dict[str, Json], dict[str, Tensor]]]:
    """Split a state into the fields and tensors of each shard's "load" request. ``names``: the parameters of each."""
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
        metadata = {"version": version, "filled": True, "plain": plain, "read_at": [], "taus": [], "dropped": 0}
        parts.append(({"metadata": metadata, "clocks": dict(state["clocks"])}, tensors))
    return parts
