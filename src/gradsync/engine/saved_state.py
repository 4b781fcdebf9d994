"""A synchronizer's saved state: what all ranks have in common, and under "own" what is each rank's alone.

[Note: one form for every way of saving] ``torch.save`` takes any nested dict. ``torch.distributed.checkpoint`` asks for
more: ranks that save the same key save one value, and a load reads only the keys that ``state_dict()`` has when it
begins. So what is one rank's alone has the rank in its key (``own.rank3``), tensors are there from the start, and what
comes and goes (an exchange under way, an open accumulation) is one entry of bytes. Each rank also lists its tensors: a
load that has left one out raises.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.comm.base import Communicator
from gradsync.comm.objects import broadcast_object, recv_object, send_object
from gradsync.strategies.base import Placement, Strategy

VERSION = 3
_UNLABELLED = 2  # the version without "own": the state held one rank's tree, and the rank

Tree = dict[str, Any]
Path = tuple[str, ...]
Place = Callable[[Path], Placement]


def pack(tree: Tree, strategy: Strategy, *, rank: int, world_size: int) -> Tree:
    """The saved form of one rank's state. See [Note: one form for every way of saving]."""
    common: Tree = {}
    own: Tree = {}
    empty: list[str] = []
    _separate(tree, (), lambda path: _place(path, strategy), common, own, empty)
    own["tensors"] = sorted([*_tensors(common), *_tensors(own)])
    own["empty"] = empty  # dicts: torch.distributed.checkpoint knows only what is in them
    return {
        "version": VERSION,
        "world_size": world_size,
        "strategy": spec.render(strategy),
        **common,
        "own": {_label(rank): own},
    }


def merge(states: Sequence[Tree]) -> Tree:
    """Merge states into one: the own parts of all of them, and the shared part of the first."""
    if not states:
        raise ValueError("expected the states of all ranks of a run; got an empty list.")
    merged = dict(states[0])
    merged["own"] = {label: own for state in states for label, own in state["own"].items()}
    return merged


def gather(state: Tree, comm: Communicator, dst: int | None) -> Tree:
    """Merge the states of all ranks, on rank ``dst`` (None: on all); an empty dict on the others. Blocks."""
    if dst is None:
        owns = [broadcast_object(comm, state["own"], src) for src in range(comm.world_size)]
    elif comm.rank != dst:
        send_object(comm, state["own"], dst)
        return {}
    else:
        owns = [state["own"] if src == dst else recv_object(comm, src) for src in range(comm.world_size)]
    return merge([{**state, "own": own} for own in owns])


def own_state(saved: Tree | Sequence[Tree], strategy: Strategy, *, rank: int, world_size: int) -> Tree:
    """The part of a saved state that this rank loads. Refuses a state of another strategy or of other ranks."""
    given = [saved] if isinstance(saved, dict) else list(saved)
    state = merge([_current(each, strategy) for each in given])
    owners = sorted(int(label.removeprefix("rank")) for label in state["own"])
    if state["world_size"] == world_size and rank in owners:
        return unpack(state, rank)
    trees = {owner: unpack(state, owner) for owner in owners}
    if owners == list(range(state["world_size"])):
        return _redistributed(list(trees.values()), strategy, rank, world_size)
    if any(_holds_something(own) for own in _without_lists(state["own"])):
        whose = f"rank {owners[0]}" if len(owners) == 1 else f"ranks {owners}"
        raise ValueError(
            f"the state is that of {whose} of {state['world_size']}, and residuals and the like are a rank's own; this "
            f"is rank {rank} of {world_size}. Save and load the states of all ranks: sync.gather_state_dict(), which "
            "all ranks call, or torch.distributed.checkpoint with as many ranks as saved it."
        )
    return trees[owners[0]]


def _current(state: Tree, strategy: Strategy) -> Tree:
    """A saved state, converted to the current version."""
    version = state.get("version")
    if version not in (_UNLABELLED, VERSION):
        raise ValueError(
            f"expected a gradsync state of version {VERSION}; got {version!r}. Pass what sync.state_dict() or "
            "sync.gather_state_dict() returned, or load it with the gradsync that saved it."
        )
    if state["strategy"] != spec.render(strategy):
        raise ValueError(
            f"the state was saved by {state['strategy']!r}; this synchronizer runs {spec.render(strategy)!r}."
        )
    if state["version"] == VERSION:
        return state
    tree = {key: value for key, value in state.items() if key not in ("version", "rank", "world_size", "strategy")}
    return pack(tree, strategy, rank=state["rank"], world_size=state["world_size"])


