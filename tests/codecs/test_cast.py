"""fp16 and bf16: the rounding of torch, sums of payloads, and the rounding error in the residual."""

from __future__ import annotations

import pytest
import torch

from gradsync.codecs import Bf16, Fp16, Payload, Residual
from gradsync.codecs.cast import Cast

each_cast = pytest.mark.parametrize("codec", [Fp16(), Bf16()], ids=str)


@each_cast
@pytest.mark.parametrize("numel", [0, 1, 3, 4, 100_003])
def test_encode_casts_as_torch_and_zeroes_the_padding(codec: Cast, numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    payload = Payload(torch.full((codec.encoded_bytes(numel),), 0xA5, dtype=torch.uint8))
    codec.encode(x, payload, gain=0.3)
    short = payload.view(codec.sums_as)
    assert torch.equal(short[:numel], (x * 0.3).to(codec.sums_as))
    assert short[numel:].numel() == -numel % 4
    assert not short[numel:].any(), "the padding is summed, too"


@each_cast
def test_residual_is_exactly_the_rounding_error(codec: Cast) -> None:
    x, residual = torch.randn(50_000, generator=torch.Generator().manual_seed(0)), torch.zeros(50_000)
    payload = Payload(torch.empty(codec.encoded_bytes(50_000), dtype=torch.uint8))
    codec.encode(x, payload, residual=Residual(residual, residual))
    out = torch.empty_like(x)
    codec.decode(payload, out)
    assert torch.equal(out + residual, x)
    assert residual.any()


def test_gain_is_applied_before_the_cast() -> None:
    """4 ranks with 40000 each: the sum would be inf in float16, the mean is not."""
    codec, x = Fp16(), torch.full((8,), 40_000.0)
    total = torch.zeros(8, dtype=torch.float16)
    for _ in range(4):
        payload = Payload(torch.empty(codec.encoded_bytes(8), dtype=torch.uint8))
        codec.encode(x, payload, gain=1 / 4)
        total += payload.view(torch.float16)
    out = torch.empty(8)
    assert codec.decode(Payload(total.view(torch.uint8)), out) is True
    assert torch.equal(out, x)
