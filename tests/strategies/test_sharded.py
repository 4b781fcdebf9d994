"""``sharded``: each rank steps its own slices with the user's own optimizer, and N ranks equal one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.base import Work
from gradsync.comm.forwarding import Forwarding
from gradsync.testing import run_ranks
from tests.support.ranks import run_processes
from tests.support.simulated import connect_on_hosts

JOINED, STEPS, TOLERANCE = 12, 6, 1e-9
Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "nesterov": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd foreach": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, foreach=True),
    "sgd fused": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adamw foreach": lambda params: optim.AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: optim.AdamW(params, lr=0.01, fused=True),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1),
    "adagrad fused": lambda params: optim.Adagrad(params, lr=0.05, fused=True),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "radam": lambda params: optim.RAdam(params, lr=0.01),
    "adamax": lambda params: optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: optim.Adadelta(params, lr=1.0),
    "rprop": lambda params: optim.Rprop(params, lr=0.01),
    "asgd": lambda params: optim.ASGD(params, lr=0.05, t0=2),
}


class Reader(nn.Module):
    """Reads parameters of its children without calling them, as attention does, and of an LSTM, which keeps a list."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(len(x), 2, 8)
        h = h + self.attention(h, h, h)[0]
        h = self.scale * self.recurrent(h)[0].mean(1)
        return torch.tanh(h @ self.head.weight.T + self.head.bias)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    model = make().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.3 * torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return model


class Run:
    """A model in training: one rank's, or (without ``comm``) one plain process on the joined batches."""

    def __init__(
        self,
        comm: Communicator | None,
        make: Make = OPTIMIZERS["adamw"],
        model: Callable[[], nn.Module] = mlp,
        strategy: str = "sharded",
        *,
        state: dict[str, Any] | None = None,
        load_late: bool = False,
        **options: Any,
    ) -> None:
        self.comm = comm
        self.model = seeded(model)
        self.optimizer = make(self.model.parameters())
        self.sync: Any = None
        if state is not None and not load_late:
            self.load(state)
        if comm is not None:
            self.sync = gradsync.synchronize(
                self.model,
                self.optimizer,
                strategy,
                comm=comm,
                **{"bucket_bytes": 9000, "first_bucket_bytes": 600, **options},
            )
        if state is not None and load_late:
            self.load(state)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(JOINED, 16, dtype=torch.float64, generator=generator)
        if self.comm is not None:
            size = JOINED // self.comm.world_size
            x = x[self.comm.rank * size : (self.comm.rank + 1) * size]
        loss: Tensor = (self.model(x) - x[:, :8]).square().mean()
        return loss

    def train(self, start: int = 0, stop: int = STEPS, clip: float | None = None, norm_type: float = 2.0) -> Run:
        for step in range(start, stop):
            self.optimizer.zero_grad()
            self.loss(step).backward()
            if clip is not None and self.sync is not None:
                self.sync.clip_grad_norm_(clip, norm_type)
            elif clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip, norm_type)
            self.optimizer.step()
        return self

    def saved(self) -> dict[str, Any]:
        optimizer = self.optimizer.state_dict() if self.sync is None else self.sync.optimizer_state_dict(dst=None)
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": optimizer})

    def close(self) -> dict[str, Any]:
        saved = self.saved()
        if self.sync is not None:
            self.sync.close()
        return saved


