"""Policies for late gradients: closed-form numbers, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from gradsync import spec
from gradsync.server.job import Job
from gradsync.server.late import Late
from gradsync.server.shard import Push, Shard
from gradsync.server.staleness import KIND, Compensate, Drop, Policy, Scale, make, resolve_policy, wire_text, written


def push(tau: int = 3, **tensors: dict[str, Tensor]) -> Late:
    none: dict[str, Tensor] = {}
    empty = {"grads": none, "params": none, "backup": none, "state": {}}
    return Late(worker=1, clock=5, tau=tau, **(empty | tensors))


def of(*values: float) -> dict[str, Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def test_scale_divides_the_rate_by_the_staleness_and_leaves_a_fresh_push_whole() -> None:
    assert [Scale().admit(push(tau)) for tau in (0, 1, 2, 5, 100)] == [1.0, 1.0, 0.5, 0.2, 0.01]


def test_drop_lets_the_bound_itself_pass() -> None:
    assert [Drop(older_than=3).admit(push(tau)) for tau in (0, 3, 4)] == [1.0, 1.0, None]
    assert [Drop(older_than=0).admit(push(tau)) for tau in (0, 1)] == [1.0, None]


def test_plain_leaves_all_as_it_is() -> None:
    assert make("").admit(push(99)) == 1.0
    assert not make("").needs_backup


@pytest.mark.parametrize("bounded", [False, True])
def test_compensate_is_the_formula_over_several_pushes(bounded: bool) -> None:
    state: dict[str, Tensor] = {}
    mean = 0.0
    kept = []
    for g, w, bak in [(0.5, 1.0, 0.8), (-0.25, 0.9, 1.1), (2.0, 0.0, 0.3), (0.5, 0.9, 1.0)]:
        mean = 0.95 * mean + 0.05 * g * g
        published = g + 2.0 / math.sqrt(mean + 1e-7) * g * g * (w - bak)
        expected = min(max(published, min(g, 0.0)), max(g, 0.0)) if bounded else published  # within 0 and g
        late = push(grads=of(g), params=of(w), backup=of(bak), state=state)
        assert Compensate(strength=2.0, memory=0.95, bounded=bounded).admit(late) == 1.0
        assert late.grads["w"].item() == pytest.approx(expected, rel=1e-12)
        assert late.params["w"].item() == w
        assert late.backup is not None
        assert late.backup["w"].item() == bak
        kept.append(late.grads["w"].item() / g)
    assert state["MS/w"].item() == pytest.approx(mean, rel=1e-12)  # what the shard must save
    if bounded:  # as it is, as it is, all taken off, a part taken off
        assert kept[:3] == [1.0, 1.0, 0.0]
        assert 0.1 < kept[3] < 0.9


def test_compensate_sees_the_two_parts_of_a_complex_weight_apart() -> None:
    grad, weight = torch.tensor([1 + 1j, 2 - 1j]), torch.tensor([0.5 - 0.01j, 1j])
    read = torch.tensor([0.5 + 0j, 1j])
    late = push(grads={"w": grad.clone()}, params={"w": weight}, backup={"w": read})
    Compensate(strength=1.0, memory=0.0).admit(late)
    assert late.grads["w"].tolist() == pytest.approx([1 + 0.99j, 2 - 1j], rel=1e-6)


def test_compensate_leaves_a_fresh_gradient_and_a_zero_one_as_they_are() -> None:
    late = push(grads=of(1, 2, 3), params=of(5, 6, 7), backup=of(5, 6, 7))
    Compensate().admit(late)
    assert torch.equal(late.grads["w"], of(1, 2, 3)["w"])
    late = push(grads=of(0, 0), params=of(5, 6), backup=of(1, 2))
    Compensate().admit(late)
    assert torch.equal(late.grads["w"], of(0, 0)["w"])


def test_compensate_turns_a_gradient_towards_what_it_is_at_the_newer_weights() -> None:
    # Of a loss whose Hessian is h: g(w) = g(bak) + h·(w - bak). The policy must move the same way along every axis.
    h, bak = torch.tensor([3.0, 0.5]), torch.tensor([1.0, -2.0])
    weight = bak - torch.tensor([0.2, -0.4])
    old, now = h * bak, h * weight
    late = push(grads={"w": old.clone()}, params={"w": weight}, backup={"w": bak})
    Compensate().admit(late)
    assert torch.equal((late.grads["w"] - old).sign(), (now - old).sign())


@pytest.mark.parametrize(
    ("policy", "bounded"), [("", False), ("scale", True), ("compensate", True), ("drop(older_than=3)", True)]
)
def test_at_a_rate_that_late_gradients_make_too_high_the_policies_hold_it(policy: str, bounded: bool) -> None:
    # Half of w², 8 workers in turn: at a rate of 0.3 one worker converges, and gradients 7 updates late do not.
    weight = nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.3)
    shard = Shard(Job.describe({"w": weight}, sgd, num_workers=8, staleness=None), ["w"], [{"lr": 0.3}], make(policy))
    shard.fill({"w": torch.ones(1)})
    read = {worker: shard.read(worker)["w"].clone() for worker in range(8)}
    for number in range(240):
        worker = number % 8
        shard.take(Push(worker, number // 8, 1.0, [{"lr": 0.3}], {"w": read[worker].clone()}))
        read[worker] = shard.read(worker)["w"].clone()
    assert (abs(read[7].item()) < 2.0) == bounded, read


@pytest.mark.parametrize(
    "text", ["scale", "drop", "drop(older_than=4)", "compensate", "compensate(strength=1.0, memory=0.5, bounded=False)"]
)
def test_a_policy_is_read_from_its_text_and_written_back(text: str) -> None:
    policy = resolve_policy(text)
    assert spec.render(policy) == text == wire_text(policy)
    assert spec.parse(text, KIND) == policy == make(text)


def test_a_function_gives_the_rate_and_goes_to_no_other_process() -> None:
    policy: Policy = resolve_policy(half)
    assert policy.admit(push(3)) == 0.125
    assert resolve_policy(lambda tau: 0.0).admit(push()) is None
    assert resolve_policy(lambda tau: None).admit(push()) is None
    assert str(written(policy)).endswith("test_staleness.half>")
    with pytest.raises(ValueError, match=r"half is a function, and functions do not go to a server"):
        wire_text(policy)
    with pytest.raises(ValueError, match="was a function, and a text can't hold one"):
        make(str(written(policy)))
    with pytest.raises(ValueError, match=r"finite, 0 or more, or None; got -1.0 for a staleness of 3"):
        resolve_policy(lambda tau: -1.0).admit(push(3))


@pytest.mark.parametrize("bad", ["scalle", "drop(older_than=-1)", "compensate(memory=1)", "compensate(strength=-1)", 7])
def test_nonsense_is_refused(bad: object) -> None:
    with pytest.raises(ValueError):
        resolve_policy(bad)


def half(tau: int) -> float:
    return 0.5**tau
