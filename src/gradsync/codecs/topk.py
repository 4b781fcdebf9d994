"""``topk``: the largest values, each with its position.

``TopK`` is the codec. ``_Plan`` holds everything that follows from a size and a density, and how positions are stored.
float32 on a CPU is selected by a kernel in one pass over the values (kernels/codecs/topk.py), anything else by torch.

[Note: fixed sizes] How many values are kept depends on the values, and a GPU's host must not wait to learn it. So the
torch code always handles k positions, together with a mask of those that are in use; the others change nothing.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs import sparse
from gradsync.codecs.base import Finite, Payload, padded
from gradsync.codecs.random import sequence_start, stratified_positions
from gradsync.codecs.scratch import scratch
from gradsync.codecs.sparse import Sparse, check_density, kernels, kernels_support, num_to_keep

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_SAMPLE_KEY = 0  # the same sample in every step: the selection depends on the values only
_SAMPLE_START = sequence_start(_SAMPLE_KEY)


@spec.register("codec", "topk")
@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """Keeps the largest values by magnitude; the others stay in the residual until they have grown large enough.

    Zeros are never sent. NaN and inf count as larger than every number. For the format see [Note: index of top-k].

    >>> import torch
    >>> from gradsync.codecs import Payload, TopK
    >>> codec, x = TopK(density=0.25), torch.tensor([1.0, -8.0, 2.0, 3.0])
    >>> payload = Payload(torch.empty(codec.encoded_bytes(4), dtype=torch.uint8))
    >>> codec.encode(x, payload)
    >>> out = torch.empty(4)
    >>> codec.decode(payload, out), out.tolist()
    (True, [0.0, -8.0, 0.0, 0.0])
    >>> 4_000_000 / TopK(density=0.01).encoded_bytes(1_000_000) > 75     # the positions are counted
    True
    """

    density: float = 0.01  # lower => fewer bytes, larger residual
    exact: bool = False  # True => always the k largest; False => sometimes up to 15 % fewer, to avoid a second pass

    def __post_init__(self) -> None:
        check_density(self.density)

    def max_kept(self, numel: int) -> int:
        return num_to_keep(numel, self.density)

    def index_bytes(self, numel: int) -> int:
        return _Plan.of(self, numel).index_bytes

    def num_kept(self, index: Tensor, numel: int) -> int:
        plan = _Plan.of(self, numel)
        if index.device.type == "cpu":
            return int(kernels("topk").count(plan.high(index).view(torch.uint64).numpy()))
        return plan.k  # see [Note: fixed sizes]

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
        plan = _Plan.of(self, x.numel())
        if kernels_support(x, values, *(tensor for tensor in (before, after) if tensor is not None)):
            return _select_by_kernel(plan, x, index, values, gain=gain, before=before, after=after)
        y = sparse.compensated(x, gain=gain, before=before)
        keep = _largest(y, plan)
        where, used = _first_set(keep, plan.k)
        values.copy_(torch.where(used, sparse.narrow(y[where], values.dtype), 0.0))
        plan.write(where, used, index)
        if after is not None:
            sent = sparse.narrow(y, values.dtype).to(y.dtype)
            rest = torch.where(sent.isfinite(), y - sent, 0.0)
            after.copy_(torch.where(keep, rest, y))
        return int(used.sum()) if used.is_cpu else plan.k

    def scatter(
        self, index: Tensor, values: Tensor, out: Tensor, *, gain: float = 1.0, add: bool = False, key: int = 0
    ) -> Finite:
        plan = _Plan.of(self, out.numel())
        if kernels_support(out, values):
            run = kernels("topk")
            return _scatter_by_kernel(plan, index, values, out, gain=gain, op=run.ADD if add else run.SET)
        where, used = (entries[: values.numel()] for entries in plan.read(index))
        return sparse.scatter_at(values[: plan.k], where, out, gain=gain, add=add, used=used)

    def erase(self, payload: Payload, out: Tensor, *, key: int = 0) -> None:
        if out.numel() == 0:
            return
        plan = _Plan.of(self, out.numel())
        index = payload[: plan.index_bytes]
        if kernels_support(out):
            unread = scratch("topk unread values", plan.k, out.dtype)
            _scatter_by_kernel(plan, index, unread, out, gain=1.0, op=kernels("topk").ZERO)
        else:
            where, used = plan.read(index)
            sparse.write_at(out, where, torch.zeros_like(where, dtype=out.dtype), used)


@dataclass(frozen=True)
class _Plan:
    """What follows from a size and a density: how many values are kept, how they are found, how positions are stored.

    [Note: index of top-k] Positions are ascending, so their high bits are stored in unary. The lowest 8 bits of each
    position (16 if few are kept) are stored as they are. The bits above give the block of 256 (65536) positions. They
    are one bit string: for each block a 1 for every value kept in it, then a 0. So the i-th value, in block b, sets bit
    i + b. At a density of 1 % that is 9.4 bits per position.
    """

    numel: int
    k: int
    low_bytes: int  # per position: its low bits
    low_section_bytes: int  # for all positions, padded
    index_bytes: int
    num_samples: int
    sample_ranks: tuple[int, ...]  # positions, in the sample sorted in descending order, of the thresholds to try
    min_kept: int  # fewer than this above a threshold => try the next one
    capacity: int  # of the buffer: if more values are above the threshold, it is raised during the pass

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(codec: TopK, numel: int) -> _Plan:
        k = codec.max_kept(numel)
        low_bytes = 1 if numel <= 2048 * k else 2
        low_section_bytes = padded(k * low_bytes)
        num_bits = k + (numel >> 8 * low_bytes) + 1
        # About 128 of the sample should be among the k largest, but the sample must stay cheap.
        num_samples = min(numel, max(4096, min(128 * numel // k, numel // 64)))
        hits = num_samples * k / numel
        # The threshold is aimed below the k-th largest by the sampling error.
        rank = k if num_samples == numel else math.ceil(hits + (4 if codec.exact else 2) * math.sqrt(hits))
        return _Plan(
            numel=numel,
            k=k,
            low_bytes=low_bytes,
            low_section_bytes=low_section_bytes,
            index_bytes=low_section_bytes + padded(-(-num_bits // 8)),
            num_samples=num_samples,
            sample_ranks=tuple(min(r, num_samples) for r in (rank, 2 * rank)),
            min_kept=k if codec.exact else math.ceil(0.85 * k),
            capacity=k + k // 4 + 1024,
        )

    def low(self, index: Tensor) -> Tensor:
        return index[: self.low_section_bytes]

    def high(self, index: Tensor) -> Tensor:
        return index[self.low_section_bytes :]

    def write(self, where: Tensor, used: Tensor, index: Tensor) -> None:
        """Write ascending positions, those in use, to an index, with torch."""
        index.zero_()
        low = torch.stack([where >> 8 * place & 0xFF for place in range(self.low_bytes)], dim=1)
        self.low(index)[: low.numel()] = torch.where(used.unsqueeze(1), low, 0).to(torch.uint8).view(-1)
        high = self.high(index)
        unused = high.numel() * 8  # the bit that entries which are not in use set: it is not stored
        bits = torch.zeros(unused + 1, dtype=torch.uint8, device=index.device)
        place = torch.arange(self.k, device=index.device) + (where >> 8 * self.low_bytes)
        bits.scatter_(0, torch.where(used, place, unused), 1)
        high.copy_((bits[:unused].view(-1, 8) << _bit_positions(index.device)).sum(1))

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The positions in an index, with torch, and which of them are in use: see [Note: fixed sizes].

        An index of another codec is refused on a CPU. On a GPU, positions that do not exist are ignored.
        """
        bits = self.high(index).unsqueeze(1) >> _bit_positions(index.device) & 1
        is_set = bits.view(-1) != 0
        high, used = _first_set(is_set, self.k)
        where = high - torch.arange(self.k, device=index.device)
        low = self.low(index)[: self.k * self.low_bytes].view(-1, self.low_bytes).to(torch.int64)
        for place in reversed(range(self.low_bytes)):
            where = where << 8 | low[:, place]
        exists = used & (where < self.numel)
        if index.is_cpu and (int(is_set.sum()) > self.k or not torch.equal(exists, used)):
            raise _invalid_payload(self)
        return torch.where(exists, where, 0), exists


