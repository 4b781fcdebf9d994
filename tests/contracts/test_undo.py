"""The contract of strategies whose steps can be undone: a backward that a lost peer interrupts leaves no trace.

Rank 2 dies at one of its collectives of a step. On the survivors ``discard_step()`` brings the state back, bit for bit.
Where a rank has ended the step, ``accept_step()`` brings those that have not to the state of the undisturbed run.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync import spec
from gradsync.buckets.bucket import BucketPlan, plan_buckets
from gradsync.comm.base import Communicator, ReduceOp, Work
from gradsync.comm.forwarding import Forwarding
from gradsync.errors import PeerLost
from gradsync.reducers.plain import Plain
from gradsync.replicas.header import Header
from gradsync.strategies.base import Strategy
from gradsync.strategies.gradient_sync import GradientSync, ReducerSync
from gradsync.testing import Faulty, run_ranks
from tests.support.ranks import run_processes

CODECS = [name for name in spec.names("codec") if name not in ("chain", "dense")]
STRATEGIES = [
    "allreduce",
    *(f"allreduce(reducer=compressed(codec={name}, min_numel=8))" for name in CODECS),
    "allreduce(reducer=compressed(codec=chain(topk, int8), min_numel=8))",
    "allreduce(reducer=compressed(codec=int8, feedback='ef21', min_numel=8))",
    "allreduce(reducer=compressed(codec=topk(density=0.3), feedback='ef21', min_numel=8))",
    "allreduce(reducer=compressed(codec=int8, feedback='none', min_numel=8))",
    "allreduce(reducer=compressed(codec=dgc(density=0.1, warmup_steps=4), min_numel=8))",
    "allreduce(reducer=powersgd(rank=1, min_compression=1))",
    "allreduce(reducer=powersgd(rank=1, min_compression=1, alternating=True))",
    "allreduce(reducer=powersgd(rank=1, min_compression=1, start_step=3))",
    "allreduce(reducer=adasum)",
    "onebit_adam(warmup_steps=3, codec={'*': 'sign', '*.weight': 'sign'})",
    "local_sgd(exact_steps=50)",
    "auto(steps=50)",
]
ONLY_GRADIENTS = [name for name in STRATEGIES if name.startswith(("allreduce", "onebit_adam"))]
STEPS = (0, 3)  # the interrupted one: the first, whose buckets are provisional, and one with residuals


class Killed(Exception):
    """How a rank that is a thread dies."""


def die() -> None:
    raise Killed


class Trainer:
    """One rank's model, with sparse and unused parameters and with buffers, and its synchronizer."""

    def __init__(self, comm: Communicator, strategy: str, *, dense_only: bool = False) -> None:
        """``dense_only``: no collective comes after those of the buckets."""
        self.comm = comm
        seeded = torch.Generator().manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "words": nn.EmbeddingBag(9, 6, sparse=True),
                "one": nn.Linear(6, 12),
                "norm": nn.BatchNorm1d(12),
                "two": nn.Linear(12, 5),
                "unused": nn.Linear(3, 3),
            }
        )
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(0.4 * torch.randn(param.shape, generator=seeded))
        params = list(self.model.parameters())
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(params, lr=0.05)]
        if "adam" in strategy or dense_only:
            self.model["words"].sparse = False
        if "adam" in strategy:
            optimizers = [torch.optim.AdamW(params, lr=0.02)]
        (self.optimizer,) = optimizers
        self.sync = gradsync.synchronize(
            self.model,
            self.optimizer,
            strategy,
            comm=comm,
            bucket_bytes=200,
            first_bucket_bytes=100,
            buffers="none" if dense_only else "broadcast",
        )
        self.engine = self.sync._engine
        self.engine.undoable = True

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + self.comm.rank)
        words = torch.randint(9, (4, 2), generator=generator)
        self.optimizer.zero_grad()
        hidden = self.model["norm"](self.model["one"](self.model["words"](words)))
        (self.model["two"](hidden.tanh()) - torch.randn(4, 5, generator=generator)).square().mean().backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return self.engine.strategy.state_dict()


