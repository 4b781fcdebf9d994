"""Checks of the tensors that collectives are given: what would go wrong far away is refused here."""

from __future__ import annotations

from torch import Tensor


def check_rows(whole: Tensor, part: Tensor, world_size: int, names: tuple[str, str]) -> None:
    """Check that ``whole`` is ``world_size`` rows of ``part``'s shape and dtype, both contiguous."""
    expected = (world_size, *part.shape)
    if tuple(whole.shape) != expected or whole.dtype != part.dtype:
        raise ValueError(
            f"{names[0]} must have shape {expected} and dtype {part.dtype}, a row of {names[1]}'s shape for each rank; "
            f"got {tuple(whole.shape)} and {whole.dtype}."
        )
    check_contiguous(whole, names[0])
    check_contiguous(part, names[1])


def check_exchange(tensor: Tensor, out: Tensor, world_size: int) -> None:
    """Check what an all-to-all is given: ``world_size`` rows each, of one shape and dtype, contiguous."""
    if tensor.shape != out.shape:
        raise ValueError(f"out must have tensor's shape {tuple(tensor.shape)}; got {tuple(out.shape)}.")
    if tensor.shape[:1] != (world_size,) or tensor.dtype != out.dtype:
        check_rows(tensor, out[0], world_size, ("tensor", "out[0]"))
    check_contiguous(tensor)
    check_contiguous(out, "out")


def check_contiguous(tensor: Tensor, name: str = "tensor") -> None:
    """Refuse tensors that a transport would have to copy behind the caller's back."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; got strides {tensor.stride()}. Pass {name}.contiguous().")
