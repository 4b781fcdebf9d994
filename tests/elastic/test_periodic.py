"""Elastic runs of strategies that exchange weights every n-th step: workers die, leave, join and come late."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
import torch

import gradsync
from gradsync.data.order import even_part
from tests.elastic.test_survive import BATCH, EXACT, Outcome, Run, run
from tests.elastic.trained import Samples, make_model

__all__ = ["run"]  # a fixture


def check_equal(outcome: Outcome, *, finished: int, steps: int) -> None:
    """Every worker that finished has taken all steps, and has the same parameters bit for bit."""
    finals = list(outcome.finals().values())
    assert len(finals) == finished, outcome.log
    for final in finals:
        assert final["steps"] == steps, outcome.log
        for name, value in finals[0]["model"].items():
            assert torch.equal(final["model"][name], value), name


def check_samples(outcome: Outcome, every: int) -> None:
    """No sample has come into the weights twice. What a killed worker has trained since its last exchange has not."""
    finished, found = set(outcome.finals()), defaultdict(list)
    for path in outcome.folder.glob("steps.*"):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        last = lines[-1]["step"] if lines else 0
        kept = last if path.name.removeprefix("steps.") in finished else (last - 1) // every * every
        for line in lines:
            if line["step"] <= kept:
                found[line["step"]] += line["samples"]
    assert all(len(set(each)) == len(each) for each in found.values()), outcome.log


def simulate(num_steps: int, every: int, lost_at: int) -> dict[str, torch.Tensor]:
    """Local SGD with plain SGD on 3 workers, of which worker 1 is lost after ``lost_at`` steps."""
    data = Samples()
    loader = gradsync.shard(data, global_batch_size=BATCH, seed=2)
    batches = []
    while len(batches) < num_steps:
        batches += [index for index, _, _ in loader]
    workers = {}
    for worker in range(3):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=100_000)
        workers[worker] = model, optimizer, schedule
    counted = dict.fromkeys(workers, 0)
    split = [0, 1, 2]
    for step, batch in enumerate(batches[:num_steps], start=1):
        for place, worker in enumerate(split):
            if worker not in workers:
                continue
            own = batch[even_part(len(batch), len(split), place)]
            model, optimizer, schedule = workers[worker]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(data.x[own]), data.y[own]).backward()
            optimizer.step()
            schedule.step()
            counted[worker] += len(own)
        if step == lost_at:
            del workers[1]
        if step % every == 0:
            total = sum(counted[worker] for worker in workers)
            with torch.no_grad():
                for params in zip(*(model.parameters() for model, _, _ in workers.values()), strict=True):
                    mean = sum(counted[w] / total * p for w, p in zip(workers, params, strict=True))
                    for param in params:
                        param.copy_(mean)
            split, counted = list(workers), dict.fromkeys(workers, 0)
    model, _, _ = workers[0]
    return {name: value.detach() for name, value in model.state_dict().items()}


def test_worker_killed_between_exchanges_is_left_out_as_in_a_simulation(run: Run) -> None:
    outcome = run(
        *("--max-restarts", "0"),
        kills=[["1.0", 26, "hook"]],
        epochs=16,
        step_s=0.01,
        strategy="local_sgd(every=10)",
        optimizer="sgd",
        settle=True,
    )
    check_equal(outcome, finished=2, steps=80)
    expected = simulate(80, 10, lost_at=25)
    for name, value in outcome.finals()["0.0"]["model"].items():
        torch.testing.assert_close(value, expected[name], rtol=0.0, atol=EXACT)
    (change,) = outcome.stats()["0.0"]["changes"]
    assert not change["discarded"]
    assert change["lost_steps"] == 10
    assert outcome.stats()["2.0"]["discarded_steps"] == 0
    check_samples(outcome, 10)


KILLS = [["0.0", 2, "exchange"], ["2.0", 4, "commit"], ["2.1", 12, "hook"]]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("diloco(every=8)", {}),
        ("local_sgd(every=8, codec=int8, optimizer_state='average')", {"norm": True}),
        ("diloco(every=8, fragments=2, overlap=3, codec=int4)", {}),
        ("local_sgd(every=5, exact_steps=12, schedule='quadratic')", {"kills": [["0.0", 12, "hook"], *KILLS[1:]]}),
    ],
)
def test_workers_die_in_and_between_exchanges(run: Run, strategy: str, options: dict[str, Any]) -> None:
    given = {"kills": KILLS, "epochs": 60, "step_s": 0.03, "settle": True, **options}
    outcome = run(strategy=strategy, **given)
    assert outcome.code == 0, outcome.log
    assert outcome.log.count("was killed by SIGKILL") == 3, outcome.log
    check_equal(outcome, finished=3, steps=300)
    check_samples(outcome, 8)
    assert "0.1" in outcome.finals()  # the new workers took part


def test_worker_dies_while_all_settle(run: Run) -> None:
    outcome = run(kills=[["0.0", 1, "settle"]], epochs=6, strategy="diloco(every=8)", settle=True)
    check_equal(outcome, finished=2, steps=30)


@pytest.mark.alone
def test_worker_leaves_in_order_after_an_exchange(run: Run) -> None:
    outcome = run(kills=[["1.0", 13, "leave"]], epochs=16, step_s=0.01, strategy="diloco(every=10)", settle=True)
    assert outcome.code == 0, outcome.log
    check_equal(outcome, finished=2, steps=80)
    (change,) = outcome.stats()["0.0"]["changes"]
    assert change["lost_steps"] == 0
    outcome.check_samples(80, may_miss=0)


def test_late_worker_loses_nothing_with_a_quorum(run: Run) -> None:
    outcome = run(
        epochs=16,
        step_s=0.01,
        slow={"2.0": 0.06},
        strategy="diloco(every=8, quorum=2, grace_s=0.05)",
        settle=True,
    )
    assert outcome.code == 0, outcome.log
    check_equal(outcome, finished=3, steps=80)
    outcome.check_samples(80, may_miss=0)
    stats = outcome.stats()
    assert stats["2.0"]["late"] > 0
    assert stats["0.0"]["late"] == 0
    assert not stats["2.0"]["changes"]


def test_late_worker_survives_a_loss(run: Run) -> None:
    outcome = run(
        kills=[["0.0", 30, "hook"]],
        epochs=24,
        step_s=0.01,
        slow={"2.0": 0.04},
        strategy="local_sgd(every=8, codec=int8, quorum=1, grace_s=0.02)",
        settle=True,
    )
    assert outcome.code == 0, outcome.log
    check_equal(outcome, finished=len(outcome.finals()), steps=120)


def test_quorum_needs_an_elastic_run() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="gradsync run --elastic"):
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "diloco(every=5, quorum=1)")
    with pytest.raises(ValueError, match="needs quorum="):
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "local_sgd(grace_s=1.0)")
    with pytest.raises(ValueError, match="fragments=1"):
        gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), "diloco(quorum=1, fragments=2)")
