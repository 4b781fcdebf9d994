"""One parameter's place in the buckets: where its gradient lies, and what has happened to it in this window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.comm import large_pages
from gradsync.comm.base import Loan

if TYPE_CHECKING:
    from gradsync.bucket import Bucket

SMALL_BYTES = 64 * 1024  # gradients up to here are brought into the bucket together, when it is full
STREAMED_BYTES = 256 * 1024  # gradients from here on are written past the cache: it could not hold them anyhow


class Slot:
    """One parameter's place in a bucket, and what has happened to it in the current window of backwards."""

    def __init__(self, name: str, param: Parameter, bucket: Bucket, *, view: Tensor, flat: Tensor, index: int) -> None:
        self.name = name
        self.param = param
        self.bucket = bucket
        self.view = view  # a part of bucket.buffer in the parameter's own shape and strides
        self.flat = flat  # the same part as it lies in memory: real numbers in a row
        self.fresh: Tensor | None = None  # a gradient that lies, in the same order, where autograd put it
        self.kept = (0, flat.numel())  # what of it, from and to, its reader takes from there
        self.is_small = flat.nbytes <= SMALL_BYTES
        self._is_plain = view.is_contiguous()
        self.index = index  # its flag's place in bucket.flags
        self.ready = False  # its gradient of the current backward is in
        self.held = False  # it has gathered gradients, and .grad was taken away meanwhile (see Engine)
        self.scaled = False  # already multiplied on its way in
        self.carried: Tensor | None = None  # an earlier mean that must not be averaged again

    @property
    def start(self) -> int:
        """Where in ``bucket.storage`` it begins, counted in real numbers."""
        return int(self.flat.storage_offset() - self.bucket.storage.storage_offset())

    @property
    def has_gradient(self) -> bool:
        """Whether the view holds something of this window (or .grad does)."""
        return self.held or self.param.grad is not None

    def collect(self, factor: float | None = None) -> None:
        """Bring ``param.grad`` into the bucket, where it stays: afterwards ``param.grad is view``.

        ``factor``: multiply on the way, which costs nothing as the gradient is copied anyhow. Only for a gradient
        that comes whole; one that was gathered over several backwards is scaled at the launch.
        """
        grad = self.param.grad
        if grad is None or grad is self.view:
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

    def bring_in(self, factor: float | None, *, may_lend: bool) -> None:
        """Have a gradient that came whole where its reducer looks for it: in the bucket, or where autograd put it."""
        if not (may_lend and self.lend(factor)):
            self.collect(factor)

    def keep_only(self, first: int, end: int) -> None:
        """Say which values of the bucket are read where autograd put them; the others will be copied into it."""
        start, numel = self.start, self.flat.numel()
        self.kept = (min(max(first - start, 0), numel), min(max(end - start, 0), numel))

    def lend(self, factor: float | None = None) -> bool:
        """Leave the gradient where autograd put it, for a reducer that reads it there; say whether that can be.

        What of it is not ``kept`` is multiplied by ``factor`` on its way into the bucket.
        """
        grad = self.param.grad
        assert grad is not None, "there is a gradient to lend"
        if self.held or grad is self.view or self.view.is_complex():
            return False
        first, end = self.kept
        is_whole = end - first == self.flat.numel()
        if not is_whole and (factor is None or first == end or grad.nbytes < STREAMED_BYTES):
            return False
        fresh = self._as_it_lies(grad.detach() if grad.requires_grad else grad)
        if fresh is None:
            return False
        self.fresh = fresh
        if not is_whole and factor is not None:
            for part in (slice(0, first), slice(end, None)):
                self._multiply_in(self.flat[part], fresh[part], factor)
        return True

    def _as_it_lies(self, grad: Tensor) -> Tensor | None:
        """The gradient's values in the order of the view's, without a copy; None where they lie otherwise."""
        if self._is_plain and grad.is_contiguous():
            return grad if grad.dim() == 1 else grad.view(-1)
        if grad.stride() != self.view.stride() or not torch.ops.aten.is_non_overlapping_and_dense(grad):
            return None
        return grad.as_strided(self.flat.shape, (1,))

    def loan(self) -> Loan:
        """What of a lent gradient is kept, for the bucket that it belongs into."""
        assert self.fresh is not None, "the gradient was lent"
        first, end = self.kept
        return Loan(self.start + first, self.fresh[first:end], self.bucket.factor)

    def recall(self) -> None:
        """Bring what was lent into the bucket after all."""
        if self.fresh is not None:
            torch.mul(self.fresh, self.bucket.factor, out=self.flat)
            self.release()

    def release(self) -> None:
        """What was lent, if anything, has been read: autograd may have its memory back. ``.grad`` is the view."""
        if self.fresh is not None:
            self.fresh, self.param.grad = None, self.view

    @property
    def source(self) -> Tensor:
        """What this rank gives, flat, before it is multiplied by ``source_gain``."""
        return self.flat if self.fresh is None else self.fresh

    @property
    def source_gain(self) -> float:
        return 1.0 if self.fresh is None else self.bucket.factor

    def shaped(self, flat: Tensor) -> Tensor:
        """Values that lie as this slot's do, seen in the parameter's shape."""
        values = torch.view_as_complex(flat.view(-1, 2)) if self.param.is_complex() else flat
        return values.as_strided(self.view.shape, self.view.stride())

    def flattened(self, values: Tensor) -> Tensor:
        """A copy of values in the parameter's shape, as this slot's lie."""
        if values.shape != self.param.shape:
            raise ValueError(f"parameter {self.name} has shape {tuple(self.param.shape)}; got {tuple(values.shape)}.")
        flat = large_pages.zeros(self.flat.numel(), real_dtype(values.dtype), self.flat.device)
        self.shaped(flat).copy_(values)
        return flat

    @staticmethod
    def _multiply_in(place: Tensor, grad: Tensor, factor: float) -> None:
        if not grad.is_cpu or grad.nbytes < STREAMED_BYTES:
            torch.mul(grad, factor, out=place)
            return
        from gradsync.streaming import scale_into  # Numba takes a second to import

        scale_into(place, grad, factor)

    def hold(self) -> None:
        """Take ``.grad`` away and keep what it gathered: clipping and ``step()`` then leave it alone."""
        if self.param.grad is not None:
            self.collect()
            self.param.grad = None
            self.held = True

    def set_aside(self) -> None:
        """Keep an earlier mean out of the window that begins; ``restore`` adds it back."""
        grad = self.param.grad
        if grad is None:
            return
        self.collect()
        # Zeros, as zero_grad(set_to_none=False) leaves them, are not worth a copy. (On CUDA asking would block.)
        if self.view.is_cuda or bool(self.view.any()):
            self.carried = self.view.detach().clone()
            self.view.zero_()

    def restore(self) -> None:
        """Add back what ``set_aside`` kept."""
        if self.carried is not None:
            self.view.add_(self.carried)
            self.carried = None

    def gathered(self) -> Tensor | None:
        """A copy of what the window has gathered so far."""
        if self.held:
            return self.view.detach().clone()
        return None if self.param.grad is None else self.param.grad.detach().clone()

    def holds_something(self) -> bool:
        """Whether there is more than zeros, which ``zero_grad(set_to_none=False)`` leaves."""
        return self.held or (self.param.grad is not None and bool(self.param.grad.any()))

    def forget(self) -> None:
        """Drop all that was gathered."""
        self.held, self.carried, self.param.grad = False, None, None

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
        assert isinstance(before, Slot)
        if before.held:
            self.view.data.copy_(before.view)
        self.held, self.carried = before.held, before.carried


