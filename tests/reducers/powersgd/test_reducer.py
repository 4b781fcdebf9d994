"""PowerSGD: means of low-rank factors, complete residuals, saved state and bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm import Communicator
from gradsync.comm.base import Work
from gradsync.reducers.powersgd.reducer import PowerSGD
from gradsync.testing import run_ranks
from tests.reducers.powersgd.harness import SHAPES, ReducerHarness

BOTH = pytest.mark.parametrize("alternating", [False, True], ids=["both factors", "alternating"])


def random_grads(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def grads_of(comm: Communicator, step: int) -> dict[str, Tensor]:
    return random_grads(1000 * step + comm.rank)


def assert_same_bits(ranks: list[Any]) -> None:
    for other in ranks[1:]:
        assert other.keys() == ranks[0].keys()
        assert all(torch.equal(other[name], ranks[0][name]) for name in other)


def mean_of(world: int, step: int, name: str) -> Tensor:
    return torch.stack([random_grads(1000 * step + rank)[name].double() for rank in range(world)]).mean(0)


# -- means ------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_replicas_are_bitwise_equal_and_vectors_exact(world: int, dtype: torch.dtype, alternating: bool) -> None:
    def run(comm: Communicator) -> dict[str, Tensor]:
        ranks = ReducerHarness(comm, PowerSGD(rank=3, alternating=alternating), dtype=dtype)
        return {f"{step} {name}": g for step in range(3) for name, g in ranks.step(grads_of(comm, step)).items()}

    ranks = run_ranks(world, run)
    assert_same_bits(ranks)
    eps = torch.finfo(dtype).eps
    for name in ("bias", "few", "one", "none"):
        mean = mean_of(world, 2, name)
        assert torch.allclose(ranks[0][f"2 {name}"].double(), mean, rtol=4 * eps, atol=4 * eps)
    assert (ranks[0]["2 a"].double() - mean_of(world, 2, "a")).norm() > 0.1, "rank 3 is an approximation"


@BOTH
def test_low_rank_gradients_are_exact(alternating: bool) -> None:
    """All ranks' columns lie in one plane, which 4 columns can represent: once it is found, residuals are zero."""

    def run(comm: Communicator) -> list[dict[str, Tensor]]:
        run = ReducerHarness(
            comm, PowerSGD(rank=4, alternating=alternating), dtype=torch.float64, shapes={"w": (40, 50)}
        )
        common = torch.Generator().manual_seed(0)
        left, right = torch.randn(40, 2, generator=common).double(), torch.randn(2, 50, generator=common).double()
        outcomes = []
        for step in range(4):
            own = (
                left
                @ torch.randn(2, 2, generator=torch.Generator().manual_seed(step * 10 + comm.rank)).double()
                @ right
            )
            outcomes.append({"mean": run.step({"w": own})["w"], "own": own, "residual": run.residuals()["w"]})
        return outcomes

    ranks = run_ranks(2, run)
    # If alternating, the error of a step with a fixed factor that is not exact yet is corrected in the next step.
    for span in ((0, 1), (2, 3)) if alternating else ((0,), (1,), (2,), (3,)):
        mean = sum(ranks[0][step]["mean"] for step in span)
        given = sum(rank[step]["own"] / 2 for rank in ranks for step in span)
        assert torch.allclose(torch.as_tensor(mean), torch.as_tensor(given), atol=1e-11)
        assert all(rank[span[-1]]["residual"].abs().max() < 1e-11 for rank in ranks)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_residuals_complete_the_means(dtype: torch.dtype, alternating: bool) -> None:
    """Over all steps: the sum of the means plus the ranks' residuals is the sum of their gradients."""

    def run(comm: Communicator) -> list[dict[str, Tensor]]:
        run = ReducerHarness(comm, PowerSGD(rank=2, alternating=alternating), dtype=dtype)
        means = [run.step(grads_of(comm, step), factor=(0.25, 0.75)[comm.rank]) for step in range(5)]
        return [{name: sum(mean[name].double() for mean in means) for name in SHAPES}, run.residuals()]  # type: ignore[misc]

    ranks = run_ranks(2, run)
    tolerance = 20 * torch.finfo(dtype).eps
    for name in ("a", "b", "conv", "tall"):
        given = sum(
            factor * random_grads(1000 * step + rank)[name].to(dtype).double()
            for step in range(5)
            for rank, factor in enumerate((0.25, 0.75))
        )
        residual = sum(rank[1][name].double() for rank in ranks)
        assert residual.norm() > 0.1
        assert torch.allclose(ranks[0][0][name] + residual, given, rtol=0, atol=tolerance), name