def _bit_positions(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _invalid_payload(plan: _Plan) -> ValueError:
    return ValueError(
        f"expected a payload with at most {plan.k} positions below {plan.numel}; it has others. "
        "It was not made by this codec, or changed on the way."
    )


class _KernelScratch(threading.local):
    """The scratch arrays of the selection kernel, by dtype, one set per thread; grown when a plan needs more."""

    def __init__(self) -> None:
        self._arrays: dict[torch.dtype, tuple[Any, ...]] = {}
        self._sizes: dict[torch.dtype, tuple[int, int]] = {}

    def of(self, plan: _Plan, dtype: torch.dtype) -> tuple[Any, ...]:
        num_samples, capacity = self._sizes.get(dtype, (0, 0))
        if plan.num_samples > num_samples or plan.capacity > capacity:
            num_samples, capacity = max(plan.num_samples, num_samples), max(plan.capacity, capacity)
            run = kernels("topk")
            sample, kept, chunk = (torch.empty(n, dtype=dtype) for n in (num_samples, capacity, run.CHUNK))
            positions, counts = (torch.empty(n, dtype=torch.int64) for n in (capacity, run.NUM_COUNTS))
            arrays = (sample, sample.view(_BITS[dtype]), positions, kept, kept.view(_BITS[dtype]), chunk, counts)
            self._arrays[dtype] = tuple(array.numpy() for array in arrays)
            self._sizes[dtype] = num_samples, capacity
        return self._arrays[dtype]


_scratch = _KernelScratch()


def _select_by_kernel(
    plan: _Plan, x: Tensor, index: Tensor, values: Tensor, *, gain: float, before: Tensor | None, after: Tensor | None
) -> int:
    if after is not None and before is None:
        sparse.compensate(x, after, gain=gain, before=None)
        x, gain = after, 1.0
    given = x.numpy()
    return int(
        kernels("topk").select(
            given,
            given if before is None else before.numpy(),
            given if after is None else after.numpy(),
            sparse.compensation_mode(x, gain, before, after),
            sparse.as_scalar(gain, x),
            plan.sample_ranks,
            plan.min_kept,
            plan.num_samples,
            plan.capacity,
            _SAMPLE_START,
            *_scratch.of(plan, x.dtype),
            values.numpy(),
            plan.low(index).numpy(),
            plan.low_bytes,
            plan.high(index).view(torch.uint64).numpy(),
        )
    )


def _scatter_by_kernel(plan: _Plan, index: Tensor, values: Tensor, out: Tensor, *, gain: float, op: int) -> bool:
    run = kernels("topk")
    status = run.scatter(
        plan.low(index).numpy(),
        plan.low_bytes,
        plan.high(index).view(torch.uint64).numpy(),
        values.numpy(),
        out.numpy(),
        sparse.as_scalar(gain, out),
        op,
    )
    if status == run.INVALID:
        raise _invalid_payload(plan)
    return bool(status == run.FINITE)


def _largest(y: Tensor, plan: _Plan) -> Tensor:
    """A mask of the values that the kernel would choose, with torch. See [Note: fixed sizes]."""
    bits = _BITS[y.dtype]
    magnitudes = y.view(bits) & torch.iinfo(bits).max
    sample = magnitudes[stratified_positions(plan.num_samples, plan.numel, _SAMPLE_KEY, y.device)]
    sample = sample.to(torch.int64).sort(descending=True).values
    threshold = torch.ones((), dtype=torch.int64, device=y.device)
    for rank in reversed(plan.sample_ranks):
        candidate = sample[rank - 1].clamp(min=1)
        threshold = torch.where((magnitudes >= candidate).sum() >= plan.min_kept, candidate, threshold)
    # If more than k values reach the threshold, the k largest are kept; of equal ones the first.
    threshold = torch.maximum(magnitudes.topk(plan.k).values[-1].to(torch.int64), threshold)
    larger, equal = magnitudes > threshold, magnitudes == threshold
    return larger | equal & (equal.cumsum(0) <= plan.k - larger.sum())


def _first_set(mask: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The positions of the first k elements that are set, and which of these entries are in use; 0 for the others."""
    beyond = k  # all other elements write to one more entry, which is dropped
    entry = torch.where(mask, mask.cumsum(0) - 1, beyond).clamp(max=beyond)
    positions = torch.zeros(k + 1, dtype=torch.int64, device=mask.device)
    positions.scatter_(0, entry, torch.arange(mask.numel(), device=mask.device))
    used = torch.arange(k, device=mask.device) < mask.sum()
    return torch.where(used, positions[:k], 0), used
