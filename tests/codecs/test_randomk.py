"""Random-k: equal positions on all ranks, an exact residual, and payloads that can be summed."""

from __future__ import annotations

import pytest
import torch

from gradsync import spec
from gradsync.codecs import randomk
from gradsync.codecs.base import Codec, Payload, Residual
from gradsync.codecs.random import stratified_positions
from gradsync.codecs.randomk import RandomK
from tests.codecs.arrays import KINDS, SIZES, array, check_residual_completes_sent, decoded, empty_payload


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("num", [1, 2, 700, 70_001])
def test_stratified_positions_has_one_in_each_stratum(numel: int, num: int) -> None:
    num = min(num, numel)
    drawn = stratified_positions(num, numel, key=9)
    strata = torch.arange(num + 1) * numel // num
    assert bool((drawn >= strata[:-1]).all())
    assert bool((drawn < strata[1:]).all())


def test_stratified_positions_covers_all_and_differs_by_key() -> None:
    times = torch.zeros(1000)
    for key in range(2000):
        times[stratified_positions(100, 1000, key)] += 1
    assert float(times.min()) > 140, "200 are expected, with a deviation of 13"
    assert float(times.max()) < 260
    same = (stratified_positions(1000, 100_000, 1) == stratified_positions(1000, 100_000, 2)).double().mean()
    assert float(same) < 0.05
    assert not torch.equal(stratified_positions(50, 5000, -3), stratified_positions(50, 5000, 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_residual_completes_the_decoded_values(kind: str, numel: int) -> None:
    for codec in (RandomK(), RandomK(density=0.3), RandomK(density=1.0)):
        out = check_residual_completes_sent(codec, array(kind, numel), gain=0.37, key=3)
        assert int((out != 0).sum()) <= codec.max_kept(numel)
        check_residual_completes_sent(codec, array(kind, numel, torch.float64), gain=0.37, key=3, exact=False)


def test_residual_keeps_what_float32_cannot_represent() -> None:
    x = torch.tensor([1e300, -1 / 3, 1e-300], dtype=torch.float64)
    codec, residual = RandomK(density=1.0), torch.zeros(3, dtype=torch.float64)
    payload = empty_payload(codec, 3, x.dtype)
    codec.encode(x, payload, residual=Residual(residual, residual))
    out = torch.empty_like(x)
    assert codec.decode(payload, out) is True
    assert torch.equal(out + residual, x)
    assert float(residual[0]) > 0.9e300


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", [RandomK(), RandomK(density=0.7, unbiased=True)], ids=str)
def test_torch_and_kernels_give_the_same_bits(kind: str, codec: RandomK, monkeypatch: pytest.MonkeyPatch) -> None:
    for numel in (1, 33, 70_001):
        for dtype in (torch.float32, torch.float64):
            x, before = array(kind, numel, dtype), 0.3 * array("normal", numel, dtype, seed=5)
            results = []
            for by_kernel in (True, False):
                with monkeypatch.context() as patch:
                    if not by_kernel:
                        patch.setattr(randomk, "kernels_support", lambda *tensors: False)
                    payload, residual, out = empty_payload(codec, numel, dtype), before.clone(), before.clone()
                    codec.encode(x, payload, gain=0.37, residual=Residual(residual, residual), key=4)
                    finite = codec.decode(payload, out, gain=1.7, add=True, key=4)
                    fresh, without_residual = torch.empty_like(x), empty_payload(codec, numel, dtype)
                    codec.decode(payload, fresh, key=4)
                    codec.encode(x, without_residual, gain=0.37, key=4)
                    results.append((payload, residual, out, fresh, without_residual, torch.tensor(finite)))
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_with_a_32_bit_residual(dtype: torch.dtype) -> None:
    x, residual = array("normal", 3000, dtype), 0.3 * array("normal", 3000, seed=5)
    y, codec = x.float() * 0.5 + residual, RandomK(density=0.1)
    payload = empty_payload(codec, 3000, dtype)
    codec.encode(x, payload, gain=0.5, residual=Residual(residual, residual), key=2)
    out = torch.empty(3000)
    codec.decode(payload, out, key=2)
    assert torch.equal(out + residual, y)


def test_payloads_can_be_summed() -> None:
    for numel in (1, 7, 1001):
        codec = RandomK(density=0.3)
        xs = [array("normal", numel, seed=seed) for seed in (1, 2)]
        payloads = [empty_payload(codec, numel) for _ in xs]
        for x, payload in zip(xs, payloads, strict=True):
            codec.encode(x, payload, key=8)
        total = Payload((payloads[0].view(codec.sums_as) + payloads[1].view(codec.sums_as)).view(torch.uint8))
        assert not bool(total.view(codec.sums_as)[codec.max_kept(numel) :].any()), "the padding is zero"
        kept = decoded(codec, payloads[0], xs[0], key=8) != 0
        assert int(kept.sum()) == codec.max_kept(numel)
        assert torch.equal(decoded(codec, total, xs[0], key=8), torch.where(kept, xs[0] + xs[1], 0.0))


def test_unbiased_option_is_unbiased_without_feedback() -> None:
    x, codec = array("normal", 50), RandomK(density=0.2, unbiased=True)
    payload, total = empty_payload(codec, 50), torch.zeros(50)
    for key in range(3000):
        codec.encode(x, payload, key=key)
        codec.decode(payload, total, add=True, key=key)
    torch.testing.assert_close(total / 3000, x, rtol=0.2, atol=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_are_sent_when_drawn(bad: float) -> None:
    codec, x = RandomK(density=1.0), array("normal", 100)
    x[41] = bad
    payload, residual = empty_payload(codec, 100), torch.zeros(100)
    codec.encode(x, payload, residual=Residual(residual, residual))
    assert codec.decode(payload, torch.empty(100)) is False


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_merge_equals_the_default_implementation(in_place: bool, with_residual: bool) -> None:
    codec, x = RandomK(density=0.1), array("normal", 5000)
    received = [empty_payload(codec, 5000) for _ in range(2)]
    for seed, payload in enumerate(received):
        codec.encode(array("normal", 5000, seed=seed + 1), payload, key=6)
    results = []
    for merge in (Codec.merge, RandomK.merge):
        own, before = x.clone(), 0.3 * array("normal", 5000, seed=5)
        after, out = (before, own) if in_place else (torch.full_like(x, 7.0), torch.full_like(x, 7.0))
        payload = empty_payload(codec, 5000)
        residual = Residual(before, after) if with_residual else None
        assert merge(codec, own, received, payload, gain=0.5, residual=residual, key=6, out=out, out_gain=3.0) is True
        results.append((payload, out, after))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_erase_and_empty_input() -> None:
    codec, x = RandomK(density=0.1), array("rising", 1000)
    payload, mask = empty_payload(codec, 1000), torch.ones(1000)
    codec.encode(x, payload, key=6)
    codec.erase(payload, mask, key=6)
    assert torch.equal(mask == 0, decoded(codec, payload, x, key=6) != 0)
    nothing, empty = torch.empty(0), empty_payload(codec, 0)
    codec.encode(nothing, empty, residual=Residual(nothing, nothing))
    codec.erase(empty, nothing)
    assert codec.decode(empty, nothing) is True


def test_spec_round_trip() -> None:
    for text in ("randomk", "randomk(density=0.05)", "randomk(density=0.05, unbiased=True)"):
        assert spec.render(spec.parse(text, kind="codec")) == text
    with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
        RandomK(density=0)
