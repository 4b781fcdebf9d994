"""Staleness 0: n workers with any number of servers equal one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.strategies.parameter_server.job import hyperparameters
from gradsync.strategies.parameter_server.server.server import Server
from gradsync.testing.threads import run_ranks
from tests.strategies.parameter_server.trainer import (
    TIMEOUT_S,
    Optimizers,
    Trainer,
    addresses_of,
    assert_close,
    assert_same,
    reference,
    servers,
    sgd,
)

Params = list[nn.Parameter]


def momentum(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(params: Params) -> torch.optim.Optimizer:
    groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:], "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95))


def train(
    started: list[Server],
    num_workers: int,
    steps: int,
    make: Optimizers = sgd,
    *,
    rows: Callable[[int, int], int] = lambda worker, step: 4,
    before_step: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None,
    **options: Any,
) -> list[dict[str, Tensor]]:
    def work(comm: Communicator) -> dict[str, Tensor]:
        trainer = Trainer(comm.rank, addresses_of(started), make, num_workers=num_workers, **options)
        trainer.join()
        for step in range(steps):
            before_step(trainer.optimizer, step)
            trainer.step(step, rows(comm.rank, step))
        trainer.client.close()
        return trainer.values()

    return run_ranks(num_workers, work, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("make", [sgd, momentum, adamw])
def test_bulk_synchronous_training_equals_one_process(make: Optimizers) -> None:
    with servers(2) as started:
        results = train(started, 3, 50, make)
    assert_close(results[0], reference(3, 50, make))
    for other in results[1:]:
        assert_same(other, results[0])


def test_bulk_synchronous_training_with_weights_schedule_and_clipping_equals_one_process() -> None:
    def decay(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)

    def rows(worker: int, step: int) -> int:
        return 1 + (worker + step) % 5

    with servers(3) as started:
        results = train(started, 2, 20, momentum, rows=rows, before_step=decay, clip_norm=0.3)
    expected = reference(2, 20, momentum, rows=rows, before_step=decay, clip_norm=0.3)
    assert_close(results[0], expected)
    assert_same(results[0], results[1])
    unclipped = reference(2, 20, momentum, rows=rows, before_step=decay)
    assert any(not torch.allclose(unclipped[name], expected[name], rtol=1e-3) for name in expected)


def test_bulk_synchronous_training_is_deterministic_whatever_the_arrival_order() -> None:
    found = []
    for _ in range(2):
        with servers(2) as started:
            found.append(train(started, 4, 10, adamw)[0])
    assert_same(found[0], found[1])


def test_client_state_resumes_bit_for_bit_with_another_number_of_servers() -> None:
    def work(comm: Communicator, started: list[Server], state: dict[str, Any] | None, first: int, last: int) -> Any:
        trainer = Trainer(comm.rank, addresses_of(started), adamw, num_workers=2)
        trainer.join()
        if state is not None:
            comm.barrier()  # all have joined, without a push
            if comm.rank == 0:
                trainer.client.load_state(state)
            comm.barrier()
            assert trainer.client.refresh() == first
            trainer.client.pull(trainer.params)
        for step in range(first, last):
            trainer.step(step)
        fetched = trainer.client.fetch_state() if comm.rank == 0 else None
        comm.barrier()
        trainer.client.close()
        return trainer.values(), fetched

    def run(count: int, state: dict[str, Any] | None, first: int, last: int) -> Any:
        with servers(count) as started:
            return run_ranks(2, lambda comm: work(comm, started, state, first, last), timeout_s=TIMEOUT_S)[0]

    whole, _ = run(2, None, 0, 12)
    _, state = run(2, None, 0, 5)
    assert set(state["optimizer"]["0.weight"]) >= {"step", "exp_avg", "exp_avg_sq"}
    resumed, _ = run(3, state, 5, 12)
    assert_same(resumed, whole)


def test_shard_leaves_unused_parameters_alone() -> None:
    with servers(1) as started:

        def work(comm: Communicator) -> dict[str, Tensor]:
            trainer = Trainer(comm.rank, addresses_of(started), adamw, num_workers=2)
            trainer.join()
            grads = trainer.gradients(0)
            grads["2.bias"] = None  # no worker has a gradient for it
            if comm.rank == 1:
                grads["0.bias"] = None  # only worker 0 has one
            trainer.client.push(grads, weight=1.0, groups=hyperparameters(trainer.optimizer))
            before = trainer.values()
            trainer.client.pull(trainer.params)
            after = trainer.values()
            comm.barrier()
            trainer.client.close()
            return {name: after[name] - before[name] for name in after}

        moved = run_ranks(2, work, timeout_s=TIMEOUT_S)[0]
    assert float(moved["2.bias"].abs().sum()) == 0.0
    assert float(moved["0.bias"].abs().sum()) > 0.0


def test_codecs_with_error_feedback_stay_close_to_exact_training() -> None:
    steps, codecs = 60, {"0.weight": "int4", "2.weight": "topk(density=0.3)"}
    exact = reference(2, steps)
    errors = {}
    for feedback in ("ef", "none"):
        with servers(2) as started:
            # In float64 codecs go through torch: nothing is compiled.
            results = train(started, 2, steps, codecs=codecs, feedback=feedback, dtype=torch.float64)
        assert_same(results[0], results[1])
        errors[feedback] = sum(float((results[0][name] - exact[name]).norm()) for name in codecs)
    assert 1e-4 < errors["ef"] < errors["none"] / 2


def test_backup_does_not_wait_for_the_slowest_worker_and_drops_its_push() -> None:
    with servers(1) as started:
        trainers = [Trainer(worker, addresses_of(started), num_workers=3, backup=1) for worker in range(3)]
        for trainer in trainers:
            trainer.join()
        late = trainers[2].gradients(0)
        for trainer in trainers[:2]:
            trainer.step(0, pull=False)
        for trainer in trainers[:2]:
            trainer.client.pull(trainer.params)  # the third has not pushed
        assert_close(trainers[0].values(), reference(2, 1))
        trainers[2].client.push(late, weight=4.0, groups=trainers[2].client._groups)
        trainers[2].client.pull(trainers[2].params)
        assert_same(trainers[2].values(), trainers[0].values())
        assert trainers[2].client.clock == 1
        assert trainers[0].client.stats()["dropped"] == 1
        for trainer in trainers:
            trainer.client.close()
