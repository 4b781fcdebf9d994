"""Arrays that are hard on a sparse codec, and the law that none of them may break."""

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
    """Room for a payload, with rubbish in it."""
    return Payload(torch.full((codec.encoded_bytes(numel, dtype),), 0xA5, dtype=torch.uint8))


def sent(codec: Codec, payload: Payload, like: Tensor, *, key: int = 0) -> Tensor:
    """What a payload says."""
    out = torch.full_like(like, 7.0)
    codec.decode(payload, out, key=key)
    return out


def check_law(codec: Codec, x: Tensor, *, gain: float = 1.0, key: int = 0, exactly: bool = True) -> Tensor:
    """Encode, in place and not, with and without a residual; return what was sent when there was one."""
    before = (array("normal", x.numel(), x.dtype, seed=5) * 0.3).to(x.dtype)
    y = x * gain + before
    apart, after = empty_payload(codec, x.numel(), x.dtype), torch.full_like(x, 7.0)
    codec.encode(x, apart, gain=gain, residual=Residual(before, after), key=key)
    same, residual = empty_payload(codec, x.numel(), x.dtype), before.clone()
    codec.encode(x, same, gain=gain, residual=Residual(residual, residual), key=key)
    assert torch.equal(apart, same)
    assert torch.equal(after, residual)
    out = sent(codec, same, x, key=key)
    if exactly:
        assert torch.equal(out + after, y)
    else:
        torch.testing.assert_close(out + after, y, rtol=1e-6, atol=1e-6 * float(y.abs().max()))
    forgetful, whole = empty_payload(codec, x.numel(), x.dtype), empty_payload(codec, x.numel(), x.dtype)
    codec.encode(y, forgetful, key=key)
    codec.encode(y, whole, residual=Residual(torch.zeros_like(y), after), key=key)
    assert torch.equal(forgetful, whole)
    assert torch.equal(forgetful, same)
    return out
