"""A rank's trainable values in flat tensors, as push-sum has them: sums ``x`` and a weight; the model is x / weight.

On a directed graph some members get more than others. A weight that travels with the values, divided and added up as
they are, tells how much: the ratio is right everywhere. (Where all get alike it is 1 for ever.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradsync.reducers.shards import worked_in

SAMPLE_NUMEL = 1 << 14  # values by which two models are compared; more => a surer figure, a little more work


class Part:
    """The parameters of one dtype and device. Values of 16 bits are summed in 32."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = {name: _as_real(param) for name, param in params.items()}
        first = next(iter(self.params.values()))
        self.dtype, self.device = first.dtype, first.device
        numel = sum(param.numel() for param in self.params.values())
        self.x = torch.empty(numel, dtype=worked_in(self.dtype), device=self.device)
        self.views = self.cut(self.x)

    def cut(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor, by parameter, in its shape."""
        pieces = flat.split([param.numel() for param in self.params.values()])
        return {name: piece.view(param.shape) for (name, param), piece in zip(self.params.items(), pieces, strict=True)}

    def read(self, out: Tensor) -> Tensor:
        """The model's values as they are now, in a flat tensor."""
        for name, view in self.cut(out).items():
            view.copy_(self.params[name])
        return out

    def model(self, weight: float) -> Tensor:
        """What the parameters are to be, in their dtype."""
        return (self.x if weight == 1.0 else self.x / weight).to(self.dtype)


class Replica:
    """The values of one model, taken from its parameters and put back. Not locked: its owner sees to that."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        for name, param in params.items():
            kinds.setdefault((param.dtype, param.device), {})[name] = param
        self.names = list(params)
        self.parts = [Part(of_kind) for of_kind in kinds.values()]
        self.weight = 1.0
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew from the model as it is, with a weight of one."""
        self.weight = 1.0
        for part in self.parts:
            part.read(part.x)

    @torch.no_grad()
    def take_in(self) -> None:
        """Add to ``x`` what the optimizer (or anybody) has changed in the parameters since ``put_back``."""
        for part in self.parts:
            if self.weight == 1.0 and part.x.dtype == part.dtype:
                part.read(part.x)  # x was what the parameters were, to the bit
                continue
            now = part.read(torch.empty_like(part.x))
            part.x.add_(now.sub_(part.model(self.weight)))

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the parameters x / weight."""
        for part in self.parts:
            values = part.cut(part.x if self.weight == 1.0 else part.x / self.weight)
            for name, param in part.params.items():
                param.copy_(values[name])

    @torch.no_grad()
    def count_as_one(self) -> None:
        """Have this model count like any other, whatever weight it has gathered: it stays what it is."""
        if self.weight != 1.0:
            for part in self.parts:
                part.x.div_(self.weight)
            self.weight = 1.0

    def values(self) -> dict[str, Tensor]:
        """A copy of x by parameter name."""
        return {name: view.clone() for part in self.parts for name, view in part.views.items()}

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor], weight: float) -> None:
        """Take back what ``values`` gave; the parameters follow."""
        if set(values) != set(self.names):
            odd = sorted(set(values) ^ set(self.names))[0]
            raise ValueError(f"the state is of another model: {odd!r} is not in both.")
        for part in self.parts:
            for name, view in part.views.items():
                view.copy_(values[name])
        self.weight = weight
        self.put_back()

    @property
    def numel(self) -> int:
        return sum(part.x.numel() for part in self.parts)


def mean_square(one: Tensor, other: Tensor, weights: tuple[float, float] = (1.0, 1.0)) -> tuple[float, float]:
    """How far two flat tensors, each over its weight, are apart, and how large the first is.

    Both are mean squares over a sample of the values.
    """
    stride = max(1, one.numel() // SAMPLE_NUMEL)
    mine, theirs = one[::stride].double() / weights[0], other[::stride].double() / weights[1]
    if mine.numel() == 0:
        return 0.0, 0.0
    return float((mine - theirs).square().mean()), float(mine.square().mean())


def _as_real(param: Tensor) -> Tensor:
    """The parameter's own memory, as real numbers."""
    data = param.detach()
    return torch.view_as_real(data) if data.is_complex() else data
