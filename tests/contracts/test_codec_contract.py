"""The contract of all codecs. A new codec is tested by being listed in ``ALL_CODECS``."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsync import spec
from gradsync.codecs.base import Codec, Payload, Residual

ALL_CODECS = [
    "dense",
    "fp16",
    "bf16",
    "int8",
    "int8(block=32)",
    "int8(rounding='stochastic')",
    "int4",
    "int4(rounding='stochastic')",
    "sign",
    "ternary",
    "topk(density=0.01)",
    "topk(density=0.3)",
    "randomk(density=0.1)",
    "dgc(density=0.01)",
    "chain(topk(density=0.01), int8)",
    "chain(topk(density=0.1), int4)",
    "chain(randomk(density=0.1), int8)",
]
each_codec = pytest.mark.parametrize("text", ALL_CODECS)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, 256, 257, 5000]
GUARD = 64  # bytes, and values, on either side of the memory that a codec may write to


def codec_of(text: str) -> Codec:
    codec = spec.parse(text, kind="codec")
    assert isinstance(codec, Codec)
    return codec


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + numel)).to(dtype)


def empty_payload(codec: Codec, numel: int, dtype: torch.dtype = torch.float32) -> Payload:
    """A payload buffer filled with garbage."""
    return Payload(torch.full((codec.encoded_bytes(numel, dtype),), 0xA5, dtype=torch.uint8))


def encoded(codec: Codec, x: Tensor, *, gain: float = 1.0, residual: Residual | None = None, key: int = 0) -> Payload:
    payload = empty_payload(codec, x.numel(), x.dtype)
    codec.encode(x, payload, gain=gain, residual=residual, key=key)
    return payload


def decoded(codec: Codec, payload: Payload, like: Tensor, *, gain: float = 1.0, key: int = 0) -> Tensor:
    out = torch.full_like(like, 7.0)
    assert codec.decode(payload, out, gain=gain, key=key) is True
    return out


def assert_residual_completes_decoded(codec: Codec, x: Tensor, before: Tensor, *, gain: float, key: int) -> None:
    """The decoded values plus the residual are the input, up to one rounding of the larger."""
    after = torch.full_like(x, 7.0)
    payload = encoded(codec, x, gain=gain, residual=Residual(before, after), key=key)
    sent = decoded(codec, payload, x, key=key)
    y = x.double() * gain + before.double()
    size = torch.stack([(x * gain).abs(), before.abs(), sent.abs(), after.abs()]).amax(0).double()
    unit = torch.finfo(x.dtype).eps
    error = (sent.double() + after.double() - y).abs()
    # y itself is rounded twice (gain, residual), and the new residual once.
    assert (error <= 1.5 * unit * size + 2 * torch.finfo(x.dtype).smallest_normal * unit).all(), (x, sent, after)


def test_every_registered_codec_is_listed() -> None:
    listed = {text.partition("(")[0] for text in ALL_CODECS}
    assert listed == set(spec.names("codec"))


@each_codec
def test_spec_round_trip(text: str) -> None:
    assert spec.parse(spec.render(codec_of(text)), kind="codec") == codec_of(text)


@each_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encoded_bytes_is_a_multiple_of_8_and_monotonic(text: str, dtype: torch.dtype) -> None:
    codec = codec_of(text)
    sizes = [codec.encoded_bytes(numel, dtype) for numel in range(0, 3000, 7)]
    assert sizes[0] == 0
    assert all(size % 8 == 0 for size in sizes)
    assert sizes == sorted(sizes)


@each_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", SIZES)
def test_residual_completes_the_decoded_values(text: str, dtype: torch.dtype, numel: int) -> None:
    x, before = values(numel, dtype), 0.3 * values(numel, dtype, seed=1)
    assert_residual_completes_decoded(codec_of(text), x, before, gain=0.37, key=numel)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    text=st.sampled_from(ALL_CODECS),
    numel=st.integers(0, 3000),
    dtype=st.sampled_from(DTYPES[:2]),
    gain=st.floats(-4.0, 4.0, width=32),
    key=st.integers(0, 2**64 - 1),
    seed=st.integers(0, 99),
)
def test_residual_completes_any_values(
    text: str, numel: int, dtype: torch.dtype, gain: float, key: int, seed: int
) -> None:
    spread = values(numel, dtype, seed) * 10.0 ** (4 * values(numel, dtype, seed + 1))
    spread = spread.clamp(-1e4, 1e4)  # fp16 goes no further than 65504
    assert_residual_completes_decoded(codec_of(text), spread, values(numel, dtype, seed + 2), gain=gain, key=key)


@each_codec
@pytest.mark.parametrize("name", ["zeros", "denormal", "tiny", "equal", "huge"])
def test_extreme_values(text: str, name: str) -> None:
    normal, largest = values(3000, torch.float32), torch.finfo(torch.float32).max
    x = {
        "zeros": torch.zeros(3000),
        "denormal": normal * 1e-42,
        "tiny": normal * 1e-37,
        "equal": torch.full((3000,), -0.5),
        "huge": torch.where(normal > 0, largest, -largest),
    }[name]
    codec = codec_of(text)
    if name == "huge" and text in ("fp16", "bf16"):
        assert codec.decode(encoded(codec, x), torch.empty_like(x)) is False  # out of range is reported
        return
    assert_residual_completes_decoded(codec, x, torch.zeros_like(x), gain=1.0, key=1)
    if name == "zeros":
        assert not decoded(codec, encoded(codec, x, key=2), x, key=2).any()


@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_decode_reports_nonfinite_values(text: str, bad: float) -> None:
    codec, x = codec_of(text), values(2000, torch.float32)
    if "randomk" in text:
        x[:] = bad  # a single one may not be drawn, and would stay in the residual
    x[1234] = bad
    after = torch.zeros_like(x)
    payload = encoded(codec, x, residual=Residual(torch.zeros_like(x), after))
    for add in (False, True):
        out = torch.zeros_like(x)
        assert codec.decode(payload, out, add=add) is False
        assert not out.isfinite().all()
    other = torch.zeros_like(x)
    fine = encoded(codec, torch.zeros_like(x))
    assert codec.merge(torch.zeros_like(x), [fine, payload], empty_payload(codec, 2000), out=other) is False


@each_codec
def test_decode_ignores_nonfinite_values_that_were_in_out(text: str) -> None:
    codec, x = codec_of(text), values(2000, torch.float32)
    assert codec.decode(encoded(codec, x), torch.full_like(x, float("nan")), add=True) is True


@each_codec
@pytest.mark.parametrize("numel", SIZES)
def test_encode_is_the_same_with_residual_in_place_separate_or_none(text: str, numel: int) -> None:
    codec, x, before = codec_of(text), values(numel, torch.float32), values(numel, torch.float32, seed=1)
    apart, same = torch.full_like(x, 7.0), before.clone()
    one = encoded(codec, x, gain=0.5, residual=Residual(before, apart), key=3)
    two = encoded(codec, x, gain=0.5, residual=Residual(same, same), key=3)
    none = encoded(codec, x * 0.5 + before, key=3)
    assert torch.equal(one, two)
    assert torch.equal(one, none)
    assert torch.equal(apart, same)
    assert torch.equal(before, values(numel, torch.float32, seed=1)), "`before` is not written to"


@each_codec
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("offset", [0, 3])
def test_encode_and_decode_write_only_within_their_arguments(text: str, numel: int, offset: int) -> None:
    """For tensors at any address, and a payload at any multiple of 8 bytes."""
    codec, start = codec_of(text), GUARD + offset
    size = codec.encoded_bytes(numel)
    x = torch.full((numel + 2 * GUARD,), 7.0)
    after, out = x.clone(), x.clone()
    x[start : start + numel] = values(numel, torch.float32)
    buffer = torch.full((size + 2 * GUARD + 8,), 0x7E, dtype=torch.uint8)
    payload, inner = Payload(buffer[GUARD + 8 : GUARD + 8 + size]), slice(start, start + numel)
    codec.encode(x[inner], payload, residual=Residual(after[inner].zero_(), after[inner]), key=1)
    codec.decode(payload, out[inner], key=1)
    aligned = encoded(codec, values(numel, torch.float32), key=1)
    assert torch.equal(payload, aligned)
    assert torch.equal(out[inner], decoded(codec, aligned, values(numel, torch.float32), key=1))
    for tensor in (after, out):
        assert (tensor[:start] == 7).all()
        assert (tensor[start + numel :] == 7).all()
    assert (buffer[: GUARD + 8] == 0x7E).all()
    assert (buffer[GUARD + 8 + size :] == 0x7E).all()


@each_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_scales_and_adds(text: str, dtype: torch.dtype) -> None:
    codec, x = codec_of(text), values(1500, dtype)
    payload = encoded(codec, x, key=4)
    plain = decoded(codec, payload, x, key=4)
    torch.testing.assert_close(decoded(codec, payload, x, gain=0.25, key=4), plain * 0.25)
    total = values(1500, dtype, seed=1)
    expected = total + plain * 0.25
    assert codec.decode(payload, total, gain=0.25, add=True, key=4) is True
    torch.testing.assert_close(total, expected)


@each_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_received", [0, 1, 3])
def test_merge_gives_the_bits_of_the_default_implementation(text: str, dtype: torch.dtype, num_received: int) -> None:
    codec = codec_of(text)
    for numel in SIZES:
        x, before = values(numel, dtype), 0.1 * values(numel, dtype, seed=1)
        received = [encoded(codec, values(numel, dtype, seed=2 + i), key=9) for i in range(num_received)]
        results = []
        for merge in (type(codec).merge, Codec.merge):
            after, out, payload = torch.full_like(x, 7.0), torch.full_like(x, 7.0), empty_payload(codec, numel, dtype)
            residual = Residual(before, after)
            finite = merge(codec, x, received, payload, gain=0.6, residual=residual, key=9, out=out, out_gain=0.5)
            assert finite is True
            results.append((payload, after, out))
            assert torch.equal(out, decoded(codec, payload, x, gain=0.5, key=9)), (
                "the owner has the values that the other ranks decode"
            )
        for ours, plain in zip(*results, strict=True):
            assert torch.equal(ours, plain)
        in_place = x.clone()
        codec.merge(in_place, received, empty_payload(codec, numel, dtype), gain=0.6, key=9, out=in_place)
        apart = torch.full_like(x, 7.0)
        codec.merge(x, received, empty_payload(codec, numel, dtype), gain=0.6, key=9, out=apart)
        assert torch.equal(in_place, apart)


@each_codec
def test_randomness_depends_only_on_the_key(text: str) -> None:
    codec, x = codec_of(text), values(2000, torch.float32)
    first = encoded(codec, x, key=5)
    torch.manual_seed(99)
    assert torch.equal(first, encoded(codec, x, key=5))
    if "stochastic" in text or "ternary" in text:
        assert not torch.equal(first, encoded(codec, x, key=6))


@each_codec
def test_payloads_with_sums_as_can_be_summed(text: str) -> None:
    codec = codec_of(text)
    if codec.sums_as is None:
        return
    parts = [values(999, torch.float32, seed=seed) for seed in range(3)]
    payloads = [encoded(codec, part, gain=1 / 3, key=2) for part in parts]
    total = Payload(sum(payload.view(codec.sums_as) for payload in payloads).view(torch.uint8))  # type: ignore[union-attr]
    expected = torch.stack([decoded(codec, payload, parts[0], key=2) for payload in payloads]).sum(0)
    unit = torch.finfo(codec.sums_as).eps
    torch.testing.assert_close(decoded(codec, total, parts[0], key=2), expected, rtol=4 * unit, atol=4 * unit)


def test_importing_codecs_does_not_import_numba() -> None:
    code = "import sys, gradsync.codecs; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=180, check=False).returncode == 0
