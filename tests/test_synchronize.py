"""What synchronize() promises beside the sums: views, hooks, errors, state. Ranks are threads here."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradsync
from gradsync.comm import Communicator
from gradsync.engine.engine import Engine
from gradsync.strategies import AllReduce, Verdict
from gradsync.strategies.allreduce import header_bytes
from gradsync.testing import run_ranks
from tests.support.models import build


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def attach(model: nn.Module, **options: Any) -> tuple[torch.optim.Optimizer, gradsync.Synchronizer]:
    optimizer = sgd(model)
    return optimizer, gradsync.synchronize(model, optimizer, **options)


def engine_of(sync: gradsync.Synchronizer) -> Engine:
    return sync._engine


# -- in place -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_synchronize_makes_gradients_views_of_buckets(set_to_none: bool) -> None:
    model = build()
    optimizer, sync = attach(model)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(torch.ones(2, 4)).sum().backward()
        storages = {bucket.storage.untyped_storage().data_ptr() for bucket in engine_of(sync).plan.buckets}
        for param in model.parameters():
            assert param.grad is not None
            assert param.grad.untyped_storage().data_ptr() in storages
        optimizer.step()


def test_close_leaves_the_model_as_it_was() -> None:
    model = build()
    names, forward = list(model.state_dict()), model.forward
    optimizer, sync = attach(model)
    assert list(model.state_dict()) == names
    assert model.forward == forward
    model(torch.ones(2, 4)).sum().backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    sync.close()
    sync.close()
    for param, grad in zip(model.parameters(), before, strict=True):
        assert not param._post_accumulate_grad_hooks
        assert param.grad is not None
        assert torch.equal(param.grad, grad)
        assert param.grad.untyped_storage().nbytes() == grad.untyped_storage().nbytes(), "the bucket is freed"
    assert not optimizer._optimizer_step_pre_hooks
    model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(next(model.parameters()).grad, 2 * before[0])  # type: ignore[arg-type]


def test_synchronize_broadcasts_parameters_and_buffers_of_rank_0() -> None:
    def run(comm: Communicator) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with torch.no_grad():
            model[0].weight.fill_(comm.rank + 1.0)
            model[1].running_mean.fill_(comm.rank + 5.0)
        attach(model, comm=comm)
        return model[0].weight.detach(), model[1].running_mean

    for weight, mean in run_ranks(3, run):
        assert weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert mean.tolist() == [5.0, 5.0]


def test_buckets_follow_the_order_in_which_gradients_become_ready() -> None:
    class Reversed(nn.Module):
        """Registered in the order in which its gradients come: the first guess of a plan is wrong about it."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    def run(comm: Communicator) -> tuple[list[str], list[str]]:
        model = Reversed()
        _, sync = attach(model, comm=comm, bucket_bytes=1, first_bucket_bytes=1)
        first = [names[0] for names in engine_of(sync).plan.layout]
        model(torch.ones(2, 4)).sum().backward()
        return first, [names[0] for names in engine_of(sync).plan.layout]

    for first, then in run_ranks(2, run):
        assert first[0].startswith("layers.3")
        assert [name.split(".")[1] for name in then] == ["0", "0", "1", "1", "2", "2", "3", "3"]


# -- buffers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [("broadcast", [0.0, 0.0]), ("mean", [0.5, 0.5]), ("none", [0.0, 1.0])])
def test_buffers(mode: str, expected: list[float]) -> None:
    class Counting(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.rank = rank
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.fill_(float(self.rank))
            return self.linear(x)

    def run(comm: Communicator) -> float:
        model = Counting(comm.rank)
        attach(model, comm=comm, buffers=mode)
        model(torch.ones(1, 1)).sum().backward()
        return float(model.seen)

    assert run_ranks(2, run) == expected


# -- what is said when something is wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate": 0}, "accumulate must be at least 1"),
        ({"accumulation": "median"}, "'mean' or 'sum'"),
        ({"buffers": "all"}, "broadcast, mean, none"),
        ({"bucket_bytes": 0}, "at least a byte"),
        ({"strategy": "allredcue"}, "Did you mean 'allreduce'"),
        ({"sparse": ["nowhere"]}, "does not have"),
    ],
)
def test_synchronize_refuses_bad_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        attach(build(), **options)


