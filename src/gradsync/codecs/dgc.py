"""``dgc``: Deep Gradient Compression, top-k with momentum correction before the selection and a warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsync import spec
from gradsync.codecs.base import Finite, Payload
from gradsync.codecs.sparse import Sparse, check_density
from gradsync.codecs.topk import TopK

WARMUP = (0.25, 0.063, 0.015, 0.004)  # each for a quarter of the warm-up; then the density asked for


@spec.register("codec", "dgc")
@dataclass(frozen=True, kw_only=True)
class Dgc(Sparse):
    """``topk`` with momentum correction, local clipping, factor masking and a density that falls during the warm-up.

    On the wire it is the ``TopK`` that ``at(step)`` returns. A codec keeps no state, so the rest is done by the error
    feedback (``MomentumCorrection`` in reducers/compressed/feedback.py): ``u = momentum * u + g``, ``v += u``, v is
    sent, and both are set to zero where it was sent (``erase``). The optimizer must have no momentum.

    >>> from gradsync.codecs import Dgc
    >>> codec = Dgc(warmup_steps=400)
    >>> [codec.at(step).density for step in (0, 100, 200, 300, 400)]
    [0.25, 0.063, 0.015, 0.004, 0.001]
    """

    density: float = 0.001  # lower => fewer bytes, larger residual
    momentum: float = 0.9  # replaces the optimizer's; higher => smoother steps, slower changes of direction
    clip_norm: float | None = None  # lower => smaller steps; None => none. For the mean; each rank's limit is smaller
    warmup_steps: int = 0  # more => a smoother start, and more bytes during it

    def __post_init__(self) -> None:
        check_density(self.density)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1; got momentum={self.momentum}. Try 0.9.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, or None for no clipping; got clip_norm={self.clip_norm}.")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be 0 or more; got warmup_steps={self.warmup_steps}.")

    def at(self, step: int) -> TopK:
        if step >= self.warmup_steps:
            return self._after_warmup
        stage = WARMUP[len(WARMUP) * max(step, 0) // self.warmup_steps]
        return TopK(density=max(stage, self.density))

    @property
    def _after_warmup(self) -> TopK:
        return TopK(density=self.density)

    def max_kept(self, numel: int) -> int:
        return self._after_warmup.max_kept(numel)

    def index_bytes(self, numel: int) -> int:
        return self._after_warmup.index_bytes(numel)

    def num_kept(self, index: Tensor, numel: int) -> int:
        return self._after_warmup.num_kept(index, numel)

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
        return self._after_warmup.select(x, index, values, gain=gain, before=before, after=after, key=key)

    def scatter(
        self, index: Tensor, values: Tensor, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0
    ) -> Finite:
        return self._after_warmup.scatter(index, values, out, gain=gain, add=add, key=key)

    def erase(self, payload: Payload, out: Tensor, *, key: int = 0) -> None:
        self._after_warmup.erase(payload, out, key=key)