def _redistributed(trees: Sequence[Tree], strategy: Strategy, rank: int, world_size: int) -> Tree:
    if any(tree["window"]["num_backwards"] for tree in trees):
        raise ValueError(
            f"the state was saved within an accumulation, by {len(trees)} ranks that each have gradients of their own; "
            f"here are {world_size}. Save when sync.synchronized is true, or load it with {len(trees)} ranks."
        )
    merged = strategy.redistribute([tree["strategy_state"] for tree in trees], rank, world_size)
    return {**trees[rank % len(trees)], "strategy_state": merged}


# -- splitting a tree into shared and own parts, and back --------------------------------------------------------------


def _without_lists(owns: Mapping[str, Tree]) -> Iterator[Tree]:
    for own in owns.values():
        yield {key: value for key, value in own.items() if key not in ("tensors", "empty")}


def _label(rank: int) -> str:
    return f"rank{rank}"


def _place(path: Path, strategy: Strategy) -> Placement:
    if path[0] == "strategy_state":
        return strategy.placement(path[1:]) if path[1:] else Placement.OWN
    if path == ("window", "gathered"):
        return Placement.VARYING
    return Placement.OWN if path[0] == "window" else Placement.SHARED


def _separate(tree: Mapping[str, Any], path: Path, place: Place, common: Tree, own: Tree, empty: list[str]) -> None:
    if not tree:
        empty.append("/".join(path))
    for key, value in tree.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of {'/'.join(path)} must be text; got {key!r}. Place it as VARYING.")
        here = (*path, key)
        placement = place(here)
        if placement is Placement.VARYING:
            own[key] = _serialized(value)
        elif isinstance(value, Mapping):
            parts: tuple[Tree, Tree] = {}, {}
            _separate(value, here, place, *parts, empty)
            for side, part in zip((common, own), parts, strict=True):
                if part:
                    side[key] = part
        else:
            (common if placement is Placement.SHARED else own)[key] = value


def unpack(state: Tree, rank: int) -> Tree:
    """The tree from which ``pack`` made this rank's part of a state."""
    own = dict(state["own"][_label(rank)])
    listed, empty = own.pop("tensors"), own.pop("empty")
    common = {key: value for key, value in state.items() if key not in ("version", "world_size", "strategy", "own")}
    found = {*_tensors(common), *_tensors(own)}
    lost = sorted(set(listed) ^ found)
    if lost:
        raise ValueError(
            f"rank {rank} has saved {len(listed)} tensors, and {len(found)} were loaded: {lost[0]!r} is only in "
            f"{'the saved state' if lost[0] in listed else 'what was loaded'}. torch.distributed.checkpoint reads what "
            "state_dict() has when the load begins: freeze the same parameters as when it was saved, or save what "
            "sync.gather_state_dict() returns."
        )
    tree = _joined(common, own)
    for path in empty:
        place = tree
        for key in path.split("/"):
            place = place.setdefault(key, {})
    return tree


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> Tree:
    both = {key: _deserialized(value) for key, value in one.items()}
    for key, value in other.items():
        both[key] = _joined(both[key], value) if key in both else _deserialized(value)
    return both


def _serialized(value: Any) -> bytes:
    """One entry, whatever it holds: a load replaces it whole."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def _deserialized(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _deserialized(item) for key, item in value.items()}
    return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True) if isinstance(value, bytes) else value


def _tensors(tree: Mapping[str, Any], path: Path = ()) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, (*path, key))
        elif isinstance(value, Tensor):
            yield "/".join((*path, key))


def _holds_something(value: Any) -> bool:
    """Whether it holds anything but zeros."""
    if isinstance(value, Tensor):
        return bool(value.any())
    if isinstance(value, Mapping):
        return any(_holds_something(item) for item in value.values())
    if isinstance(value, bytes):
        return _holds_something(_deserialized(value))
    return any(map(_holds_something, value)) if isinstance(value, list | tuple) else bool(value)
