"""int8 and int4: error, size, unbiasedness, zero blocks, and equal bits of kernels and torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsync.codecs import Int4, Int8, Payload, Residual, Sign, Ternary
from gradsync.codecs.base import Codec
from gradsync.codecs.blockwise import Blockwise

BLOCKWISE = [
    Int8(),
    Int8(block=96),
    Int8(rounding="stochastic"),
    Int4(),
    Int4(rounding="stochastic"),
    Sign(),
    Sign(block=256),
    Ternary(),
]


def random(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def decoded(codec: Codec, x: Tensor, *, key: int = 0) -> Tensor:
    payload = Payload(torch.empty(codec.encoded_bytes(x.numel(), x.dtype), dtype=torch.uint8))
    codec.encode(x, payload, key=key)
    out = torch.empty_like(x)
    codec.decode(payload, out, key=key)
    return out


def hard_values(numel: int, dtype: torch.dtype) -> Tensor:
    """Blocks of normal, zero, huge and denormal values, and with NaN and inf."""
    x, largest = random(numel, dtype), torch.finfo(dtype).max
    for start, kind in enumerate((0.0, largest, 1e-43, 1e-37)):
        x[300 + 512 * start : 812 + 512 * start] *= kind if kind != largest else 1.0
        if kind == largest:
            x[300 + 512 * start : 812 + 512 * start] = largest
    x[-700], x[-2] = float("nan"), float("inf")
    return x


@pytest.mark.parametrize("codec", BLOCKWISE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kernels_and_torch_give_the_same_bits(
    codec: Blockwise, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [(random(numel, dtype), 0.3) for numel in (1, 33, 255, 257, 1025, 5000)]
    cases.append((hard_values(5001, dtype), 1.0))
    results = []
    for with_torch in (False, True):
        if with_torch:
            monkeypatch.setattr(Blockwise, "_kernels", lambda self, like: None)
        for x, gain in cases:
            before, after = 0.01 * random(x.numel(), dtype, seed=1), torch.full_like(x, 7.0)
            before[300:812] = 0
            payload = Payload(torch.full((codec.encoded_bytes(x.numel(), dtype),), 9, dtype=torch.uint8))
            codec.encode(x, payload, gain=gain, residual=Residual(before, after), key=11)
            out, total = torch.full_like(x, 7.0), before.clone()
            finite = codec.decode(payload, out, gain=0.7), codec.decode(payload, total, gain=3.0, add=True)
            results.append((finite, payload, after, out, total))
    for kernel, plain in zip(results[: len(cases)], results[len(cases) :], strict=True):
        assert kernel[0] == plain[0]
        for ours, theirs in zip(kernel[1:], plain[1:], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("codec", [Int8(), Int4()], ids=str)
def test_error_is_at_most_half_a_step_and_residual_is_exact(codec: Blockwise) -> None:
    x = random(50_000) * 10.0 ** random(50_000, seed=1)
    payload, after = Payload(torch.empty(codec.encoded_bytes(50_000), dtype=torch.uint8)), torch.empty_like(x)
    codec.encode(x, payload, residual=Residual(torch.zeros_like(x), after))
    out = torch.empty_like(x)
    codec.decode(payload, out)
    assert torch.equal(out + after, x)
    whole = x[: 50_000 // 256 * 256].view(-1, 256)
    step = whole.abs().amax(1, keepdim=True) / codec.levels
    assert (after[: whole.numel()].view(-1, 256).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("codec", [Int8(rounding="stochastic"), Int4(rounding="stochastic"), Ternary()], ids=str)
def test_stochastic_rounding_is_unbiased(codec: Blockwise) -> None:
    x, keys = random(1000), 400
    mean = torch.stack([decoded(codec, x, key=key) for key in range(keys)]).double().mean(0)
    step = torch.cat([part.abs().amax().expand(part.numel()) for part in x.split(codec.block)]).double() / codec.levels
    # The variance is at most step² / 4. None of the 1000 means is off by more than 5 standard deviations.
    deviation = (mean - x.double()) / (step * 0.5 / keys**0.5)
    assert deviation.abs().max() < 5
    assert abs(deviation.mean()) < 5 / 1000**0.5


def test_random_numbers_are_independent_across_keys_and_positions() -> None:
    codec, x = Int8(rounding="stochastic"), torch.full((4096,), 0.3)
    x[::256] = 1.0
    up = torch.stack([decoded(codec, x, key=key) > 0.3 for key in range(64)]).double()
    up = up[:, torch.arange(4096) % 256 != 0]
    centred = (up - up.mean()) / up.std()
    between_keys = (centred[1:] * centred[:-1]).mean()
    between_neighbours = (centred[:, 1:] * centred[:, :-1]).mean()
    assert abs(between_keys) < 0.01
    assert abs(between_neighbours) < 0.01


@pytest.mark.parametrize(("codec", "ratio"), [(Int8(), 3.9), (Int4(), 7.7), (Sign(), 30), (Ternary(), 15)], ids=str)
@pytest.mark.parametrize("numel", [1_000_000, 10_007, 100_003])
def test_compression_ratio(codec: Blockwise, ratio: float, numel: int) -> None:
    assert 4 * numel / codec.encoded_bytes(numel) >= ratio * (1 if numel > 50_000 else 0.95)


def test_decode_reports_overflow_only_where_it_happens() -> None:
    codec, x = Int8(), torch.tensor([1e30, 1e38])
    payload = Payload(torch.empty(codec.encoded_bytes(2), dtype=torch.uint8))
    codec.encode(x, payload)
    out = torch.empty(2)
    assert codec.decode(payload, out, gain=2.0) is True
    assert codec.decode(payload, out, gain=100.0) is False
    assert torch.equal(out, torch.tensor([0.0, float("inf")]))


@pytest.mark.parametrize("block", [0, 31, 100, 8192, -256])
def test_invalid_block_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match=r"block must be a multiple of 32, up to 4096.*got block=.*Try block=\d+"):
        Int8(block=block)


def test_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="rounding must be one of nearest, stochastic; got rounding='up'"):
        Int8(rounding="up")  # type: ignore[arg-type]


def zero_block_case(codec: Blockwise, dtype: torch.dtype) -> tuple[Tensor, Tensor, Payload]:
    """Values with some zero blocks, a residual in all blocks, and a payload of another rank with few nonzero blocks."""
    numel = 7 * codec.block + 5
    x, before, theirs = random(numel, dtype), 0.01 * random(numel, dtype, seed=1), random(numel, dtype, seed=2)
    for block in (1, 4, 5, 7):
        x[block * codec.block : (block + 1) * codec.block] = 0
    x[4 * codec.block] = -0.0
    for block in (0, 1, 2, 3, 4, 7):
        theirs[block * codec.block : (block + 1) * codec.block] = 0
    payload_received = Payload(torch.empty(codec.encoded_bytes(numel, dtype), dtype=torch.uint8))
    codec.encode(theirs, payload_received, key=3)
    return x, before, payload_received


@pytest.mark.parametrize("codec", [Int8(), Int8(rounding="stochastic"), Int4()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_residual_of_a_zero_block_is_unchanged(codec: Blockwise, dtype: torch.dtype) -> None:
    x, before, payload_received = zero_block_case(codec, dtype)
    after, out = torch.empty_like(x), torch.full_like(x, 7.0)
    payload = Payload(torch.full((codec.encoded_bytes(x.numel(), dtype),), 9, dtype=torch.uint8))
    codec.encode(x, payload, residual=Residual(before, after), key=5)
    codec.decode(payload, out, key=5)
    for block in range(8):
        part = slice(block * codec.block, (block + 1) * codec.block)
        is_zero = block in (1, 4, 5, 7)
        assert bool((out[part] == 0).all()) == is_zero
        assert torch.equal(after[part], before[part]) == is_zero
    # In block 5 the owner of a shard has no gradient, but another rank has.
    codec.merge(x, [payload_received], payload, residual=Residual(before, after), key=5, out=out)
    for block in range(8):
        part = slice(block * codec.block, (block + 1) * codec.block)
        assert torch.equal(after[part], before[part]) == (block in (1, 4, 7))


@pytest.mark.parametrize("codec", BLOCKWISE, ids=str)
def test_kernels_and_torch_agree_on_zero_blocks(codec: Blockwise, monkeypatch: pytest.MonkeyPatch) -> None:
    x, before, payload_received = zero_block_case(codec, torch.float32)
    results = []
    for with_torch in (False, True):
        if with_torch:
            monkeypatch.setattr(Blockwise, "_kernels", lambda self, like: None)
        for received in ([], [payload_received]):
            after, out = torch.empty_like(x), torch.empty_like(x)
            payload = Payload(torch.full((codec.encoded_bytes(x.numel()),), 9, dtype=torch.uint8))
            codec.merge(x, received, payload, gain=0.3, residual=Residual(before, after), key=5, out=out)
            results.append((payload, after, out))
    for ours, plain in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("codec", [Sign(), Ternary()], ids=str)
def test_coarse_codecs_send_the_residual_of_zero_blocks(codec: Blockwise) -> None:
    x, before, _ = zero_block_case(codec, torch.float32)
    after = torch.empty_like(x)
    payload = Payload(torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8))
    codec.encode(x, payload, residual=Residual(before, after))
    assert all(not torch.equal(a, b) for a, b in zip(after.split(codec.block), before.split(codec.block), strict=True))
    assert codec.elidable_blocks(x.numel()) is None
