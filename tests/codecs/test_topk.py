"""Top-k: the largest values, an exact residual, a fixed payload size, and equal bits of kernels and torch."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs import topk
from gradsync.codecs.base import Codec, Payload, Residual
from gradsync.codecs.random import stratified_positions
from gradsync.codecs.topk import TopK
from tests.codecs.arrays import KINDS, SIZES, array, check_residual_completes_sent, decoded, empty_payload

NAN, INF = float("nan"), float("inf")


def largest(y: Tensor, k: int) -> Tensor:
    """The k largest by magnitude at their positions, the first of equal ones, and zero elsewhere."""
    order = torch.sort(y.abs(), descending=True, stable=True).indices[:k]
    return torch.zeros_like(y).index_copy(0, order, y[order])


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "kernels_support", lambda *tensors: False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
def test_residual_completes_the_decoded_values(kind: str, numel: int) -> None:
    for dtype in (torch.float32, torch.float64):
        for codec in (TopK(), TopK(density=0.3), TopK(density=1.0), TopK(density=0.02, exact=True)):
            check_residual_completes_sent(codec, array(kind, numel, dtype), gain=0.37)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", [0.0004, 0.01, 0.3])
def test_exact_keeps_the_largest_and_the_first_of_equal_ones(kind: str, numel: int, density: float) -> None:
    x, codec = array(kind, numel), TopK(density=density, exact=True)
    payload = empty_payload(codec, numel)
    codec.encode(x, payload)
    assert torch.equal(decoded(codec, payload, x), largest(x, max(1, math.ceil(density * numel))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_keeps_at_least_85_percent_of_the_largest(kind: str, seed: int) -> None:
    x, codec = array(kind, 70_001, seed=seed), TopK()
    payload = empty_payload(codec, x.numel())
    codec.encode(x, payload)
    num = codec.num_kept(payload[: codec.index_bytes(x.numel())], x.numel())
    k = codec.max_kept(x.numel())
    assert min(0.85 * k, int((x != 0).sum())) <= num <= k
    assert torch.equal(decoded(codec, payload, x), largest(x, num))


@pytest.mark.parametrize("num_seen", [100, 300])
@pytest.mark.parametrize("exact", [False, True])
def test_select_corrects_a_sample_of_only_the_largest(num_seen: int, exact: bool) -> None:
    x = array("normal", 100_000)
    x[stratified_positions(4096, 100_000, 0)[:num_seen]] += 50.0
    codec = TopK(exact=exact)
    out = check_residual_completes_sent(codec, x, gain=0.5)
    assert int((out != 0).sum()) >= (1000 if exact else 850)


def test_select_corrects_a_sample_of_none_of_the_largest() -> None:
    x = array("rising", 100_000)
    x[stratified_positions(4096, 100_000, 0)] = 1e-3
    payload = empty_payload(TopK(), 100_000)
    TopK().encode(x, payload)
    assert torch.equal(decoded(TopK(), payload, x), largest(x, 1000))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", [TopK(), TopK(density=0.3, exact=True), TopK(density=0.0003)], ids=str)
def test_torch_and_kernels_give_the_same_bits(kind: str, codec: TopK, monkeypatch: pytest.MonkeyPatch) -> None:
    for numel in (1, 33, 70_001):
        for dtype in (torch.float32, torch.float64):
            x, before = array(kind, numel, dtype), 0.3 * array("normal", numel, dtype, seed=5)
            results = []
            for by_kernel in (True, False):
                with monkeypatch.context() as patch:
                    if not by_kernel:
                        patch.setattr(topk, "kernels_support", lambda *tensors: False)
                    payload, residual, out = empty_payload(codec, numel, dtype), before.clone(), before.clone()
                    codec.encode(x, payload, gain=0.37, residual=Residual(residual, residual))
                    finite = codec.decode(payload, out, gain=1.7, add=True)
                    erased = before.clone()
                    codec.erase(payload, erased)
                    results.append((payload, residual, out, erased, torch.tensor(finite)))
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_16_bit_values_with_a_32_bit_residual(dtype: torch.dtype, kind: str) -> None:
    x, codec = array(kind, 3000, dtype), TopK(density=0.1)
    residual = 0.3 * array("normal", 3000, seed=5)
    y = x.float() * 0.5 + residual
    payload = empty_payload(codec, 3000, dtype)
    codec.encode(x, payload, gain=0.5, residual=Residual(residual, residual))
    out = decoded(codec, payload, x)
    assert int((out != 0).sum()) <= 300
    torch.testing.assert_close(out.float() + residual, y, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("at", [0, 31, 69_999, 70_000])
def test_nonfinite_values_are_sent(bad: float, at: int) -> None:
    for codec in (TopK(), TopK(exact=True, density=1e-5)):
        x, out = array("huge", 70_001), torch.empty(70_001)
        x[at] = bad
        payload = empty_payload(codec, x.numel())
        codec.encode(x, payload, residual=Residual(torch.zeros_like(x), torch.empty_like(x)))
        assert codec.decode(payload, out) is False
        assert not bool(out[at].isfinite())
        x[at] = 0.0
        codec.encode(x, payload)
        assert codec.decode(payload, out) is True


@pytest.mark.usefixtures("torch_only")
def test_nonfinite_values_are_sent_by_torch() -> None:
    test_nonfinite_values_are_sent(NAN, 31)
    test_nonfinite_values_are_sent(-INF, 70_000)


def test_more_nan_than_capacity() -> None:
    x = torch.full((10_000,), NAN)
    payload = empty_payload(TopK(), 10_000)
    TopK().encode(x, payload)
    assert TopK().decode(payload, torch.empty(10_000)) is False


@pytest.mark.parametrize("kind", ["normal", "equal", "mostly zeros"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_merge_equals_the_default_implementation(kind: str, in_place: bool, with_residual: bool) -> None:
    for numel, codec in ((1, TopK()), (5000, TopK(density=0.1)), (70_001, TopK())):
        x = array(kind, numel)
        received = [empty_payload(codec, numel) for _ in range(2)]
        for seed, payload in enumerate(received):
            codec.encode(array(kind, numel, seed=seed + 1), payload)
        results = []
        for merge in (Codec.merge, TopK.merge):
            own, before = x.clone(), 0.3 * array("normal", numel, seed=5)
            after = before if in_place else torch.full_like(x, 7.0)
            out = own if in_place else torch.full_like(x, 7.0)
            payload = empty_payload(codec, numel)
            residual = Residual(before, after) if with_residual else None
            assert merge(codec, own, received, payload, gain=0.5, residual=residual, out=out, out_gain=3.0) is True
            results.append((payload, out, after))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def test_payload_is_small_and_all_of_it_is_written() -> None:
    assert 4_000_000 / TopK().encoded_bytes(1_000_000) > 77
    assert 4_000_000 / TopK(density=0.001).encoded_bytes(1_000_000) > 700
    assert TopK().encoded_bytes(0) == 0
    for numel in (1, 7, 100, 70_001):
        one, other = empty_payload(TopK(), numel), Payload(~empty_payload(TopK(), numel))
        for payload in (one, other):
            TopK().encode(array("mostly zeros", numel), payload)
        assert torch.equal(one, other)


def test_empty_input() -> None:
    nothing, payload = torch.empty(0), empty_payload(TopK(), 0)
    TopK().encode(nothing, payload, residual=Residual(nothing, nothing))
    assert TopK().decode(payload, nothing) is True
    assert TopK().merge(nothing, [payload], payload, out=nothing) is True


def test_decode_refuses_invalid_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = empty_payload(TopK(), 10_000)
    TopK().encode(array("normal", 10_000), payload)
    with pytest.raises(ValueError, match=r"expected a payload of \d+ bytes .* decode to the dtype"):
        TopK().decode(payload, torch.empty(10_000, dtype=torch.float64))
    for by_kernel in (True, False):
        if not by_kernel:
            monkeypatch.setattr(topk, "kernels_support", lambda *tensors: False)
        for rubbish in (0xFF, 0x80):
            with pytest.raises(ValueError, match="it has others"):
                TopK().decode(Payload(torch.full_like(payload, rubbish)), torch.empty(10_000))


def test_threads_do_not_share_scratch() -> None:
    xs = [array("normal", 200_000, seed=seed) for seed in range(3)]
    wrong: list[int] = []

    def work(number: int) -> None:
        payload, codec = empty_payload(TopK(), 200_000), TopK(exact=True)
        for _ in range(10):
            codec.encode(xs[number], payload)
            if not torch.equal(decoded(codec, payload, xs[number]), largest(xs[number], 2000)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not wrong


def test_spec_round_trip() -> None:
    for text in ("topk", "topk(density=0.05)", "topk(density=0.05, exact=True)"):
        assert spec.render(spec.parse(text, kind="codec")) == text
    for density in (0.0, -0.1, 1.5, NAN):
        with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
            TopK(density=density)