def test_without_feedback_there_are_no_residuals() -> None:
    def run(comm: Communicator) -> dict[str, Tensor]:
        run = ReducerHarness(comm, PowerSGD(rank=2, feedback=False))
        for _ in range(3):
            mean = run.step(grads_of(comm, 0))
        assert run.residuals() == {}
        return mean

    mean = run_ranks(2, run)[0]["tall"].double()
    assert torch.linalg.matrix_rank(mean, rtol=1e-5) == 2
    assert torch.linalg.matrix_norm(mean, 2) <= torch.linalg.matrix_norm(mean_of(2, 0, "tall"), 2) * 1.0001


def test_rank_without_data_still_sends_its_residual() -> None:
    """Rank 1 has NaN with weight zero from the second step on: it is ignored, and its residual decreases to zero."""

    def run(comm: Communicator) -> tuple[dict[str, Tensor], float]:
        run = ReducerHarness(comm, PowerSGD(rank=4))
        run.step(grads_of(comm, 0))
        before = run.residuals()["a"].norm()
        nothing = {name: torch.full(shape, math.nan) for name, shape in SHAPES.items()}
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for _ in range(15):
            mean = run.step(nothing if comm.rank else zeros, factor=float(comm.rank == 0), in_place=True)
        return mean, float(run.residuals()["a"].norm() / before)

    ranks = run_ranks(2, run)
    assert all(bool(mean["a"].isfinite().all()) for mean, _ in ranks)
    assert ranks[1][1] < 1e-2


def test_gradients_read_in_place_give_the_bits_of_copied_ones() -> None:
    def run(comm: Communicator, in_place: bool) -> dict[str, Tensor]:
        run = ReducerHarness(comm, PowerSGD(rank=3))
        return [run.step(grads_of(comm, step), in_place=in_place) for step in range(3)][-1]

    in_place, copied = run_ranks(2, lambda comm: run(comm, True)), run_ranks(2, lambda comm: run(comm, False))
    assert_same_bits([*in_place, *copied])


def test_unused_parameters_have_no_gradient_and_keep_their_state() -> None:
    def run(comm: Communicator) -> None:
        run = ReducerHarness(comm, PowerSGD(rank=4))
        run.step(grads_of(comm, 0))
        for _ in range(40):  # residuals are sent even without a gradient
            got = run.step({"a": random_grads(comm.rank)["a"]} if comm.rank == 0 else {})
        assert set(got) == {"a"}
        assert run.residuals()["b"].norm() < 1e-3
        factor = run.reducer.state_dict()["shared"]["right"]["b"]
        assert torch.allclose(factor @ factor.T, torch.eye(4), atol=1e-5)

    run_ranks(2, run)


def test_feedback_finds_the_optimum() -> None:
    """A quadratic with a different optimum on each rank: with feedback, training finds their mean."""

    def run(comm: Communicator, reducer: PowerSGD) -> float:
        run = ReducerHarness(comm, reducer, dtype=torch.float64, shapes={"w": (30, 40), "v": (7,)})
        generator = torch.Generator().manual_seed(comm.rank)
        targets = {name: torch.randn(p.shape, generator=generator).double() for name, p in run.params.items()}
        for _ in range(200):
            means = run.step({name: p.detach() - targets[name] for name, p in run.params.items()})
            with torch.no_grad():
                for name, param in run.params.items():
                    param.sub_(means[name], alpha=0.03)
        target = targets["w"].clone()
        comm.all_reduce(target).wait()
        return float((run.params["w"].detach() - target / comm.world_size).norm() / target.norm())

    assert max(run_ranks(2, lambda comm: run(comm, PowerSGD(rank=2)))) < 1e-3
    assert max(run_ranks(2, lambda comm: run(comm, PowerSGD(rank=2, alternating=True)))) < 1e-3
    assert min(run_ranks(2, lambda comm: run(comm, PowerSGD(rank=2, feedback=False)))) > 0.05


