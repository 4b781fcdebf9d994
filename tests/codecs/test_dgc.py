"""Deep Gradient Compression is top-k on the wire, and tells the feedback what to gather."""

from __future__ import annotations

import pytest
import torch

from gradsync import spec
from gradsync.codecs.base import Residual
from gradsync.codecs.dgc import Dgc
from gradsync.codecs.topk import TopK
from tests.codecs.arrays import array, empty_payload, sent


def test_on_the_wire_it_is_topk() -> None:
    x, results = array("normal", 20_001), []
    for codec in (Dgc(density=0.02), TopK(density=0.02)):
        payload, residual = empty_payload(codec, x.numel()), array("normal", x.numel(), seed=1)
        codec.encode(x, payload, gain=0.3, residual=Residual(residual, residual))
        out, merged, answer = sent(codec, payload, x), torch.empty_like(x), empty_payload(codec, x.numel())
        codec.merge(x, [payload], answer, residual=Residual(residual, residual), out=merged)
        codec.erase(answer, residual)
        num = torch.tensor(codec.num_kept(payload[: codec.index_bytes(x.numel())], x.numel()))
        results.append((payload, residual, out, merged, answer, num))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_momentum_is_forgotten_where_a_value_was_sent() -> None:
    """The steps that the feedback takes; ``velocity`` and ``residual`` are zero together, and only where sent."""
    codec, sum_sent, sum_velocity = Dgc(density=0.1), torch.zeros(500), torch.zeros(500)
    velocity, residual = torch.zeros(500), torch.zeros(500)
    for step in range(20):
        velocity.mul_(codec.momentum).add_(array("normal", 500, seed=step))
        sum_velocity += velocity
        now, payload = codec.at(step), empty_payload(codec, 500)
        now.encode(velocity, payload, residual=Residual(residual, residual))
        out = sent(now, payload, velocity)
        sum_sent += out
        now.erase(payload, velocity)
        assert torch.equal(velocity == 0, out != 0)
        assert torch.equal(residual == 0, out != 0)
    torch.testing.assert_close(sum_sent + residual, sum_velocity)


def test_the_density_falls_as_training_starts() -> None:
    codec = Dgc(warmup_steps=8)
    densities = [codec.at(step).density for step in range(10)]
    assert densities == [0.25, 0.25, 0.063, 0.063, 0.015, 0.015, 0.004, 0.004, 0.001, 0.001]
    assert [Dgc(density=0.01, warmup_steps=4).at(step).density for step in range(5)] == [0.25, 0.063, 0.015, 0.01, 0.01]
    assert Dgc().at(0) == TopK(density=0.001)


def test_specs() -> None:
    for text in ("dgc", "dgc(density=0.01, momentum=0.8, clip_norm=1.5, warmup_steps=200)"):
        assert spec.render(spec.parse(text, kind="codec")) == text


@pytest.mark.parametrize(
    "wrong", [{"density": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}, {"clip_norm": 0.0}, {"warmup_steps": -1}]
)
def test_what_can_not_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        Dgc(**wrong)  # type: ignore[arg-type]