def assert_close(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Models and optimizer states are equal, to rounding."""
    for name, value in expected["model"].items():
        assert float((got["model"][name] - value).norm() / value.norm()) <= TOLERANCE, name
    assert got["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert got["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for number, state in expected["optimizer"]["state"].items():
        assert list(got["optimizer"]["state"][number]) == list(state)
        for key, value in state.items():
            torch.testing.assert_close(got["optimizer"]["state"][number][key], value, rtol=1e-8, atol=1e-12, msg=key)


def assert_same_bits(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes[1:]:
        assert all(torch.equal(value, outcomes[0]["model"][name]) for name, value in outcome["model"].items())


# -- exact with every elementwise optimizer ---------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "name"), list(enumerate(OPTIMIZERS)), ids=list(OPTIMIZERS))
def test_optimizer_equals_one_process(number: int, name: str) -> None:
    make = OPTIMIZERS[name]
    outcomes = run_ranks(2 + number % 3, lambda comm: Run(comm, make).train().close())
    assert_same_bits(outcomes)
    assert_close(outcomes[0], Run(None, make).train().close())


@pytest.mark.parametrize("world", [2, 3, 4])
def test_modules_that_read_parameters_of_others(world: int) -> None:
    outcomes = run_ranks(world, lambda comm: Run(comm, model=Reader).train().close())
    assert_same_bits(outcomes)
    assert_close(outcomes[0], Run(None, model=Reader).train().close())


def test_parameters_that_one_rank_or_none_uses() -> None:
    """Rank r uses layer r only: the owner of a slice learns from the others whether it has a gradient."""

    def go(comm: Communicator | None) -> dict[str, Any]:
        run = Run(None, model=lambda: nn.ModuleList(nn.Linear(16, 8) for _ in range(4)))
        if comm is not None:
            run.sync = gradsync.synchronize(run.model, run.optimizer, "sharded", comm=comm, bucket_bytes=1500)
        for step in range(STEPS):
            x = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            run.optimizer.zero_grad()
            losses = [run.model.get_submodule(str(rank))(x).square().mean() for rank in range(3)]
            (sum(losses) / 3 if comm is None else losses[comm.rank]).backward()
            run.optimizer.step()
        return run.close()

    outcomes = run_ranks(3, go)
    assert_same_bits(outcomes)
    assert_close(outcomes[0], go(None))
    assert sorted(outcomes[0]["optimizer"]["state"]) == [0, 1, 2, 3, 4, 5], "none for the layer that no rank uses"


class OwnAdam(optim.Adam):
    """A subclass may do anything in its step."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: optim.Muon([p for p in params if p.dim() == 2], lr=0.1), "Muon: it orthogonalizes"),
        (lambda params: optim.Adafactor(params), "Adafactor: it keeps means over the rows"),
        (lambda params: OwnAdam(params), "OwnAdam: it is not known"),
    ],
)
def test_optimizer_that_is_not_elementwise_is_refused(make: Make, reason: str) -> None:
    model = nn.Linear(3, 3, bias=False)
    with pytest.raises(ValueError, match=reason):
        gradsync.synchronize(model, make(list(model.parameters())), "sharded")
    model(torch.ones(1, 3)).sum().backward()  # it is left as it was
    assert model.weight.grad is not None


def test_second_optimizer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Put all into one optimizer"):
        gradsync.synchronize(model, optim.SGD(model[0].parameters(), lr=0.1), "sharded")


def test_optimizer_shows_the_users_parameters_outside_of_a_step() -> None:
    def go(comm: Communicator) -> None:
        run = Run(comm).train(0, 2)
        assert [*run.model.parameters()] == run.optimizer.param_groups[0]["params"]
        run.optimizer.param_groups[0]["betas"] = None  # its step raises
        run.loss(2).backward()
        with pytest.raises(TypeError):
            run.optimizer.step()
        assert [*run.model.parameters()] == run.optimizer.param_groups[0]["params"]
        run.sync.close()

    run_ranks(2, go)


# -- gradients between backward and step ------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "norm_type"), [(2, 2.0), (3, 1.0), (4, float("inf"))])
def test_clipping_takes_the_norm_over_all_ranks(world: int, norm_type: float) -> None:
    outcomes = run_ranks(world, lambda comm: Run(comm).train(clip=0.05, norm_type=norm_type).close())
    assert_same_bits(outcomes)
    assert_close(outcomes[0], Run(None).train(clip=0.05, norm_type=norm_type).close())


def test_reading_gradients_of_which_a_rank_has_a_slice_raises() -> None:
    def go(comm: Communicator) -> None:
        run = Run(comm).train(0, 1)
        run.loss(1).backward()
        (first, *_) = params = list(run.model.parameters())
        for read in (
            lambda: nn.utils.clip_grad_norm_(params, 1.0),
            lambda: nn.utils.clip_grad_norm_(params, 1.0, foreach=False),
            lambda: nn.utils.get_total_norm([param.grad for param in params]),
            lambda: first.grad.sum().item(),
            lambda: first.grad.clone(),
            lambda: first.grad.data,
            lambda: torch.zeros(40, 16).double().add_(first.grad),
        ):
            with pytest.raises(ValueError, match=r"use sync\.clip_grad_norm_"):
                read()
        assert "PartialGradient" in repr(first.grad)
        nn.utils.clip_grad_value_(params, 0.5)  # each value by itself: right on the slice
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        assert all(not param.grad.any() for param in params)  # zeros are whole
        run.sync.close()

    run_ranks(2, go)


def test_norm_that_is_not_finite_raises_if_asked() -> None:
    def go(comm: Communicator) -> None:
        run = Run(comm).train(0, 1)
        (run.loss(1) * (float("inf") if comm.rank == 1 else 1.0)).backward()
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            run.sync.clip_grad_norm_(1.0, error_if_nonfinite=True)
        with pytest.raises(ValueError, match="norm_type must be above 0"):
            run.sync.clip_grad_norm_(1.0, 0.0)
        run.sync.close()

    run_ranks(2, go)


