"""Arrays that are difficult for a sparse codec, and a check that decoded values plus residual are the input."""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.codecs.base import Codec, Payload, Residual

SIZES = [1, 2, 31, 33, 2049, 70_001]
KINDS = ["normal", "zeros", "equal", "few values", "mostly zeros", "rising", "denormal", "huge", "rows"]


def array(kind: str, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """``numel`` values of a kind."""
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(seed + numel), dtype=torch.float64)
    count = torch.arange(numel, dtype=torch.float64)
    values = {
        "normal": normal,
        "zeros": torch.zeros_like(normal),
        "equal": torch.full_like(normal, -0.5),
        "few values": (2 * normal).round() / 4,
        "mostly zeros": torch.where(normal > 2.7, normal, 0.0),
        "rising": 1 + count / max(numel, 1),
        "denormal": normal * 1e-42,
        "huge": normal * 1e37,
        "rows": normal * (count // 64 % 7 == 3),
    }[kind]
    if dtype == torch.float16:
        values = values.clamp(-1e4, 1e4)
    return values.to(dtype)


def empty_payload(codec: Codec, numel: int, dtype: torch.dtype = torch.float32) -> Payload:
    """A payload buffer filled with garbage."""
    return Payload(torch.full((codec.encoded_bytes(numel, dtype),), 0xA5, dtype=torch.uint8))


def decoded(codec: Codec, payload: Payload, like: Tensor, *, key: int = 0) -> Tensor:
    """The values of a payload."""
    out = torch.full_like(like, 7.0)
    codec.decode(payload, out, key=key)
    return out


def check_residual_completes_sent(
    codec: Codec, x: Tensor, *, gain: float = 1.0, key: int = 0, exact: bool = True
) -> Tensor:
    """Encode with a residual in place, a separate one and none; returns the values sent with a residual."""
    before = (array("normal", x.numel(), x.dtype, seed=5) * 0.3).to(x.dtype)
    y = x * gain + before
    apart, after = empty_payload(codec, x.numel(), x.dtype), torch.full_like(x, 7.0)
    codec.encode(x, apart, gain=gain, residual=Residual(before, after), key=key)
    same, residual = empty_payload(codec, x.numel(), x.dtype), before.clone()
    codec.encode(x, same, gain=gain, residual=Residual(residual, residual), key=key)
    assert torch.equal(apart, same)
    assert torch.equal(after, residual)
    out = decoded(codec, same, x, key=key)
    if exact:
        assert torch.equal(out + after, y)
    else:
        torch.testing.assert_close(out + after, y, rtol=1e-6, atol=1e-6 * float(y.abs().max()))
    without_residual, with_zero_residual = (
        empty_payload(codec, x.numel(), x.dtype),
        empty_payload(codec, x.numel(), x.dtype),
    )
    codec.encode(y, without_residual, key=key)
    codec.encode(y, with_zero_residual, residual=Residual(torch.zeros_like(y), after), key=key)
    assert torch.equal(without_residual, with_zero_residual)
    assert torch.equal(without_residual, same)
    return out
