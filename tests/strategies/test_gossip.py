"""Gossip: values mix to the right mean on any graph, with codecs, without a centre, and whoever dies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator, run_ranks
from gradsync.comm.base import Solo
from gradsync.comm.messages import Message
from gradsync.gossip import Exponential, Random, Ring, Topology
from gradsync.gossip.book import Book, Epoch
from gradsync.gossip.circle import Circle
from gradsync.gossip.meeting import Meeting
from gradsync.strategies import Gossip
from tests.ranks import run_processes


@spec.register("topology", "test_lopsided")
class Lopsided(Topology):
    """Directed, and some get more than others: all push to the next, and the first to the third as well."""

    def targets(self, place: int, size: int, step: int) -> list[int]:
        ahead = {(place + 1) % size} | ({2 % size} if place == 0 else set())
        return sorted(ahead - {place})


class Trial:
    """One rank's model of a few values, of which it has its own, and a loop that only mixes them."""

    def __init__(
        self, comm: Communicator, strategy: str, values: Tensor, *, dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        self.model = nn.Linear(len(values), 1, bias=False, dtype=dtype)
        with torch.no_grad():
            self.model.weight.zero_()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.sync = gradsync.synchronize(self.model, self.optimizer, strategy, comm=comm, **options)
        with torch.no_grad():
            self.model.weight.copy_(values)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.model.weight.sum().backward()
            self.optimizer.step()

    @property
    def values(self) -> Tensor:
        return self.model.weight.detach()[0].clone()

    def stats(self, key: str) -> Any:
        return self.sync.stats()[key]


def mixed(
    world: int, strategy: str, steps: int, *, numel: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, list[Tensor], list[dict[str, Any]]]:
    """What all began with, what each has after some steps, and its statistics."""
    start = torch.randn(world, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(comm: Communicator) -> tuple[Tensor, dict[str, Any]]:
        trial = Trial(comm, strategy, start[comm.rank], dtype=dtype)
        with trial.sync:
            trial.step(steps)
            return trial.values, trial.sync.stats()

    outcomes = run_ranks(world, run)
    return start, [values for values, _ in outcomes], [stats for _, stats in outcomes]


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [Ring(), Exponential(), Random(seed=3), Lopsided()])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_sources_are_those_whose_targets_one_is_and_all_hear_of_all(topology: Topology, size: int) -> None:
    reached = {place: {place} for place in range(size)}
    for step in range(24):
        targets = {place: topology.targets(place, size, step) for place in range(size)}
        for place in range(size):
            assert place not in targets[place]
            assert topology.sources(place, size, step) == [p for p in range(size) if place in targets[p]]
        before = {place: set(who) for place, who in reached.items()}
        for place, found in targets.items():
            for target in found:
                reached[target] |= before[place]
    assert all(len(who) == size for who in reached.values())


def test_epochs_are_ordered_as_what_is_known() -> None:
    book = Book({0: "a", 1: "b", 2: "c"})
    first = book.epoch(5)
    book.left[2] = 7
    assert book.epoch(6) == first, "who leaves in order was there until then"
    left = book.epoch(7)
    assert first.is_before(left)
    assert not left.is_before(first)
    assert left.members == [0, 1]
    other = Epoch(first.joined, frozenset({1}))
    assert not other.is_before(left)
    assert not left.is_before(other), "two deaths that were learnt apart: neither is older"
    book.add(Book({3: "d"}, {1: "gone"}))
    assert book.epoch(9).members == [0, 3]
    assert other.is_before(book.epoch(9))
    assert Epoch.from_json(book.epoch(9).to_json()) == book.epoch(9)


# -- mixing -----------------------------------------------------------------------------------------------------------


def test_one_peer_exponential_is_the_exact_mean_after_two_steps_of_four() -> None:
    start, ends, _ = mixed(4, "gossip", 2)
    for values in ends:
        torch.testing.assert_close(values, start.mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [("gossip(topology=ring)", 40), ("gossip(topology=random)", 40), ("gossip(topology=test_lopsided)", 60)],
)
def test_all_come_to_the_mean_of_what_they_began_with(strategy: str, steps: int) -> None:
    start, ends, stats = mixed(5, strategy, steps)
    for values, told in zip(ends, stats, strict=True):
        torch.testing.assert_close(values, start.mean(0), rtol=0, atol=1e-6)
        assert told["consensus"]["rms"] < 1e-5
    total = sum(told["push_sum_weight"] for told in stats)
    assert total == pytest.approx(5, abs=1e-12)
    if "lopsided" in strategy:  # without weights the third would count for more
        assert max(told["push_sum_weight"] for told in stats) > 1.1


def test_on_a_directed_graph_weights_and_values_are_what_the_matrix_says() -> None:
    world, steps = 4, 3
    start, ends, stats = mixed(world, "gossip(topology=test_lopsided)", steps)
    column = torch.zeros(world, world, dtype=torch.float64)  # column p: what p's values become
    for place in range(world):
        targets = Lopsided().targets(place, world, 0)
        for to in [place, *targets]:
            column[to, place] = 1 / (len(targets) + 1)
    x, weight = start.clone(), torch.ones(world, 1, dtype=torch.float64)
    for _ in range(steps):
        x, weight = column @ x, column @ weight
    torch.testing.assert_close(torch.stack(ends), x / weight, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        torch.tensor([told["push_sum_weight"] for told in stats], dtype=torch.float64), weight[:, 0]
    )


def test_optimizer_steps_count_alike_on_a_directed_graph() -> None:
    """The mean moves by the mean of what the ranks' optimizers do, however much weight each has."""

    def run(comm: Communicator) -> float:
        trial = Trial(comm, "gossip(topology=test_lopsided)", torch.zeros(1, dtype=torch.float64))
        trial.optimizer.param_groups[0]["lr"] = float(comm.rank)  # the gradient is 1
        with trial.sync:
            trial.step(10)
            trial.sync.settle()
            return float(trial.values)

    assert run_ranks(4, run) == [pytest.approx(-10 * 1.5, abs=1e-12)] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_narrow_values_is_kept_in_what_they_are_summed_in(dtype: torch.dtype) -> None:
    start, ends, _ = mixed(3, "gossip(topology=ring)", 30, numel=200, dtype=dtype)
    expected = start.to(dtype).double().mean(0)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for values in ends:
        torch.testing.assert_close(values.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("codec", ["int8", "sign", "topk(density=0.1)", "randomk(density=0.25, unbiased=True)"])
def test_with_a_codec_estimates_keep_the_mean_and_all_come_to_it(codec: str) -> None:
    rule = "{'weight': " + codec + "}"
    start, ends, stats = mixed(3, f"gossip(topology=ring, codec={rule})", 50, numel=256)
    mean = torch.stack(ends).mean(0)
    torch.testing.assert_close(mean, start.mean(0), rtol=0, atol=1e-12)
    for values, told in zip(ends, stats, strict=True):
        assert float((values - mean).square().mean().sqrt()) < 0.1, "it began at 1"
        assert told["codecs"] == {"weight": spec.render(spec.parse(codec, "codec"))}
        assert told["bytes_sent"] < 50 * 2 * 256 * 8 * 0.2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "int8"}, "neighbours have to stay the same"),
        ({"codec": "int8", "topology": "random"}, "topology=random"),
        ({"codec": "int8", "topology": "ring", "asynchronous": True}, "asynchronous=True"),
        ({"codec": "dgc", "topology": "ring"}, "Use topk"),
        ({"rate": 0.0}, "rate is a part of the way"),
        ({"silent_s": 0.0}, "silent_s"),
        ({"port": -1}, "port must be"),
        ({"topology": "triangle"}, "triangle"),
    ],
)
def test_what_can_not_be_is_refused_with_a_reason(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Gossip(**options)


def test_asynchronous_pairs_keep_the_sum_and_come_together() -> None:
    start = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(comm: Communicator) -> tuple[Tensor, Tensor, dict[str, Any]]:
        trial = Trial(comm, "gossip(topology=random, asynchronous=True)", start[comm.rank])
        with trial.sync:
            for _ in range(40):
                trial.step()
                time.sleep(0.002)
            with trial.sync.join():
                pass
            ended = trial.values
            trial.sync.settle()
            return ended, trial.values, trial.sync.stats()

    outcomes = run_ranks(4, run)
    ends = torch.stack([ended for ended, _, _ in outcomes])
    torch.testing.assert_close(ends.mean(0), start.mean(0), rtol=0, atol=1e-13)
    assert float((ends - start.mean(0)).abs().max()) < 0.1 * float((start - start.mean(0)).abs().max())
    for _, settled, told in outcomes:
        torch.testing.assert_close(settled, start.mean(0), rtol=0, atol=1e-13)
        assert torch.equal(settled, outcomes[0][1])
        assert sum(told["staleness"]["histogram"].values()) >= 40
        assert told["staleness"]["max"] >= 1
        assert told["consensus"]["rms"] < 1.0


def test_two_who_ask_each_other_at_once_meet_in_the_middle() -> None:
    """Both questions cross on the way, every time: had each moved by a half, they would only have swapped."""

    def run(comm: Communicator) -> float:
        trial = Trial(comm, "gossip(asynchronous=True)", torch.tensor([float(comm.rank)]).double())
        with trial.sync:
            trial.step()
            with trial.sync.join():
                pass
            return float(trial.values)

    for zero, one in (run_ranks(2, run) for _ in range(3)):
        assert zero + one == 1.0
        assert abs(zero - one) <= 0.5


# -- settling, joining, resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["mean", "broadcast", "none"])
def test_settled_all_hold_the_exact_mean_and_buffers_as_asked(buffers: str) -> None:
    def run(comm: Communicator) -> tuple[float, float, float]:
        model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "gossip(topology=ring)", comm=comm, buffers=buffers) as sync:  # type: ignore[arg-type]
            with torch.no_grad():
                model[0].weight.fill_(comm.rank)
                model[1].running_mean.fill_(comm.rank)
            sync.settle()
            apart = sync.stats()["consensus"]["at_settle"]
            return float(model[0].weight.detach()[0]), float(model[1].running_mean[0]), apart

    outcomes = run_ranks(3, run)
    expected = {"mean": [1.0] * 3, "broadcast": [0.0] * 3, "none": [0.0, 1.0, 2.0]}
    assert [weight for weight, _, _ in outcomes] == [1.0] * 3
    assert [mean for _, mean, _ in outcomes] == expected[buffers]
    assert outcomes[0][2] > 0.0
    assert outcomes[1][2] == 0.0


