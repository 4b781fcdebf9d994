"""Every strategy continues from weights that are loaded after ``synchronize``: see docs/how_to/checkpoints.md."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.hooks import RemovableHandle

import gradsync
from gradsync.comm import Communicator
from gradsync.strategies.weight_loads import LoadWatcher
from gradsync.testing import run_ranks
from tests.contracts.test_strategy import STRATEGIES, is_repeatable

RANKS = 3
Act = Callable[[nn.Module, int], None]


def seeded(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The same weights on all ranks, for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.4 * torch.randn(value.shape, dtype=value.dtype, generator=generator)
        for name, value in model.state_dict().items()
    }


def load(model: nn.Module, rank: int) -> None:
    model.load_state_dict(seeded(model, 7))


def load_half(model: nn.Module, rank: int) -> None:
    assert isinstance(model, nn.Sequential)
    part = {name.removeprefix("2."): value for name, value in seeded(model, 7).items() if name.startswith("2.")}
    model[2].load_state_dict(part)


def load_and_put_back(model: nn.Module, rank: int) -> None:
    """Load other weights and restore the old ones, as an evaluation does, on one rank."""
    if rank == 0:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        load(model, rank)
        model.load_state_dict(before)


def load_others(model: nn.Module, rank: int) -> None:
    model.load_state_dict(seeded(model, rank))


def replace_storage(model: nn.Module, rank: int) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach().clone(), model.parameters())


def nothing(model: nn.Module, rank: int) -> None:
    pass


def train(
    comm: Communicator, strategy: str, act: Act, *, early: bool = False, still: bool = False
) -> dict[str, Tensor]:
    """Train; call ``act`` after four steps (``early``: before the first); then train on (``still``: at a rate of 0)."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model.load_state_dict(seeded(model, 0))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if "adam" in strategy:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync:

        def step(number: int) -> None:
            generator = torch.Generator().manual_seed(number * 100 + comm.rank)
            x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()

        if not early:
            for number in range(4):
                step(number)
            if not is_repeatable(strategy):
                sync.settle()  # ranks are at different steps, and must load between the same
        act(model, comm.rank)
        if still:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        for number in range(4, 17):
            step(number)
        sync.settle()
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_continues_from_loaded_weights(strategy: str, early: bool) -> None:
    """The learning rate is 0 from then on, so that any other weight that is mixed in would show."""
    for outcome in run_ranks(RANKS, lambda comm: train(comm, strategy, load, early=early, still=True)):
        expected = seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(), 7)
        for name, value in expected.items():
            torch.testing.assert_close(outcome[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", ["parameter_server", "diloco(every=5)", "gossip"])
def test_strategy_continues_from_weights_loaded_into_a_submodule(strategy: str) -> None:
    for outcome in run_ranks(RANKS, lambda comm: train(comm, strategy, load_half, still=True)):
        expected = seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double(), 7)
        torch.testing.assert_close(outcome["2.weight"], expected["2.weight"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("act", [load_and_put_back, replace_storage])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_ignores_loads_and_moves_that_keep_the_values(strategy: str, act: Act) -> None:
    if strategy == "hogwild" and act is replace_storage:
        with pytest.raises(ValueError, match=r"moved out of the memory that the ranks share.*synchronize again"):
            run_ranks(RANKS, lambda comm: train(comm, strategy, act))
        return
    outcomes = run_ranks(RANKS, lambda comm: train(comm, strategy, act))
    usual = run_ranks(RANKS, lambda comm: train(comm, strategy, nothing)) if is_repeatable(strategy) else outcomes
    for outcome, expected in zip(outcomes, usual, strict=True):
        for name, value in expected.items():
            assert torch.equal(outcome[name], value), name
            torch.testing.assert_close(outcome[name], outcomes[0][name])


@pytest.mark.parametrize("strategy", ["parameter_server", "parameter_server(staleness=None)", "diloco(every=5)"])
def test_strategy_refuses_different_weights_on_each_rank(strategy: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(gradsync.OutOfStep, match=r"[Ll]oad the same"):
            train(comm, strategy, load_others)

    run_ranks(RANKS, run)


def clamp(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-0.1, 0.1)


def replace_values(model: nn.Module, rank: int) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() + 1.0, model.parameters())


@pytest.mark.parametrize("act", [clamp, replace_values])
def test_parameter_server_refuses_in_place_writes(act: Act) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=r"written to since the last step.*load_state_dict\(\) on all ranks"):
            train(comm, "parameter_server", act)

    run_ranks(2, run)


def test_load_watcher_is_not_in_copies_of_the_model() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsync.synchronize(model, optimizer, "diloco(every=2)"):
        copied = copy.deepcopy(model)
        hooks = pickle.dumps(model._load_state_dict_pre_hooks)
    assert b"gradsync" not in hooks
    assert type(copied._load_state_dict_pre_hooks) is type(nn.Linear(2, 1)._load_state_dict_pre_hooks)


def test_load_watcher_keeps_hook_handles_working() -> None:
    model = nn.Linear(2, 1)
    called: list[str] = []

    def register(name: str) -> RemovableHandle:
        return model.register_load_state_dict_pre_hook(lambda *_: called.append(name))

    def load_calls() -> list[str]:
        called.clear()
        model.load_state_dict(model.state_dict())
        return list(called)

    before = [register(f"before {at}") for at in range(2)]
    with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "diloco(every=2)"):
        meanwhile = [register(f"while {at}") for at in range(2)]
        assert load_calls() == ["before 0", "before 1", "while 0", "while 1"]
        before[0].remove()
        meanwhile[0].remove()
        assert load_calls() == ["before 1", "while 1"]
    after = register("after")
    assert load_calls() == ["before 1", "while 1", "after"]
    for handle in (before[1], meanwhile[1], after):
        handle.remove()
    assert load_calls() == []


def test_load_watcher_copied_handle_removes_the_copied_hook() -> None:
    model = nn.Linear(2, 1)
    handles = [model.register_load_state_dict_pre_hook(print)]
    with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "diloco(every=2)"):
        handles.append(model.register_load_state_dict_pre_hook(print))
        copied, copies = copy.deepcopy((model, handles))
    for handle in copies:
        handle.remove()
    assert len(copied._load_state_dict_pre_hooks) == 0
    assert len(model._load_state_dict_pre_hooks) == 2


def test_load_watcher_removal_leaves_other_watchers() -> None:
    model = nn.Linear(2, 1)
    first, second = (LoadWatcher(model, dict(model.named_parameters())) for _ in range(2))
    first.remove()
    model.load_state_dict(seeded(model, 7))
    assert not first.was_loaded
    assert second.was_loaded
