"""DiLoCo: the outer step against its formulas, in fragments, and overlapping with the inner steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator
from gradsync.strategies import DiLoCo
from gradsync.strategies.periodic.exchange import split_into_fragments
from gradsync.testing import run_ranks
from tests.engine.saved import strategy_state
from tests.strategies.periodic.runs import (
    STREAMED,
    adamw,
    anchors,
    build,
    close,
    equal,
    loss_of,
    params_of,
    sgd,
    step_once,
    train,
)


def reference(world: int, steps: int, every: int, shares: list[float], **rates: float) -> list[list[Tensor]]:
    """Replicas side by side in one process, with torch's own SGD as the outer optimizer."""
    anchor = build()
    outer = torch.optim.SGD(anchor.parameters(), nesterov=rates["momentum"] > 0, **rates)  # type: ignore[arg-type]
    replicas = [build() for _ in range(world)]
    inner = [sgd(replica) for replica in replicas]
    for step in range(steps):
        for rank, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            step_once(replica, optimizer, rank, step)
        if (step + 1) % every:
            continue
        all_params = [list(replica.parameters()) for replica in replicas]
        for number, param in enumerate(anchor.parameters()):
            gaps = [share * (param - mine[number]) for share, mine in zip(shares, all_params, strict=True)]
            param.grad = torch.stack(gaps).sum(0).detach()
        outer.step()
        for replica in replicas:
            replica.load_state_dict(anchor.state_dict())
    return [params_of(replica) for replica in replicas]


def test_inner_rate_is_scaled_for_adam() -> None:
    def first_step(comm: Communicator, text: str) -> tuple[list[Tensor], float]:
        model = build()
        optimizer = adamw(model)
        before = params_of(model)
        with gradsync.synchronize(model, optimizer, text, comm=comm):
            step_once(model, optimizer, comm.rank, 0)
            seen = optimizer.param_groups[0]["lr"]
        return [after - old for after, old in zip(params_of(model), before, strict=True)], seen

    for world in (1, 4):
        same = run_ranks(world, lambda comm: first_step(comm, "diloco(every=100, rate='same', inner_warmup=0)"))
        alone = run_ranks(world, lambda comm: first_step(comm, "diloco(every=100, inner_warmup=0)"))
        for (long, _), (short, seen) in zip(same, alone, strict=True):
            factor = world**-0.5
            assert all(torch.allclose(b, a * factor, rtol=1e-9) for a, b in zip(long, short, strict=True))
            assert seen == 0.01, "the user's schedule finds its own rate"


