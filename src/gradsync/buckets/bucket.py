"""Buckets: flat buffers whose views are the parameters' gradients, and the plan: which parameter is where."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.buckets.slot import AnySlot, LooseSlot, Slot, SparseSlot, real_dtype

MIB = 1 << 20
BUCKET_BYTES = 25 * MIB  # larger => fewer, longer collectives; smaller => they start earlier in backward
FIRST_BUCKET_BYTES = 1 * MIB  # small, so that the wire is busy soon after backward begins
# The last min(LAST_BYTES, 2 buckets) of gradients go in quarter-size buckets, the same amount before them in half-size
# ones: nothing hides the time that the last buckets take on the wire.
LAST_BYTES = 18 * MIB
LITTLE = 8  # a bucket filled to less than 1/LITTLE of its cap takes in the next parameter, however large that is
ALIGN_BYTES = 64  # every gradient begins on a cache line: vector loads never straddle


class Allocator(Protocol):
    """Allocates the memory of buckets: a transport may place it in a segment of its own."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...


class Bucket:
    """A flat buffer whose views are the parameters' ``.grad``: the unit of overlap.

    ``storage`` is the buffer and, behind it, one flag per parameter: 1 if this rank has a gradient. The flags are
    summed over the ranks with the rest, and show which parameters no rank used, without another collective.
    ``multiple_of``: the storage is padded to a multiple of this number of values.
    """

    def __init__(
        self, index: int, params: Sequence[tuple[str, Parameter]], allocator: Allocator, *, multiple_of: int = 1
    ) -> None:
        first = params[0][1]
        self.index = index
        self.dtype = first.dtype
        self.device = first.device
        real = real_dtype(first.dtype)
        reals_per_value = 2 if first.dtype.is_complex else 1
        align = max(1, ALIGN_BYTES // first.element_size())
        offsets, end = [], 0
        for _, param in params:
            offsets.append(end)
            end += -(-param.numel() // align) * align
        numel = end * reals_per_value
        padded = -(-(numel + len(params)) // multiple_of) * multiple_of
        self.storage = allocator.allocate(padded, real, first.device)
        self.buffer = self.storage[:numel]
        self.flags = self.storage[numel : numel + len(params)]
        values = torch.view_as_complex(self.buffer.view(-1, 2)) if first.dtype.is_complex else self.buffer
        self.slots = [
            Slot(
                name,
                param,
                self,
                view=_view_like(values, offset, param),
                flat=self.buffer[offset * reals_per_value : (offset + param.numel()) * reals_per_value],
                index=index,
            )
            for index, ((name, param), offset) in enumerate(zip(params, offsets, strict=True))
        ]
        self.factor = 1.0  # scales this rank's gradients to its share of the mean
        self.loss_scale = 1.0  # the factor of the GradScaler in them
        self.may_overflow = False  # a GradScaler looks for inf among them
        self.may_roll_back = False  # the step may be undone: reducers write their new state to second copies
        self.missing = len(self.slots)  # slots whose gradient of the current backward has not arrived
        self.launched = False

    @property
    def num_bytes(self) -> int:
        return self.storage.numel() * self.storage.element_size()

    def begin_step(self) -> None:
        """Begin a synchronizing backward."""
        self.missing = len(self.slots)
        self.launched = False
        for slot in self.slots:
            slot.ready = slot.scaled = False
            slot.external = None

    def finalize(self, factor: float) -> None:
        """Make the buffer this rank's contribution: every gradient times ``factor``, zeros where there is none, flags.

        [Note: weight zero] A factor of zero fills with zeros instead of multiplying: a rank that contributes
        nothing must not make the sum NaN.

        A gradient that the reducer reads in place is left where it is; the reducer multiplies it.
        """
        self.factor = factor
        lies_outside, unscaled, unused = [], [], []
        for slot in self.slots:
            if factor == 0.0:
                slot.external = None
            if slot.external is not None:
                continue
            grad = slot.param.grad
            if grad is None and not slot.held:
                unused.append(slot)
            elif grad is None or slot.is_in_bucket(grad) or slot.held:
                slot.collect()
                if not slot.scaled:
                    unscaled.append(slot)
            elif factor == 0.0 or not slot.read_in_place():
                lies_outside.append((slot, grad))
        self.flags.fill_(1.0)
        if lies_outside or unscaled or unused or factor == 0.0:  # else all of it is read in place, or scaled already
            with torch.no_grad():
                self._complete(factor, lies_outside, unscaled, unused)

    def _complete(
        self, factor: float, outside: Sequence[tuple[Slot, Tensor]], unscaled: Sequence[Slot], unused: Sequence[Slot]
    ) -> None:
        if outside:
            self._bring_in(outside, factor)
        if factor == 0.0:
            self.buffer.zero_()
        elif factor != 1.0 and len(unscaled) == len(self.slots):
            self.buffer.mul_(factor)
        elif factor != 1.0:
            for slot in unscaled:
                slot.view.mul_(factor)
        for slot in unused:
            slot.view.zero_()  # it still holds the last mean
            self.flags[slot.index].zero_()  # not `= 0.0`: that copies from the host, and blocks on a GPU

    @staticmethod
    def _bring_in(outside: Sequence[tuple[Slot, Tensor]], factor: float) -> None:
        """Copy gradients from where autograd put them, all at once: most of them are small."""
        views = [slot.view for slot, _ in outside]
        torch._foreach_copy_(views, [grad for _, grad in outside])
        if factor != 1.0:
            torch._foreach_mul_(views, factor)
        for slot, _ in outside:
            slot.scaled, slot.param.grad = True, slot.view

    def release(self) -> None:
        """The reducer has read all gradients that it reads in place."""
        for slot in self.slots:
            slot.release()

    def checksum(self) -> float | Tensor:
        """The sum of all values that this rank contributes; a tensor if they are on a GPU, which is not waited for."""
        sums = [slot.source.detach().double().sum() * slot.source_gain for slot in self.slots]
        return sum(float(part) for part in sums) if self.storage.is_cpu else torch.stack(sums).sum()

    def publish(self) -> None:
        """After the reduction: ``.grad`` is the view wherever any rank had a gradient, and stays None elsewhere."""
        absent = [slot for slot in self.slots if slot.param.grad is None and not slot.held]
        # Read the flags only where this rank lacks a gradient: on a GPU it blocks until the collective is done.
        counts = self.flags.tolist() if absent else []
        for slot in self.slots:
            slot.held, slot.external = False, None
            shown = slot.view if slot.partial is None else slot.partial
            if slot.param.grad is not shown and (slot not in absent or counts[slot.index] > 0):
                slot.param.grad = shown
            if slot.stashed is not None:
                slot.unstash()


class BucketPlan:
    """Which parameter lies in which bucket, in the order in which the buckets' collectives start on every rank."""

    def __init__(
        self,
        layout: Sequence[Sequence[str]],
        sparse: Sequence[str],
        params: Mapping[str, Parameter],
        allocator: Allocator,
        *,
        loose: Sequence[str] = (),
        multiple_of: int = 1,
    ) -> None:
        self.layout = [list(names) for names in layout]
        self.buckets = [
            Bucket(index, [(name, params[name]) for name in names], allocator, multiple_of=multiple_of)
            for index, names in enumerate(layout)
        ]
        self.sparse = [SparseSlot(name, params[name]) for name in sparse]
        self.loose = [LooseSlot(name, params[name]) for name in loose]  # gradients that stay with their rank
        self.fingerprint = fingerprint_of(self.layout, sparse)
        self.is_provisional = False  # buckets are laid out anew after the first backward, whose order is not known yet

    def slots(self) -> Iterator[AnySlot]:
        for bucket in self.buckets:
            yield from bucket.slots
        yield from self.sparse
        yield from self.loose

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def dissolve(self) -> None:
        """Break the reference cycle of slots and buckets: else their memory waits for the garbage collector."""
        for bucket in self.buckets:
            bucket.slots = []


def fingerprint_of(layout: Sequence[Sequence[str]], sparse: Sequence[str]) -> int:
    """One number for a plan: two ranks whose buckets would differ have different ones."""
    digest = hashlib.sha256(json.dumps([[list(names) for names in layout], list(sparse)]).encode()).digest()
    return int.from_bytes(digest[:6], "big")  # 48 bits: a float64 holds it exactly


def plan_buckets(
    params: Sequence[tuple[str, Parameter]],
    *,
    cap_bytes: int = BUCKET_BYTES,
    first_cap_bytes: int = FIRST_BUCKET_BYTES,
) -> list[list[str]]:
    """Group parameters, given in the order in which their gradients become ready, into buckets of at most a size.

    A bucket has one dtype and one device; the buckets come in the order in which they will be full. A parameter that is
    larger than the cap has a bucket of its own, together with the parameters before it if those fill less than an
    eighth of the cap: each bucket costs about 100 µs. The last ``min(LAST_BYTES, 2 buckets)`` use quarter-size buckets,
    the same amount before them half-size ones, because no computation hides the last collectives.

    >>> import torch
    >>> from gradsync.buckets.bucket import plan_buckets
    >>> params = [(name, torch.nn.Parameter(torch.zeros(4))) for name in "jihgfedcba"]
    >>> plan_buckets(params, cap_bytes=64, first_cap_bytes=16)
    [['j'], ['i', 'h'], ['g'], ['f'], ['e'], ['d'], ['c'], ['b'], ['a']]
    """
    if cap_bytes <= 0 or first_cap_bytes <= 0:
        raise ValueError(f"a bucket must hold at least one byte; got {cap_bytes=} {first_cap_bytes=}.")
    open_buckets: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    full: list[tuple[int, list[str]]] = []  # (when its last gradient is ready, names)
    last_ready: dict[tuple[torch.dtype, torch.device], int] = {}
    to_come = sum(param.numel() * param.element_size() for _, param in params)
    for position, (name, param) in enumerate(params):
        kind = (param.dtype, param.device)
        num_bytes = param.numel() * param.element_size()
        cap = _cap_near_the_end(cap_bytes, to_come + sizes.get(kind, 0))
        if not full:
            cap = min(cap, first_cap_bytes)
        if kind in open_buckets and sizes[kind] + num_bytes > cap and sizes[kind] * LITTLE >= cap:
            full.append((last_ready[kind], open_buckets.pop(kind)))
            sizes[kind] = 0
        open_buckets.setdefault(kind, []).append(name)
        sizes[kind] = sizes.get(kind, 0) + num_bytes
        last_ready[kind] = position
        to_come -= num_bytes
    full += [(last_ready[kind], names) for kind, names in open_buckets.items()]
    return [names for _, names in sorted(full)]


def _cap_near_the_end(cap_bytes: int, left_bytes: int) -> int:
    last = min(2 * cap_bytes, LAST_BYTES)
    return -(-cap_bytes // (4 if left_bytes <= last else 2 if left_bytes <= 2 * last else 1))


def _view_like(values: Tensor, offset: int, param: Parameter) -> Tensor:
    """A view of ``values`` in the parameter's strides where it is dense (channels-last too), else in plain order.

    Autograd adds into a gradient fastest when it is laid out as the parameter is.
    """
    dense = torch.ops.aten.is_non_overlapping_and_dense(param)
    strides = param.stride() if dense else torch.empty(param.shape, device="meta").stride()
    return values.as_strided(param.shape, strides, values.storage_offset() + offset)
