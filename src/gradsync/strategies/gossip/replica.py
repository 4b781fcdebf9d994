"""A rank's trainable values in flat tensors, as push-sum needs them: sums ``x`` and a weight; the model is x / weight.

On a directed graph some members receive more than others. The weight travels with the values, and is divided and summed
as they are, so that x / weight is right on every member. (On a graph where all receive alike it is always 1.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradsync.codecs.base import compute_dtype

SAMPLE_NUMEL = 1 << 14  # values that are sampled to compare two models; more => more precise, a little more work


class Part:
    """The parameters of one dtype and device. 16-bit values are summed in 32 bits.

    ``params`` holds the tensors as they were at the start, for their shapes. A parameter's memory may be replaced later
    (``param.data = ...``), so values are read and written through the parameters themselves.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._owners = dict(params)
        self.params = {name: _as_real(param) for name, param in params.items()}
        first = next(iter(self.params.values()))
        self.dtype, self.device = first.dtype, first.device
        numel = sum(param.numel() for param in self.params.values())
        self.x = torch.empty(numel, dtype=compute_dtype(self.dtype), device=self.device)
        self.views = self.views_of(self.x)

    def views_of(self, flat: Tensor) -> dict[str, Tensor]:
        """Views into a flat tensor, by parameter name, in the parameter's shape."""
        pieces = flat.split([param.numel() for param in self.params.values()])
        return {name: piece.view(param.shape) for (name, param), piece in zip(self.params.items(), pieces, strict=True)}

    def read(self, out: Tensor) -> Tensor:
        """Copy the model's current values into ``out``, a flat tensor, and return it."""
        now = self.current_values()
        for name, view in self.views_of(out).items():
            view.copy_(now[name])
        return out

    def current_values(self) -> dict[str, Tensor]:
        """The parameters' own memory, wherever that is now; ValueError if their shape, dtype or device has changed."""
        now = {name: _as_real(owner) for name, owner in self._owners.items()}
        for name, before in self.params.items():
            if _kind(now[name]) != _kind(before):
                raise ValueError(
                    f"parameter {name} was {_kind(before)} at synchronize(), and is {_kind(now[name])} now. Convert "
                    "the model first, or close() and synchronize again."
                )
        return now

    def model_values(self, weight: float) -> Tensor:
        """X / weight: the values for the parameters, in their dtype."""
        return (self.x if weight == 1.0 else self.x / weight).to(self.dtype)


class Replica:
    """The values of one model, read from its parameters and written back. Not thread-safe: the owner locks it."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for name, param in params.items():
            kinds.setdefault((param.dtype, param.device), {})[name] = param
        self.names = list(params)
        self.parts = [Part(of_kind) for of_kind in kinds.values()]
        self.weight = 1.0
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Set x to the model's current values, and the weight to one."""
        self.weight = 1.0
        for part in self.parts:
            part.read(part.x)

    @torch.no_grad()
    def add_local_updates(self) -> None:
        """Add to x what the optimizer (or other code) has changed in the parameters since ``write_model``."""
        for part in self.parts:
            if self.weight == 1.0 and part.x.dtype == part.dtype:
                part.read(part.x)  # x and the parameters were bitwise equal before the change
                continue
            now = part.read(torch.empty_like(part.x))
            part.x.add_(now.sub_(part.model_values(self.weight)))

    @torch.no_grad()
    def read_model(self) -> None:
        """Set x so that x / weight is what the parameters are now; the weight stays."""
        for part in self.parts:
            part.read(part.x).mul_(self.weight)

    @torch.no_grad()
    def write_model(self) -> None:
        """Set the parameters to x / weight."""
        for part in self.parts:
            values = part.views_of(part.x if self.weight == 1.0 else part.x / self.weight)
            for name, param in part.current_values().items():
                param.copy_(values[name])

    @torch.no_grad()
    def normalize_weight(self) -> None:
        """Set the weight to one and keep the model: x becomes x / weight."""
        if self.weight != 1.0:
            for part in self.parts:
                part.x.div_(self.weight)
            self.weight = 1.0

    def values(self) -> dict[str, Tensor]:
        """A copy of x by parameter name."""
        return {name: view.clone() for part in self.parts for name, view in part.views.items()}

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor], weight: float) -> None:
        """Set x and the weight to what ``values`` returned earlier, and write the model."""
        if set(values) != set(self.names):
            odd = sorted(set(values) ^ set(self.names))[0]
            raise ValueError(f"the state is of another model: {odd!r} is not in both.")
        for part in self.parts:
            for name, view in part.views.items():
                view.copy_(values[name])
        self.weight = weight
        self.write_model()

    @property
    def numel(self) -> int:
        return sum(part.x.numel() for part in self.parts)


def mean_square(one: Tensor, other: Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> tuple[float, float]:
    """The mean squares of the difference of two flat tensors, each divided by its weight, and of the first one.

    Both are computed over a sample of the values.
    """
    stride = max(1, one.numel() // SAMPLE_NUMEL)
    mine, theirs = one[::stride].double() / weights[0], other[::stride].double() / weights[1]
    if mine.numel() == 0:
        return 0.0, 0.0
    return float((mine - theirs).square().mean()), float(mine.square().mean())


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _as_real(param: Tensor) -> Tensor:
    """The parameter's own memory, as real numbers."""
    data = param.detach()
    return torch.view_as_real(data) if data.is_complex() else data
