"""Staleness policies: closed-form numbers, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gradsync import spec
from gradsync.strategies.parameter_server.job import Job
from gradsync.strategies.parameter_server.server.shard import Push, Shard
from gradsync.strategies.parameter_server.server.staleness import (
    KIND,
    Compensate,
    Drop,
    Policy,
    Scale,
    StalePush,
    policy_for_spec,
    policy_from_text,
    policy_text,
    resolve_policy,
)


def stale_push(tau: int = 3, **tensors: dict[str, Tensor]) -> StalePush:
    none: dict[str, Tensor] = {}
    empty = {"grads": none, "params": none, "backup": none, "state": {}}
    return StalePush(worker=1, clock=5, tau=tau, **(empty | tensors))


def of(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def test_scale_divides_the_learning_rate_by_the_staleness() -> None:
    assert [Scale().admit(stale_push(tau)) for tau in (0, 1, 2, 5, 100)] == [1.0, 1.0, 0.5, 0.2, 0.01]


def test_drop_keeps_a_push_at_the_bound() -> None:
    assert [Drop(older_than=3).admit(stale_push(tau)) for tau in (0, 3, 4)] == [1.0, 1.0, None]
    assert [Drop(older_than=0).admit(stale_push(tau)) for tau in (0, 1)] == [1.0, None]


def test_apply_as_is_changes_nothing() -> None:
    assert policy_from_text("").admit(stale_push(99)) == 1.0
    assert not policy_from_text("").needs_backup


@pytest.mark.parametrize("bounded", [False, True])
def test_compensate_follows_the_formula_over_several_pushes(bounded: bool) -> None:
    state: dict[str, Tensor] = {}
    mean = 0.0
    kept = []
    for g, w, bak in [(0.5, 1.0, 0.8), (-0.25, 0.9, 1.1), (2.0, 0.0, 0.3), (0.5, 0.9, 1.0)]:
        mean = 0.95 * mean + 0.05 * g * g
        published = g + 2.0 / math.sqrt(mean + 1e-7) * g * g * (w - bak)
        expected = min(max(published, min(g, 0.0)), max(g, 0.0)) if bounded else published  # within 0 and g
        push = stale_push(grads=of(g), params=of(w), backup=of(bak), state=state)
        assert Compensate(strength=2.0, memory=0.95, bounded=bounded).admit(push) == 1.0
        assert push.grads["w"].item() == pytest.approx(expected, rel=1e-12)
        assert push.params["w"].item() == w
        assert push.backup is not None
        assert push.backup["w"].item() == bak
        kept.append(push.grads["w"].item() / g)
    assert state["MS/w"].item() == pytest.approx(mean, rel=1e-12)  # what the shard must save
    if bounded:  # unchanged, unchanged, reduced to zero, reduced
        assert kept[:3] == [1.0, 1.0, 0.0]
        assert 0.1 < kept[3] < 0.9


def test_compensate_treats_the_parts_of_a_complex_weight_separately() -> None:
    grad, weight = torch.tensor([1 + 1j, 2 - 1j]), torch.tensor([0.5 - 0.01j, 1j])
    read = torch.tensor([0.5 + 0j, 1j])
    push = stale_push(grads={"w": grad.clone()}, params={"w": weight}, backup={"w": read})
    Compensate(strength=1.0, memory=0.0).admit(push)
    assert push.grads["w"].tolist() == pytest.approx([1 + 0.99j, 2 - 1j], rel=1e-6)


def test_compensate_leaves_fresh_and_zero_gradients_unchanged() -> None:
    push = stale_push(grads=of(1, 2, 3), params=of(5, 6, 7), backup=of(5, 6, 7))
    Compensate().admit(push)
    assert torch.equal(push.grads["w"], of(1, 2, 3)["w"])
    push = stale_push(grads=of(0, 0), params=of(5, 6), backup=of(1, 2))
    Compensate().admit(push)
    assert torch.equal(push.grads["w"], of(0, 0)["w"])


def test_compensate_moves_a_gradient_towards_that_of_the_newer_weights() -> None:
    # Of a loss whose Hessian is h: g(w) = g(bak) + h·(w - bak). The policy must move the same way along every axis.
    h, bak = torch.tensor([3.0, 0.5]), torch.tensor([1.0, -2.0])
    weight = bak - torch.tensor([0.2, -0.4])
    old, now = h * bak, h * weight
    push = stale_push(grads={"w": old.clone()}, params={"w": weight}, backup={"w": bak})
    Compensate().admit(push)
    assert torch.equal((push.grads["w"] - old).sign(), (now - old).sign())


@pytest.mark.parametrize(
    ("policy", "bounded"), [("", False), ("scale", True), ("compensate", True), ("drop(older_than=3)", True)]
)
def test_policies_keep_stale_training_stable_at_a_high_learning_rate(policy: str, bounded: bool) -> None:
    # Half of w², 8 workers in turn: at a rate of 0.3 one worker converges, and gradients 7 updates late do not.
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.3)
    shard = Shard(
        Job.describe({"w": weight}, sgd, num_workers=8, staleness=None), ["w"], [{"lr": 0.3}], policy_from_text(policy)
    )
    shard.fill({"w": torch.ones(1)})
    read = {worker: shard.read(worker)["w"].clone() for worker in range(8)}
    for number in range(240):
        worker = number % 8
        shard.apply_push(Push(worker, number // 8, 1.0, [{"lr": 0.3}], {"w": read[worker].clone()}))
        read[worker] = shard.read(worker)["w"].clone()
    assert (abs(read[7].item()) < 2.0) == bounded, read


@pytest.mark.parametrize(
    "text", ["scale", "drop", "drop(older_than=4)", "compensate", "compensate(strength=1.0, memory=0.5, bounded=False)"]
)
def test_policy_survives_the_round_trip_through_its_text(text: str) -> None:
    policy = resolve_policy(text)
    assert spec.render(policy) == text == policy_text(policy)
    assert spec.parse(text, KIND) == policy == policy_from_text(text)


def test_custom_policy_applies_its_function_and_has_no_text() -> None:
    policy: Policy = resolve_policy(half)
    assert policy.admit(stale_push(3)) == 0.125
    assert resolve_policy(lambda tau: 0.0).admit(stale_push()) is None
    assert resolve_policy(lambda tau: None).admit(stale_push()) is None
    assert str(policy_for_spec(policy)).endswith("test_staleness.half>")
    with pytest.raises(ValueError, match=r"half is a function, and functions do not go to a server"):
        policy_text(policy)
    with pytest.raises(ValueError, match="was a function, and a text can't hold one"):
        policy_from_text(str(policy_for_spec(policy)))
    with pytest.raises(ValueError, match=r"finite, 0 or more, or None; got -1.0 for a staleness of 3"):
        resolve_policy(lambda tau: -1.0).admit(stale_push(3))


@pytest.mark.parametrize("bad", ["scalle", "drop(older_than=-1)", "compensate(memory=1)", "compensate(strength=-1)", 7])
def test_resolve_policy_refuses_invalid_policies(bad: object) -> None:
    with pytest.raises(ValueError):
        resolve_policy(bad)


def half(tau: int) -> float:
    return 0.5**tau
