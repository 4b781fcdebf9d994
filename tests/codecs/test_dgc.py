"""Deep Gradient Compression: top-k on the wire, with momentum correction and a warm-up."""

from __future__ import annotations

import pytest
import torch

from gradsync import spec
from gradsync.codecs.base import Residual
from gradsync.codecs.dgc import Dgc
from gradsync.codecs.topk import TopK
from tests.codecs.arrays import array, decoded, empty_payload


def test_payload_equals_that_of_topk() -> None:
    x, results = array("normal", 20_001), []
    for codec in (Dgc(density=0.02), TopK(density=0.02)):
        payload, residual = empty_payload(codec, x.numel()), array("normal", x.numel(), seed=1)
        codec.encode(x, payload, gain=0.3, residual=Residual(residual, residual))
        out, merged, merged_payload = decoded(codec, payload, x), torch.empty_like(x), empty_payload(codec, x.numel())
        codec.merge(x, [payload], merged_payload, residual=Residual(residual, residual), out=merged)
        codec.erase(merged_payload, residual)
        num = torch.tensor(codec.num_kept(payload[: codec.index_bytes(x.numel())], x.numel()))
        results.append((payload, residual, out, merged, merged_payload, num))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_erase_resets_momentum_where_a_value_was_sent() -> None:
    """The steps of the error feedback: ``velocity`` and ``residual`` become zero where a value was sent, only there."""
    codec, sum_sent, sum_velocity = Dgc(density=0.1), torch.zeros(500), torch.zeros(500)
    velocity, residual = torch.zeros(500), torch.zeros(500)
    for step in range(20):
        velocity.mul_(codec.momentum).add_(array("normal", 500, seed=step))
        sum_velocity += velocity
        now, payload = codec.at(step), empty_payload(codec, 500)
        now.encode(velocity, payload, residual=Residual(residual, residual))
        out = decoded(now, payload, velocity)
        sum_sent += out
        now.erase(payload, velocity)
        assert torch.equal(velocity == 0, out != 0)
        assert torch.equal(residual == 0, out != 0)
    torch.testing.assert_close(sum_sent + residual, sum_velocity)


def test_density_falls_during_warmup() -> None:
    codec = Dgc(warmup_steps=8)
    densities = [codec.at(step).density for step in range(10)]
    assert densities == [0.25, 0.25, 0.063, 0.063, 0.015, 0.015, 0.004, 0.004, 0.001, 0.001]
    assert [Dgc(density=0.01, warmup_steps=4).at(step).density for step in range(5)] == [0.25, 0.063, 0.015, 0.01, 0.01]
    assert Dgc().at(0) == TopK(density=0.001)


def test_spec_round_trip() -> None:
    for text in ("dgc", "dgc(density=0.01, momentum=0.8, clip_norm=1.5, warmup_steps=200)"):
        assert spec.render(spec.parse(text, kind="codec")) == text


@pytest.mark.parametrize(
    "wrong", [{"density": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"clip_norm": 0.0}, {"warmup_steps": -1}]
)
def test_invalid_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Dgc(**wrong)  # type: ignore[arg-type]
