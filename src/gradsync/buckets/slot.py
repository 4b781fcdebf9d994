"""One parameter's place in the buckets: where its gradient lies, and what has happened to it in this window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.buckets.partial import PartialGradient
from gradsync.comm import hugepages
from gradsync.comm.base import SourceSlice

if TYPE_CHECKING:
    from gradsync.buckets.bucket import Bucket

SMALL_BYTES = 64 * 1024  # gradients up to here are copied into the bucket together, when it is full
STREAMED_BYTES = 256 * 1024  # gradients from here on are written past the cache: it could not hold them anyhow


class Slot:
    """One parameter's place in a bucket, and what has happened to it in the current window of backwards."""

    def __init__(self, name: str, param: Parameter, bucket: Bucket, *, view: Tensor, flat: Tensor, index: int) -> None:
        self.name = name
        self.param = param
        self.bucket = bucket
        self.view = view  # a part of bucket.buffer in the parameter's own shape and strides
        self.flat = flat  # the same part in memory order, as real numbers
        # Which values (from, to) of the gradient the reducer reads where autograd put them; None: all are copied into
        # the bucket first. The reducer decides it once, when it is attached: see Reducer.place_gradients.
        self.in_place: tuple[int, int] | None = None
        self.external: Tensor | None = None  # the gradient where autograd put it, flat, while it is read there
        self.is_small = flat.nbytes <= SMALL_BYTES
        self._is_plain = view.is_contiguous()
        self.index = index  # its flag's place in bucket.flags
        self.ready = False  # its gradient of the current backward has arrived
        self.held = False  # it has accumulated gradients, and .grad is None meanwhile (see Engine)
        self.scaled = False  # already multiplied when it was copied in
        self.stashed: Tensor | None = None  # an earlier mean that must not be averaged again
        self.partial: PartialGradient | None = None  # .grad in place of the view, where only a slice of it is the mean

    def is_in_bucket(self, grad: Tensor | None) -> bool:
        """Whether a gradient is this slot's part of the bucket."""
        return grad is not None and (grad is self.view or grad is self.partial)

    def show_slice_only(self) -> None:
        """Let ``publish`` give out a gradient that can't be read: this rank has only its slice of the mean."""
        if self.partial is None:
            self.partial = PartialGradient.of(self.view)
        self.partial.is_partial = True

    @property
    def is_partial(self) -> bool:
        """Whether ``.grad`` is a mean of which this rank has only its slice."""
        return self.partial is not None and self.param.grad is self.partial and self.partial.is_partial

    @property
    def start(self) -> int:
        """Where in ``bucket.storage`` it begins, counted in real numbers."""
        return int(self.flat.storage_offset() - self.bucket.storage.storage_offset())

    @property
    def has_gradient(self) -> bool:
        """Whether the view holds something of this window (or .grad does)."""
        return self.held or self.param.grad is not None

    @property
    def held_gradient(self) -> Tensor | None:
        """What was accumulated, if ``.grad`` is None meanwhile; else None."""
        return self.view if self.held else None

    def collect(self, factor: float | None = None) -> None:
        """Bring ``param.grad`` into the bucket, where it stays: afterwards ``param.grad is view``.

        ``factor``: multiply while copying, which costs nothing. Only for a gradient of one backward; one that was
        accumulated over several backwards is scaled at the launch.
        """
        grad = self.param.grad
        if grad is None or self.is_in_bucket(grad):
            return  # nothing there, or autograd has added into the bucket itself
        with torch.no_grad():
            if self.held:
                self.view.add_(grad)
                self.held = False
            elif factor is None:
                self.view.copy_(grad)
            else:
                self._multiply_in(self.view, grad.detach(), factor)
                self.scaled = True
        self.param.grad = self.view

    def place(self, factor: float | None) -> None:
        """Put a gradient of one backward where its reducer reads it: in the bucket, or where autograd put it."""
        if not self.read_in_place(factor):
            self.collect(factor)

    def read_in_place(self, factor: float | None = None) -> bool:
        """Leave the gradient where autograd put it, if the reducer reads it there; returns whether that is possible.

        Values outside of ``in_place`` are multiplied by ``factor`` and written to the bucket.
        """
        grad = self.param.grad
        assert grad is not None, "there is a gradient to read"
        if self.in_place is None or self.held or self.is_in_bucket(grad) or self.view.is_complex():
            return False
        first, end = self.in_place
        is_whole = end - first == self.flat.numel()
        if not is_whole and (factor is None or first == end or grad.nbytes < STREAMED_BYTES):
            return False
        external = self._in_memory_order(grad.detach() if grad.requires_grad else grad)
        if external is None:
            return False
        self.external = external
        if not is_whole and factor is not None:
            for part in (slice(0, first), slice(end, None)):
                self._multiply_in(self.flat[part], external[part], factor)
        return True

    def _in_memory_order(self, grad: Tensor) -> Tensor | None:
        """The gradient's values in the memory order of the view, without a copy; None if the orders differ."""
        if self._is_plain and grad.is_contiguous():
            return grad if grad.dim() == 1 else grad.view(-1)
        if grad.stride() != self.view.stride() or not torch.ops.aten.is_non_overlapping_and_dense(grad):
            return None
        return grad.as_strided(self.flat.shape, (1,))

    def source_slice(self) -> SourceSlice:
        """The values that are read where autograd put them, and where in the bucket's buffer they belong."""
        assert self.external is not None and self.in_place is not None, "the gradient is read in place"
        first, end = self.in_place
        return SourceSlice(self.start + first, self.external[first:end], self.bucket.factor)

    def copy_in(self) -> None:
        """Copy a gradient that was to be read in place into the bucket after all."""
        if self.external is not None:
            torch.mul(self.external, self.bucket.factor, out=self.flat)
            self.release()

    def release(self) -> None:
        """The gradient was read in place: autograd may reuse its memory. ``.grad`` becomes the view."""
        if self.external is not None:
            self.external, self.param.grad = None, self.view

    @property
    def source(self) -> Tensor:
        """This rank's values, flat, before they are multiplied by ``source_gain``."""
        return self.flat if self.external is None else self.external

    @property
    def source_gain(self) -> float:
        return 1.0 if self.external is None else self.bucket.factor

    def shaped(self, flat: Tensor) -> Tensor:
        """Values in the memory order of this slot, viewed in the parameter's shape."""
        values = torch.view_as_complex(flat.view(-1, 2)) if self.param.is_complex() else flat
        return values.as_strided(self.view.shape, self.view.stride())

    def flattened(self, values: Tensor) -> Tensor:
        """A flat copy of values in the parameter's shape, in the memory order of this slot."""
        if values.shape != self.param.shape:
            raise ValueError(f"parameter {self.name} has shape {tuple(self.param.shape)}; got {tuple(values.shape)}.")
        flat = hugepages.zeros(self.flat.numel(), real_dtype(values.dtype), self.flat.device)
        self.shaped(flat).copy_(values)
        return flat

    @staticmethod
    def _multiply_in(place: Tensor, grad: Tensor, factor: float) -> None:
        if not grad.is_cpu or grad.nbytes < STREAMED_BYTES:
            torch.mul(grad, factor, out=place)
            return
        from gradsync.kernels.streaming import scale_into  # Numba takes a second to import

        scale_into(place, grad, factor)

    def hold(self) -> None:
        """Set ``.grad`` to None and keep what it accumulated: clipping and ``step()`` then leave it alone."""
        if self.param.grad is not None:
            self.collect()
            self.param.grad = None
            self.held = True

    def stash(self) -> None:
        """Keep an earlier mean out of the window that begins; ``unstash`` adds it back."""
        grad = self.param.grad
        if grad is None:
            return
        self.collect()
        if self.partial is not None:
            self.partial.is_partial = False  # from here on it holds what this rank accumulates
        # Zeros, as zero_grad(set_to_none=False) leaves them, are not worth a copy. (On a GPU asking would block.)
        if not self.view.is_cpu or bool(self.view.any()):
            self.stashed = self.view.detach().clone()
            self.view.zero_()

    def unstash(self) -> None:
        """Add back what ``stash`` kept."""
        if self.stashed is not None:
            self.view.add_(self.stashed)
            self.stashed = None

    def gathered(self) -> Tensor | None:
        """A copy of what the window has accumulated so far."""
        if self.held:
            return self.view.detach().clone()
        if self.is_partial:
            return None  # without the other ranks' slices it is of no use
        return None if self.param.grad is None else self.param.grad.detach().clone()

    def holds_something(self) -> bool:
        """Whether it holds more than zeros, which ``zero_grad(set_to_none=False)`` leaves."""
        return self.held or self.is_partial or (self.param.grad is not None and bool(self.param.grad.any()))

    def forget(self) -> None:
        """Drop everything that was accumulated."""
        self.held, self.stashed, self.param.grad = False, None, None

    def is_displaced(self) -> bool:
        """Whether ``model.to(...)`` has re-pointed the gradient, and with it the view, out of the bucket.

        Refuses a parameter that has another dtype or device by now.
        """
        if self.param.dtype != self.bucket.dtype or self.param.device != self.bucket.device:
            raise ValueError(
                f"parameter {self.name} was converted to {self.param.dtype} on {self.param.device} after "
                "synchronize(). Convert the model first, or close() and attach again."
            )
        return self.view.untyped_storage().data_ptr() != self.bucket.storage.untyped_storage().data_ptr()

    def inherit(self, before: AnySlot) -> None:
        """Take over what an earlier plan's slot of this parameter holds. (``.grad`` itself comes with ``collect``.)"""
        if before.held_gradient is not None:
            self.view.data.copy_(before.held_gradient)
        self.held, self.stashed = before.held_gradient is not None, before.stashed