def test_synchronize_refuses_bad_models_and_optimizers() -> None:
    model = build()
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        gradsync.synchronize([model], sgd(model))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        gradsync.synchronize(model, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LBFGS"):
        gradsync.synchronize(model, torch.optim.LBFGS(model.parameters()))
    wrapped = nn.DataParallel(model)
    with pytest.raises(ValueError, match="Drop the wrapper"):
        gradsync.synchronize(wrapped, sgd(wrapped))
    with pytest.raises(ValueError, match="not the model's"):
        gradsync.synchronize(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1))
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="no data yet"):
        gradsync.synchronize(lazy, torch.optim.SGD(build().parameters(), lr=0.1))
    frozen = build().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to synchronize"):
        gradsync.synchronize(frozen, torch.optim.SGD(frozen.parameters(), lr=0.1))


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_set_weight_refuses_bad_weights(weight: float) -> None:
    _, sync = attach(build())
    with pytest.raises(ValueError, match="finite, and not below 0"):
        sync.set_weight(weight)


@pytest.mark.parametrize(
    ("differ", "says"),
    [
        ("shape", "parameter 0.weight: rank 1 has shape (9, 4)"),
        ("dtype", "torch.float64"),
        ("name", "rank 1 has parameter renamed.weight"),
        ("frozen", "frozen"),
        ("lr", "param_groups[0]['lr']: rank 1 has 0.2, rank 0 has 0.1"),
        ("accumulate", "setting accumulate: rank 1 has 2, rank 0 has 1"),
    ],
)
def test_synchronize_names_what_differs_between_ranks(differ: str, says: str) -> None:
    def run(comm: Communicator) -> str:
        odd = comm.rank == 1
        model: nn.Module = nn.Sequential(nn.Linear(4, 9 if odd and differ == "shape" else 8), nn.Linear(8, 2))
        if odd and differ == "dtype":
            model = model.double()
        if odd and differ == "name":
            model = nn.ModuleDict({"renamed": nn.Linear(4, 8), "last": nn.Linear(8, 2)})
        if odd and differ == "frozen":
            model[1].requires_grad_(False)  # type: ignore[index]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if odd and differ == "lr" else 0.1)
        options = {"accumulate": 2} if odd and differ == "accumulate" else {}
        with pytest.raises(gradsync.OutOfStep) as caught:
            gradsync.synchronize(model, optimizer, comm=comm, **options)  # type: ignore[arg-type]
        return str(caught.value)

    texts = run_ranks(2, run)
    assert texts[0] == texts[1]
    assert says in texts[0]


def test_header_finds_ranks_at_different_steps() -> None:
    def run(comm: Communicator) -> str:
        model = build()
        _, sync = attach(model, comm=comm)
        model(torch.randn(2, 4)).sum().backward()
        state = sync.state_dict()
        if comm.rank == 1:
            state["step"] = 7
        sync.load_state_dict(state)
        with pytest.raises(gradsync.OutOfStep) as caught:
            model(torch.randn(2, 4)).sum().backward()
        with pytest.raises(gradsync.GradSyncError, match="has failed and can't go on"):
            model(torch.randn(2, 4)).sum().backward()
        return str(caught.value)

    texts = run_ranks(3, run)
    assert len(set(texts)) == 1
    assert "rank 1 is out of step: its number of synchronizing backwards is 7, that of the others 1" in texts[0]


def test_engine_refuses_a_reentrant_checkpoint() -> None:
    model = build()
    attach(model)
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(gradsync.GradSyncError, match="use_reentrant=False"):
        checkpoint(model, x, use_reentrant=True).sum().backward()


def test_step_refuses_gradients_under_no_sync() -> None:
    model = build()
    optimizer, sync = attach(model)
    with sync.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="never synchronized"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_zero_grad_drops_the_weight_of_an_accumulation() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer, sync = attach(model)
    with sync.no_sync():
        (100 * model.weight).sum().backward()
    optimizer.zero_grad()
    (3 * model.weight).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 3.0