class SparseSlot:
    """A parameter whose gradients are sparse: not in any bucket, moved as rows and their indices."""

    def __init__(self, name: str, param: Parameter) -> None:
        self.name = name
        self.param = param
        self.held: Tensor | None = None
        self.carried: Tensor | None = None

    @property
    def has_gradient(self) -> bool:
        return self.held is not None or self.param.grad is not None

    def collect(self) -> None:
        """Give back to ``.grad`` what was held; autograd's own sparse tensor stays where it is."""
        if self.held is not None:
            grad = self.param.grad
            self.param.grad = self.held if grad is None else self.held + grad
            self.held = None

    def hold(self) -> None:
        self.collect()
        self.held, self.param.grad = self.param.grad, None

    def set_aside(self) -> None:
        self.carried, self.param.grad = self.param.grad, None

    def restore(self) -> None:
        if self.carried is not None:
            grad = self.param.grad
            self.param.grad = self.carried if grad is None else self.carried + grad
            self.carried = None

    def holds_something(self) -> bool:
        return self.has_gradient

    def forget(self) -> None:
        self.held = self.carried = self.param.grad = None

    def gathered(self) -> Tensor | None:
        grad = self.held if self.held is not None else self.param.grad
        return None if grad is None else grad.detach().clone()

    def inherit(self, before: AnySlot) -> None:
        assert isinstance(before, SparseSlot)
        self.held, self.carried = before.held, before.carried


AnySlot = Slot | SparseSlot


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of the numbers which a complex one is made of."""
    return torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