@pytest.mark.parametrize("fused", [False, True])
def test_scaler_skips_a_step_on_all_ranks_if_one_has_inf(fused: bool) -> None:
    """The inf is in one slice of the gradients, which one rank has."""

    def go(comm: Communicator) -> tuple[dict[str, Any], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        run = Run(comm, lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=fused), scaler=scaler)
        for step in range(4):
            run.optimizer.zero_grad()
            loss = run.loss(step)
            if step == 2 and comm.rank == 1:
                loss = loss + run.model.get_parameter("4.bias")[-1] * float("inf")
            scaler.scale(loss).backward()
            scaler.step(run.optimizer)
            scaler.update()
        return run.close(), float(scaler.get_scale())

    outcomes = run_ranks(3, go)
    assert [scale for _, scale in outcomes] == [512.0] * 3
    assert_same_bits([saved for saved, _ in outcomes])
    plain = Run(None).train(0, 2).train(3, 4).close()
    for name, value in plain["model"].items():
        torch.testing.assert_close(outcomes[0][0]["model"][name], value, rtol=1e-7, atol=1e-9)


# -- the optimizer's state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_state_of_a_rank_is_its_share(world: int) -> None:
    def go(comm: Communicator) -> int:
        run = Run(comm, model=lambda: nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 8))).train(0, 2)
        assert not run.optimizer.state
        num_bytes = int(run.sync.stats()["optimizer_state_bytes"])
        run.sync.close()
        return num_bytes

    whole = 2 * 8 * sum(param.numel() for param in nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 8)).parameters())
    shares = run_ranks(world, go)
    assert whole <= sum(shares) <= whole + 100
    assert max(shares) < 1.1 * whole / world