# -- NaN, inf and a GradScaler ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_named_and_leave_the_state_unchanged(
    value: float, dtype: torch.dtype, alternating: bool
) -> None:
    def run(comm: Communicator) -> None:
        run = ReducerHarness(comm, PowerSGD(rank=3, alternating=alternating), dtype=dtype)
        for step in range(3):
            run.step(grads_of(comm, step))
        before = run.reducer.state_dict()
        for name in ("a", "conv", "bias"):
            grads = grads_of(comm, 3)
            if comm.rank == 1:
                grads[name].view(-1)[7] = value
            got = run.step(grads)
            assert run.nonfinite == [name]
            assert not got[name].isfinite().all()
            assert all(bool(got[other].isfinite().all()) for other in SHAPES if other != name)
            after = run.reducer.state_dict()
            assert after["steps"] == before["steps"] == 3
            assert_same_bits([before["own"]["residuals"], after["own"]["residuals"]])
            assert_same_bits([before["shared"]["right"], after["shared"]["right"]])
            assert_same_bits([before["shared"]["left"], after["shared"]["left"]])
        run.step(grads_of(comm, 3))
        assert run.nonfinite == []
        assert run.reducer.nonfinite == []
        assert not torch.equal(run.residuals()["a"], before["own"]["residuals"]["a"])

    run_ranks(2, run)


@BOTH
def test_residuals_are_in_unscaled_units(alternating: bool) -> None:
    def run(comm: Communicator, scales: tuple[float, ...]) -> dict[str, Tensor]:
        run = ReducerHarness(comm, PowerSGD(rank=3, alternating=alternating))
        for step, scale in enumerate(scales):
            grads = {name: grad * scale for name, grad in grads_of(comm, step).items()}
            got = {name: mean / scale for name, mean in run.step(grads, loss_scale=scale).items()}
        return {**got, "residual": run.residuals()["conv"]}

    plain, scaled = (run_ranks(2, lambda comm, s=s: run(comm, s)) for s in ((1.0, 1.0, 1.0), (1024.0, 512.0, 0.25)))
    assert_same_bits([plain[0], scaled[0]])


# -- state ------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stop", [0, 3, 4])
def test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(stop: int, dtype: torch.dtype, alternating: bool) -> None:
    def run(comm: Communicator) -> None:
        whole, first = (ReducerHarness(comm, PowerSGD(rank=3, alternating=alternating), dtype=dtype) for _ in range(2))
        for step in range(stop):
            whole.step(grads_of(comm, step))
            first.step(grads_of(comm, step))
        reducer = PowerSGD(rank=3, alternating=alternating)
        reducer.load_state_dict(first.reducer.state_dict())  # before attach
        second = ReducerHarness(comm, reducer, dtype=dtype)
        third = ReducerHarness(comm, PowerSGD(rank=3, alternating=alternating), dtype=dtype)
        third.step(grads_of(comm, 99))
        third.reducer.load_state_dict(second.reducer.state_dict())  # after attach
        for step in range(stop, stop + 3):
            outcomes = [each.step(grads_of(comm, step)) for each in (whole, second, third)]
            assert_same_bits(outcomes)
            assert_same_bits([each.residuals() for each in (whole, second, third)])

    run_ranks(2, run)


@BOTH
def test_state_follows_the_parameters_into_another_plan(alternating: bool) -> None:
    """The compiled sums do not depend on the position of a matrix, so even the bits are those of the old plan."""

    def run(comm: Communicator) -> None:
        moved, stayed = (ReducerHarness(comm, PowerSGD(rank=3, alternating=alternating)) for _ in range(2))
        for step in range(6):
            if step == 3:
                assert len(moved.plan.buckets) > 1
                moved.rebuild(10**6)
                assert len(moved.plan.buckets) == 1
            if step == 4:
                moved.rebuild(2000)
            assert_same_bits([run.step(grads_of(comm, step)) for run in (moved, stayed)])
            assert_same_bits([run.residuals() for run in (moved, stayed)])

    run_ranks(2, run)


