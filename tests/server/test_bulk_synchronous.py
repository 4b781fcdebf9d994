"""Staleness 0: n workers and any number of servers are one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.comm.threads import run_ranks
from gradsync.server.job import hyperparameters
from gradsync.server.server import Server
from tests.server.rig import (
    TIMEOUT_S,
    Optimizers,
    Trainee,
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
        trainee = Trainee(comm.rank, addresses_of(started), make, num_workers=num_workers, **options)
        trainee.join()
        for step in range(steps):
            before_step(trainee.optimizer, step)
            trainee.step(step, rows(comm.rank, step))
        trainee.client.close()
        return trainee.values()

    return run_ranks(num_workers, work, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("make", [sgd, momentum, adamw])
def test_fifty_steps_equal_one_process(make: Optimizers) -> None:
    with servers(2) as started:
        results = train(started, 3, 50, make)
    assert_close(results[0], reference(3, 50, make))
    for other in results[1:]:
        assert_same(other, results[0])


def test_uneven_weights_a_schedule_and_clipping_are_the_whole_models() -> None:
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


def test_two_runs_are_the_same_bits_whoever_comes_first() -> None:
    found = []
    for _ in range(2):
        with servers(2) as started:
            found.append(train(started, 4, 10, adamw)[0])
    assert_same(found[0], found[1])


def test_saved_and_taken_back_goes_on_bit_for_bit_also_with_other_servers() -> None:
    def work(comm: Communicator, started: list[Server], state: dict[str, Any] | None, first: int, last: int) -> Any:
        trainee = Trainee(comm.rank, addresses_of(started), adamw, num_workers=2)
        trainee.join()
        if state is not None:
            comm.barrier()  # all have come in, with no push
            if comm.rank == 0:
                trainee.client.load_state(state)
            comm.barrier()
            assert trainee.client.refresh() == first
            trainee.client.pull(trainee.params)
        for step in range(first, last):
            trainee.step(step)
        fetched = trainee.client.fetch_state() if comm.rank == 0 else None
        comm.barrier()
        trainee.client.close()
        return trainee.values(), fetched

    def run(count: int, state: dict[str, Any] | None, first: int, last: int) -> Any:
        with servers(count) as started:
            return run_ranks(2, lambda comm: work(comm, started, state, first, last), timeout_s=TIMEOUT_S)[0]

    whole, _ = run(2, None, 0, 12)
    _, state = run(2, None, 0, 5)
    assert set(state["optimizer"]["0.weight"]) >= {"step", "exp_avg", "exp_avg_sq"}
    resumed, _ = run(3, state, 5, 12)
    assert_same(resumed, whole)


def test_unused_parameters_are_left_alone() -> None:
    with servers(1) as started:

        def work(comm: Communicator) -> dict[str, Tensor]:
            trainee = Trainee(comm.rank, addresses_of(started), adamw, num_workers=2)
            trainee.join()
            grads = trainee.gradients(0)
            grads["2.bias"] = None  # nobody uses it
            if comm.rank == 1:
                grads["0.bias"] = None  # one does
            trainee.client.push(grads, weight=1.0, groups=hyperparameters(trainee.optimizer))
            before = trainee.values()
            trainee.client.pull(trainee.params)
            after = trainee.values()
            comm.barrier()
            trainee.client.close()
            return {name: after[name] - before[name] for name in after}

        moved = run_ranks(2, work, timeout_s=TIMEOUT_S)[0]
    assert float(moved["2.bias"].abs().sum()) == 0.0
    assert float(moved["0.bias"].abs().sum()) > 0.0


def test_lossy_codecs_reach_the_servers_and_feedback_brings_back_what_they_leave_out() -> None:
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


def test_backup_goes_on_without_the_last_and_drops_what_it_brings() -> None:
    with servers(1) as started:
        trainees = [Trainee(worker, addresses_of(started), num_workers=3, backup=1) for worker in range(3)]
        for trainee in trainees:
            trainee.join()
        late = trainees[2].gradients(0)
        for trainee in trainees[:2]:
            trainee.step(0, pull=False)
        for trainee in trainees[:2]:
            trainee.client.pull(trainee.params)  # the third has not pushed
        assert_close(trainees[0].values(), reference(2, 1))
        trainees[2].client.push(late, weight=4.0, groups=trainees[2].client._groups)
        trainees[2].client.pull(trainees[2].params)
        assert_same(trainees[2].values(), trainees[0].values())
        assert trainees[2].client.clock == 1
        assert trainees[0].client.stats()["dropped"] == 1
        for trainee in trainees:
            trainee.client.close()