class LooseSlot:
    """A parameter whose gradient lies in no bucket: autograd's own tensor is what the optimizer reads."""

    is_partial = False

    def __init__(self, name: str, param: Parameter) -> None:
        self.name = name
        self.param = param
        self.held: Tensor | None = None
        self.stashed: Tensor | None = None

    @property
    def has_gradient(self) -> bool:
        return self.held is not None or self.param.grad is not None

    @property
    def held_gradient(self) -> Tensor | None:
        return self.held

    def collect(self) -> None:
        """Give back to ``.grad`` what was held."""
        self.param.grad, self.held = _added(self.held, self.param.grad), None

    def scale(self, factor: float) -> None:
        """Multiply what the window has accumulated. See [Note: weight zero]."""
        self.collect()
        if self.param.grad is not None:
            grad = self.param.grad.detach()
            self.param.grad = grad.mul_(factor) if factor else torch.zeros_like(grad)

    def hold(self) -> None:
        """Set ``.grad`` to None and keep what it accumulated: clipping and ``step()`` then leave it alone."""
        self.collect()
        self.held, self.param.grad = self.param.grad, None

    def stash(self) -> None:
        """Keep an earlier mean out of the window that begins; ``unstash`` adds it back."""
        self.stashed, self.param.grad = self.param.grad, None

    def unstash(self) -> None:
        """Add back what ``stash`` kept."""
        self.param.grad, self.stashed = _added(self.stashed, self.param.grad), None

    def holds_something(self) -> bool:
        """Whether it holds more than zeros, which ``zero_grad(set_to_none=False)`` leaves."""
        return self.held is not None or (self.param.grad is not None and bool(self.param.grad.any()))

    def forget(self) -> None:
        """Drop everything that was accumulated."""
        self.held = self.stashed = self.param.grad = None

    def gathered(self) -> Tensor | None:
        """A copy of what the window has accumulated so far."""
        grad = self.held if self.held is not None else self.param.grad
        return None if grad is None else grad.detach().clone()

    def inherit(self, before: AnySlot) -> None:
        """Take over what an earlier plan's slot of this parameter holds. (``.grad`` itself is the parameter's.)"""
        self.held, self.stashed = before.held_gradient, before.stashed
        if isinstance(before, Slot):  # its bucket is released
            self.held = None if self.held is None else self.held.detach().clone()
            if self.param.grad is before.view:
                self.param.grad = before.view.detach().clone()


class SparseSlot(LooseSlot):
    """A parameter whose gradients are sparse: sent as rows and their indices."""

    def holds_something(self) -> bool:
        return self.has_gradient


def _added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of two gradients, in the first one's memory where both are dense."""
    if first is None or second is None:
        return second if first is None else first
    with torch.no_grad():
        dense = first.layout == torch.strided and second.layout == torch.strided
        return first.add_(second) if dense else first + second


AnySlot = Slot | LooseSlot


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a complex dtype; any other dtype is returned as it is."""
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