@pytest.mark.parametrize(
    ("text", "world", "make", "lengths"),
    [
        ("diloco(every=2, rate='same')", 2, adamw, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ("diloco(every=2, rate='same', inner_warmup=2)", 2, adamw, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("diloco(every=2)", 1, adamw, [1.0] * 5),
        ("diloco(every=2)", 2, sgd, [1.0] * 5),
    ],
)
def test_inner_rate_warms_up_over_two_rounds(text: str, world: int, make: Any, lengths: list[float]) -> None:
    def rates(comm: Communicator) -> list[float]:
        model = build()
        optimizer = make(model)
        used: list[float] = []
        with gradsync.synchronize(model, optimizer, text, comm=comm):
            optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
            given = optimizer.param_groups[0]["lr"]
            for step in range(len(lengths)):
                step_once(model, optimizer, comm.rank, step)
        return [rate / given for rate in used]

    for used in run_ranks(world, rates):
        assert used == pytest.approx(lengths)


@pytest.mark.parametrize("world", [1, 3])
def test_diloco_matches_a_reference_with_torch_sgd_outside(world: int) -> None:
    shares = [(rank + 1) / sum(range(world + 1)) for rank in range(world)]
    expected = reference(world, 11, 4, shares, lr=0.7, momentum=0.9)
    got = run_ranks(
        world, lambda comm: train(comm, "diloco(every=4, outer_warmup=0)", 11, weights=lambda rank: 8.0 * (rank + 1))
    )
    for mine, theirs in zip(got, expected, strict=True):
        assert close(mine["history"][-1], theirs)


@pytest.mark.parametrize("codec", ["{'*.weight': 'int4'}", "{'*': 'topk(density=0.2)', '0.*': 'int8'}"])
def test_exchange_makes_replicas_bitwise_equal(codec: str) -> None:
    ranks = run_ranks(3, lambda comm: train(comm, f"diloco(every=3, codec={codec})", 7, make=adamw))
    for step, (one, other, third) in enumerate(zip(*(rank["history"] for rank in ranks), strict=True), start=1):
        assert equal(one, other) == equal(one, third) == (step % 3 == 0), step


def test_outer_warmup_begins_as_plain_averaging() -> None:
    strategy = DiLoCo(outer_lr=0.6, outer_momentum=0.9, outer_warmup=4)
    assert [strategy.rates(step) for step in (0, 2, 4, 16, 99)] == [
        (1.0, 0.0),
        (pytest.approx(0.95), 0.45),
        (pytest.approx(0.9), 0.9),
        (0.6, 0.9),
        (0.6, 0.9),
    ]
    plain, warm = run_ranks(2, lambda comm: [train(comm, f"{name}(every=3)", 5) for name in ("local_sgd", "diloco")])[0]
    assert all(equal(a, b) for a, b in zip(plain["history"], warm["history"], strict=True))


def test_fragments_are_exchanged_in_turn_and_applied_at_their_step() -> None:
    plain = "diloco(every=6, outer_momentum=0.0, outer_lr=1.0, fragments=2, overlap=2)"
    ranks = run_ranks(2, lambda comm: train(comm, plain, 12))
    alone = run_ranks(2, lambda comm: train(comm, "diloco(every=100)", 12))
    parts = split_into_fragments(dict(build().named_parameters()), 2)
    names = list(dict(build().named_parameters()))
    at = {name: 0 if name in parts[0] else 1 for name in names}
    # Exchanges begin after steps 3 and 6 and are applied after 5 and 8: until then each rank is on its own.
    for rank in range(2):
        assert equal(ranks[rank]["history"][3], alone[rank]["history"][3])
        for number, name in enumerate(names):
            before, landed = ranks[rank]["history"][3][number], ranks[rank]["history"][4][number]
            stepped = alone[rank]["history"][4][number] - alone[rank]["history"][3][number]
            moved = landed - before - stepped
            gap = ranks[1 - rank]["history"][2][number] - ranks[rank]["history"][2][number]
            expected = gap / 2 if at[name] == 0 else torch.zeros_like(gap)
            assert torch.allclose(moved, expected, atol=1e-12), name
    for number, name in enumerate(names):
        gaps = [(ranks[0]["history"][step][number] - ranks[1]["history"][step][number]).norm() for step in (4, 6, 7)]
        if at[name] == 1:
            assert gaps[2] < 0.7 * gaps[1], "the second fragment is applied after step 8"


def test_anchors_stay_equal_with_fragments_and_codec() -> None:
    ranks = run_ranks(3, lambda comm: train(comm, STREAMED, 17, make=adamw, settle=True))
    first = anchors(ranks[0])
    assert all(torch.equal(first[name], anchors(other)[name]) for other in ranks[1:] for name in first)
    assert all(equal(list(ranks[0]["model"].values()), list(other["model"].values())) for other in ranks[1:])
    assert not equal(ranks[0]["history"][-1], ranks[1]["history"][-1])  # so settle() made them equal


def test_settle_averages_without_an_outer_step() -> None:
    def go(comm: Communicator) -> tuple[list[list[Tensor]], dict[str, Tensor], dict[str, Tensor]]:
        loose = train(comm, "diloco(every=4)", 6)
        settled = train(comm, "diloco(every=4)", 6, settle=True)
        mine = [list(loose["model"].values()), list(settled["model"].values())]
        return mine, anchors(loose), anchors(settled)

    ranks = run_ranks(2, go)
    means = [(a + b) / 2 for a, b in zip(ranks[0][0][0], ranks[1][0][0], strict=True)]
    for (_, settled), before, after in ranks:
        assert close(settled, means)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_anchors_of_16_bit_weights_have_32_bits() -> None:
    def go(comm: Communicator) -> tuple[list[Tensor], dict[str, Any]]:
        model = build(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with gradsync.synchronize(model, optimizer, "diloco(every=2, outer_momentum=0.5)", comm=comm) as sync:
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, comm.rank, step, torch.bfloat16).backward()
                optimizer.step()
            return params_of(model), strategy_state(sync.state_dict())["exchange"]

    (one, state), (other, _) = run_ranks(2, go)
    assert equal(one, other)
    assert {value.dtype for value in (*state["anchors"].values(), *state["momenta"].values())} == {torch.float32}
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(state["anchors"].values(), one, strict=True))


class Mixed(nn.Module):
    """Sparse gradients, running statistics, a frozen layer and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1).double()
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.linspace(-0.5, 0.5 + 0.1 * number, param.numel()).view(param.shape))

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(self.frozen(self.norm(self.rows(rows))).double())
        return out


@pytest.mark.parametrize("overlap", [0, 1])
def test_diloco_synchronizes_every_kind_of_parameter_and_buffer(overlap: int) -> None:
    def go(comm: Communicator) -> dict[str, Tensor]:
        model = Mixed()
        frozen = model.frozen.weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        strategy = f"diloco(every=3, outer_momentum=0.5, overlap={overlap})"
        with gradsync.synchronize(model, optimizer, strategy, comm=comm, buffers="mean") as sync:
            for step in range(8):
                if step == 5:
                    model.frozen.requires_grad_(True)  # unfrozen on all ranks: exchanged from now on
                generator = torch.Generator().manual_seed(10 * step + comm.rank)
                optimizer.zero_grad()
                model(torch.randint(10, (6,), generator=generator)).square().mean().backward()
                optimizer.step()
            assert not torch.equal(frozen, model.frozen.weight)
            sync.settle()
            return {name: value.clone() for name, value in model.state_dict().items()}

    one, other = run_ranks(2, go)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_diloco_counts_steps_that_a_scaler_skips() -> None:
    def go(comm: Communicator) -> tuple[list[Tensor], dict[str, Any]]:
        model = build(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with gradsync.synchronize(model, optimizer, "diloco(every=3)", comm=comm, scaler=scaler) as sync:
            for step in range(6):
                optimizer.zero_grad()
                loss = loss_of(model, comm.rank, step, torch.float32)
                scaler.scale(loss * float("inf") if comm.rank == 1 and step == 1 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return params_of(model), sync.stats()

    (one, stats), (other, _) = run_ranks(2, go)
    assert equal(one, other)
    assert stats["exchanges"] == 2


def test_diloco_counts_accumulation_windows() -> None:
    def go(comm: Communicator) -> tuple[list[Tensor], int]:
        model = build()
        optimizer = sgd(model)
        with gradsync.synchronize(model, optimizer, "diloco(every=2)", comm=comm, accumulate=3) as sync:
            for step in range(12):
                loss_of(model, comm.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            return params_of(model), sync.stats()["exchanges"]

    (one, rounds), (other, _) = run_ranks(2, go)
    assert equal(one, other)
    assert rounds == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diloco(every=0)", "every is a number of steps"),
        ("diloco(every=4, fragments=5)", "fragments must be from 1 to every"),
        ("diloco(every=8, fragments=2, overlap=5)", "overlap must be from 0 to every // fragments = 4"),
        ("diloco(outer_lr=0.0)", "outer_lr must be above 0"),
        ("diloco(outer_warmup=-1)", "outer_warmup is a number of exchanges"),
        ("diloco(outer_momentum=1.0)", "outer_momentum must be from 0 to below 1"),
    ],
)
def test_diloco_refuses_invalid_options(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec.parse(text)


def test_diloco_refuses_more_fragments_than_parameters() -> None:
    model = build()
    with pytest.raises(ValueError, match="number of trained parameters, 4; got fragments="):
        gradsync.synchronize(model, sgd(model), "diloco(fragments=5)")


def test_split_into_fragments_balances_sizes() -> None:
    params = {str(number): nn.Parameter(torch.zeros(10 if number else 45)) for number in range(9)}
    parts = split_into_fragments(params, 3)
    assert parts == [["0"], ["1", "3", "5", "7"], ["2", "4", "6", "8"]]


def test_stats_report_bytes_and_consensus_distance() -> None:
    ranks = run_ranks(2, lambda comm: train(comm, "diloco(every=4)", 6))
    stats = ranks[0]["stats"]
    num_bytes = sum(value.numel() for value in ranks[0]["model"].values()) * 8
    assert num_bytes / 4 <= stats["bytes_per_step"] < num_bytes / 4 + 100
    assert (stats["exchanges"], stats["next_exchange"], stats["every"]) == (1, 8, 4)
    assert stats["waited_s"] > 0
    alone = run_ranks(2, lambda comm: train(comm, "diloco(every=100)", 4))
    one, other = (torch.cat([value.flatten() for value in rank["history"][-1]]) for rank in alone)
    assert stats["consensus_distance"] == pytest.approx(float((one - other).norm()) / 2)
    compressed = run_ranks(2, lambda comm: train(comm, "diloco(every=4, codec={'*.weight': 'int4'})", 2))
    assert compressed[0]["stats"]["bytes_per_step"] < stats["bytes_per_step"] / 3
    assert compressed[0]["stats"]["codecs"]["0.weight"].startswith("int4")
