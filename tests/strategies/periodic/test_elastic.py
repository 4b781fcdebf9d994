"""An exchange that a lost peer interrupts is undone, or kept; and two sides that have both gone on are merged."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.base import Solo
from gradsync.elastic.membership import APART
from gradsync.errors import PeerLost
from gradsync.testing import run_ranks
from tests.contracts.test_undo import LosesAResult, assert_same
from tests.strategies.periodic.runs import adamw, build, params_of, step_once

STRATEGIES = [
    "diloco(every=50, outer_warmup=0)",
    "diloco(every=50, codec={'*.weight': 'int4'})",
    "local_sgd(every=50, codec={'*.weight': 'topk(density=0.2)'})",
    "local_sgd(every=50, reducer=powersgd(rank=1), optimizer_state='average')",
]


class Trainer:
    """A rank that exchanges when it is told to."""

    def __init__(self, comm: Communicator, strategy: str) -> None:
        self.comm = comm
        self.model = build()
        self.optimizer = adamw(self.model)
        self.sync = gradsync.synchronize(self.model, self.optimizer, strategy, comm=comm)
        self.engine = self.sync._engine
        self.strategy: Any = self.engine.strategy
        self.strategy.undoable = self.strategy._exchange.undoable = True

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            step_once(self.model, self.optimizer, self.comm.rank, step)

    def exchange(self) -> None:
        self.strategy._next_exchange = [self.strategy._clock]
        self.strategy.retry_exchange()

    def state(self) -> dict[str, Any]:
        """All that an exchange changes, but for what each rank measures itself."""
        state = self.strategy.state_dict()
        del state["exchange"]["square_distances"]
        return {**state, "params": params_of(self.model)}


def warmed_up(comm: Communicator, strategy: str) -> Trainer:
    trainer = Trainer(comm, strategy)
    trainer.train(0, 2)
    trainer.exchange()
    trainer.train(2, 5)
    trainer.strategy._next_exchange = [trainer.strategy._clock]
    return trainer


def undisturbed(comm: Communicator, strategy: str) -> tuple[int, dict[str, Any]]:
    """The number of an exchange's collectives, and the state after it."""
    trainer = warmed_up(LosesAResult(comm), strategy)
    own = trainer.strategy._exchange.comm
    before = own.count
    trainer.exchange()
    return own.count - before, trainer.state()


class HalfEnded:
    """Three ranks begin an exchange that rank 1 does not end: it loses the result of one of its collectives."""

    def __init__(self, strategy: str, lose: int) -> None:
        self.strategy, self.lose = strategy, lose
        self._shared: dict[int, dict[str, Any]] = {}
        self._met = threading.Barrier(3, timeout=20)

    def __call__(self, comm: Communicator) -> tuple[str, dict[str, Any]]:
        trainer = warmed_up(LosesAResult(comm), self.strategy)
        strategy, own = trainer.strategy, trainer.strategy._exchange.comm
        before, number = trainer.state(), strategy.commit_number(0)
        if comm.rank == 1:
            own.lose_at = own.count + self.lose
        try:
            trainer.exchange()
            self._shared[comm.rank] = strategy.shared_state()
        except PeerLost:
            pass
        if comm.rank == 1:
            comm.world.lose(1, "it has failed")  # type: ignore[attr-defined]
        self._met.wait()
        assert number == strategy.commit_number(0) - (comm.rank in self._shared) >= APART
        if comm.rank in self._shared:
            return "ended", trainer.state()
        if not self._shared:
            strategy.discard_step()
            assert_same(trainer.state(), before)
            return "undone", before
        assert strategy.accept_step(next(iter(self._shared.values()))) == []
        assert strategy.commit_number(0) == number + 1
        return "kept", trainer.state()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_interrupted_exchange_is_undone_or_kept(strategy: str) -> None:
    expected = run_ranks(3, lambda comm: undisturbed(comm, strategy), timeout_s=20)
    count, _ = expected[1]
    seen = set()
    for lose in sorted({1, 2, count // 2, count - 1, count}):
        results = run_ranks(3, HalfEnded(strategy, lose), timeout_s=20)
        seen |= {outcome for outcome, _ in results}
        for (outcome, state), (_, wanted) in zip(results, expected, strict=True):
            if outcome != "undone":
                assert_same(state, wanted)
    assert seen == {"undone", "ended", "kept"}


def test_exchange_is_repeated_after_it_was_undone() -> None:
    def go(comm: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        trainer = warmed_up(comm, STRATEGIES[1])
        strategy, exchange = trainer.strategy, trainer.strategy._exchange
        before, reduce = trainer.state(), exchange.reduce

        def fail(*given: Any) -> None:
            reduce(*given)
            raise PeerLost(rank=2, reason="a planted loss", after_s=0.0)

        exchange.reduce = fail
        with pytest.raises(PeerLost):
            trainer.exchange()
        exchange.reduce = reduce
        strategy.discard_step()
        assert_same(trainer.state(), before)
        strategy.retry_exchange()
        return trainer.state(), undisturbed(comm.clone(), STRATEGIES[1])[1]

    for repeated, wanted in run_ranks(2, go, timeout_s=20):
        assert_same(repeated, wanted)


def test_sides_are_merged_by_their_shares() -> None:
    def go(comm: Communicator) -> tuple[Any, ...]:
        trainer = Trainer(Solo(worker=comm.worker), "diloco(every=2, outer_warmup=0)")
        trainer.comm = comm  # each side has data of its own
        trainer.train(0, 5 + 2 * comm.rank)
        strategy, engine = trainer.strategy, trainer.engine
        anchors = {name: anchor.clone() for name, anchor in strategy._exchange.anchors.items()}
        weights = {name: param.detach().clone() for name, param in engine.training.params.items()}
        engine.move_to(comm.clone(), None)
        assert strategy.diverge_obstacle() == ""
        distance = strategy.merge_sides(comm, [0.25, 0.75][comm.rank])
        merged = {name: anchor.clone() for name, anchor in strategy._exchange.anchors.items()}
        moved = {name: param.detach() - weights[name] for name, param in engine.training.params.items()}
        steps = strategy._clock, list(strategy._next_exchange)
        trainer.train(7, 9)
        trainer.sync.settle()
        return anchors, merged, moved, distance, steps, params_of(trainer.model)

    one, other = run_ranks(2, go, timeout_s=20)
    assert one[4] == other[4] == (7, [8])
    assert all(torch.equal(a, b) for a, b in zip(one[5], other[5], strict=True))
    for anchors, merged, moved, distance, *_ in (one, other):
        square = 0.0
        for name, anchor in anchors.items():
            mean = 0.25 * one[0][name] + 0.75 * other[0][name]
            torch.testing.assert_close(merged[name], mean)
            torch.testing.assert_close(moved[name], mean - anchor)
            square += float((mean - anchor).square().sum())
        assert distance == pytest.approx(square**0.5)
        assert_same(merged, one[1])


def test_exact_strategies_refuse_two_histories() -> None:
    for text in ("allreduce", "local_sgd(exact_steps=5)"):
        assert "are equal after every step" in gradsync.spec.parse(text, "strategy").diverge_obstacle()
