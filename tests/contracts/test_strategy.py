"""The contract of every strategy. A new strategy is tested by being registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.support.ranks import run_processes

# Where a short run needs other settings than the defaults.
SETTINGS = {
    "onebit_adam": "onebit_adam(warmup_steps=6, codec=int8)",
    "local_sgd": "local_sgd(every=4, exact_steps=3)",
    "diloco": "diloco(every=5)",
    "auto": "auto(steps=6, seconds=0.05)",
}
# Other ways through a strategy. What a codec does is the codecs' contract: here one that compresses small parameters.
MORE = [
    "allreduce(codec=int8)",
    "sharded(codec=int8)",
    "allreduce(reducer=compressed(codec=topk(density=0.3), min_numel=8))",
    "local_sgd(every=3, codec={'*.weight': 'int8'}, optimizer_state='average')",
    "local_sgd(every=1, codec={'*.weight': 'topk(density=0.3)'})",
    "diloco(every=6, fragments=2, codec={'*.weight': 'int4'}, overlap=2)",
    "gossip(topology=ring, codec=int8, min_numel=8)",
    "gossip(topology=random)",
    "gossip(asynchronous=True)",
    "parameter_server(staleness=2)",
    "parameter_server(staleness=None, staleness_policy=scale, codec=int8)",
]
# The result depends on timing.
UNREPEATABLE = {
    "hogwild",
    "auto(steps=6, seconds=0.05)",  # measures, and may choose other buckets
    "gossip(asynchronous=True)",
    "parameter_server(staleness=2)",
    "parameter_server(staleness=None, staleness_policy=scale, codec=int8)",
}
NAMES = [name for name in spec.names("strategy") if not name.startswith("test_")]
STRATEGIES = [SETTINGS.get(name, name) for name in NAMES] + MORE


def is_repeatable(strategy: str) -> bool:
    return strategy not in UNREPEATABLE


def train(
    comm: Communicator, strategy: str, steps: int, state: dict[str, Any] | None = None, *, settle: bool = False
) -> dict[str, Any]:
    """Train on this rank's own data; with ``state``, resume from it."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    seeded = torch.Generator().manual_seed(0)  # not torch's own, which ranks that are threads share
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.4 * torch.randn(param.shape, generator=seeded))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if "adam" in strategy:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    start = 0 if state is None else state["at"]
    losses = []
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, bucket_bytes=300, first_bucket_bytes=100) as sync:
        if state is not None:
            sync.load_state_dict(state["sync"])
        for step in range(start, steps):
            generator = torch.Generator().manual_seed(step * 100 + comm.rank)
            x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        if settle:
            sync.settle()
        stats = sync.stats()
        assert spec.render(spec.parse(stats["strategy"])) == stats["strategy"]
        assert stats["bytes_per_step"] >= 0
        return {
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "optimizer": sync.optimizer_state_dict(dst=None),
            "sync": sync.state_dict(),
            "at": steps,
            "losses": losses,
        }


def params_of(outcome: dict[str, Any]) -> list[Tensor]:
    return list(outcome["model"].values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 3])
def test_strategy_learns(strategy: str, world: int) -> None:
    for outcome in run_ranks(world, lambda comm: train(comm, strategy, 40)):
        assert sum(outcome["losses"][-5:]) < 0.7 * sum(outcome["losses"][:5])


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if is_repeatable(name)])
def test_strategy_resumes_bit_for_bit(strategy: str) -> None:
    whole = run_ranks(2, lambda comm: train(comm, strategy, 20))
    half = run_ranks(2, lambda comm: train(comm, strategy, 9))
    resumed = run_ranks(2, lambda comm: train(comm, strategy, 20, half[comm.rank]))
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(params_of(one), params_of(other), strict=True))


@pytest.mark.parametrize("strategy", sorted(UNREPEATABLE))
def test_unrepeatable_strategy_resumes(strategy: str) -> None:
    half = run_ranks(2, lambda comm: train(comm, strategy, 20))
    for before, after in zip(half, run_ranks(2, lambda comm: train(comm, strategy, 40, half[comm.rank])), strict=True):
        assert after["sync"]["step"] == 40
        first = sum(before["losses"][:5])
        assert sum(after["losses"][:5]) < 0.5 * first, "it did not resume"
        assert sum(after["losses"][-5:]) < 0.5 * first


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_settle_makes_parameters_equal(strategy: str) -> None:
    first, *others = run_ranks(3, lambda comm: train(comm, strategy, 7, settle=True))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(params_of(first), params_of(other), strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_load_state_dict_refuses_a_foreign_state(strategy: str) -> None:
    made = spec.parse(strategy)
    with pytest.raises(ValueError):
        made.load_state_dict({"reducer": {"unknown": 1}, "other": 2})


def train_in_process(strategy: str) -> dict[str, Any]:
    return train(gradsync.connect(timeout_s=20), strategy, 20)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_compute_the_same_as_threads(strategy: str) -> None:
    processes = run_processes(2, train_in_process, strategy)
    if not is_repeatable(strategy):
        assert all(sum(outcome["losses"][-5:]) < 0.9 * sum(outcome["losses"][:5]) for outcome in processes)
        return
    threads = run_ranks(2, lambda comm: train(comm, strategy, 20))
    for one, other in zip(processes, threads, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(params_of(one), params_of(other), strict=True))
