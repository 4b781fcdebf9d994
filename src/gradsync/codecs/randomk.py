"""``randomk``: the values at random positions, which are the same on every rank: payloads can be all-reduced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs import sparse
from gradsync.codecs.base import Finite, Payload
from gradsync.codecs.random import sequence_start, stratified_positions
from gradsync.codecs.sparse import Sparse, check_density, kernels, kernels_support, num_to_keep


@spec.register("codec", "randomk")
@dataclass(frozen=True, kw_only=True)
class RandomK(Sparse):
    """Keeps one value, chosen by the key, in each of k equal strata (see random.py); no positions are sent.

    Values of every dtype are sent as float32: the residual keeps the rounding error of float64 values.

    >>> import torch
    >>> from gradsync.codecs import Payload, RandomK
    >>> codec, x = RandomK(density=0.5), torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(4), dtype=torch.uint8))
    >>> codec.encode(x, payload, key=5)
    >>> out = torch.empty(4)
    >>> codec.decode(payload, out, key=5), int((out == x).sum())
    (True, 2)
    """

    density: float = 0.01  # lower => fewer bytes, larger residual
    unbiased: bool = False  # True => values are divided by the density: unbiased; only without error feedback

    sums_as = torch.float32

    def __post_init__(self) -> None:
        check_density(self.density)

    def max_kept(self, numel: int) -> int:
        return num_to_keep(numel, self.density)

    def index_bytes(self, numel: int) -> int:
        return 0

    def num_kept(self, index: Tensor, numel: int) -> int:
        return self.max_kept(numel)

    def values_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def _scale(self, numel: int) -> float:
        return numel / self.max_kept(numel) if self.unbiased else 1.0

    def select(
        self,
        x: Tensor,
        index: Tensor,
        values: Tensor,
        *,
        gain: float = 1.0,
        before: Tensor | None = None,
        after: Tensor | None = None,
        key: int = 0,
    ) -> int:
        num, scale = values.numel(), self._scale(x.numel())
        given = [tensor for tensor in (before, after) if tensor is not None]
        if kernels_support(x, *given):
            kernels("randomk").select(
                x.numpy(),
                (x if before is None else before).numpy(),
                (x if after is None else after).numpy(),
                sparse.compensation_mode(x, gain, before, after),
                sparse.as_scalar(gain, x),
                after is not None,
                sequence_start(key),
                scale,
                values.numpy(),
            )
            return num
        where = stratified_positions(num, x.numel(), key, x.device)
        if after is None:
            assert before is None, "a residual that is added must also be written back, or it is lost"
            x, where = x[where], torch.arange(num, device=x.device)
        y = sparse.compensated(x, gain=gain, before=before)
        values.copy_(sparse.narrow(y[where].to(torch.float64) * scale, torch.float32))
        if after is not None:
            after.copy_(sparse.subtract_sent(y, where, values))
        return num

    def scatter(
        self, index: Tensor, values: Tensor, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0
    ) -> Finite:
        if kernels_support(out):
            run = kernels("randomk")
            op = run.ADD if add else run.SET
            return bool(run.scatter(values.numpy(), out.numpy(), sparse.as_scalar(gain, out), op, sequence_start(key)))
        where = stratified_positions(values.numel(), out.numel(), key, out.device)
        return sparse.scatter_at(values, where, out, gain=gain, add=add)

    def erase(self, payload: Payload, out: Tensor, *, key: int = 0) -> None:
        if out.numel():
            out[stratified_positions(self.max_kept(out.numel()), out.numel(), key, out.device)] = 0
