"""A chain encodes the values that a sparse codec keeps, and adds the next codec's error to the residual."""

from __future__ import annotations

import pytest
import torch

from gradsync import spec
from gradsync.codecs.base import Codec, Payload, Residual
from gradsync.codecs.cast import Bf16
from gradsync.codecs.chain import Chain
from gradsync.codecs.dense import Dense
from gradsync.codecs.dgc import Dgc
from gradsync.codecs.quantize import Int4, Int8
from gradsync.codecs.randomk import RandomK
from gradsync.codecs.sign import Sign
from gradsync.codecs.topk import TopK
from tests.codecs.arrays import KINDS, array, decoded, empty_payload

CHAINS = [
    Chain(TopK(density=0.1), Int8()),
    Chain(TopK(density=0.01), Sign()),
    Chain(RandomK(density=0.1), Bf16()),
    Chain(TopK(density=0.3), RandomK(density=0.5), Int4()),
]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "huge"])  # sums of those are inf in some codecs
@pytest.mark.parametrize("codec", CHAINS, ids=str)
def test_residual_completes_the_decoded_values(codec: Chain, kind: str) -> None:
    for numel in (1, 33, 20_001):
        x, before = array(kind, numel), 0.3 * array("normal", numel, seed=5)
        y, residual = x * 0.37 + before, before.clone()
        payload = empty_payload(codec, numel)
        codec.encode(x, payload, gain=0.37, residual=Residual(residual, residual), key=2)
        out = decoded(codec, payload, x, key=2)
        assert int((out != 0).sum()) <= codec.first.max_kept(numel)
        torch.testing.assert_close(out + residual, y, rtol=1e-6, atol=1e-6)


def test_chain_equals_its_two_codecs() -> None:
    x, codec = array("normal", 20_001), Chain(TopK(exact=True), Int8())
    payload = empty_payload(codec, x.numel())
    codec.encode(x, payload)
    where = torch.sort(x.abs(), descending=True, stable=True).indices[: codec.first.max_kept(x.numel())].sort().values
    inner = empty_payload(Int8(), where.numel())
    Int8().encode(x[where], inner)
    expected = torch.zeros_like(x).index_copy(0, where, decoded(Int8(), inner, x[where]))
    assert torch.equal(decoded(codec, payload, x), expected)


def test_scale_ignores_unused_capacity() -> None:
    """The sign's scale is a mean: zeros in it would make it too small."""
    x, codec = torch.zeros(10_000), Chain(TopK(), Sign())
    x[[5, 700, 9000]] = torch.tensor([2.0, -2.0, 2.0])
    payload = empty_payload(codec, 10_000)
    codec.encode(x, payload)
    assert torch.equal(decoded(codec, payload, x), x)


