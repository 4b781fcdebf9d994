"""Averaging of the optimizers' own tensors (momenta, variances) over the ranks, for local SGD."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object


def averaged_values(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, Tensor]]:
    """The tensors to average, as (number of the parameter, name, tensor). Step counts are tensors too, and left out."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        state = optimizer.state.get(param, {})
        for name in sorted(state):
            value = state[name]
            if isinstance(value, Tensor) and value.dim() and (value.is_floating_point() or value.is_complex()):
                yield number, name, value


def average_state(optimizer: torch.optim.Optimizer, shares: Sequence[float], comm: Communicator) -> Callable[[], None]:
    """Compute each tensor's mean over the ranks that have it, weighted by ``shares``. Blocks.

    Returns a function that overwrites the tensors with it: a lost peer may interrupt this one, and changes nothing.
    A rank on which a parameter had no gradient yet has no state for it, and is given none.
    """
    mine = {(number, name): value for number, name, value in averaged_values(optimizer)}
    listed = [[number, name, list(value.shape), str(value.dtype)] for (number, name), value in mine.items()]
    gathered = all_gather_object(comm, listed)
    owners: dict[tuple[int, str, tuple[int, ...], str], list[int]] = {}
    for rank, kept in enumerate(gathered):
        for number, name, shape, dtype in kept:
            owners.setdefault((number, name, tuple(shape), dtype), []).append(rank)
    works = []
    for number, name, shape, dtype in sorted(owners):
        ranks = owners[number, name, shape, dtype]
        total = sum(shares[rank] for rank in ranks)
        if total == 0.0:
            continue  # only ranks without data have it
        value = mine.get((number, name))
        real = getattr(torch, dtype.removeprefix("torch."))
        if comm.rank not in ranks or shares[comm.rank] == 0.0 or value is None:
            given = torch.zeros(shape, dtype=real, device=optimizer.param_groups[0]["params"][0].device)
        else:
            given = (value * (shares[comm.rank] / total)).contiguous()
        works.append((comm.all_reduce(torch.view_as_real(given) if given.is_complex() else given), given, value))
    for work, _, _ in works:
        work.wait()

    def commit() -> None:
        for _, given, value in works:
            if value is not None:
                value.copy_(given)

    return commit
