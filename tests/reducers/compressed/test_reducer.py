"""The compressed reducer: residuals are complete, replicas stay equal, and a resumed run is bitwise equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync import spec
from gradsync.comm import Communicator
from gradsync.reducers import Compressed
from gradsync.strategies import AllReduce
from gradsync.testing import run_ranks
from tests.engine.saved import strategy_state, strategy_states

CODECS = [
    "fp16",
    "bf16",
    "int8",
    "int8(rounding='stochastic')",
    "int4",
    "sign",
    "ternary",
    "topk(density=0.05)",
    "randomk(density=0.1)",
    "chain(topk(density=0.05), int8)",
]
LOSSLESS = ["dense", "topk(density=1.0)"]
SUMMED_ON_THE_WAY = ("fp16", "bf16")  # the rounding error of the all-reduce is in no rank's residual


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(60, 90), nn.Tanh(), nn.Linear(90, 70), nn.LayerNorm(70), nn.Linear(70, 3)).to(dtype)
    seeded = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.2 * torch.randn(param.shape, generator=seeded))
    return model


def batch_of(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(8, 60, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def total(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name].double() for part in parts]).sum(0) for name in parts[0]}


def strategy_of(codec: str, **options: Any) -> AllReduce:
    return AllReduce(reducer=Compressed(codec, min_numel=1000, **options))


def run(
    comm: Communicator,
    strategy: AllReduce,
    steps: int,
    *,
    dtype: torch.dtype = torch.float32,
    lr: float = 0.0,
    start: int = 0,
    state: Any = None,
    bucket_bytes: int = 20_000,
    prepare: Callable[[Any], None] = lambda sync: None,
) -> dict[str, Any]:
    """Train, by default with a learning rate of 0; returns the gradients before and after the reduction, and states."""
    model = build(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if state is not None:
        model.load_state_dict(state["model"])
    inputs, means, weights = [], [], []
    options = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": 500}
    with gradsync.synchronize(model, optimizer, strategy, comm=comm, **options) as sync:
        if state is not None:
            sync.load_state_dict(state["sync"])
        prepare(sync)
        plain = build(dtype)
        for step in range(start, steps):
            x = batch_of(comm.rank, step, dtype)
            plain.load_state_dict(model.state_dict())
            plain.zero_grad()
            plain(x).square().mean().backward()
            inputs.append({name: grad / comm.world_size for name, grad in gradients(plain).items()})
            optimizer.zero_grad()
            model(x).square().mean().backward()
            means.append(gradients(model))
            optimizer.step()
            weights.append([param.detach().clone() for param in model.parameters()])
        return {
            "inputs": total(inputs) if inputs else {},
            "means": means,
            "weights": weights,
            "sync": sync.state_dict(),
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "stats": sync.stats(),
        }


def residuals_of(outcome: dict[str, Any]) -> dict[str, Tensor]:
    saved: dict[str, Tensor] = strategy_state(outcome["sync"])["reducer"]["own"]["residuals"]
    return saved


def check_residuals_complete_the_means(ranks: list[dict[str, Any]], tolerance: float) -> None:
    """The sum of the ranks' gradients is the sum of the means plus the residuals."""
    inputs, means = total([rank["inputs"] for rank in ranks]), total(ranks[0]["means"])
    for name in inputs:
        kept = (
            sum((residuals_of(rank)[name].double() for rank in ranks), torch.zeros(()))
            if name in residuals_of(ranks[0])
            else 0.0
        )
        off = float((inputs[name] - means[name] - kept).norm() / inputs[name].norm())
        assert off < tolerance, f"{name} is off by {off:.1e} of its norm"


