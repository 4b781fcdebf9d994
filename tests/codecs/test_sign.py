"""sign: one bit a value, the mean magnitude of a block, and +1 for zero."""

from __future__ import annotations

import torch

from gradsync.codecs import Payload, Residual, Sign


def sent(x: torch.Tensor, block: int = 1024) -> torch.Tensor:
    codec = Sign(block=block)
    payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    codec.encode(x, payload)
    out = torch.empty_like(x)
    assert codec.decode(payload, out)
    return out


def test_it_is_the_sign_times_the_mean_magnitude_of_the_block() -> None:
    x = torch.randn(2500, generator=torch.Generator().manual_seed(0))
    out = sent(x, block=512)
    for values, said in zip(x.split(512), out.split(512), strict=True):
        torch.testing.assert_close(said, values.sign() * values.abs().mean())
        assert said.abs().unique().numel() == 1


def test_zero_is_positive_whatever_its_own_sign() -> None:
    out = sent(torch.tensor([0.0, -0.0, 3.0, -3.0]))
    assert torch.equal(out, torch.tensor([1.5, 1.5, 1.5, -1.5]))


def test_a_mean_of_the_largest_numbers_does_not_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    for numel in (1, 3, 7, 1000, 1024, 3001):
        assert torch.allclose(sent(torch.full((numel,), -largest)), torch.full((numel,), -largest))


def test_with_feedback_everything_arrives_in_time() -> None:
    """What is sent in n steps comes near to n times the value, however coarse each step is."""
    codec, x, total = Sign(), torch.randn(2000, generator=torch.Generator().manual_seed(1)), torch.zeros(2000)
    left, payload = torch.zeros(2000), Payload(torch.empty(codec.encoded_bytes(2000), dtype=torch.uint8))
    for _ in range(300):
        codec.encode(x, payload, residual=Residual(left, left))
        codec.decode(payload, total, gain=1 / 300, add=True)
    torch.testing.assert_close(total + left / 300, x, rtol=1e-3, atol=1e-4)
    assert (total - x).abs().mean() < 0.1 * x.abs().mean()
