"""Gradients of which this rank holds one slice of the mean: ``PartialGradient`` refuses to be read as if it were whole.

Under a strategy that shards the optimizer a rank gets the mean of its own slice of each bucket only. The rest of
``.grad`` is undefined. Norms and copies of it would be wrong without a sign, so they raise. Changing every value by
itself (``mul_``, ``clamp_``, ``zero_``) is right on the slice, which is all that the optimizer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_DESCRIBING = {  # they read no value
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_cpu", "is_cuda"),
    *("is_sparse", "is_sparse_csr", "is_mps", "is_xpu", "is_meta", "is_quantized", "is_nested", "itemsize", "nbytes"),
    *("_version", "grad", "size", "stride", "numel", "nelement", "dim", "element_size", "data_ptr", "is_contiguous"),
    *("is_floating_point", "is_complex", "storage_offset", "untyped_storage", "get_device", "type", "__hash__"),
    *("requires_grad_", "_is_view", "is_inference", "is_pinned", "__len__"),
}
_ELEMENTWISE = {  # they change each value by itself, so the slice comes out right
    *("add_", "sub_", "mul_", "div_", "neg_", "clamp_", "clamp_min_", "clamp_max_", "nan_to_num_", "fill_"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
    *("_foreach_add_", "_foreach_sub_", "_foreach_mul_", "_foreach_div_", "_foreach_neg_"),
    *("_foreach_clamp_min_", "_foreach_clamp_max_", "_amp_foreach_non_finite_check_and_unscale_"),
}
_ZEROING = {"zero_", "_foreach_zero_"}


class PartialGradient(Tensor):
    """The ``.grad`` of a parameter after a backward that left this rank only its slice of the mean.

    It shares the memory of the bucket. ``is_partial`` turns False when it is zeroed: from then on it is like any other.

    >>> import torch
    >>> from gradsync.buckets.partial import PartialGradient
    >>> grad = PartialGradient.of(torch.ones(3))
    >>> grad.mul_(0.5).shape
    torch.Size([3])
    >>> grad.norm()
    Traceback (most recent call last):
    ...
    ValueError: norm() would read gradients of which this rank has only its slice: ...
    """

    is_partial: bool

    @staticmethod
    def of(view: Tensor) -> PartialGradient:
        """``view`` itself, guarded; partial from the start."""
        made = view.detach().as_subclass(PartialGradient)
        made.is_partial = True
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = _name_of(func)
        given = list(_partial_among([*args, *(kwargs or {}).values()]))
        first = list(_partial_among(args[:1]))  # an operation in place writes to its first argument
        if name in _ZEROING:
            for grad in first:
                grad.is_partial = False
        elif given and name not in _DESCRIBING and not (name in _ELEMENTWISE and len(first) == len(given)):
            raise ValueError(
                f"{name}() would read gradients of which this rank has only its slice: `sharded` leaves each rank its "
                "share of the mean. For clipping and the norm use sync.clip_grad_norm_(max_norm), which takes the "
                "norm over all ranks; to look at whole gradients use another strategy, such as allreduce."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _name_of(func: Callable[..., Any]) -> str:
    name: str = func.__name__
    return str(getattr(func, "__self__").__name__) if name == "__get__" else name  # noqa: B009 - a descriptor's method


def _partial_among(values: Iterable[Any]) -> Iterable[PartialGradient]:
    for value in values:
        if isinstance(value, PartialGradient):
            if value.is_partial:
                yield value
        elif isinstance(value, list | tuple):
            yield from _partial_among(value)