def check_same_bits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks[1:]:
        for mine, first in zip(rank["means"], ranks[0]["means"], strict=True):
            assert all(torch.equal(mine[name], first[name]) for name in first)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_residuals_complete_the_means(codec: str, world: int) -> None:
    ranks = run_ranks(world, lambda comm: run(comm, strategy_of(codec), 5, lr=0.05))
    check_same_bits(ranks)
    check_residuals_complete_the_means(ranks, 1e-2 if codec in SUMMED_ON_THE_WAY else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("codec", ["int8", "topk(density=0.05)", "randomk(density=0.1)", "fp16"])
def test_residuals_complete_the_means_in_other_dtypes(codec: str, dtype: torch.dtype) -> None:
    ranks = run_ranks(2, lambda comm: run(comm, strategy_of(codec), 4, lr=0.05, dtype=dtype))
    check_same_bits(ranks)
    check_residuals_complete_the_means(ranks, 2e-2 if dtype == torch.bfloat16 or codec in SUMMED_ON_THE_WAY else 1e-12)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_lossless_codecs_are_exact(codec: str) -> None:
    ranks = run_ranks(3, lambda comm: run(comm, strategy_of(codec), 3, dtype=torch.float64))
    inputs, means = total([rank["inputs"] for rank in ranks]), total(ranks[0]["means"])
    for name in inputs:
        assert torch.allclose(inputs[name], means[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("codec", ["int8", "int4", "topk(density=0.2)"])
def test_ef21_converges_to_the_gradient_of_a_constant_loss(codec: str) -> None:
    def same_batch(comm: Communicator) -> dict[str, Any]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gradsync.synchronize(model, optimizer, strategy_of(codec, feedback="ef21"), comm=comm) as sync:
            for _ in range(60):
                optimizer.zero_grad()
                model(batch_of(comm.rank, 0, torch.float32)).square().mean().backward()
            plain = build()
            plain(batch_of(comm.rank, 0, torch.float32)).square().mean().backward()
            return {"means": [gradients(model)], "inputs": gradients(plain), "sync": sync.state_dict()}

    ranks = run_ranks(3, same_batch)
    check_same_bits(ranks)
    exact = {name: value / 3 for name, value in total([rank["inputs"] for rank in ranks]).items()}
    for name, value in exact.items():
        assert float((ranks[0]["means"][0][name] - value).norm() / value.norm()) < 0.02, name


RESUMED = [
    ("int8", "ef"),
    ("int4(rounding='stochastic')", "ef"),
    ("sign", "ef21"),
    ("dgc", "ef"),
    ("chain(dgc, int8)", "ef"),
]


@pytest.mark.parametrize(("codec", "feedback"), RESUMED)
def test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(codec: str, feedback: str) -> None:
    def go(comm: Communicator) -> tuple[dict[str, Any], dict[str, Any]]:
        whole = run(comm, strategy_of(codec, feedback=feedback), 6, lr=0.1)
        first = run(comm, strategy_of(codec, feedback=feedback), 3, lr=0.1)
        other_buckets = 7_000  # the plan is part of the state
        rest = run(
            comm,
            strategy_of(codec, feedback=feedback),
            6,
            lr=0.1,
            start=3,
            state=first,
            bucket_bytes=other_buckets,
        )
        return whole, rest

    for whole, rest in run_ranks(3, go):
        for mine, expected in zip(rest["weights"], whole["weights"][3:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_residuals_survive_another_number_of_ranks(before: int, after: int) -> None:
    saved = run_ranks(before, lambda comm: run(comm, strategy_of("sign"), 3))
    everyone = {"model": saved[0]["model"], "sync": [rank["sync"] for rank in saved]}
    loaded = run_ranks(after, lambda comm: run(comm, strategy_of("sign"), 3, start=3, state=everyone))
    for name, value in total([residuals_of(rank) for rank in saved]).items():
        parts = [residuals_of(rank)[name] for rank in loaded if name in residuals_of(rank)]
        assert torch.allclose(torch.stack(parts).double().sum(0), value, rtol=1e-6, atol=1e-9)

    def load_one(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="states of all ranks"):
            run(comm, strategy_of("sign"), 3, state=saved[0])

    run_ranks(after, load_one)


def test_nonfinite_gradient_raises_with_its_name() -> None:
    def go(comm: Communicator) -> str:
        def spoil(sync: Any) -> None:
            if comm.rank == 1:
                sync._engine.training.model[2].weight.register_hook(
                    lambda grad: grad.index_fill(0, torch.tensor(5), torch.nan)
                )

        with pytest.raises(gradsync.NonFiniteGradient) as caught:
            run(comm, strategy_of("int8"), 1, prepare=spoil)
        return str(caught.value)

    texts = run_ranks(2, go)
    assert texts[0] == texts[1]
    assert "2.weight" in texts[0]
    assert "GradScaler" in texts[0]


@pytest.mark.parametrize("codec", ["int8", "topk(density=0.1)", "sign", "fp16"])
@pytest.mark.parametrize("feedback", ["ef", "ef21"])
def test_step_with_inf_is_rolled_back(codec: str, feedback: str) -> None:
    def go(comm: Communicator) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
        strategy = strategy_of(codec, feedback=feedback)
        with gradsync.synchronize(model, optimizer, strategy, comm=comm, scaler=scaler) as sync:

            def step(scale: float) -> None:
                optimizer.zero_grad()
                loss = model(batch_of(comm.rank, 0, torch.float32)).square().mean()
                scaler.scale(loss * scale).backward()
                scaler.step(optimizer)
                scaler.update()

            for _ in range(2):  # after the first step the buckets are rebuilt, and ef21 starts again
                step(1.0)
            before = strategy_state(sync.state_dict())["reducer"]
            params = [param.detach().clone() for param in model.parameters()]
            step(float("inf") if comm.rank == 0 else 1.0)
            after = strategy_state(sync.state_dict())["reducer"]
            assert scaler.get_scale() == 128.0
            assert all(torch.equal(a, b) for a, b in zip(params, model.parameters(), strict=True))
            for key in ("own", "shared"):
                for kind, kept in before[key].items():
                    assert all(torch.equal(kept[name], after[key][kind][name]) for name in kept)
                    assert any(value.any() for value in kept.values())
            step(1.0)

    run_ranks(2, go)


def test_residuals_are_in_unscaled_units() -> None:
    def go(comm: Communicator) -> list[dict[str, Tensor]]:
        kept = []
        for scale in (1.0, 1024.0):
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
            with gradsync.synchronize(model, optimizer, strategy_of("int8"), comm=comm, scaler=scaler) as sync:
                for step in range(3):
                    optimizer.zero_grad()
                    scaler.scale(model(batch_of(comm.rank, step, torch.float32)).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
                kept.append(strategy_state(sync.state_dict())["reducer"]["own"]["residuals"])
        return kept

    for one, scaled in run_ranks(2, go):
        assert all(torch.equal(one[name], scaled[name]) for name in one)


def test_dgc_momentum_equals_that_of_the_optimizer() -> None:
    """If all is sent uncompressed, momentum before the mean and after it give the same training."""

    def go(comm: Communicator) -> list[list[Tensor]]:
        trained = []
        for strategy, momentum in ((AllReduce(reducer=Compressed("dgc", min_numel=10**9)), 0.0), (AllReduce(), 0.9)):
            model = build(torch.float64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
            with gradsync.synchronize(model, optimizer, strategy, comm=comm):
                for step in range(4):
                    optimizer.zero_grad()
                    model(batch_of(comm.rank, step, torch.float64)).square().mean().backward()
                    optimizer.step()
            trained.append([param.detach() for param in model.parameters()])
        return trained

    for mine, exact in run_ranks(2, go):
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(mine, exact, strict=True))


DGC = "dgc(density=0.05, momentum=0.9, clip_norm=0.001)"


@pytest.mark.parametrize("codec", [DGC, f"chain({DGC}, fp16)"])
def test_dgc_clips_gradients_and_resets_the_velocity_of_sent_values(codec: str) -> None:
    def go(comm: Communicator) -> dict[str, Any]:
        return strategy_state(run(comm, strategy_of(codec), 3)["sync"])["reducer"]["own"]  # type: ignore[no-any-return]

    for own in run_ranks(2, go):
        velocity, residual = own["velocities"]["0.weight"], own["residuals"]["0.weight"]
        assert 0 < float(velocity.norm()) < 0.001 / 2 / 2**0.5 * 3  # three steps of half a clipped gradient
        assert codec != DGC or torch.equal(velocity == 0, residual == 0)
        assert 0.03 < float((velocity == 0).float().mean()) < 0.2


def test_bytes_per_step_do_not_grow_with_the_world() -> None:
    def sent(comm: Communicator) -> int:
        model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "allreduce(codec=int8)", comm=comm) as sync:
            return int(sync.stats()["bytes_per_step"])

    whole = 2 * 512 * 512 * 4
    for world in (2, 4, 8):
        plain = 2 * (world - 1) / world * whole
        assert plain / run_ranks(world, sent)[0] > 3.9


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_residual_is_sent_if_a_parameter_is_no_longer_compressed(before: int, after: int) -> None:
    saved = run_ranks(before, lambda comm: run(comm, strategy_of("int4"), 2, lr=0.05))
    rules = AllReduce(reducer=Compressed({"0.*": "int4", "*": "dense"}))
    states = [{**rank["sync"], "strategy": spec.render(rules)} for rank in saved]
    state = {"model": saved[0]["model"], "sync": states}

    def go_on(comm: Communicator) -> dict[str, Any]:
        return run(comm, spec.parse(spec.render(rules), kind="strategy"), 5, start=2, lr=0.05, state=state)

    ranks = run_ranks(after, go_on)
    check_same_bits(ranks)
    inputs = total([rank["inputs"] for rank in ranks])
    name = "2.weight"
    loaded_residual = sum(residuals_of(rank)[name].double() for rank in saved)
    means = total(ranks[0]["means"])[name]
    assert float((inputs[name] + loaded_residual - means).norm() / inputs[name].norm()) < 2e-6
    assert all(not bool(residuals_of(rank)[name].any()) for rank in ranks)


def test_patterns_choose_codecs_and_small_parameters_are_dense() -> None:
    model = build()
    codec = {"0.*": "sign", "*.weight": "int8", "*": "topk(density=0.01)"}
    reducer = Compressed(codec, min_numel=1000)
    chosen = {name: spec.render(reducer.rules.codec_of(name, param)) for name, param in model.named_parameters()}
    assert chosen["0.weight"] == chosen["0.bias"] == "sign"
    assert chosen["2.weight"] == chosen["4.weight"] == chosen["3.weight"] == "int8"
    assert chosen["2.bias"] == "dense"
    assert run_ranks(1, lambda comm: run(comm, AllReduce(reducer=reducer), 0))[0]["stats"]["codecs"] == chosen
    text = spec.render(AllReduce(codec={"0.*": "sign", "*": "int8"}))
    assert text == "allreduce(codec={'0.*': sign, '*': int8})"
    assert spec.render(spec.parse(text)) == text

    def misspelt(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="fits no parameter"):
            run(comm, AllReduce(codec={"encoder.*": "int8"}), 1)

    run_ranks(2, misspelt)


def test_accumulated_gradients_are_compressed_once() -> None:
    def go(comm: Communicator) -> dict[str, Tensor]:
        model = build(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, strategy_of("dense"), comm=comm, accumulate=2):
            for step in range(2):
                model(batch_of(comm.rank, step, torch.float64)).square().mean().backward()
            return gradients(model)

    exact = run_ranks(2, lambda comm: run(comm, AllReduce(), 2, dtype=torch.float64))
    mean = {name: value / 2 for name, value in total(exact[0]["means"]).items()}
    for name, value in run_ranks(2, go)[0].items():
        assert torch.allclose(value, mean[name], rtol=1e-12, atol=1e-15)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="feedback must be one of"):
        Compressed("int8", feedback="ef22")
    with pytest.raises(ValueError, match="names no codec"):
        Compressed({})
    with pytest.raises(ValueError, match="min_numel"):
        Compressed("int8", min_numel=-1)
    with pytest.raises(ValueError, match="both say how"):
        AllReduce(codec="int8", reducer="plain")
    with pytest.raises(ValueError, match="feedback of its own"):
        Compressed("dgc", feedback="ef21")


def test_gathered_state_holds_the_residuals_of_all_ranks() -> None:
    def go(comm: Communicator) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, strategy_of("sign"), comm=comm) as sync:
            model(batch_of(comm.rank, 0, torch.float32)).square().mean().backward()
            own, everyone = sync.state_dict(), sync.gather_state_dict(dst=None)
        mine = strategy_states(everyone)[comm.rank]["reducer"]["own"]["residuals"]
        kept = strategy_state(own)["reducer"]["own"]["residuals"]
        assert kept.keys() == mine.keys()
        assert all(torch.equal(kept[name], mine[name]) for name in kept)
        with gradsync.synchronize(model, optimizer, strategy_of("sign"), comm=comm) as sync:
            sync.load_state_dict(everyone)
            again = strategy_state(sync.state_dict())["reducer"]["own"]["residuals"]
        assert all(torch.equal(kept[name], again[name]) for name in kept)

    run_ranks(3, go)
