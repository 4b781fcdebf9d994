"""sign: one bit per value, the mean magnitude of a block, and +1 for zero."""

from __future__ import annotations

import torch

from gradsync.codecs import Payload, Residual, Sign


def decoded(x: torch.Tensor, block: int = 1024) -> torch.Tensor:
    codec = Sign(block=block)
    payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    codec.encode(x, payload)
    out = torch.empty_like(x)
    assert codec.decode(payload, out)
    return out


def test_decoded_is_sign_times_mean_magnitude_of_the_block() -> None:
    x = torch.randn(2500, generator=torch.Generator().manual_seed(0))
    out = decoded(x, block=512)
    for values, values_out in zip(x.split(512), out.split(512), strict=True):
        torch.testing.assert_close(values_out, values.sign() * values.abs().mean())
        assert values_out.abs().unique().numel() == 1


def test_zero_is_positive_even_if_negative_zero() -> None:
    out = decoded(torch.tensor([0.0, -0.0, 3.0, -3.0]))
    assert torch.equal(out, torch.tensor([1.5, 1.5, 1.5, -1.5]))


def test_mean_of_the_largest_numbers_does_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    for numel in (1, 3, 7, 1000, 1024, 3001):
        assert torch.allclose(decoded(torch.full((numel,), -largest)), torch.full((numel,), -largest))


def test_feedback_makes_the_running_mean_converge() -> None:
    """The sum of n steps approaches n times the value, although each step is coarse."""
    codec, x, total = Sign(), torch.randn(2000, generator=torch.Generator().manual_seed(1)), torch.zeros(2000)
    residual, payload = torch.zeros(2000), Payload(torch.empty(codec.encoded_bytes(2000), dtype=torch.uint8))
    for _ in range(300):
        codec.encode(x, payload, residual=Residual(residual, residual))
        codec.decode(payload, total, gain=1 / 300, add=True)
    torch.testing.assert_close(total + residual / 300, x, rtol=1e-3, atol=1e-4)
    assert (total - x).abs().mean() < 0.1 * x.abs().mean()
