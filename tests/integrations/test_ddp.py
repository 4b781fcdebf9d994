"""gradsync's reducers as DDP's communication hook, over real Gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from gradsync.integrations import comm_hook
from tests.support.ranks import run_processes

STEPS = 8


def train(comm: gradsync.Communicator, **options: Any) -> tuple[list[Tensor], list[float], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 120), nn.Tanh(), nn.Linear(120, 60), nn.Tanh(), nn.Linear(60, 40))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    hook = comm_hook(ddp, **options) if options else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        optimizer.zero_grad()
        loss = (ddp(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [param.detach().clone() for param in model.parameters()], losses, hook.state_dict() if hook else {}


def train_all() -> dict[str, Any]:
    comm = gradsync.connect("c10d", timeout_s=180)
    return {
        "exact": train(comm),
        "dense": train(comm, codec="dense"),
        "plain": train(comm, reducer="plain"),
        "int8": train(comm, codec={"*": "int8"}),
        "sign": train(comm, reducer="compressed(codec=sign, min_numel=100)"),
        "powersgd": train(comm, reducer="powersgd(rank=4)"),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_comm_hook_trains_as_ddp_does(world: int) -> None:
    ranks = run_processes(world, train_all, timeout_s=100)
    for name, (params, losses, state) in ranks[0].items():
        assert all(torch.equal(a, b) for rank in ranks[1:] for a, b in zip(params, rank[name][0], strict=True)), name
        exact_params, exact_losses, _ = ranks[0]["exact"]
        if name in ("dense", "plain"):
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(params, exact_params, strict=True))
        else:
            assert abs(losses[-1] - exact_losses[-1]) < 0.2 * exact_losses[-1], (name, losses, exact_losses)
        if name in ("int8", "sign", "powersgd"):
            assert state["reducer"]["own"]["residuals"].keys(), name
            assert any(not torch.equal(a, b) for a, b in zip(params, exact_params, strict=True)), f"{name} was not used"


def refuse() -> list[str]:
    comm = gradsync.connect("c10d", timeout_s=180)
    ddp = DistributedDataParallel(nn.Linear(100, 100))
    texts = []
    for call in (
        lambda: comm_hook(ddp.module, codec="int8"),  # type: ignore[arg-type]
        lambda: comm_hook(ddp),
        lambda: comm_hook(ddp, codec="int8", comm=comm).load_state_dict({"rank": 1 - comm.rank, "reducer": {}}),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_comm_hook_refuses_bad_arguments() -> None:
    for texts in run_processes(2, refuse, timeout_s=180):
        assert "synchronize(model, optimizer)" in texts[0]
        assert "either codec= or reducer=" in texts[1]
        assert "that of rank" in texts[2]