@pytest.mark.parametrize("strategy", ["gossip", "gossip(topology=ring)", "gossip(asynchronous=True)"])
def test_ranks_with_fewer_batches_keep_the_others_company(strategy: str) -> None:
    def run(comm: Communicator) -> tuple[float, int]:
        trial = Trial(comm, strategy, torch.tensor([float(comm.rank)]).double())
        with trial.sync:
            for _ in range(2):
                with trial.sync.join():
                    trial.step(3 + 4 * comm.rank)
            trial.sync.settle()
            return float(trial.values), trial.stats("clocks")[comm.rank]

    outcomes = run_ranks(3, run)
    assert [value for value, _ in outcomes] == [pytest.approx(1.0, abs=1e-12)] * 3
    if "asynchronous" not in strategy:
        assert [clock for _, clock in outcomes] == [22] * 3, "all have mixed as often as the longest"


def test_a_run_with_uneven_ranks_is_the_same_bits_again() -> None:
    def run(comm: Communicator) -> Tensor:
        trial = Trial(comm, "gossip", torch.randn(3, generator=torch.Generator().manual_seed(comm.rank)).double())
        trial.optimizer.param_groups[0]["lr"] = 0.1 * comm.rank
        with trial.sync, trial.sync.join():
            trial.step(4 + 3 * comm.rank)
        return trial.values

    for one, other in zip(run_ranks(3, run), run_ranks(3, run), strict=True):
        assert torch.equal(one, other)