def assert_same(one: Any, other: Any, path: str = "state") -> None:
    """Equal bit for bit."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for at, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}/{at}")
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        bits = [value.contiguous().view(-1).view(torch.uint8) for value in (one, other)]
        assert torch.equal(*bits), path
    else:
        assert one == other, path


def collectives_of(step: int, world: int, strategy: str) -> tuple[int, int]:
    """The numbers of the last rank's first and last collective of a step, as ``Faulty`` counts them."""

    def go(comm: Communicator) -> tuple[int, int]:
        faulty = Faulty(comm, seed=0)
        trainer = Trainer(faulty, strategy)
        for at in range(step):
            trainer.step(at)
        before = faulty._plan._count
        trainer.backward(step)
        return before + 1, faulty._plan._count

    return run_ranks(world, go)[-1]


def interrupt(comm: Communicator, strategy: str, step: int, kill_at: int) -> str:
    """Let the last rank die in a step."""
    is_last = comm.rank == comm.world_size - 1
    return interrupt_on(Faulty(comm, seed=0, kill_at=kill_at if is_last else None, on_kill=die), strategy, step)


def interrupt_on(faulty: Faulty, strategy: str, step: int) -> str:
    """Undo a step if it is interrupted; returns what became of it."""
    trainer = Trainer(faulty, strategy)
    for at in range(step):
        trainer.step(at)
    before = trainer.state()
    try:
        trainer.backward(step)
    except Killed:
        return "killed"
    except PeerLost:
        if trainer.engine.step > step:
            return "ended"  # only the new layout of the buckets was not agreed on
        trainer.engine.strategy.discard_step()
        assert_same(trainer.state(), before)
        return "undone"
    return "ended"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_discard_step_brings_the_state_back(strategy: str, world: int) -> None:
    outcomes: list[str] = []
    for step in STEPS:
        first, last = collectives_of(step, world, strategy)
        points = {first, last, *random.Random(f"{strategy} {world}").choices(range(first, last + 1), k=3)}
        for kill_at in sorted(points):
            outcomes += run_ranks(world, lambda comm: interrupt(comm, strategy, step, kill_at), timeout_s=20)  # noqa: B023
    assert outcomes.count("undone") > len(outcomes) // 3


# -- a step that some ranks have ended ---------------------------------------------------------------------------------


class _LostWork(Work):
    def __init__(self, work: Work) -> None:
        self._work = work

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        raise PeerLost(rank=(2,), reason="a planted loss", after_s=0.0, during="all_reduce")


class LosesAResult(Forwarding):
    """Contributes to all collectives, and never receives the result of one of them: waiting for it raises."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.count = 0
        self.lose_at: int | None = None

    def _watched(self, work: Work) -> Work:
        self.count += 1
        return _LostWork(work) if self.count == self.lose_at else work

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp = "sum") -> Work:
        return self._watched(self.inner.all_reduce(tensor, op=op))

    def all_reduce_from(self, buffer: torch.Tensor, sources: Any) -> Work:
        return self._watched(self.inner.all_reduce_from(buffer, sources))

    def all_gather(self, tensor: torch.Tensor, *, out: torch.Tensor) -> Work:
        return self._watched(self.inner.all_gather(tensor, out=out))

    def all_to_all(self, tensor: torch.Tensor, *, out: torch.Tensor, own: bool = True, used: Any = None) -> Work:
        return self._watched(self.inner.all_to_all(tensor, out=out, own=own, used=used))

    def split(self, ranks: Any) -> Communicator | None:
        group = self.inner.split(ranks)
        assert group is not None
        return LosesAResult(group)


class HalfEnded:
    """Three ranks take a step that rank 1 does not end, because it loses the result of its n-th collective of it."""

    def __init__(self, strategy: str, step: int, lose: int) -> None:
        self.strategy, self.step, self.lose = strategy, step, lose
        self._shared: dict[int, dict[str, Any]] = {}
        self._met = threading.Barrier(3, timeout=20)

    def __call__(self, comm: Communicator) -> tuple[str, dict[str, Any]]:
        trainer = Trainer(LosesAResult(comm), self.strategy, dense_only=True)
        own, strategy = trainer.engine.comm, trainer.engine.strategy
        assert isinstance(own, LosesAResult)
        for at in range(self.step):
            trainer.step(at)
        before = trainer.state()
        if comm.rank == 1:
            own.lose_at = own.count + self.lose
        try:
            trainer.backward(self.step)
            self._shared[comm.rank] = strategy.shared_state()
        except PeerLost:
            pass
        if comm.rank == 1:
            comm.world.lose(1, "it has failed")  # type: ignore[attr-defined]
        self._met.wait()
        if comm.rank in self._shared:
            return "ended", trainer.state()
        if self._shared:
            assert strategy.accept_step(next(iter(self._shared.values()))) == []
            return "kept", trainer.state()
        strategy.discard_step()
        assert_same(trainer.state(), before)
        return "undone", before


def undisturbed(comm: Communicator, strategy: str, step: int) -> tuple[int, dict[str, Any]]:
    """The number of a step's collectives, and the state after it."""
    trainer = Trainer(LosesAResult(comm), strategy, dense_only=True)
    own = trainer.engine.comm
    assert isinstance(own, LosesAResult)
    for at in range(step):
        trainer.step(at)
    before = own.count
    trainer.backward(step)
    return own.count - before, trainer.state()


