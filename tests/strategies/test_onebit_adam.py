"""1-bit Adam: exact until the variance is frozen, then compressed momentum, with the user's own optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator
from gradsync.strategies import OneBitAdam
from gradsync.testing import run_ranks
from tests.engine.saved import strategy_state

WARMUP, STEPS = 4, 9


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(50, 100), nn.Tanh(), nn.Linear(100, 50)).double()
    seeded = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.2 * torch.randn(param.shape, generator=seeded))
    return model


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = (model(x) - x).square().mean()
    return loss


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(
    comm: Communicator,
    strategy: Any,
    steps: int = STEPS,
    state: dict[str, Any] | None = None,
    *,
    with_closure: bool = False,
) -> dict[str, Any]:
    model = build()
    optimizer = adamw(model)
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, bucket_bytes=20_000) as sync:
        if state is not None:
            for part, name in ((model, "model"), (optimizer, "optimizer"), (sync, "sync")):
                part.load_state_dict(state[name])
        at = sync.stats()["step"]
        digests = []
        for step in range(at, steps):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, comm.rank, step)
                loss.backward()
                return loss

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            digests.append([param.detach().clone() for param in model.parameters()])
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sync": sync.state_dict()}
        return {**saved, "digests": digests}


def reference(world: int) -> list[Tensor]:
    """One process on the batches of all ranks, with the formulas of the paper written out."""
    model = build()
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(world)) / world).backward()  # type: ignore[union-attr]
        if step < WARMUP:
            optimizer.step()
            continue
        for param in model.parameters():
            assert param.grad is not None
            state = optimizer.state[param]
            state["exp_avg"].lerp_(param.grad, 0.1)
            variance = state["exp_avg_sq"] / (1 - 0.999**WARMUP)
            update = state["exp_avg"] / (1 - 0.9 ** (step + 1)) / (variance.sqrt() + 1e-8)
            param.data = param.data * (1 - 0.01 * 0.1) - 0.01 * update
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize(("world", "with_closure"), [(1, False), (2, False), (3, True)])
def test_onebit_adam_without_loss_is_adam_with_a_frozen_variance(world: int, with_closure: bool) -> None:
    def go(comm: Communicator) -> dict[str, Any]:
        return train(comm, OneBitAdam(warmup_steps=WARMUP, codec="dense"), with_closure=with_closure)

    ranks = run_ranks(world, go)
    for mine, expected in zip(ranks[0]["digests"][-1], reference(world), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-9, atol=1e-12)


def test_onebit_adam_warms_up_exactly_and_keeps_replicas_equal() -> None:
    exact = run_ranks(2, lambda comm: train(comm, "allreduce"))
    ranks = run_ranks(2, lambda comm: train(comm, OneBitAdam(warmup_steps=WARMUP)))
    for step in range(STEPS):
        mine = ranks[0]["digests"][step]
        assert all(torch.equal(a, b) for a, b in zip(mine, ranks[1]["digests"][step], strict=True))
        same = all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(mine, exact[0]["digests"][step], strict=True))
        assert same == (step < WARMUP), step
    residuals = strategy_state(ranks[0]["sync"])["reducer"]["own"]["residuals"]
    assert residuals["0.weight"].any()
    state = ranks[0]["optimizer"]["state"]
    assert all(float(entry["step"]) == STEPS for entry in state.values())


def test_onebit_adam_resumes_bit_for_bit() -> None:
    def go(comm: Communicator) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        whole = train(comm, "onebit_adam(warmup_steps=4)")
        half = train(comm, "onebit_adam(warmup_steps=4)", steps=6)
        rest = train(comm, "onebit_adam(warmup_steps=4)", state=half)
        return whole["digests"][6:], rest["digests"]

    for whole, rest in run_ranks(2, go):
        assert len(whole) == len(rest) == STEPS - 6
        for mine, expected in zip(rest, whole, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.1), "Adam or AdamW"),
        (lambda params: torch.optim.Adam(params, amsgrad=True), "amsgrad"),
        (lambda params: torch.optim.Adam(params, weight_decay=0.1), "Use AdamW"),
    ],
)
def test_onebit_adam_refuses_unsupported_optimizers(make: Any, message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        gradsync.synchronize(model, make(model.parameters()), "onebit_adam")
    with pytest.raises(ValueError, match="no variance to freeze"):
        OneBitAdam(warmup_steps=0)


def test_onebit_adam_kernels_agree_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        def run(comm: Communicator) -> list[Tensor]:
            model = build().float()
            optimizer = adamw(model)
            with gradsync.synchronize(model, optimizer, OneBitAdam(warmup_steps=2), comm=comm):
                for step in range(6):
                    optimizer.zero_grad()
                    x = torch.randn(8, 50, generator=torch.Generator().manual_seed(100 * step + comm.rank))
                    (model(x) - x).square().mean().backward()
                    optimizer.step()
            averages = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
            return [*(param.detach() for param in model.parameters()), *averages]

        first, second = run_ranks(2, run)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return first

    compiled = trained()
    monkeypatch.setattr("gradsync.strategies.onebit_adam.COMPILED_DTYPES", ())
    for ours, torchs in zip(compiled, trained(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-6)


def test_onebit_adam_kernel_increments_the_version() -> None:
    model = nn.Linear(4, 4)
    optimizer = adamw(model)
    with gradsync.synchronize(model, optimizer, OneBitAdam(warmup_steps=1)):
        for _ in range(3):
            before = model.weight._version
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            assert model.weight._version > before
