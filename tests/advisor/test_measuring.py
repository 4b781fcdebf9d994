"""Measuring the network and the choices' arithmetic by real collectives: plausible figures, equal on all ranks."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from gradsync.advisor import Choice, Gradient, Network, measure_costs, measure_network
from gradsync.advisor.costs import _sample
from gradsync.advisor.network import rate_of
from gradsync.comm import Communicator, connect
from gradsync.testing import run_ranks

GRADIENTS = (Gradient("weight", (256, 300)), Gradient("bias", (300,)))
CHOICES = [Choice("allreduce"), Choice("allreduce(codec=int8)"), Choice("allreduce(reducer=powersgd(rank=1))")]


def test_measure_network_agrees_on_all_ranks() -> None:
    found = run_ranks(3, lambda comm: measure_network(comm, seconds=0.2, name="here"))
    assert found[0] == found[1] == found[2]
    assert found[0].name == "here"
    assert (found[0].transport, found[0].world_size, found[0].num_hosts) == ("threads", 3, 1)
    for name, value in asdict(found[0]).items():
        if isinstance(value, float):
            assert 0 <= value < float("inf"), name
    assert found[0].busy_bytes_per_s <= found[0].bytes_per_s
    assert found[0].busy_call_s >= found[0].call_s > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_measure_costs_agrees_on_all_ranks(world_size: int) -> None:
    def measure(comm: Communicator) -> object:
        return measure_costs(GRADIENTS, CHOICES, world_size=comm.world_size, comm=comm)

    found = run_ranks(world_size, measure)
    assert all(each == found[0] for each in found)
    costs = found[0]
    for choice in CHOICES[1:]:
        cost = costs.of(choice.strategy, world_size=world_size)  # type: ignore[attr-defined]
        assert len(cost.stages) == (1 if "int8" in choice.strategy and world_size == 2 else 2)
        assert all(part > 0 for part in cost.stages)
        assert cost.finish > 0
        other = costs.of(choice.strategy, world_size=5 - world_size)  # type: ignore[attr-defined]
        assert len(other.stages) == (1 if "int8" in choice.strategy and world_size == 3 else 2)


def test_sample_has_the_proportions_of_the_model() -> None:
    """Weights and biases alternate: half of a model's tensors could be all its biases."""
    model = [
        Gradient(f"{kind}{at}", (512, 512) if kind == "weight" else (512,))
        for at in range(40)
        for kind in ("weight", "bias")
    ]
    total = sum(gradient.num_bytes for gradient in model)
    for part in (2, 5, 10):
        sample = _sample(model, total // part)
        share = sum(gradient.num_bytes for gradient in sample if "weight" in gradient.name)
        assert share / sum(gradient.num_bytes for gradient in sample) > 0.99
        assert sum(gradient.num_bytes for gradient in sample) == pytest.approx(total / part, rel=0.2)
    (cut,) = _sample([Gradient("embedding", (100_000, 64))], 1 << 20)
    assert cut.num_bytes == pytest.approx(1 << 20, rel=0.01)
    assert _sample(model, total) == model


def test_measure_costs_samples_a_large_model() -> None:
    many = [Gradient(f"weight{at}", (512, 512)) for at in range(200)]  # 200 MB
    costs = measure_costs(many, [Choice("allreduce(codec=fp16)")], sample_bytes=4 << 20)
    assert costs.of("allreduce(codec=fp16)", world_size=2).finish > 0


def test_measure_network_refuses_a_single_rank() -> None:
    with pytest.raises(ValueError, match="a world of one"):
        measure_network(connect())


@pytest.mark.parametrize("text", ["", "fast", "1", "0gbit", "1 parsec", "-1gbit"])
def test_rate_of_refuses_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match="such as 100mbit"):
        rate_of(text)


def test_network_at_another_rate_gets_no_faster() -> None:
    here = Network(name="here", bytes_per_s=500e6, busy_bytes_per_s=200e6, cpu_s_per_byte=1e-9, burst_bytes=1e6)
    slow, fast = here.at("1gbit"), here.at("100gbit")
    assert slow.bytes_per_s == slow.busy_bytes_per_s == pytest.approx(119e6)
    assert (slow.cpu_s_per_byte, slow.burst_bytes) == (1e-9, 0.0)
    assert (fast.bytes_per_s, fast.busy_bytes_per_s) == (500e6, 200e6)