@pytest.mark.parametrize("strategy", ONLY_GRADIENTS)
def test_accept_step_gives_the_state_of_the_undisturbed_run(strategy: str) -> None:
    step = 3
    expected = run_ranks(3, lambda comm: undisturbed(comm, strategy, step))
    count, _ = expected[1]
    for lose, possible in ((1, {"undone"}), (count // 2, {"undone", "kept"}), (count, {"kept"})):
        results = run_ranks(3, HalfEnded(strategy, step, lose), timeout_s=20)
        outcomes = [outcome for outcome, _ in results]
        assert outcomes[1] in possible
        assert {outcomes[0], outcomes[2]} == {"ended" if outcomes[1] == "kept" else "undone"}
        for (outcome, state), (_, wanted) in zip(results, expected, strict=True):
            if outcome != "undone":
                assert_same(state, wanted)


@pytest.mark.parametrize("reducer", ["compressed(codec=int8, min_numel=8)", "powersgd(rank=1, min_compression=1)"])
def test_accept_step_drops_and_names_residuals_that_were_not_sent(reducer: str) -> None:
    strategy = f"allreduce(reducer={reducer})"
    (_, ahead), *_ = run_ranks(3, lambda comm: undisturbed(comm, strategy, 3))

    def go(comm: Communicator, lose: int) -> tuple[list[str], dict[str, torch.Tensor]]:
        trainer = Trainer(LosesAResult(comm), strategy, dense_only=True)
        own = trainer.engine.comm
        assert isinstance(own, LosesAResult)
        for at in range(3):
            trainer.step(at)
        own.lose_at = own.count + lose
        with pytest.raises(PeerLost):
            trainer.backward(3)
        lost = trainer.engine.strategy.accept_step(ahead)
        return lost, trainer.state()["reducer"]["own"]["residuals"]

    seen: set[str] = set()
    for lose in (3, 4, 5, 6):  # after the two of the headers
        for lost, residuals in run_ranks(3, lambda comm: go(comm, lose), timeout_s=20):  # noqa: B023
            seen |= set(lost)
            kept = {name for name, residual in residuals.items() if residual.any()}
            assert not kept & set(lost)
            assert {"one.weight", "two.weight"} <= kept | set(lost)
    assert seen


@pytest.mark.parametrize(
    ("strategy", "obstacle"),
    [
        *((name, "") for name in STRATEGIES),
        ("local_sgd", ""),
        ("diloco(fragments=2)", ""),
        ("sharded", "slice of the optimizer's state"),
        ("hogwild", "--keep-going"),
        ("gossip", "--keep-going"),
        ("parameter_server", "--keep-going"),
        ("auto(allow=[sharded])", "slice of the optimizer's state"),
    ],
)
def test_elastic_obstacle_names_what_can_not_be_undone(strategy: str, obstacle: str) -> None:
    found = spec.parse(strategy, "strategy").elastic_obstacle()
    assert obstacle in found if obstacle else not found


def test_elastic_obstacle_refuses_a_gradient_sync_that_can_not_be_undone() -> None:
    class Unprepared(Strategy):
        def gradient_sync(self, step: int) -> GradientSync:
            return ReducerSync(Plain())

        def bytes_per_step(self) -> int:
            return 0

    assert "discard_step()" in Unprepared().elastic_obstacle()


# -- a new communicator with fewer ranks -------------------------------------------------------------------------------


def take_step(strategy: Strategy, params: Mapping[str, nn.Parameter], comm: Communicator) -> dict[str, torch.Tensor]:
    """Attach a strategy to a new plan, and average seeded gradients in one backward."""
    layout = plan_buckets(list(params.items()), cap_bytes=300, first_cap_bytes=100)
    plan = BucketPlan(layout, [], params, comm)
    strategy.attach(plan, comm)
    sync = strategy.gradient_sync(3)
    assert sync is not None
    sync.begin_step(Header(step=3, weight=1.0, num_backwards=1, fingerprint=plan.fingerprint, has_data=True))
    sync.headers(block=True)
    generator = torch.Generator().manual_seed(comm.rank)
    for bucket in plan.buckets:
        bucket.begin_step()
        bucket.may_roll_back = True
        for slot in bucket.slots:
            slot.param.grad = torch.randn(slot.param.shape, generator=generator)
        bucket.finalize(1 / comm.world_size)
        sync.launch(bucket)
    sync.finish()
    sync.end_step()
    return {slot.name: slot.view.clone() for bucket in plan.buckets for slot in bucket.slots}


@pytest.mark.parametrize("strategy", ONLY_GRADIENTS)
def test_attach_with_other_ranks_keeps_this_ranks_state(strategy: str) -> None:
    """As if the survivors' states had been loaded into new strategies: each keeps its own residuals."""
    states: dict[int, dict[str, Any]] = {}
    met = threading.Barrier(3, timeout=20)

    def go(comm: Communicator) -> Any:
        trainer = Trainer(comm, strategy, dense_only=True)
        for at in range(3):
            trainer.step(at)
        states[comm.rank] = trainer.state()
        met.wait()
        survivors = comm.split([0, 2])
        if survivors is None:
            return None
        params = {name: param for name, param in trainer.model.named_parameters() if "unused" not in name}
        moved, fresh = trainer.engine.strategy, spec.parse(strategy, "strategy")
        got = take_step(moved, params, survivors)
        fresh.setup(trainer.engine.training)
        fresh.attach(trainer.engine.plan, survivors)
        fresh.load_state_dict(fresh.redistribute([states[0], states[2]], survivors.rank, 2))
        wanted = take_step(fresh, params, survivors)
        assert_same(got, wanted)
        known = {name for name, _ in params.items()}
        assert_same(*(_of_parameters(each.state_dict(), known) for each in (moved, fresh)))
        return got

    first, _, second = run_ranks(3, go, timeout_s=20)
    assert_same(first, second)


def _of_parameters(state: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """A state without the parameters that have left the plan."""
    return {
        key: _of_parameters(value, known) if isinstance(value, dict) else value
        for key, value in state.items()
        if not key.startswith("unused") or key in known
    }


# -- real processes ----------------------------------------------------------------------------------------------------


def interrupt_in_process(transport: str, strategy: str, step: int, kill_at: int) -> str:
    comm = gradsync.connect(transport, timeout_s=10)
    last = comm.rank == comm.world_size - 1
    faulty = Faulty(comm.unchecked(), seed=0, kill_at=kill_at if last else None)
    return interrupt_on(faulty, strategy, step)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce",
        "allreduce(reducer=compressed(codec=int8, min_numel=8))",
        "allreduce(reducer=powersgd(rank=1, min_compression=1))",
    ],
)
def test_discard_step_in_processes(strategy: str, transport: str) -> None:
    first, last = collectives_of(3, 3, strategy)
    for kill_at in (first + 2, (first + last) // 2 + 1):
        *survivors, killed = run_processes(
            3, interrupt_in_process, transport, strategy, 3, kill_at, expect_failure=True, preload=(__name__,)
        )
        assert killed == -signal.SIGKILL
        assert survivors == ["undone", "undone"]