def test_set_weight_zero_leaves_an_earlier_mean_alone() -> None:
    def run(comm: Communicator) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        _, sync = attach(model, comm=comm)
        seen = []
        for weights in ((1, 1), (0, 0), (0, 2)):
            sync.set_weight(weights[comm.rank])
            (3 * model.weight).sum().backward()
            assert model.weight.grad is not None
            seen.append(model.weight.grad.item())
        return seen

    assert run_ranks(2, run) == [[3.0, 3.0, 6.0]] * 2


def test_set_weight_is_for_its_own_model_alone() -> None:
    def run(comm: Communicator) -> float:
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        _, first_sync = attach(first, comm=comm)
        attach(second, comm=comm)
        first_sync.set_weight(1 if comm.rank == 0 else 9)
        (float(comm.rank) * second.weight).sum().backward()
        assert second.weight.grad is not None
        return second.weight.grad.item()

    assert run_ranks(2, run) == [0.5, 0.5]


def test_synchronize_refuses_a_second_synchronizer() -> None:
    model = build()
    _, sync = attach(model)
    with pytest.raises(ValueError, match=r"parameter 0\.weight is already kept in step"):
        attach(model)
    sync.close()
    attach(model)[1].close()


@pytest.mark.parametrize("handed_over", [True, False])
def test_join_copies_schedules_or_finds_them_apart(handed_over: bool) -> None:
    def run(comm: Communicator) -> tuple[list[float], str]:
        model = build()
        optimizer = sgd(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        options = {"scheduler": schedule} if handed_over else {}
        sync = gradsync.synchronize(model, optimizer, comm=comm, **options)  # type: ignore[arg-type]
        rates = []
        try:
            for _ in range(2):
                with sync.join():
                    for _ in range(2 + comm.rank):
                        optimizer.zero_grad()
                        model(torch.randn(2, 4)).sum().backward()
                        optimizer.step()
                        schedule.step()
                        rates.append(optimizer.param_groups[0]["lr"])
        except gradsync.OutOfStep as error:
            return rates, str(error)
        return rates, ""

    (short, said), (long, said_too) = run_ranks(2, run)
    assert said == said_too
    if handed_over:
        assert short[2:] == pytest.approx(long[3:5]), "in the second epoch they have the same rates again"
        assert not said
    else:
        assert "pass scheduler=" in said


def test_engine_refuses_an_unannounced_sparse_gradient() -> None:
    model = nn.Embedding(5, 2)
    attach(model)
    with pytest.raises(ValueError, match=r"sparse=\['weight'\]"):
        F.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()


def test_synchronize_takes_announced_sparse_gradients() -> None:
    model = nn.Embedding(5, 2)
    attach(model, sparse=["weight"])
    F.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.to_dense()[1].tolist() == [1.0, 1.0]


def test_step_refuses_a_parameter_added_to_the_optimizer_later() -> None:
    model = build()
    optimizer, _ = attach(model)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="added to the optimizer"):
        optimizer.step()


def test_engine_refuses_to_go_on_after_a_broken_backward() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError("planted")

    def run(comm: Communicator) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        attach(model, comm=comm, bucket_bytes=1, first_bucket_bytes=1)
        if comm.rank == 1:
            h = Broken.apply(model[0](torch.ones(2, 4)))
            with pytest.raises(ZeroDivisionError):
                model[1](h).sum().backward()
        with pytest.raises(gradsync.GradSyncError) as caught:
            model(torch.ones(2, 4)).sum().backward()
        return str(caught.value)

    texts = run_ranks(2, run, timeout_s=2)
    assert "did not come to its end" in texts[1]
    assert "rank 1 was lost" in texts[0]


# -- the same data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
def test_same_data_warning_is_given_once(same: bool) -> None:
    def run(comm: Communicator) -> None:
        model = build()
        optimizer, _ = attach(model, comm=comm)
        generator = torch.Generator().manual_seed(0 if same else comm.rank)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(2, 4, generator=generator)).square().mean().backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, run)
    said = [w for w in caught if issubclass(w.category, gradsync.SameDataWarning)]
    assert len(said) == (1 if same else 0)
    if same:
        assert re.search(
            "gradients of the Sequential .*or use the same random seed.*gradsync.shard", str(said[0].message)
        )