@pytest.mark.parametrize("codec", CHAINS, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_merge_equals_the_default_implementation(codec: Chain, with_residual: bool) -> None:
    x = array("normal", 5000)
    received = [empty_payload(codec, 5000) for _ in range(2)]
    for seed, payload in enumerate(received):
        codec.encode(array("normal", 5000, seed=seed + 1), payload, key=6)
    results = []
    for merge in (Codec.merge, Chain.merge):
        own, residual = x.clone(), 0.3 * array("normal", 5000, seed=5)
        kept = Residual(residual, residual) if with_residual else None
        payload = empty_payload(codec, 5000)
        assert merge(codec, own, received, payload, gain=0.5, residual=kept, key=6, out=own, out_gain=3.0) is True
        results.append((payload, own, residual))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_are_propagated(bad: float) -> None:
    codec, x = Chain(TopK(), Int8()), array("normal", 10_000)
    x[77] = bad
    payload = empty_payload(codec, 10_000)
    codec.encode(x, payload, residual=Residual(torch.zeros_like(x), torch.empty_like(x)))
    assert codec.decode(payload, torch.empty(10_000)) is False


def test_16_bit_values_with_a_32_bit_residual() -> None:
    x, residual, codec = array("normal", 3000, torch.bfloat16), 0.3 * array("normal", 3000, seed=5), CHAINS[0]
    y = x.float() * 0.5 + residual
    payload, out = empty_payload(codec, 3000, x.dtype), torch.empty_like(x)
    codec.encode(x, payload, gain=0.5, residual=Residual(residual, residual))
    codec.decode(payload, out)
    assert int((out != 0).sum()) > 200
    torch.testing.assert_close(out.float() + residual, y, rtol=0.01, atol=1e-3)


def test_encoded_bytes_counts_everything_and_all_is_written() -> None:
    codec = Chain(TopK(), Int8())
    assert 4_000_000 / codec.encoded_bytes(1_000_000) > 175
    assert codec.encoded_bytes(0) == 0
    one, other = empty_payload(codec, 10_000), Payload(~empty_payload(codec, 10_000))
    for payload in (one, other):
        codec.encode(array("mostly zeros", 10_000), payload)
    assert torch.equal(one, other)
    nothing, empty = torch.empty(0), empty_payload(codec, 0)
    codec.encode(nothing, empty, residual=Residual(nothing, nothing))
    codec.erase(empty, nothing)
    assert codec.decode(empty, nothing) is True
    assert codec.merge(nothing, [empty], empty, out=nothing) is True
    with pytest.raises(ValueError, match="expected a payload of"):
        codec.decode(one, torch.empty(20_000))


def test_sums_as_is_none_if_positions_are_sent() -> None:
    assert Chain(RandomK(), Bf16()).sums_as == torch.bfloat16
    assert Chain(RandomK(), Int8()).sums_as is None
    assert Chain(TopK(), Bf16()).sums_as is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_residual_has_the_dtype_of_the_kept_values_on_its_way(dtype: torch.dtype) -> None:
    codec = Chain(RandomK(density=0.1), Bf16())  # random-k keeps float32 whatever it is given
    x, residual = array("normal", 20_001).to(dtype), torch.zeros(20_001, dtype=dtype)
    payload = Payload(torch.zeros(codec.encoded_bytes(x.numel(), dtype), dtype=torch.uint8))
    codec.encode(x, payload, residual=Residual(residual, residual), key=2)
    sent = decoded(codec, payload, x, key=2)
    assert sent.any()
    assert torch.allclose(sent.double() + residual.double(), x.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_chain_takes_warmup_and_momentum_from_its_first_codec() -> None:
    codec = Chain(Dgc(warmup_steps=100, momentum=0.8, clip_norm=2.0), Int8())
    assert (codec.momentum, codec.clip_norm) == (0.8, 2.0)
    assert codec.at(0) == Chain(TopK(density=0.25), Int8())
    assert codec.at(100) == Chain(TopK(density=0.001), Int8())
    still = Chain(TopK(), Int8())
    assert still.at(5) is still
    assert {still: 1}[Chain(TopK(), Int8())] == 1


def test_erase_zeroes_the_sent_positions() -> None:
    codec, x = Chain(TopK(density=0.1), Int8()), array("rising", 1000)
    payload, mask = empty_payload(codec, 1000), torch.ones(1000)
    codec.encode(x, payload)
    codec.erase(payload, mask)
    assert torch.equal(mask == 0, decoded(codec, payload, x) != 0)


def test_chain_refuses_codecs_that_cannot_be_chained() -> None:
    codec = TopK()
    assert Chain(codec) is codec
    assert Chain(Int8()) == Int8()
    with pytest.raises(ValueError, match="at least one codec; got none"):
        Chain()
    for wrong in ((Int8(), TopK()), (TopK(), Dense(), Int8())):
        with pytest.raises(ValueError, match="Begin with topk, randomk or dgc"):
            Chain(*wrong)
    with pytest.raises(ValueError, match="made of codecs"):
        Chain(TopK(), "int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["chain(topk(density=0.05), int8)", "chain(topk, randomk(density=0.5), int4)"])
def test_spec_round_trip(text: str) -> None:
    codec = spec.parse(text, kind="codec")
    assert isinstance(codec, Chain)
    assert spec.render(codec) == text
    assert spec.parse(spec.render(codec), kind="codec") == codec
    assert spec.render(spec.parse("chain(topk(density=0.05))", kind="codec")) == "topk(density=0.05)"
