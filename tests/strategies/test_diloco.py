"""DiLoCo: the outer step by its formulas, in fragments and beside the inner steps, and back again after a stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator, run_ranks
from gradsync.strategies import DiLoCo
from gradsync.strategies.exchange import partition
from tests.ranks import run_processes
from tests.strategies.periodic import adamw, build, close, equal, loss_of, params_of, sgd, train

STREAMED = (
    "diloco(every=6, outer_lr=0.8, outer_momentum=0.5, outer_warmup=2, fragments=2, overlap=2, "
    "codec={'*.weight': 'int4'})"
)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


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
        everyone = [list(replica.parameters()) for replica in replicas]
        for number, param in enumerate(anchor.parameters()):
            gaps = [share * (param - mine[number]) for share, mine in zip(shares, everyone, strict=True)]
            param.grad = torch.stack(gaps).sum(0).detach()
        outer.step()
        for replica in replicas:
            replica.load_state_dict(anchor.state_dict())
    return [params_of(replica) for replica in replicas]


@pytest.mark.parametrize("world", [1, 3])
def test_it_is_the_users_steps_and_an_outer_one_by_samples(world: int) -> None:
    shares = [(rank + 1) / sum(range(world + 1)) for rank in range(world)]
    expected = reference(world, 11, 4, shares, lr=0.7, momentum=0.9)
    got = run_ranks(
        world, lambda comm: train(comm, "diloco(every=4, outer_warmup=0)", 11, weights=lambda rank: 8.0 * (rank + 1))
    )
    for mine, theirs in zip(got, expected, strict=True):
        assert close(mine["history"][-1], theirs)


@pytest.mark.parametrize("codec", ["{'*.weight': 'int4'}", "{'*': 'topk(density=0.2)', '0.*': 'int8'}"])
def test_after_an_exchange_all_replicas_have_the_same_bits(codec: str) -> None:
    ranks = run_ranks(3, lambda comm: train(comm, f"diloco(every=3, codec={codec})", 7, make=adamw))
    for step, (one, other, third) in enumerate(zip(*(rank["history"] for rank in ranks), strict=True), start=1):
        assert equal(one, other) == equal(one, third) == (step % 3 == 0), step


def test_the_outer_step_begins_as_plain_averaging() -> None:
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


def anchors(outcome: dict[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = outcome["sync"]["strategy_state"]["exchange"]["anchors"]
    return found


def test_fragments_come_in_turn_and_land_at_their_step_on_all_ranks() -> None:
    plain = "diloco(every=6, outer_momentum=0.0, outer_lr=1.0, fragments=2, overlap=2)"
    ranks = run_ranks(2, lambda comm: train(comm, plain, 12))
    alone = run_ranks(2, lambda comm: train(comm, "diloco(every=100)", 12))
    parts = partition(dict(build().named_parameters()), 2)
    names = list(dict(build().named_parameters()))
    at = {name: 0 if name in parts[0] else 1 for name in names}
    # Begun after steps 3 and 6, they land after 5 and 8: until then each rank is on its own.
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
            assert gaps[2] < 0.7 * gaps[1], "the second fragment lands after step 8"


def test_streamed_and_compressed_the_anchors_stay_the_same_bits() -> None:
    ranks = run_ranks(3, lambda comm: train(comm, STREAMED, 17, make=adamw, settle=True))
    first = anchors(ranks[0])
    assert all(torch.equal(first[name], anchors(other)[name]) for other in ranks[1:] for name in first)
    assert all(equal(list(ranks[0]["model"].values()), list(other["model"].values())) for other in ranks[1:])
    assert not equal(ranks[0]["history"][-1], ranks[1]["history"][-1])  # it was settle() that brought them together


@pytest.mark.parametrize("stop", [4, 7, 11])  # with a fragment under way, landed, and with the other one under way
def test_stopped_at_any_step_it_goes_on_bit_for_bit(stop: int) -> None:
    def go(comm: Communicator) -> tuple[list[list[Tensor]], list[list[Tensor]], Any]:
        whole = train(comm, STREAMED, 16, make=adamw)
        half = train(comm, STREAMED, stop, make=adamw)
        rest = train(comm, STREAMED, 16, half, make=adamw)
        return whole["history"][stop:], rest["history"], half["sync"]["strategy_state"]["flight"]

    for whole, rest, flight in run_ranks(2, go):
        assert (flight is not None) == (stop in (4, 7))
        assert len(whole) == len(rest) == 16 - stop
        assert all(equal(a, b) for a, b in zip(whole, rest, strict=True))


def test_a_state_goes_to_another_number_of_ranks() -> None:
    saved = run_ranks(2, lambda comm: train(comm, STREAMED, 7))
    states = [outcome["sync"] for outcome in saved]

    def go(comm: Communicator) -> dict[str, Any]:
        model = build()
        with gradsync.synchronize(model, sgd(model), STREAMED, comm=comm) as sync:
            sync.load_state_dict(states)
            loaded = params_of(model)
            sync.settle()
            return {"sync": sync.state_dict(), "history": [loaded, params_of(model)]}

    ranks = run_ranks(3, go)
    for rank in range(3):
        assert equal(ranks[rank]["history"][0], saved[rank % 2]["history"][-1])
        assert equal(ranks[rank]["history"][1], ranks[0]["history"][1])
    assert ranks[0]["sync"]["strategy_state"]["clock"] == 7
    with pytest.raises(ValueError, match="rank 0 of 2"):
        run_ranks(1, lambda comm: train(comm, STREAMED, 8, {**saved[0], "at": 7}))


def test_settling_is_averaging_and_no_outer_step() -> None:
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


def uneven(comm: Communicator, strategy: str, steps: list[int]) -> dict[str, Any]:
    model = build()
    optimizer = adamw(model)
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, timeout_s=None) as sync:
        with sync.join():
            for step in range(steps[comm.rank]):
                step_once(model, optimizer, comm.rank, step)
        after_join = params_of(model)
        for step in range(20, 33):  # and on together: the clocks agree again
            step_once(model, optimizer, comm.rank, step)
        sync.settle()
        return {
            "joined": after_join,
            "end": params_of(model),
            "optimizer": optimizer.state_dict(),
            "sync": sync.stats(),
        }


@pytest.mark.parametrize("strategy", ["diloco(every=4)", STREAMED])
@pytest.mark.parametrize("steps", [[5, 13, 9], [3, 0, 3], [7, 7, 7]])
def test_ranks_with_less_data_give_what_they_have_and_take_over_the_rest(strategy: str, steps: list[int]) -> None:
    ranks = run_ranks(3, lambda comm: uneven(comm, strategy, steps))
    together = len(set(steps)) > 1
    for other in ranks[1:]:
        assert equal(ranks[0]["joined"], other["joined"]) == together
        assert equal(ranks[0]["end"], other["end"])
    counts = {float(state["step"]) for rank in ranks for state in rank["optimizer"]["state"].values()}
    assert counts == {max(steps) + 13.0}


def test_a_rank_gives_what_it_has_left_once() -> None:
    """Rank 1 stops after 6 steps: its last 2 weigh a third in the mean after step 8, and nothing after step 12."""

    def go(comm: Communicator) -> list[list[Tensor]]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        history = []
        strategy = "diloco(every=4, outer_lr=1.0, outer_momentum=0.0)"
        with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync, sync.join():
            for step in range(13 if comm.rank == 0 else 6):
                step_once(model, optimizer, comm.rank, step)
                history.append(params_of(model))
        return history

    first, second = run_ranks(2, go)
    replicas = [build(), build()]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.05) for replica in replicas]
    for step in range(13):
        for rank in range(2 if step < 6 else 1):
            step_once(replicas[rank], optimizers[rank], rank, step)
        if step in (3, 7):
            share = 4 / (8 if step == 3 else 6)
            with torch.no_grad():
                for param, other in zip(replicas[0].parameters(), replicas[1].parameters(), strict=True):
                    param.copy_(share * param + (1 - share) * other)
                    other.copy_(param)
        assert close(first[step], params_of(replicas[0])), step
    assert len(second) == 6


def test_sixteen_bits_have_anchors_of_thirty_two() -> None:
    def go(comm: Communicator) -> tuple[list[Tensor], dict[str, Any]]:
        model = build(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with gradsync.synchronize(model, optimizer, "diloco(every=2, outer_momentum=0.5)", comm=comm) as sync:
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, comm.rank, step, torch.bfloat16).backward()
                optimizer.step()
            return params_of(model), sync.state_dict()["strategy_state"]["exchange"]

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
def test_everything_a_model_may_have_is_brought_together(overlap: int) -> None:
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


def test_a_step_that_a_scaler_skips_on_one_rank_still_counts() -> None:
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


def test_accumulation_counts_its_windows() -> None:
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


def test_weights_that_are_not_numbers_are_refused_on_all_ranks_and_leave_the_anchors() -> None:
    def go(comm: Communicator) -> tuple[str, bool]:
        model = build()
        optimizer = sgd(model)
        with gradsync.synchronize(model, optimizer, "diloco(every=2, fragments=2, overlap=1)", comm=comm) as sync:

            def spoilt() -> None:
                for step in range(8):
                    step_once(model, optimizer, comm.rank, step)
                    if comm.rank == 1 and step == 2:
                        with torch.no_grad():
                            next(model.parameters()).fill_(float("nan"))

            with pytest.raises(gradsync.NonFiniteGradient) as refused:
                spoilt()
            kept = sync._engine.strategy._exchange.anchors  # type: ignore[attr-defined]
            return str(refused.value), all(bool(value.isfinite().all()) for value in kept.values())

    for said, finite in run_ranks(2, go):
        assert "NaN or inf on some rank" in said
        assert finite


def test_a_rank_that_goes_its_own_way_is_named() -> None:
    def go(comm: Communicator) -> str:
        model = build()
        optimizer = sgd(model)
        with gradsync.synchronize(model, optimizer, "diloco(every=2)", comm=comm) as sync:
            step_once(model, optimizer, comm.rank, 0)
            with pytest.raises(gradsync.OutOfStep) as told:
                sync.settle() if comm.rank == 2 else step_once(model, optimizer, comm.rank, 1)
            return str(told.value)

    for said in run_ranks(3, go):
        assert said.startswith("rank 2 is out of step: its number of steps is 1, that of the others 2")


def test_a_peer_that_is_lost_beside_the_steps_is_told_in_the_step() -> None:
    def go(comm: Communicator) -> int | None:
        model = build()
        optimizer = sgd(model)
        with gradsync.synchronize(model, optimizer, "diloco(every=8, fragments=2, overlap=3)", comm=comm) as sync:
            for step in range(12):
                if comm.rank == 1 and step == 2:
                    return None
                try:
                    step_once(model, optimizer, comm.rank, step)
                except gradsync.PeerLost as lost:
                    return lost.rank if step == 4 else None  # it would have landed after step 7
                if step == 3:
                    sync._engine.strategy._flight.abandon(10.0)  # type: ignore[attr-defined]
        return None

    assert run_ranks(2, go) == [1, None]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("diloco(every=0)", "every is a number of steps"),
        ("diloco(every=4, fragments=5)", "fragments must be from 1 to every"),
        ("diloco(every=8, fragments=2, overlap=5)", "overlap must be from 0 to every // fragments = 4"),
        ("diloco(outer_lr=0.0)", "outer_lr must be above 0"),
        ("diloco(outer_warmup=-1)", "outer_warmup is a number of exchanges"),
        ("diloco(outer_momentum=1.0)", "outer_momentum must be from 0 to below 1"),
    ],
)
def test_what_makes_no_sense_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec.parse(text)


def test_more_fragments_than_parameters_are_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="4 trained parameters"):
        gradsync.synchronize(model, sgd(model), "diloco(fragments=5)")


def test_fragments_are_of_about_one_size_and_spread_over_the_model() -> None:
    params = {str(number): nn.Parameter(torch.zeros(10 if number else 45)) for number in range(9)}
    parts = partition(params, 3)
    assert parts == [["0"], ["1", "3", "5", "7"], ["2", "4", "6", "8"]]


def test_it_says_what_it_sends_and_how_far_the_replicas_are_apart() -> None:
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


def until_killed(folder: str, victim: int | None, steps: int) -> dict[str, Any]:
    """Train with a checkpoint of each rank's own after step 9; resume where there is one."""
    comm = gradsync.connect(timeout_s=10)
    own = Path(folder) / f"{comm.rank}.pt"
    state = torch.load(own) if own.exists() else None
    model = build()
    optimizer = adamw(model)
    with gradsync.synchronize(model, optimizer, STREAMED) as sync:
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sync": sync}
        if state is not None:
            for name, part in parts.items():
                part.load_state_dict(state[name])
        for step in range(0 if state is None else state["at"], steps):
            if victim == comm.rank and step == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            step_once(model, optimizer, comm.rank, step)
            if step == 9 and victim is not None:
                torch.save({"at": 10, **{name: part.state_dict() for name, part in parts.items()}}, own)
        return {"params": params_of(model), "anchors": anchors({"sync": sync.state_dict()})}


def test_killed_and_resumed_from_a_checkpoint_it_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    fresh = tmp_path / "never"
    fresh.mkdir()
    whole = run_processes(2, until_killed, str(fresh), None, 18)
    lost, killed = run_processes(2, until_killed, str(tmp_path), 1, 18, expect_failure=True)
    assert killed == -signal.SIGKILL
    assert isinstance(lost, gradsync.PeerLost)
    resumed = run_processes(2, until_killed, str(tmp_path), None, 18)
    for one, other in zip(whole, resumed, strict=True):
        assert equal(one["params"], other["params"])
        assert all(torch.equal(one["anchors"][name], other["anchors"][name]) for name in one["anchors"])