def test_who_has_left_a_meeting_since_still_counts_for_how_far_all_mix() -> None:
    circle = Circle(0, host="127.0.0.1", port=0, keys=None, silent_s=2.0)
    try:
        meeting = Meeting(circle, timeout_s=1)
        circle.start("run", {0: circle.address}, 1)
        for member, clock in ((1, 9), (2, 12)):
            circle.book.joined[member] = ""
            fields = {"number": 0, "what": "join", "clock": clock}
            circle._handlers["idle"](member, Message("idle", fields))
        circle.book.left[1] = 9
        circle.book.dead[2] = "killed"
        steps: list[int] = []
        assert meeting.gather("join", clock=lambda: len(steps), step=lambda: steps.append(0)) == 0
        assert len(steps) == 9
    finally:
        circle.close()


def test_with_another_number_of_ranks_a_saved_state_goes_on() -> None:
    def save(comm: Communicator) -> list[dict[str, Any]]:
        trial = Trial(comm, "gossip(topology=ring, codec={'weight': int8})", torch.full((64,), float(comm.rank)))
        with trial.sync:
            trial.step(3)
            return trial.sync.gather_state_dict()

    states = run_ranks(3, save)[0]

    def load(comm: Communicator) -> tuple[float, int]:
        trial = Trial(comm, "gossip(topology=ring, codec={'weight': int8})", torch.zeros(64))
        with trial.sync:
            trial.sync.load_state_dict(states)
            trial.step(2)
            return float(trial.values[0]), trial.stats("clocks")[comm.rank]

    outcomes = run_ranks(2, load)
    assert [clock for _, clock in outcomes] == [5, 5]
    assert all(0.0 < value < 2.0 for value, _ in outcomes)


