"""Mistakes on one rank that would part the replicas in silence: each is found at once, on every rank, and named.

Ranks are threads here; tests/multiprocess/test_one_rank_differs.py has the same on real transports.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator
from gradsync.testing import run_ranks
from tests.support.models import build

Loop = Callable[[Communicator, nn.Module, torch.optim.Optimizer, gradsync.Synchronizer], None]


def errors_of(loop: Loop, *, world_size: int = 3, strategy: str = "allreduce", **options: object) -> list[str]:
    """What each rank of a loop raises: its kind and text."""

    def run(comm: Communicator) -> str:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with gradsync.synchronize(model, optimizer, strategy, comm=comm, **options) as sync:  # type: ignore[arg-type]
            try:
                loop(comm, model, optimizer, sync)
            except (gradsync.GradSyncError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
        return "nothing"

    return run_ranks(world_size, run, timeout_s=5.0)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch.float().reshape(-1, 1).expand(-1, 4)).square().mean()
    return loss


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


# -- backwards that one rank skips or takes twice -------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_header_finds_a_skipped_backward_by_the_loaders_batch(accumulate: int) -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        loader = gradsync.shard(torch.arange(60), global_batch_size=6, comm=comm)
        for number, batch in enumerate(loader):
            if comm.rank == 1 and number == 3:
                continue
            step_on(model, optimizer, batch)

    texts = errors_of(loop, accumulate=accumulate)
    assert len(set(texts)) == 1
    assert texts[0].startswith("OutOfStep: rank 1 is out of step: its batch is the one that ends at sample")
    assert "of epoch 0" in texts[0]
    assert "sync.set_weight(0)" in texts[0]


def test_header_finds_a_skipped_backward_by_the_users_own_number() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        assert isinstance(sync, gradsync.Synchronizer)
        for number in range(6):
            if comm.rank == 2 and number == 3:
                continue
            sync.set_batch(number)
            step_on(model, optimizer, torch.ones(2))

    texts = errors_of(loop)
    assert len(set(texts)) == 1
    assert "rank 2 is out of step: its batch is number 4, that of the others number 3" in texts[0]


def test_loader_batches_agree_over_epochs_uneven_ends_and_evaluations() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        loader = gradsync.shard(torch.arange(31), global_batch_size=6, comm=comm)  # the last step has one sample
        held_out = gradsync.shard(torch.arange(12), global_batch_size=6, comm=comm)
        for _ in range(3):
            for batch in loader:
                step_on(model, optimizer, batch)
            with torch.no_grad():
                for batch in held_out:
                    loss_of(model, batch)

    assert errors_of(loop) == ["nothing"] * 3


@pytest.mark.parametrize("odd", ["a backward too many", "a backward too few"])
def test_header_finds_a_backward_too_many_or_too_few_at_the_next_step(odd: str) -> None:
    seen: dict[int, int] = {}

    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        for number in range(8):
            seen[comm.rank] = number
            optimizer.zero_grad()
            twice = odd == "a backward too many" and comm.rank == 1 and number == 2
            never = odd == "a backward too few" and comm.rank == 1 and number == 2
            for _ in range(0 if never else 2 if twice else 1):
                loss_of(model, torch.ones(2)).backward()
            optimizer.step()

    texts = errors_of(loop)
    assert len(set(texts)) == 1
    assert "rank 1 is out of step: its number of calls of optimizer.step()" in texts[0]
    assert max(seen.values()) <= 3


def test_steps_after_a_join_need_not_be_as_many() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        assert isinstance(sync, gradsync.Synchronizer)
        for _ in range(2):
            with sync.join():
                for _ in range(2 + comm.rank):
                    step_on(model, optimizer, torch.ones(2))

    assert errors_of(loop) == ["nothing"] * 3


# -- plans and settings that differ ---------------------------------------------------------------------------------


def test_header_names_a_layer_that_one_rank_has_frozen() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        step_on(model, optimizer, torch.ones(2))
        if comm.rank == 1:
            next(model.parameters()).requires_grad_(False)
        step_on(model, optimizer, torch.ones(2))

    texts = errors_of(loop)
    name = next(name for name, _ in build().named_parameters())
    assert len(set(texts)) == 1
    assert f"ranks differ in parameter {name}: rank 1 has frozen" in texts[0]
    assert "rank 0 has trained" in texts[0]


def test_header_names_the_hyperparameter_that_differs() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        step_on(model, optimizer, torch.ones(2))
        if comm.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.2
        step_on(model, optimizer, torch.ones(2))

    texts = errors_of(loop)
    assert len(set(texts)) == 1
    assert "optimizer param_groups[0]['lr']: rank 1 has 0.2, rank 0 has 0.1" in texts[0]


def test_agreement_ignores_the_order_of_keys_and_the_addresses_of_objects() -> None:
    class Rule:
        pass

    def run(comm: Communicator) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        group = optimizer.param_groups[0]
        if comm.rank == 1:  # as after load_state_dict: the same, in another order
            reordered = dict(reversed(group.items()))
            group.clear()
            group.update(reordered)
        group["rule"] = Rule()
        with gradsync.synchronize(model, optimizer, comm=comm):
            step_on(model, optimizer, torch.ones(2))

    run_ranks(2, run)


# -- gradients that no synchronizing backward has made --------------------------------------------------------------


def set_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def without_hooks(model: nn.Module) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, torch.ones(2)), params), strict=True):
        param.grad = grad


@pytest.mark.parametrize("make", [set_by_hand, without_hooks])
@pytest.mark.parametrize("strategy", ["allreduce", "allreduce(codec=int8)", "diloco(every=2)", "local_sgd(every=2)"])
def test_step_refuses_gradients_that_no_backward_has_averaged(strategy: str, make: Callable[..., None]) -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        step_on(model, optimizer, torch.ones(2))
        optimizer.zero_grad()
        make(model)
        optimizer.step()

    for text in errors_of(loop, strategy=strategy, world_size=2):
        assert text.startswith("ValueError: optimizer.step() would apply a gradient of")


def test_step_refuses_a_gradient_that_only_some_hooks_have_missed() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        first = next(model.parameters())
        first.requires_grad_(False)  # the split backward: autograd does not see it ...
        loss = loss_of(model, torch.ones(2))
        first.requires_grad_(True)
        loss.backward()
        first.grad = torch.ones_like(first)  # ... and the schedule sets it afterwards
        optimizer.step()

    for text in errors_of(loop, world_size=2):
        assert text.startswith("ValueError: optimizer.step() would apply a gradient of")


def test_step_takes_zeros_as_checkpointing_sets_them() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        step_on(model, optimizer, torch.ones(2))
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    assert errors_of(loop, world_size=2) == ["nothing"] * 2


def test_step_runs_the_synchronizing_backward_of_its_closure_after_no_sync() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        assert isinstance(sync, gradsync.Synchronizer)

        def closure() -> Tensor:
            loss = loss_of(model, torch.full((2,), comm.rank + 2.0))
            loss.backward()
            return loss

        with sync.no_sync():
            loss_of(model, torch.full((2,), comm.rank + 1.0)).backward()
        optimizer.step(closure)
        flat = torch.cat([param.detach().flatten() for param in model.parameters()])
        everyone = torch.empty(comm.world_size, flat.numel())
        comm.all_gather(flat, out=everyone).wait()
        assert torch.equal(everyone[0], everyone[1])

    assert errors_of(loop, world_size=2) == ["nothing"] * 2


def test_step_still_refuses_what_is_unsynchronized_when_its_closure_has_run() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        assert isinstance(sync, gradsync.Synchronizer)

        def closure() -> Tensor:
            with sync.no_sync():
                loss = loss_of(model, torch.ones(2))
                loss.backward()
            return loss

        optimizer.step(closure)

    for text in errors_of(loop, world_size=2):
        assert "under no_sync()" in text


# -- hooks and parameters that are not what they were ---------------------------------------------------------------


def test_gradient_hooks_of_the_user_run_before_the_mean_is_taken() -> None:
    def run(comm: Communicator) -> list[Tensor]:
        model = build()
        model.append(nn.Linear(2, 20_000))  # large gradients leave for their bucket one by one
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, comm=comm, bucket_bytes=1024):
            for number in range(6):
                if number == 1:
                    for param in model.parameters():
                        param.register_post_accumulate_grad_hook(double_in_place if comm.rank else replace_by_triple)
                step_on(model, optimizer, torch.full((2,), comm.rank + 1.0))
        return [param.detach().clone() for param in model.parameters()]

    first, second = run_ranks(2, run)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def double_in_place(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def replace_by_triple(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 3


@pytest.mark.parametrize("strategy", ["allreduce", "diloco(every=2)"])
def test_step_refuses_parameters_that_were_assigned_anew(strategy: str) -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        step_on(model, optimizer, torch.ones(2))
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        step_on(model, optimizer, torch.ones(2))

    for text in errors_of(loop, strategy=strategy, world_size=2):
        assert "load_state_dict(assign=True)" in text


def test_step_refuses_a_layer_that_was_added_for_another_optimizer() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        model.add_module("head", nn.Linear(2, 2))
        step_on(model, optimizer, torch.ones(2))

    for text in errors_of(loop, world_size=2):
        assert "new parameter head.weight since synchronize()" in text


# -- what is no mistake ------------------------------------------------------------------------------------------------


def test_windows_of_ranks_with_a_batch_less_begin_anew_together() -> None:
    """The last step has fewer samples than ranks: some have run a backward less when the next epoch begins."""

    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        loader = gradsync.shard(torch.arange(13), batch_size=2, comm=comm, seed=1)
        for _ in range(3):
            for batch in loader:
                step_on(model, optimizer, batch)

    assert errors_of(loop, accumulate=2) == ["nothing"] * 3


def test_header_compares_numbers_of_numpy() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        rates = (np.float64(0.1), 0.1, np.float64(0.1 if comm.rank == 0 else 0.2))
        for rate in rates:
            optimizer.param_groups[0]["lr"] = float(rate) if comm.rank == 1 and rate == 0.1 else rate
            step_on(model, optimizer, torch.ones(2))

    for text in errors_of(loop, world_size=2):
        assert "param_groups[0]['lr']: rank 1 has 0.2, rank 0 has 0.1" in text


def test_model_moved_away_and_back_on_one_rank_goes_on() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        for number in range(4):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, torch.full((2,), comm.rank + 1.0)).backward()
            optimizer.step()
            if number == 1 and comm.rank == 0:
                model.double()
                model.float()

    assert errors_of(loop, world_size=2) == ["nothing"] * 2


def test_step_takes_gradients_of_several_backwards_and_zeros_in_place_of_none() -> None:
    def loop(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, sync: object) -> None:
        first = next(model.parameters())
        gathered = []
        for unused in (True, False):  # as gradient surgery does it: each task's gradients by themselves, then their sum
            optimizer.zero_grad()
            first.requires_grad_(not unused)
            loss = loss_of(model, torch.ones(2))
            first.requires_grad_(True)
            loss.backward()
            gathered.append([None if param.grad is None else param.grad.clone() for param in model.parameters()])
        for param, grad in zip(model.parameters(), gathered[1], strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        first.requires_grad_(False)
        loss = loss_of(model, torch.ones(2))
        first.requires_grad_(True)
        loss.backward()
        first.grad = torch.zeros_like(first)
        optimizer.step()

    assert errors_of(loop, world_size=2) == ["nothing"] * 2


def test_refused_model_can_be_attached_again() -> None:
    model = build()
    with pytest.raises(ValueError, match="Put all into one optimizer"):
        gradsync.synchronize(model, torch.optim.SGD(list(model.parameters())[:1], lr=0.1), "local_sgd")
    gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "local_sgd").close()


# -- two models, two optimizers -------------------------------------------------------------------------------------


def test_weights_of_two_synchronizers_are_apart() -> None:
    """A weight that is set for a's backward is used neither by b's batch normalization nor by an earlier one of a."""

    def run(comm: Communicator) -> list[Tensor]:
        torch.manual_seed(0)
        a, b = (gradsync.SyncBatchNorm.convert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), comm) for _ in "ab")
        sync_a, sync_b = (
            gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), comm=comm) for model in (a, b)
        )
        torch.manual_seed(1 + comm.rank)
        x = torch.randn(6, 4)
        sync_a.set_weight(10 if comm.rank else 1)
        (b(x) ** 3).mean().backward()
        (a(x) ** 3).mean().backward()
        alone = [param.grad.clone() for model in (b, a) for param in model.parameters() if param.grad is not None]
        for model in (a, b):
            model.zero_grad()
        (b(x) ** 3).mean().backward()
        sync_a.set_weight(10 if comm.rank else 1)
        (a(x) ** 3).mean().backward()
        apart = [param.grad.clone() for model in (b, a) for param in model.parameters() if param.grad is not None]
        for one, other in zip(alone, apart, strict=True):
            torch.testing.assert_close(one, other)
        sync_a.close()
        sync_b.close()
        return alone

    run_ranks(2, run)


@pytest.mark.parametrize(
    "strategy",
    ["parameter_server", "local_sgd", "diloco", "gossip", "hogwild", "onebit_adam", "auto(allow=[diloco(every=5)])"],
)
def test_strategies_around_the_step_refuse_a_second_optimizer(strategy: str) -> None:
    model = build()
    optimizer = torch.optim.Adam(list(model.parameters())[:1], lr=0.1)
    with pytest.raises(ValueError, match="Put all into one optimizer"):
        gradsync.synchronize(model, optimizer, strategy)
