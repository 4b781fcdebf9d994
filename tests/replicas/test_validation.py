"""What synchronize() takes, and what it refuses with a reason and a way out."""

from __future__ import annotations

import io
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator
from gradsync.engine.engine import Engine
from gradsync.testing import run_ranks
from tests.support.models import build


def engine_of(sync: gradsync.Synchronizer) -> Engine:
    return sync._engine


# -- parameters of odd kinds ----------------------------------------------------------------------------------------


class WithTable(nn.Module):
    """A frozen table of integers, as quantized models hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.table = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) * self.table[1]
        return result


def test_synchronize_takes_frozen_integer_parameters() -> None:
    def run(comm: Communicator) -> list[int]:
        model = WithTable()
        model.table.data += comm.rank
        optimizer = torch.optim.SGD(model.linear.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, comm=comm, accumulate=2):
            for _ in range(4):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return model.table.tolist()

    assert run_ranks(2, run) == [[0, 1, 2, 3]] * 2


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["allreduce", "diloco(every=2)"])
def test_backward_that_returns_none_leaves_a_parameter_unused(strategy: str, accumulate: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = NoGradient.apply(self.linear(x), self.weight)  # type: ignore[no-untyped-call]
            return result

    def run(comm: Communicator) -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, strategy, comm=comm, accumulate=accumulate) as sync:
            for _ in range(2 * accumulate):
                sync.set_weight(2.0)
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            assert model.weight.grad is None
            assert model.linear.weight.grad is not None

    run_ranks(2, run)


# -- optimizers that wrap others ------------------------------------------------------------------------------------


def test_wrapped_optimizers_are_refused_and_the_inner_one_is_named() -> None:
    class AcceleratedOptimizer(torch.optim.Optimizer):  # as accelerate's: it never calls its base's __init__
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return self.optimizer.param_groups

    model = build()
    wrapped = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"It wraps a SGD: pass that, `AcceleratedOptimizer\.optimizer`"):
        gradsync.synchronize(model, wrapped)


# -- what a model leaves behind when it is saved --------------------------------------------------------------------


def test_saved_model_holds_nothing_of_gradsync() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsync.synchronize(model, optimizer):
        model(torch.ones(1, 4)).sum().backward()
        saved = io.BytesIO()
        torch.save(model, saved)
        classes = {
            argument.split()[0] for op, argument, _ in pickletools.genops(pickle.dumps(model, 0)) if op.name == "GLOBAL"
        }
    assert not [name for name in classes if name.startswith("gradsync")]
    saved.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
        loaded = torch.load(saved, weights_only=True)
    assert torch.equal(loaded[0].weight, model[0].weight)


def test_saved_model_loads_where_gradsync_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        torch.save(model, tmp_path / "model.pt")
    without = (
        "import sys; sys.modules['gradsync'] = None; import torch;"
        f"print(type(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.strip() == "Sequential"


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["diloco(every=4)", "local_sgd(every=4)", "gossip", "parameter_server", "hogwild"])
def test_strategies_that_leave_gradients_alone_hold_no_buckets(strategy: str) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsync.synchronize(model, optimizer, strategy) as sync:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert engine_of(sync).plan.num_bytes == 0
        assert sync.stats()["bucket_bytes"] == []


def test_buckets_go_when_local_sgd_has_begun() -> None:
    def run(comm: Communicator) -> list[int]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes = []
        with gradsync.synchronize(model, optimizer, "local_sgd(every=2, exact_steps=2)", comm=comm) as sync:
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                sizes.append(engine_of(sync).plan.num_bytes)
                optimizer.step()
        return [size > 0 for size in sizes]

    assert run_ranks(2, run) == [[True, True, False, False, False]] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_without_buckets_is_the_weighted_mean(set_to_none: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gradsync.synchronize(model, optimizer, "diloco(every=100)", accumulate=2) as sync:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            for value, weight in ((1.0, 1), (4.0, 3)):
                sync.set_weight(weight)
                (value * model.weight).sum().backward()
                optimizer.step()
            assert model.weight.grad is not None
            assert model.weight.grad.item() == 3.25
        with sync.no_sync():
            (1.0 * model.weight).sum().backward()  # on top of a mean that was not zeroed
        saved = sync.state_dict()
    assert saved["own"]["rank0"]["window"]["num_backwards"] == 1