def test_gone_back_to_an_earlier_state_it_is_the_same_bits_again() -> None:
    def run(comm: Communicator) -> bool:
        trial = Trial(comm, "gossip", torch.randn(3, generator=torch.Generator().manual_seed(comm.rank)).double())
        with trial.sync:
            trial.step(2)
            saved = trial.sync.state_dict()
            trial.step(3)
            after = trial.values
            trial.sync.load_state_dict(saved)
            trial.step(3)
            return torch.equal(after, trial.values)

    assert run_ranks(3, run) == [True] * 3


def test_a_mean_survives_the_death_of_the_one_who_made_it() -> None:
    """It told one member and died: that one gives it to the rest, though what they would make now is another."""
    circles = [Circle(me, host="127.0.0.1", port=0, keys=None, silent_s=2.0) for me in range(3)]
    meetings = [Meeting(circle, timeout_s=10) for circle in circles]
    for circle in circles:
        circle.start("run", {other.me: other.address for other in circles}, 10)
    send = circles[0].send

    def die_after_the_first(member: int, message: Message) -> Any:
        sent = send(member, message)
        if message.kind == "mean" and member == 1:
            circles[0].die()
            raise SystemExit
        return sent

    circles[0].send = die_after_the_first  # type: ignore[method-assign]
    found: dict[int, float] = {}

    def settle(me: int) -> None:
        number = meetings[me].gather("settle", clock=lambda: 0, step=None)
        with contextlib.suppress(SystemExit):
            found[me] = float(meetings[me].mean(number, 1.0, {"x0": torch.tensor([10.0**me])})["x0"])

    threads = [threading.Thread(target=settle, args=(me,), daemon=True) for me in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for circle in circles:
        circle.close()
    assert found == {1: 37.0, 2: 37.0}, "of 1, 10 and 100"


# -- who dies and who comes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", ["gossip(topology=test_lopsided)", "gossip(topology=ring, codec={'weight': int8})"]
)
def test_when_one_leaves_the_weights_of_the_rest_add_up_again(strategy: str) -> None:
    def run(comm: Communicator) -> tuple[float, list[int], float] | None:
        trial = Trial(comm, strategy, torch.full((64,), float(comm.rank)).double())
        trial.step(3)
        if comm.rank == 1:
            trial.sync.close()
            return None
        trial.step(40)
        told = trial.sync.stats()
        value = float(trial.values[0])
        with trial.sync.join():
            pass
        trial.sync.close()
        return told["push_sum_weight"], told["living"], value

    outcomes = [outcome for outcome in run_ranks(4, run) if outcome is not None]
    assert sum(weight for weight, _, _ in outcomes) == pytest.approx(3, abs=1e-12)
    assert [living for _, living, _ in outcomes] == [[0, 2, 3]] * 3
    values = [value for _, _, value in outcomes]
    assert max(values) - min(values) < 1e-3
    assert 0.5 < values[0] < 2.5


