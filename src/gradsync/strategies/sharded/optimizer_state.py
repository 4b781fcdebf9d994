"""The optimizer on slices: which optimizers can step a slice, how one does, and its state in slices and as a whole."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, optim

from gradsync.buckets.slot import Slot
from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.strategies.sharded.shards import Shards

# They change each value by that value, its gradient and its state alone, so a slice is stepped as in the whole.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adadelta, optim.Rprop, optim.ASGD),
)
_REASONS = {
    "Muon": "it orthogonalizes whole matrices",
    "Adafactor": "it keeps means over the rows and columns of whole matrices",
    "SparseAdam": "it steps rows of sparse gradients",
}
_SCALARS = {"step", "eta", "mu", "mu_product"}  # entries of a parameter's state that are one number for all its values

State = dict[str, Any]  # of one parameter


def check_elementwise(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer that can't step a slice of a parameter by itself."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return
    reason = _REASONS.get(kind.__name__, "it is not known to change each value by its own gradient and state alone")
    known = ", ".join(sorted(each.__name__ for each in ELEMENTWISE))
    raise ValueError(
        f"sharded() lets each rank step a slice of every parameter, so the optimizer must be elementwise; got "
        f"{kind.__name__}: {reason}. Use one of {known}, or allreduce, which takes any optimizer."
    )


def num_bytes(optimizer: optim.Optimizer) -> int:
    """The bytes of the state that the optimizer itself has."""
    return _num_bytes(optimizer.state.values())


def _num_bytes(states: Iterable[State]) -> int:
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))


class ShardedState:
    """The state of the parts that this rank steps. Outside of a step the optimizer itself has none for them."""

    def __init__(self, optimizer: optim.Optimizer, shards: Shards) -> None:
        self._optimizer = optimizer
        self._shards = shards
        self._states: dict[str, State] = {}  # by parameter name; tensors are flat
        self.take()

    def take(self) -> None:
        """Move the optimizer's whole state, where it has one, into slices. Every rank has the same whole state."""
        whole: dict[Tensor, State] = {
            slot.param: self._optimizer.state.pop(slot.param, {}) for slot in self._shards.slots()
        }
        self._states = {
            part.slot.name: {
                key: _copied(value)
                if _is_scalar(key, value)
                else _flat(part.slot, value)[part.first : part.end].clone()
                for key, value in whole[part.slot.param].items()
            }
            for part in self._shards.parts()
            if whole[part.slot.param]
        }

    def give_back(self, comm: Communicator) -> None:
        """Give the optimizer its whole state again, on every rank. Blocks: all ranks call it."""
        self._optimizer.state.update(self.gather(comm, None))
        self._states = {}

    def gather(self, comm: Communicator, dst: int | None) -> dict[Tensor, State]:
        """The whole state by parameter, on rank ``dst`` (None: on all); empty elsewhere. Blocks: all ranks call it."""
        described: dict[str, State] = {}
        for one in all_gather_object(comm, {name: _described(state) for name, state in self._states.items()}):
            described.update(one)
        gathered: dict[Tensor, State] = {}
        wanted = dst is None or dst == comm.rank
        for shard in self._shards.shards:
            keys = {
                key for slot in shard.slots for key, value in described.get(slot.name, {}).items() if value == _SLICED
            }
            if wanted:
                for slot in shard.slots:
                    if slot.name in described:
                        gathered[slot.param] = {
                            key: _restored(value) if value != _SLICED else None
                            for key, value in described[slot.name].items()
                        }
            for key in sorted(keys):
                flat = torch.zeros_like(shard.buffer)
                for part in shard.parts:
                    if key in self._states.get(part.slot.name, {}):
                        start = part.slot.start
                        flat[start + part.first : start + part.end] = self._states[part.slot.name][key]
                rows = flat.view(comm.world_size, -1)
                comm.all_gather(rows[comm.rank].clone(), out=rows).wait()
                for slot in shard.slots if wanted else ():
                    if described.get(slot.name, {}).get(key) == _SLICED:
                        start = slot.start
                        gathered[slot.param][key] = slot.shaped(flat[start : start + slot.flat.numel()].clone())
        return gathered

    def num_bytes(self) -> int:
        """The bytes of this rank's slices of the state."""
        return _num_bytes(self._states.values())

    def step(self) -> None:
        """Let the optimizer step this rank's parts, with the gradients that their parameters have got."""
        with self._on_parts():
            _unhooked_step(self._optimizer)(self._optimizer)

    @contextlib.contextmanager
    def _on_parts(self) -> Iterator[None]:
        """Within it the optimizer's groups hold the parts in place of the parameters, with the state of the parts."""
        optimizer, parts = self._optimizer, self._shards.parts()
        of_param = {part.slot.param: part for part in parts}
        sparse = set(self._shards.sparse)
        before = [group["params"] for group in optimizer.param_groups]
        whole = optimizer.state
        state: defaultdict[Tensor, State] = defaultdict(dict)
        for part in parts:
            part.weights.grad = None if part.slot.param.grad is None else part.gradient
            if part.slot.name in self._states:
                state[part.weights] = self._states[part.slot.name]
        for param in sparse & whole.keys():
            state[param] = whole[param]
        try:
            optimizer.state = state
            for group, params in zip(optimizer.param_groups, before, strict=True):
                group["params"] = [
                    of_param[param].weights if param in of_param else param
                    for param in params
                    if param in of_param or param in sparse
                ]
            yield
        finally:
            optimizer.state = whole
            for group, params in zip(optimizer.param_groups, before, strict=True):
                group["params"] = params
            for part in parts:
                part.weights.grad = None
                if part.weights in state:
                    self._states[part.slot.name] = state[part.weights]
            whole.update({param: state[param] for param in sparse & state.keys()})


_SLICED = "sliced"


def _described(state: Mapping[str, Any]) -> State:
    """A part's state without its slices, as plain values."""
    return {
        key: [str(value.dtype), value.item()]
        if _is_scalar(key, value) and isinstance(value, Tensor)
        else ["", value]
        if _is_scalar(key, value)
        else _SLICED
        for key, value in state.items()
    }


def _restored(described: list[Any]) -> Any:
    dtype, value = described
    return torch.tensor(value, dtype=getattr(torch, dtype.removeprefix("torch."))) if dtype else value


def _is_scalar(key: str, value: Any) -> bool:
    return key in _SCALARS or not isinstance(value, Tensor)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _flat(slot: Slot, value: Tensor) -> Tensor:
    if value.dtype != slot.param.dtype:
        raise ValueError(
            f"the optimizer's state of {slot.name} has {value.dtype}, the parameter {slot.param.dtype}. Load it by "
            "optimizer.load_state_dict(), which converts it."
        )
    return slot.flattened(value)


def _unhooked_step(optimizer: optim.Optimizer) -> Callable[[optim.Optimizer], Any]:
    """The class's own step, without the hooks around it: this runs within one of them."""
    step: Any = type(optimizer).step
    unhooked: Callable[[optim.Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return unhooked
