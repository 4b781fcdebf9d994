"""Codecs where several ranks of each host share memory: one of them encodes the host's sum, and keeps the residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradsync
from gradsync.testing import run_ranks
from tests.engine.saved import strategy_state
from tests.reducers.compressed.test_reducer import (
    SUMMED_ON_THE_WAY,
    batch_of,
    build,
    check_residuals_complete_the_means,
    check_same_bits,
    residuals_of,
    run,
    strategy_of,
    total,
)
from tests.support.ranks import run_processes
from tests.support.simulated import connect_on_hosts

CODECS = ("int8", "fp16", "topk(density=0.05)", "sign", "dense")
STEPS = 5


def train_with_each_codec(hosts: str, leaders: int) -> dict[str, dict[str, Any]]:
    comm = connect_on_hosts(hosts, timeout_s=60, leaders=leaders)
    trained = {codec: run(comm, strategy_of(codec), STEPS, lr=0.05) for codec in CODECS}
    for feedback in ("none", "ef21"):
        trained[feedback] = run(comm, strategy_of("int8", feedback=feedback), STEPS, lr=0.05)
    trained["inf"] = {"same": step_with_inf(comm)}
    trained["nan"] = {"text": gradient_with_nan(comm)}
    return trained


def step_with_inf(comm: gradsync.Communicator) -> list[bool]:
    """Let a GradScaler skip the third of four steps; returns after which residuals and parameters are as before it."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    options: Any = {"bucket_bytes": 20_000, "first_bucket_bytes": 500}
    same = []
    with gradsync.synchronize(model, optimizer, strategy_of("int8"), comm=comm, scaler=scaler, **options) as sync:
        for scale in (1.0, 1.0, float("inf") if comm.rank == 1 else 1.0, 1.0):
            before = strategy_state(sync.state_dict())["reducer"]["own"]["residuals"]
            params = [param.detach().clone() for param in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(model(batch_of(comm.rank, 0, torch.float32)).square().mean() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            after = strategy_state(sync.state_dict())["reducer"]["own"]["residuals"]
            same.append(
                all(torch.equal(before[name], after[name]) for name in before)
                and all(torch.equal(a, b) for a, b in zip(params, model.parameters(), strict=True))
            )
    return same


def gradient_with_nan(comm: gradsync.Communicator) -> str:
    def spoil(sync: Any) -> None:
        if comm.rank == comm.world_size - 1:
            sync._engine.training.model[2].weight.register_hook(
                lambda grad: grad.index_fill(0, torch.tensor(5), torch.nan)
            )

    with pytest.raises(gradsync.NonFiniteGradient) as caught:
        run(comm, strategy_of("int8"), 1, prepare=spoil)
    return str(caught.value)


@pytest.mark.parametrize(("hosts", "leaders"), [("aabb", 8), ("aabbc", 8), ("abcabcc", 2)])
def test_leaders_keep_the_residuals_of_their_hosts(hosts: str, leaders: int) -> None:
    everyone = run_processes(len(hosts), train_with_each_codec, hosts, leaders, timeout_s=100)
    for codec in CODECS:
        ranks = [rank[codec] for rank in everyone]
        check_same_bits(ranks)
        check_residuals_complete_the_means(ranks, 1e-2 if codec in SUMMED_ON_THE_WAY else 2e-6)
        assert len({tuple(strategy_state(rank["sync"])["reducer"]["kept"]) for rank in ranks}) == 1
    for feedback in ("none", "ef21"):
        check_same_bits([rank[feedback] for rank in everyone])
    for name, value in total([residuals_of(rank["int8"]) for rank in everyone]).items():
        owners = [rank for rank in everyone if residuals_of(rank["int8"])[name].any()]
        assert len(owners) == (len(set(hosts)) if value.any() else 0), name
    assert all(rank["inf"]["same"][2:] == [True, False] for rank in everyone if not_idle(rank))
    assert len({rank["nan"]["text"] for rank in everyone}) == 1
    assert "2.weight" in everyone[0]["nan"]["text"]


def not_idle(rank: dict[str, Any]) -> bool:
    return any(value.any() for value in residuals_of(rank["int8"]).values())


def go_on(hosts: str, saved: list[dict[str, Any]]) -> dict[str, Any]:
    comm = connect_on_hosts(hosts, timeout_s=60)
    state = {"model": saved[0]["model"], "sync": [rank["sync"] for rank in saved]}
    return run(comm, strategy_of("sign"), STEPS + 3, start=STEPS, state=state)


def first_part(hosts: str) -> dict[str, Any]:
    return run(connect_on_hosts(hosts, timeout_s=60), strategy_of("sign"), STEPS)


def test_residuals_move_when_the_number_of_ranks_per_host_changes() -> None:
    layouts = ["aabb", "aaab", "abb"]
    saved = run_processes(4, first_part, layouts[0], timeout_s=60)
    for hosts in layouts[1:]:
        before = total([residuals_of(rank) for rank in saved])
        saved = run_processes(len(hosts), go_on, hosts, saved, timeout_s=60)
        check_same_bits(saved)
        inputs, means = total([rank["inputs"] for rank in saved]), total(saved[0]["means"])
        after = total([residuals_of(rank) for rank in saved])
        for name, value in inputs.items():
            assert torch.allclose(before[name] + value, means[name] + after[name], rtol=1e-5, atol=1e-6), name
        for name, value in after.items():
            if value.any():
                assert sum(bool(residuals_of(rank)[name].any()) for rank in saved) == 2, name


def test_single_ranks_take_over_the_residuals_of_hosts() -> None:
    saved = run_processes(4, first_part, "aabb", timeout_s=60)
    state = {"model": saved[0]["model"], "sync": [rank["sync"] for rank in saved]}
    loaded = run_ranks(3, lambda comm: run(comm, strategy_of("sign"), STEPS, start=STEPS, state=state))
    after = total([residuals_of(rank) for rank in loaded])
    for name, value in total([residuals_of(rank) for rank in saved]).items():
        assert torch.allclose(after[name], value, rtol=1e-6, atol=1e-9)