def test_factors_do_not_depend_on_other_parameters() -> None:
    def run(comm: Communicator) -> list[Tensor]:
        alone, among = (
            ReducerHarness(comm, PowerSGD(), shapes={"b": SHAPES["b"]}),
            ReducerHarness(comm, PowerSGD(), cap_bytes=10**6),
        )
        return [each.step(grads_of(comm, 0))["b"] for each in (alone, among)]

    first, second = run_ranks(2, run)[0]
    assert torch.equal(first, second)


def test_residual_is_sent_if_a_parameter_is_no_longer_compressed() -> None:
    def run(comm: Communicator) -> None:
        run = ReducerHarness(comm, PowerSGD(rank=3))
        run.step(grads_of(comm, 0))
        residual = run.residuals()["a"].clone()
        whole = ReducerHarness(comm, PowerSGD(rank=3, min_compression=100.0))
        state = run.reducer.state_dict()
        whole.reducer.load_state_dict(state)
        nonfinite = grads_of(comm, 1)
        nonfinite["b"][0, 0] = math.nan
        whole.step(nonfinite)  # does not count
        got = whole.step(grads_of(comm, 1))["a"]
        comm.all_reduce(residual).wait()
        assert torch.allclose(got.double(), mean_of(2, 1, "a") + residual.double(), atol=1e-6)
        assert whole.residuals() == {}
        assert torch.allclose(whole.step(grads_of(comm, 2))["a"].double(), mean_of(2, 2, "a"), atol=1e-6)

    run_ranks(2, run)


def test_invalid_states_are_refused() -> None:
    def run(comm: Communicator) -> None:
        run = ReducerHarness(comm, PowerSGD(rank=3))
        run.step(grads_of(comm, 0))
        state = run.reducer.state_dict()
        other = ReducerHarness(comm, PowerSGD(rank=2))
        other.reducer.load_state_dict(state)
        with pytest.raises(ValueError, match=r"must have shape \(2, .*got \(3, "):
            other.step(grads_of(comm, 1))
        with pytest.raises(ValueError, match="another reducer"):
            run.reducer.load_state_dict({"a": torch.ones(1)})
        with pytest.raises(ValueError, match="another reducer"):
            run.reducer.load_state_dict({**state, "own": {"estimates": {}}})

    run_ranks(2, run)


@pytest.mark.parametrize("bad", [{"rank": 0}, {"min_compression": 0.5}, {"start_step": -1}])
def test_invalid_arguments_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"got {next(iter(bad))}="):
        PowerSGD(**bad)


# -- bytes ------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("start_step", [0, 10])
def test_bytes_sent_are_those_of_the_collectives(start_step: int, alternating: bool) -> None:
    def run(comm: Communicator) -> tuple[int, int]:
        run = ReducerHarness(
            comm, PowerSGD(rank=2, alternating=alternating, start_step=start_step), dtype=torch.bfloat16
        )
        carried, counted_bytes, all_reduce = [], 0, comm.all_reduce

        def counted(tensor: Tensor) -> Work:
            carried.append(tensor.nbytes)
            return all_reduce(tensor)

        comm.all_reduce = counted  # type: ignore[method-assign, assignment]
        for step in range(2):
            counted_bytes += sum(run.reducer.bytes_sent(bucket, 2) for bucket in run.plan.buckets)
            run.step(grads_of(comm, step))
        assert counted_bytes == sum(carried)  # with two ranks each sends as many bytes as the tensor has
        return counted_bytes, 2 * run.plan.num_bytes

    for counted_bytes, whole in run_ranks(2, run):
        assert counted_bytes == whole if start_step else counted_bytes < whole


def test_complex_gradients_are_sent_uncompressed() -> None:
    def run(comm: Communicator) -> Tensor:
        run = ReducerHarness(comm, PowerSGD(rank=1), dtype=torch.complex64, shapes={"w": (20, 20)})
        values = torch.randn(20, 20, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        got = run.step({"w": values * (1 + comm.rank)})["w"]
        assert torch.allclose(got, values * 1.5)
        return got

    assert torch.equal(*run_ranks(2, run))