# -- scalers, verdicts, state ---------------------------------------------------------------------------------------


def test_header_finds_scalers_that_disagree() -> None:
    def run(comm: Communicator) -> str:
        model = build()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + comm.rank))
        gradsync.synchronize(model, optimizer, comm=comm, scaler=scaler)
        with pytest.raises(gradsync.OutOfStep) as caught:
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        return str(caught.value)

    assert "GradScaler scale" in run_ranks(2, run)[0]


def test_synchronize_under_autocast() -> None:
    def run(comm: Communicator) -> list[Tensor]:
        model = build()
        optimizer, _ = attach(model, comm=comm)
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1)).chunk(comm.world_size)[comm.rank]
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    (alone,) = run_ranks(1, run)
    for params in run_ranks(3, run):
        for param, expected in zip(params, alone, strict=True):
            assert torch.allclose(param, expected, atol=5e-3)


class Discarding(AllReduce):
    """A strategy that lets every other step pass."""

    def before_step(self, step: int) -> Verdict:
        return Verdict.APPLY if step % 2 else Verdict.DISCARD


gradsync.spec.register("strategy", "test_discarding")(Discarding)


@pytest.mark.parametrize("with_closure", [False, True])
def test_verdict_discard_changes_nothing(with_closure: bool) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    gradsync.synchronize(model, optimizer, Discarding())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    if not with_closure:
        closure()  # the first synchronizing backward: step 1 is applied
        optimizer.step()
        closure()
    before = [param.clone() for param in model.parameters()]
    optimizer.step(closure if with_closure else None)
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)


def test_load_state_dict_refuses_another_model_or_strategy() -> None:
    _, sync = attach(build())
    state = sync.state_dict()
    _, other = attach(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="of another model"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="version"):
        sync.load_state_dict({})
    with pytest.raises(ValueError, match="saved by 'diloco'"):
        sync.load_state_dict({**state, "strategy": "diloco"})


def test_stats_tell_strategy_and_transport() -> None:
    def run(comm: Communicator) -> dict[str, Any]:
        model = build()
        _, sync = attach(model, comm=comm)
        model(torch.randn(2, 4)).sum().backward()
        return sync.stats()

    stats = run_ranks(2, run)[1]
    num_bytes = sum(stats["bucket_bytes"])
    assert stats["transport"] == "threads"
    assert stats["step"] == 1
    assert stats["bytes_per_step"] == num_bytes + header_bytes(2)  # 2 (n - 1) / n of the gradients, with two ranks


def test_synchronize_in_a_world_of_one() -> None:
    model = build()
    optimizer, sync = attach(model, accumulate=2)
    with sync.join():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert sync.stats()["step"] == 1


def test_join_of_two_models() -> None:
    """While one rank is out of data the other's next collective may be of either model."""

    def run(comm: Communicator) -> list[Tensor]:
        first, second = nn.Linear(2, 1), nn.Linear(1, 1)
        one, one_sync = attach(first, comm=comm)
        two, two_sync = attach(second, comm=comm)
        with one_sync.join(), two_sync.join():
            for step in range(2 + 3 * comm.rank):
                one.zero_grad()
                two.zero_grad()
                x = torch.full((2, 2), float(step + comm.rank))
                h = first(x)
                h.square().mean().backward()
                second(h.detach()).square().mean().backward()
                one.step()
                two.step()
        return [param.detach() for model in (first, second) for param in model.parameters()]

    ranks = run_ranks(3, run, timeout_s=20)
    for params in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(params, ranks[0], strict=True))


def test_synchronize_refuses_to_diverge_where_replicas_are_equal() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the replicas of AllReduce are equal after every step"):
        gradsync.synchronize(model, optimizer, on_partition="diverge")
    with pytest.raises(ValueError, match=r"on_partition must be one of pause, diverge; got 'wait'\."):
        gradsync.synchronize(model, optimizer, on_partition="wait")  # type: ignore[arg-type]