def test_a_newcomer_fetches_the_model_and_counts_like_any_other() -> None:
    address: list[str] = []

    def member(comm: Communicator) -> tuple[float, list[int], float]:
        trial = Trial(comm, "gossip(topology=test_lopsided)", torch.full((4,), 3.0).double())
        with trial.sync:
            if comm.rank == 0:
                address.append(trial.stats("address"))
            end_s = time.monotonic() + 20
            while len(trial.stats("living")) < 3:
                assert time.monotonic() < end_s, "nobody came"
                trial.step()
            with trial.sync.join():
                trial.step(50)
            living = trial.stats("living")  # all wait in settle() for this one; after it they leave
            trial.sync.settle()
            return float(trial.values[0]), living, trial.stats("push_sum_weight")

    def newcomer() -> float:
        end_s = time.monotonic() + 20
        while not address:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        text = f"gossip(topology=test_lopsided, join={address[0]!r})"
        model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gradsync.synchronize(model, optimizer, text, comm=Solo(timeout_s=20)) as sync:
            assert float(model.weight.detach()[0, 0]) == 3.0, "it has the model of the run"
            with torch.no_grad():
                model.weight.fill_(6.0)  # what it has learnt
            with sync.join():
                for _ in range(50):
                    optimizer.zero_grad()
                    model.weight.sum().backward()
                    optimizer.step()
            sync.settle()
            return float(model.weight.detach()[0, 0])

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(newcomer()), daemon=True)
    thread.start()
    outcomes = run_ranks(2, member)
    thread.join(20)
    assert results == [pytest.approx(4.0, abs=1e-9)], "the mean of 3, 3 and 6"
    for value, living, weight in outcomes:
        assert value == pytest.approx(4.0, abs=1e-9)
        assert len(living) == 3
        assert weight == 1.0


