"""Checks of collectives' arguments, and the fingerprint and description of a call that ranks compare."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradsync.errors import OutOfStep


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
    """Check an all-to-all's tensors: ``world_size`` rows each, of one shape and dtype, contiguous."""
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


_BITS = 40


@functools.cache
def code_of(text: str) -> int:
    """A number for a name, the same in every process."""
    return zlib.crc32(text.encode())


@functools.cache
def _dtype_code(dtype: torch.dtype) -> int:
    return code_of(str(dtype))


@functools.lru_cache(4096)  # a training loop makes the same calls again
def fingerprint(kind: int, op: str, dtype: torch.dtype, count: int, root: int = 0) -> int:
    """A number of 40 bits that is the same on ranks that make the same call."""
    mixed = (kind * 1_000_003 + code_of(op)) * 1_000_003 + _dtype_code(dtype)
    mixed = (mixed * 1_000_003 + root + 1) * 0x9E3779B97F4A7C15 + count * 0xC2B2AE3D27D4EB4F
    return (mixed >> 17) & ((1 << _BITS) - 1)


def describe_call(what: str, dtype: torch.dtype, count: int) -> str:
    """The text for a call in an error.

    >>> import torch
    >>> from gradsync.comm.checks import describe_call
    >>> describe_call("all_reduce(sum)", torch.float32, 8)
    'all_reduce(sum) of 8 float32 values'
    """
    return f"{what} of {count:,} {str(dtype).removeprefix('torch.')} value{'' if count == 1 else 's'}"


def different_calls(calls: Sequence[str] | Mapping[int, str]) -> OutOfStep:
    """The error that every rank raises; ``calls``: the description of each rank's call, in rank order or by rank."""
    asked: dict[str, list[str]] = {}
    for rank, call in calls.items() if isinstance(calls, Mapping) else enumerate(calls):
        asked.setdefault(call, []).append(str(rank))
    listed = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} asked for {call}" for call, ranks in asked.items()
    )
    return OutOfStep(
        f"the ranks make different calls: {listed}. Every rank must make the same calls in the same order, with "
        "tensors of the same size and dtype."
    )


def place_of(handle: str, handles: Sequence[str]) -> int:
    """The rank of a member in a list of handles, which must name each member once."""
    if len(set(handles)) < len(handles):
        raise ValueError(f"handles must name each member once; got {list(handles)}.")
    if handle not in handles:
        raise ValueError(f"this member's handle must be among the handles: expected {handle!r}; got {list(handles)}.")
    return list(handles).index(handle)
