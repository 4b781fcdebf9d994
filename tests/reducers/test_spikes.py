"""Spikes: after one finite but huge gradient on one rank, the next steps are as accurate as without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator
from gradsync.strategies.parameter_server.encoding import Encoder
from gradsync.strategies.parameter_server.job import Job, Param
from gradsync.testing import run_ranks

NUM_STEPS, SPIKE_AT = 16, 8
SHAPE = (64, 96)
REDUCERS = (
    "compressed(codec=int8)",
    "compressed(codec=int4)",
    "compressed(codec=sign)",
    "compressed(codec=ternary)",
    "compressed(codec=bf16)",
    "compressed(codec=topk(density=0.05))",
    "compressed(codec=dgc(density=0.05))",
    "compressed(codec=chain(topk(density=0.05), int8))",
    "compressed(codec=int8, feedback='ef21')",
    "powersgd(rank=2)",
    "powersgd(rank=2, alternating=True)",
)


def one_value(gradient: Tensor) -> None:
    gradient[3, 5] = 1e28


def every_value(gradient: Tensor) -> None:
    gradient.mul_(1e28)


def gradient_of(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).to(dtype)


def errors(
    comm: Communicator, reducer: str, spike: Callable[[Tensor], None] | None, dtype: torch.dtype = torch.float32
) -> list[float]:
    """The distance of each step's mean from the exact one."""
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    with gradsync.synchronize(model, optimizer, f"allreduce(reducer={reducer})", comm=comm) as sync:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            gradients = [gradient_of(rank, step, dtype) for rank in range(comm.world_size)]
            if spike is not None and step == SPIKE_AT:
                spike(gradients[1])
            (model.weight * gradients[comm.rank]).sum().backward()
            optimizer.step()
            assert model.weight.grad is not None
            exact = torch.stack(gradients).double().mean(0)
            found.append(float(torch.linalg.vector_norm(model.weight.grad.double() - exact)))
        del sync
    return found


@pytest.mark.parametrize("spike", [one_value, every_value])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_steps_after_a_spike_are_as_accurate_as_without(
    reducer: str, num_ranks: int, spike: Callable[[Tensor], None]
) -> None:
    plain = run_ranks(num_ranks, lambda comm: errors(comm, reducer, None))[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spiky = run_ranks(num_ranks, lambda comm: errors(comm, reducer, spike))[0]
    assert spiky[:SPIKE_AT] == plain[:SPIKE_AT]
    assert max(spiky[SPIKE_AT + 1 :]) < 30 * max(plain), "not 1e20 and more"
    assert max(spiky[-4:]) < 1.5 * max(plain)
    warnings_of_spikes = [str(each.message) for each in caught if issubclass(each.category, gradsync.GradSyncWarning)]
    assert warnings_of_spikes or spike is one_value, "many codecs represent a single large value exactly"
    assert all("the gradient of weight was, on some rank," in text for text in warnings_of_spikes)


def test_spike_is_detected_in_float64() -> None:
    """float64 goes through torch, and not through the kernels."""
    reducer = "compressed(codec=int8)"
    plain = run_ranks(2, lambda comm: errors(comm, reducer, None, torch.float64))[0]
    with pytest.warns(gradsync.GradSyncWarning, match="the gradient of weight"):
        spiky = run_ranks(2, lambda comm: errors(comm, reducer, every_value, torch.float64))[0]
    assert max(spiky[SPIKE_AT + 1 :]) < 30 * max(plain)


def test_spike_does_not_stay_in_a_parameter_server_worker_residual() -> None:
    param = Param("w", (4096,), "float32", 0)
    encoder = Encoder(Job(params=(param,), optimizer="SGD", num_workers=1, codecs={"w": "sign"}), worker=0)
    for clock in range(4):
        encoder.encode("w", torch.ones(4096), clock=clock)
    with pytest.warns(gradsync.GradSyncWarning, match="the gradient of w was"):
        encoder.encode("w", torch.linspace(0, 1e28, 4096), clock=4)
    assert float(encoder.residuals["w"].abs().max()) < 1e4


def test_lasting_larger_gradients_become_typical() -> None:
    def go(comm: Communicator) -> Any:
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gradsync.synchronize(model, optimizer, "allreduce(codec=int8)", comm=comm) as sync:
            for step in range(12):
                optimizer.zero_grad()
                (
                    model.weight * gradient_of(comm.rank, step, torch.float32) * (1e12 if step >= 4 else 1)
                ).sum().backward()
                optimizer.step()
            return sync.state_dict()["strategy_state"]["reducer"]["usual"]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        typical, other = run_ranks(2, go)
    assert typical == other > 1e9
    assert 1 <= len(caught) <= 2 * 3, "not at every step"
