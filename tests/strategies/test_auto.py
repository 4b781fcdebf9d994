"""``auto``: it is exact until it decides, decides alike on all ranks, takes only what is allowed, and is saved."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import spec
from gradsync.advisor import Network
from gradsync.comm import Communicator
from gradsync.comm.allreduce.autotune import autotune
from gradsync.comm.allreduce.table import Table, this_machine
from gradsync.testing import run_ranks
from tests.engine.saved import strategy_state

QUICK = "steps=2, seconds=0.02"
SLOW = Network(name="slow", bytes_per_s=1e5, busy_bytes_per_s=1e5, cpu_s_per_byte=0.0)
FAST = Network(name="fast", bytes_per_s=1e15, busy_bytes_per_s=1e15, cpu_s_per_byte=0.0, call_s=0.0, busy_call_s=0.0)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the measured network by a given one."""

    def set_link(network: Network) -> None:
        def measured(comm: Communicator, *, seconds: float) -> Network:
            comm.barrier()
            return network

        monkeypatch.setattr("gradsync.advisor.measure_network", measured)

    return set_link


def train(comm: Communicator, strategy: str, steps: int, state: Any = None, **settings: Any) -> dict[str, Any]:
    model = nn.Sequential(*[nn.Linear(80, 80) for _ in range(4)])
    seeded = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.1 * torch.randn(param.shape, generator=seeded))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    start = 0
    if state is not None:
        model.load_state_dict(state["model"])
        start = state["at"]
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, **settings) as sync:
        if state is not None:
            sync.load_state_dict(state["sync"])
        for step in range(start, steps):
            generator = torch.Generator().manual_seed(step * 100 + comm.rank)
            x = torch.randn(6, 80, generator=generator)
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()
        values = {name: value.clone() for name, value in model.state_dict().items()}
        return {"model": values, "sync": sync.state_dict(), "at": steps, "stats": sync.stats()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


def test_auto_keeps_exact_allreduce_on_a_fast_network(link: Any, caplog: pytest.LogCaptureFixture) -> None:
    link(FAST)
    with caplog.at_level(logging.INFO, "gradsync"):
        auto = run_ranks(2, lambda comm: train(comm, f"auto({QUICK})", 10))
    exact = run_ranks(2, lambda comm: train(comm, "allreduce", 10))
    assert all(same(one, other) for one, other in zip(auto, exact, strict=True)), "the maths did not change"
    assert auto[0]["stats"]["chosen"] == "allreduce"
    assert "exact all-reduce stays" in auto[0]["stats"]["auto"]
    assert [record.message for record in caplog.records if "exact all-reduce stays" in record.message]


def test_auto_takes_only_what_is_allowed(link: Any) -> None:
    link(SLOW)
    for outcome in run_ranks(2, lambda comm: train(comm, f"auto({QUICK})", 10)):
        assert outcome["stats"]["chosen"] == "allreduce"


def test_auto_switches_on_all_ranks_after_the_same_step(link: Any, caplog: pytest.LogCaptureFixture) -> None:
    link(SLOW)
    text = f"auto(allow=[allreduce(codec=int8)], {QUICK})"
    with caplog.at_level(logging.INFO, "gradsync"):
        outcomes = run_ranks(2, lambda comm: train(comm, text, 10))
    assert same(*outcomes), "replicas are bitwise equal"
    for outcome in outcomes:
        assert outcome["stats"]["chosen"] == "allreduce(codec=int8)"
        assert outcome["stats"]["codecs"]["0.weight"] == "int8"
        assert outcome["stats"]["auto"].startswith("allreduce(codec=int8) (a step of ")
    assert [
        record.message for record in caplog.records if "auto, after 2 steps: allreduce(codec=int8)" in record.message
    ]
    before = run_ranks(2, lambda comm: train(comm, text, 4))[0]["stats"]
    assert (before["chosen"], before["auto"]) == ("allreduce", "measuring: exact so far")


def test_auto_resumes_bit_for_bit_with_its_decision(link: Any) -> None:
    link(SLOW)
    text = f"auto(allow=[allreduce(codec=int8)], {QUICK})"
    whole = run_ranks(2, lambda comm: train(comm, text, 14))
    half = run_ranks(2, lambda comm: train(comm, text, 9))
    link(FAST)  # it would decide differently now, but keeps its decision
    resumed = run_ranks(2, lambda comm: train(comm, text, 14, half[comm.rank]))
    assert all(same(one, other) for one, other in zip(whole, resumed, strict=True))
    assert resumed[0]["stats"]["chosen"] == "allreduce(codec=int8)"
    assert resumed[0]["stats"]["auto"] == half[0]["stats"]["auto"], "it was decided then, and is not again"


def test_auto_changes_bucket_sizes_on_all_ranks(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    link(FAST)

    def choose(self: Any, *_: Any) -> list[Any]:
        return ["allreduce", 30_000, "smaller buckets"]

    monkeypatch.setattr("gradsync.strategies.auto.Auto._ask", choose)
    auto = run_ranks(2, lambda comm: train(comm, f"auto({QUICK})", 10))
    exact = run_ranks(2, lambda comm: train(comm, "allreduce", 10))
    assert len(exact[0]["stats"]["bucket_bytes"]) == 1
    assert len(auto[0]["stats"]["bucket_bytes"]) == len(auto[1]["stats"]["bucket_bytes"]) == 4
    assert all(same(one, other) for one, other in zip(auto, exact, strict=True)), "two ranks' sums have one order"


def test_auto_chooses_and_saves_an_allreduce_algorithm(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    link(FAST)
    rules = ((1 << 16, "native"), (None, "ring"))

    def ring(comm: Communicator, num_bytes: int) -> Table:
        assert num_bytes > 100_000, "the largest bucket's"
        return Table(transport="threads", world_size=3, num_hosts=1, machine=this_machine(), rules=rules)

    monkeypatch.setattr("gradsync.strategies.auto.autotune", ring)
    whole = run_ranks(3, lambda comm: train(comm, f"auto({QUICK})", 12))
    assert "all-reduces by ring, which is faster here; exact all-reduce stays" in whole[0]["stats"]["auto"]
    assert strategy_state(whole[0]["sync"])["algorithms"]["rules"][-1] == [None, "ring"]
    half = run_ranks(3, lambda comm: train(comm, f"auto({QUICK})", 8))
    resumed = run_ranks(3, lambda comm: train(comm, f"auto({QUICK})", 12, half[comm.rank]))
    assert all(same(one, other) for one, other in zip(whole, resumed, strict=True))
    exact = run_ranks(3, lambda comm: train(comm, "allreduce", 12))[0]["model"]
    assert all(torch.allclose(exact[name], value, atol=1e-6) for name, value in whole[0]["model"].items())


def test_autotune_measures_from_three_ranks_on() -> None:
    assert run_ranks(2, lambda comm: autotune(comm, 1 << 16)) == [None, None], "of two ranks all are alike"
    found = run_ranks(3, lambda comm: autotune(comm, 1 << 16, rounds=1))
    assert found[0] == found[1] == found[2]


def test_auto_keeps_the_users_bucket_size(link: Any) -> None:
    link(SLOW)
    outcome = run_ranks(2, lambda comm: train(comm, f"auto({QUICK})", 10, bucket_bytes=30_000, first_bucket_bytes=9))[0]
    assert len(outcome["stats"]["bucket_bytes"]) == 5


def test_auto_with_one_worker_chooses_nothing() -> None:
    stats = train(gradsync.connect(), f"auto({QUICK})", 8)["stats"]
    assert stats["auto"] == "one worker: nothing to choose"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("auto(allow='all')", "'exact' or a list of specs"),
        ("auto(steps=0)", "at least 1"),
        ("auto(seconds=0)", "above 0"),
        ("auto(allow=[int8])", "strategy"),
    ],
)
def test_auto_refuses_invalid_options(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec.parse(text)


def test_auto_checks_allowed_strategies_at_the_start() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="onebit_adam requires Adam"):
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "auto(allow=[onebit_adam])")


def test_auto_spec_round_trips() -> None:
    text = "auto(allow=[allreduce(codec=int8), 'allreduce(codec=fp16)'], steps=5)"
    assert spec.render(spec.parse(text)) == "auto(allow=[allreduce(codec=int8), allreduce(codec=fp16)], steps=5)"