def test_a_newcomer_with_another_model_is_refused() -> None:
    def run(comm: Communicator) -> None:
        trial = Trial(comm, "gossip", torch.zeros(4).double())
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                trial.step()
                time.sleep(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            other = nn.Linear(5, 1, bias=False, dtype=torch.float64)
            with pytest.raises(ValueError, match="trains another model: weight is"):
                gradsync.synchronize(
                    other,
                    torch.optim.SGD(other.parameters(), lr=0.1),
                    Gossip(join=trial.stats("address")),
                    comm=Solo(timeout_s=10),
                )
        finally:
            stop.set()
            thread.join()
            trial.sync.close()

    run_ranks(1, run)


def struck(folder: str, victim: int, asynchronous: bool) -> tuple[float, list[int], list[float], bool] | float:
    """Train with four processes, of which one is killed in mid-step and one only comes afterwards."""
    world = gradsync.connect(timeout_s=20)
    comm = world.split([0, 1, 2])
    place = Path(folder) / "address"
    strategy = f"gossip(topology=ring, asynchronous={asynchronous})"
    started = world.rank < 3
    if not started:
        end_s = time.monotonic() + 30
        while not place.exists():
            assert time.monotonic() < end_s
            time.sleep(0.02)
        strategy = f"gossip(topology=ring, asynchronous={asynchronous}, join={place.read_text()!r})"
    model = nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = gradsync.synchronize(model, optimizer, strategy, comm=comm or Solo(timeout_s=20))
    x = torch.randn(16, 200, generator=torch.Generator().manual_seed(world.rank))
    gaps, losses, last_s = [], [], time.monotonic()

    def step() -> None:
        nonlocal last_s
        optimizer.zero_grad()
        loss = (model(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        gaps.append(time.monotonic() - last_s)
        last_s = time.monotonic()

    for at in range(10 if started else 0):
        if world.rank == victim and at == 6:
            model[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        step()
    if started and world.rank == max(rank for rank in range(3) if rank != victim):
        place.with_suffix(".new").write_text(sync.stats()["address"])
        place.with_suffix(".new").rename(place)  # whole or not at all
    end_s = time.monotonic() + 30
    while len(sync.stats()["living"]) < 3 or victim in sync.stats()["living"]:
        assert time.monotonic() < end_s, sync.stats()
        step()
    with sync.join():
        for _ in range(20):
            step()
    living = [member if member < 4 else 3 for member in sync.stats()["living"]]  # all wait in settle() for this one
    sync.settle()
    weight = model[0].weight.detach()
    outcome = max(gaps), living, [float(weight.sum()), float(weight.abs().sum())], losses[-1] < losses[0]
    sync.close()
    return outcome


@pytest.mark.parametrize(("victim", "asynchronous"), [(0, False), (2, True)])
def test_a_killed_worker_does_not_stop_the_rest_and_a_newcomer_takes_its_place(
    tmp_path: Path, victim: int, asynchronous: bool
) -> None:
    """Rank 0 too, which all ranks have met at."""
    outcomes = run_processes(4, struck, str(tmp_path), victim, asynchronous, timeout_s=60, expect_failure=True)
    assert outcomes[victim] == -signal.SIGKILL
    rest = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in rest:
        assert isinstance(outcome, tuple), outcome
        longest_s, living, _, learnt = outcome
        assert longest_s < 2.0 + 1.0, "two seconds, and one of a busy machine"
        assert living == [rank for rank in range(4) if rank != victim]
        assert learnt
    assert len({tuple(outcome[2]) for outcome in rest if isinstance(outcome, tuple)}) == 1, "settled to the same bits"


def test_keys_keep_strangers_out(tmp_path: Path) -> None:
    from gradsync.comm.curve import KeyPair

    path = tmp_path / "run.key"
    KeyPair.make().write(path)

    def run(comm: Communicator) -> tuple[float, str]:
        trial = Trial(comm, f"gossip(keys={str(path)!r})", torch.tensor([float(comm.rank)]).double())
        with trial.sync:
            trial.step()
            refused = ""
            if comm.rank == 0:
                other = nn.Linear(1, 1, bias=False, dtype=torch.float64)
                try:
                    gradsync.synchronize(
                        other,
                        torch.optim.SGD(other.parameters(), lr=0.1),
                        Gossip(join=trial.stats("address")),
                        comm=Solo(timeout_s=1),
                    )
                except gradsync.GradSyncError as error:
                    refused = str(error)
            with trial.sync.join():
                pass
            return float(trial.values), refused

    outcomes = run_ranks(2, run)
    assert [value for value, _ in outcomes] == [0.5, 0.5]
    assert "key" in outcomes[0][1]