def test_plain_state_dict_raises_with_the_fix() -> None:
    def go(comm: Communicator) -> list[int]:
        run = Run(comm).train(0, 2)
        with pytest.raises(ValueError, match=r"sync\.optimizer_state_dict\(\) on all ranks"):
            run.optimizer.state_dict()
        with pytest.raises(ValueError, match="dst must be a rank, 0 to 1"):
            run.sync.optimizer_state_dict(dst=2)
        on_one = run.sync.optimizer_state_dict(dst=1)
        run.sync.close()
        return list(on_one.get("state", []))

    assert run_ranks(2, go) == [[], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("load_late", [False, True], ids=["before", "after"])
def test_whole_state_is_loaded_by_any_number_of_ranks(load_late: bool) -> None:
    expected = Run(None).train(0, 9).close()
    state = run_ranks(2, lambda comm: Run(comm).train(0, 3).close())[0]
    state = run_ranks(3, lambda comm: Run(comm, state=state, load_late=load_late).train(3, 6).close())[0]
    assert_close(Run(None, state=state).train(6, 9).close(), expected)
    outcomes = run_ranks(4, lambda comm: Run(comm, state=state, load_late=load_late).train(6, 9).close())
    assert_same_bits(outcomes)
    assert_close(outcomes[0], expected)


def test_load_between_steps_replaces_the_state() -> None:
    state = Run(None).train(0, 3).close()

    def go(comm: Communicator) -> dict[str, Any]:
        run = Run(comm).train(0, 5)
        run.load(state)
        return run.train(3, 6).close()

    assert_close(run_ranks(3, go)[0], Run(None).train(0, 6).close())


def test_state_moves_when_the_buckets_change() -> None:
    """Freezing lays the buckets out anew: the slices of the state follow, and that of frozen parameters stays."""

    def loop(run: Run) -> dict[str, Any]:
        run.train(0, 3)
        run.model[0].requires_grad_(False)  # type: ignore[index]
        run.train(3, 5)
        run.model[0].requires_grad_(True)  # type: ignore[index]
        return run.train(5, 7).close()

    outcomes = run_ranks(3, lambda comm: loop(Run(comm)))
    assert_same_bits(outcomes)
    assert_close(outcomes[0], loop(Run(None)))


def test_ranks_that_run_out_of_data_leave_the_state_to_the_others_meanwhile() -> None:
    def go(comm: Communicator) -> dict[str, Any]:
        run = Run(comm)
        for _ in range(2):  # after the first epoch the state is sharded again
            with run.sync.join():
                run.train(0, 5 if comm.rank == 0 else 3)
            assert run.sync.stats()["optimizer_state_bytes"] > 0
        return run.close()

    outcomes = run_ranks(3, go)
    assert_same_bits(outcomes)
    plain = run_ranks(3, lambda comm: joined_allreduce(comm))
    assert_close(outcomes[0], plain[0])


def joined_allreduce(comm: Communicator) -> dict[str, Any]:
    run = Run(comm, strategy="allreduce")
    for _ in range(2):
        with run.sync.join():
            run.train(0, 5 if comm.rank == 0 else 3)
    return run.close()


def test_parameter_is_saved_without_its_bucket() -> None:
    def go(comm: Communicator) -> None:
        run = Run(comm).train(0, 2)
        for dtype in (torch.float64,):
            written = io.BytesIO()
            bias = run.model.get_parameter("0.bias")
            torch.save({"bias": bias.detach()}, written)
            assert bias.untyped_storage().nbytes() == bias.numel() * dtype.itemsize
            assert len(written.getvalue()) < 3000
        before = bias.data_ptr()
        run.sync.close()
        assert bias.data_ptr() != before, "its memory is its own again"

    run_ranks(2, go)


# -- weights that arrive while the next forward runs ------------------------------------------------------------------


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled models."""
    monkeypatch.setattr("gradsync.strategies.sharded.strategy.compiled_code_is_in_use", lambda: False)


class LateWork(Work):
    """Work whose result is there only once it was waited for."""

    def __init__(self, work: Work, arrived: Tensor, out: Tensor, waits: list[int]) -> None:
        self._parts = (work, arrived, out, waits)

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        work, arrived, out, waits = self._parts
        work.wait()
        out.copy_(arrived)
        waits.append(out.numel())


class LateComm(Forwarding):
    """Weights that are read before their gather was waited for are old ones."""

    def __init__(self, inner: Communicator, waits: list[int]) -> None:
        super().__init__(inner)
        self.waits = waits

    def gather_slices(self, buffer: Tensor) -> Work:
        arrived = buffer.clone()
        return LateWork(self.inner.gather_slices(arrived), arrived, buffer, self.waits)

    def split(self, ranks: Any) -> Communicator | None:
        group = self.inner.split(ranks)
        return None if group is None else LateComm(group, self.waits)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("model", [mlp, Reader])
@pytest.mark.parametrize("world", [2, 3])
def test_forward_waits_for_late_weights(world: int, model: Callable[[], nn.Module]) -> None:
    """A bucket for each parameter: nobody waits for that of another by the way."""
    small = {"bucket_bytes": 8, "first_bucket_bytes": 8}
    outcomes = run_ranks(world, lambda comm: Run(LateComm(comm, []), model=model, **small).train().close())
    assert_same_bits(outcomes)
    assert_close(outcomes[0], Run(None, model=model).train().close())


@pytest.mark.usefixtures("nothing_compiled")
def test_each_module_waits_for_its_own_weights_only() -> None:
    def go(comm: Communicator) -> None:
        waits: list[int] = []
        run = Run(LateComm(comm, waits)).train(0, 3)
        assert isinstance(run.model, nn.Sequential)
        num_buckets = len(run.sync.stats()["bucket_bytes"])
        assert num_buckets >= 3
        waits.clear()
        run.optimizer.zero_grad()
        run.loss(3).backward()
        assert len(waits) == num_buckets, "the backward needs all"
        waits.clear()
        run.optimizer.step()
        assert waits == []
        run.model[0](torch.zeros(1, 16, dtype=torch.float64))
        after_first = len(waits)
        assert 0 < after_first < num_buckets
        run.model[0](torch.zeros(1, 16, dtype=torch.float64))
        assert len(waits) == after_first
        run.sync.close()
        assert len(waits) == num_buckets

    run_ranks(2, go)


READS: dict[str, Callable[[Run], Any]] = {
    "state_dict": lambda run: run.model.state_dict(),
    "parameters": lambda run: list(run.model.parameters()),
    "deepcopy": lambda run: copy.deepcopy(run.model),
    "settle": lambda run: run.sync.settle(),
    "sync state_dict": lambda run: run.sync.state_dict(),
    "close": lambda run: run.sync.close(),
    "load_state_dict": lambda run: run.model.load_state_dict(seeded(mlp).state_dict()),
}


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("read", READS)
def test_reading_parameters_waits_for_all(read: str) -> None:
    def go(comm: Communicator) -> None:
        waits: list[int] = []
        run = Run(LateComm(comm, waits)).train(0, 3)
        num_buckets = len(run.sync.stats()["bucket_bytes"])
        waits.clear()
        run.loss(3).backward()
        run.optimizer.step()
        del waits[:num_buckets]
        assert waits == []
        READS[read](run)
        assert len(waits) == num_buckets
        comm.barrier()
        run.sync.close()

    run_ranks(2, go)


def test_model_may_be_compiled_while_weights_are_under_way() -> None:
    """Compiled code reads parameters without a watcher: its first call waits for all, and later steps themselves."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def go(comm: Communicator) -> dict[str, Any]:
        run = Run(LateComm(comm, []), model=Reader).train(0, 2)
        comm.barrier()
        plain, run.model = run.model, torch.compile(run.model, backend="eager")
        run.train(2, 5)
        run.model = plain
        return run.close()

    outcomes = run_ranks(2, go)
    assert_same_bits(outcomes)
    assert_close(outcomes[0], Run(None, model=Reader).train(0, 5).close())


def test_overlap_can_be_turned_off() -> None:
    def go(comm: Communicator) -> None:
        waits: list[int] = []
        run = Run(LateComm(comm, waits), strategy="sharded(overlap=False)").train(0, 2)
        num_buckets = len(run.sync.stats()["bucket_bytes"])
        assert len(waits) == 2 * num_buckets
        assert type(run.model.get_submodule("0")._parameters) is dict
        run.sync.close()

    run_ranks(2, go)


def test_model_is_as_before_after_close_and_in_copies() -> None:
    def go(comm: Communicator) -> None:
        run = Run(comm).train(0, 2)
        copied, pickled = copy.deepcopy(run.model), io.BytesIO()
        torch.save(run.model, pickled)
        pickled.seek(0)
        loaded = torch.load(pickled, weights_only=False)
        run.sync.close()
        for model in (run.model, copied, loaded):
            first = model.get_submodule("0")
            assert type(first._parameters) is dict
            assert torch.equal(model(torch.ones(1, 16).double()), run.model(torch.ones(1, 16).double()))
        assert not run.model.get_submodule("0")._forward_pre_hooks

    run_ranks(2, go)


# -- on real transports -----------------------------------------------------------------------------------------------


def connected(transport: str) -> Communicator:
    if transport == "hierarchical":
        return connect_on_hosts("aabb", timeout_s=30)
    return gradsync.connect(transport, timeout_s=30)


def train_in_process(transport: str) -> dict[str, Any]:
    comm = connected(transport)
    in_short_floats(comm)
    return Run(comm).train(clip=0.05).close()


def in_short_floats(comm: Communicator) -> None:
    """Parameters of 16 bits: the ranks end with the same bits."""
    model = nn.Sequential(nn.Linear(64, 64).to(torch.bfloat16), nn.Linear(64, 8).half())
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with gradsync.synchronize(model, optimizer, "sharded", comm=comm, bucket_bytes=4000) as sync:
        for _ in range(3):
            optimizer.zero_grad()
            middle = model[0](torch.full((2, 64), 1.0 + comm.rank, dtype=torch.bfloat16))
            model[1](middle.half()).float().square().mean().backward()
            sync.clip_grad_norm_(1.0)
            optimizer.step()
        for param in model.parameters():
            sent = param.detach().float()
            everyone = torch.empty(comm.world_size, *sent.shape)
            comm.all_gather(sent, out=everyone).wait()
            assert sent.isfinite().all()
            assert all(torch.equal(other, sent) for other in everyone)


@pytest.mark.parametrize(("transport", "world"), [("shm", 3), ("c10d", 2), ("hierarchical", 4)])
def test_processes_equal_one_process(transport: str, world: int) -> None:
    outcomes = run_processes(world, train_in_process, transport)
    assert_same_bits(outcomes)
    assert_close(outcomes[0], Run(None).train(clip=0.05).close())


@pytest.mark.parametrize("strategy", ["allreduce", "sharded"])
def test_hooks_of_a_class_that_was_wrapped_twice_run_once(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    optim.SGD([torch.zeros(1)], lr=0.1)  # torch wraps step()
    twice = optim.Optimizer.profile_hook_step(optim.SGD.step)  # as after two threads have made the first two at once
    monkeypatch.setattr(optim.SGD, "step", twice)

    def go(comm: Communicator) -> Tensor:
        model = seeded(mlp)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, strategy=strategy, comm=comm):
            model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
            optimizer.step()
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    model = seeded(mlp)
    model(torch.ones(2, 16, dtype=torch.float64)).sum().backward()
    expected = torch.cat([(param - 0.1 * param.grad).detach().flatten() for param in model.parameters()])
    for weights in run_ranks(2, go):
        torch.testing.assert_close(weights, expected)
