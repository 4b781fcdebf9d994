"""Random-k: values at drawn positions, the same on every rank, so that payloads can be summed on the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs import sparse
from gradsync.codecs.base import Payload
from gradsync.codecs.sparse import Sparse, check_density, kernels, kernels_take, share_of
from gradsync.codecs.strata import positions, start_of


@spec.register("codec", "randomk")
@dataclass(frozen=True, kw_only=True)
class RandomK(Sparse):
    """Keeps one value, drawn by the key alone, in each of k equal strata (see strata.py); no positions are sent.

    Values travel as float32 whatever they are: of float64 the residual keeps the rounding.

    >>> import torch
    >>> from gradsync.codecs import Payload, RandomK
    >>> codec, x = RandomK(density=0.5), torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(4), dtype=torch.uint8))
    >>> codec.encode(x, payload, key=5)
    >>> out = torch.empty(4)
    >>> codec.decode(payload, out, key=5), int((out == x).sum())
    (True, 2)
    """

    density: float = 0.01  # lower => fewer bytes, more held back
    unbiased: bool = False  # True => values are divided by the density: right on average, only without error feedback

    sums_as = torch.float32

    def __post_init__(self) -> None:
        check_density(self.density)

    def max_kept(self, numel: int) -> int:
        return share_of(numel, self.density)

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
        if kernels_take(x, *given):
            kernels("randomk").select(
                x.numpy(),
                (x if before is None else before).numpy(),
                (x if after is None else after).numpy(),
                sparse.how_compensated(x, gain, before, after),
                sparse.as_scalar(gain, x),
                after is not None,
                start_of(key),
                scale,
                values.numpy(),
            )
            return num
        where = positions(num, x.numel(), key, x.device)
        if after is None:
            assert before is None, "what was held back before, and is not kept after, would be lost"
            x, where = x[where], torch.arange(num, device=x.device)
        y = sparse.compensated(x, gain=gain, before=before)
        values.copy_(sparse.narrowed(y[where].to(torch.float64) * scale, torch.float32))
        if after is not None:
            after.copy_(sparse.leave(y, where, values))
        return num

    def scatter(
        self, index: Tensor, values: Tensor, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0
    ) -> bool:
        if kernels_take(out):
            run = kernels("randomk")
            how = run.ADD if add else run.SET
            return bool(run.scatter(values.numpy(), out.numpy(), sparse.as_scalar(gain, out), how, start_of(key)))
        where = positions(values.numel(), out.numel(), key, out.device)
        return sparse.put(values, where, out, gain=gain, add=add)

    def erase(self, payload: Payload, out: Tensor, *, key: int = 0) -> None:
        if out.numel():
            out[positions(self.max_kept(out.numel()), out.numel(), key, out.device)] = 0
