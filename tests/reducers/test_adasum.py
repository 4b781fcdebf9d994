"""Adasum: against its formula in float64, and its properties for equal and for orthogonal gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.buckets.bucket import BucketPlan, plan_buckets
from gradsync.comm import Communicator
from gradsync.comm.base import Work
from gradsync.reducers import Driver
from gradsync.reducers.adasum import Adasum
from gradsync.testing import run_ranks

SHAPES: dict[str, tuple[int, ...]] = {"w": (13, 7), "b": (5,), "s": (), "none": (0,), "long": (3, 50)}
WORLDS = pytest.mark.parametrize("world", [2, 3, 4, 5])

Grads = dict[str, Tensor]


def adasum_of_two(a: Tensor, b: Tensor) -> Tensor:
    along, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    gain_a = 1 - along / (2 * of_a) if of_a > 0 else 1.0
    gain_b = 1 - along / (2 * of_b) if of_b > 0 else 1.0
    return gain_a * a + gain_b * b


def adasum_tree(values: list[Tensor]) -> Tensor:
    while len(values) > 1:
        pairs = [adasum_of_two(*values[at : at + 2]) for at in range(0, len(values) - 1, 2)]
        values = pairs + ([values[-1]] if len(values) % 2 else [])
    return values[0]


def reduce(
    comm: Communicator,
    grads: Grads,
    *,
    factor: float | None = None,
    dtype: torch.dtype = torch.float64,
    reducer: Adasum | None = None,
    in_place: bool = False,
) -> tuple[Grads, list[str]]:
    """Two steps with one reducer, over buckets that shards cut; returns the result of the second."""
    params = {name: Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
    plan = BucketPlan(plan_buckets(list(params.items()), cap_bytes=900), [], params, comm)
    reducer = Adasum() if reducer is None else reducer
    reducer.attach(plan, comm)
    for _ in range(2):
        for name, param in params.items():
            param.grad = grads[name].to(dtype, copy=True) if name in grads else None
        driver = Driver(reducer, comm, len(plan.buckets))
        for bucket in plan.buckets:
            bucket.begin_step()
            for slot in bucket.slots:
                slot.in_place = (0, slot.flat.numel()) if in_place else None
            assert not in_place or all(slot.read_in_place() for slot in bucket.slots)
            bucket.finalize(1.0 / comm.world_size if factor is None else factor)
            driver.add(bucket)
        driver.drain()
        for bucket in plan.buckets:
            bucket.publish()
        nonfinite = list(reducer.nonfinite)
        reducer.end_step(finite=not nonfinite)
    return {name: param.grad.clone() for name, param in params.items() if param.grad is not None}, nonfinite


def random_grads(seed: int) -> Grads:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def assert_same_bits(ranks: list[tuple[Grads, list[str]]]) -> None:
    for grads, nonfinite in ranks[1:]:
        assert nonfinite == ranks[0][1]
        assert grads.keys() == ranks[0][0].keys()
        assert all(torch.equal(grads[name], ranks[0][0][name]) for name in grads)


@WORLDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_adasum_is_the_tree_of_the_formula_for_each_parameter(world: int, dtype: torch.dtype, in_place: bool) -> None:
    ranks = run_ranks(world, lambda comm: reduce(comm, random_grads(comm.rank), dtype=dtype, in_place=in_place))
    assert_same_bits(ranks)
    tolerance = 8 * torch.finfo(dtype).eps
    for name, got in ranks[0][0].items():
        expected = adasum_tree([random_grads(rank)[name].to(dtype).double() for rank in range(world)])
        assert torch.allclose(got.double(), expected, rtol=tolerance, atol=4 * tolerance), name


@WORLDS
def test_adasum_of_equal_gradients_is_that_gradient(world: int) -> None:
    for grads, _ in run_ranks(world, lambda comm: reduce(comm, random_grads(7), in_place=True)):
        assert all(torch.equal(grads[name], expected) for name, expected in random_grads(7).items())


@WORLDS
def test_adasum_of_orthogonal_gradients_is_their_sum(world: int) -> None:
    def one_value(rank: int) -> Grads:
        grads = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for name in ("w", "b", "long"):
            grads[name].view(-1)[rank] = 1.0 + rank
        return grads

    for grads, _ in run_ranks(world, lambda comm: reduce(comm, one_value(comm.rank), in_place=True)):
        for name in ("w", "b", "long"):
            expected = sum(one_value(rank)[name] for rank in range(world))
            assert torch.equal(grads[name], torch.as_tensor(expected))
        assert grads["s"] == 0.0


@WORLDS
def test_adasum_ignores_a_rank_without_data(world: int) -> None:
    """The last rank has NaN and weight zero. The weights of the others are ignored."""
    nothing = {name: torch.full(shape, math.nan, dtype=torch.float64) for name, shape in SHAPES.items()}

    def run(comm: Communicator) -> tuple[Grads, list[str]]:
        if comm.rank == world - 1:
            return reduce(comm, nothing, factor=0.0)
        return reduce(comm, random_grads(comm.rank), factor=0.1 + 0.2 * comm.rank)

    ranks = run_ranks(world, run)
    assert_same_bits(ranks)
    for name, got in ranks[0][0].items():
        zeros = torch.zeros(SHAPES[name], dtype=torch.float64)
        expected = adasum_tree([*(random_grads(rank)[name] for rank in range(world - 1)), zeros])
        assert torch.allclose(got, expected, rtol=1e-13, atol=1e-13), name


def test_adasum_leaves_unused_parameters_without_a_gradient() -> None:
    given = [{"w": random_grads(0)["w"]}, {"w": random_grads(1)["w"], "b": random_grads(1)["b"]}, {}]
    ranks = run_ranks(3, lambda comm: reduce(comm, given[comm.rank]))
    assert_same_bits(ranks)
    assert set(ranks[0][0]) == {"w", "b"}
    assert torch.allclose(ranks[0][0]["b"], given[1]["b"], rtol=1e-14)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_adasum_propagates_and_names_nan_and_inf(value: float) -> None:
    def run(comm: Communicator) -> tuple[Grads, list[str]]:
        grads = random_grads(comm.rank)
        if comm.rank == 1:
            grads["w"][3, 3] = value
        return reduce(comm, grads)

    ranks = run_ranks(3, run)
    for grads, nonfinite in ranks:
        assert nonfinite == ["w"]
        assert not grads["w"].isfinite().all()
        assert grads["long"].isfinite().all()


@WORLDS
def test_bytes_sent_are_those_of_the_collectives(world: int) -> None:
    def run(comm: Communicator) -> None:
        params = {name: Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        bucket = BucketPlan([list(SHAPES)], [], params, comm).buckets[0]
        bucket.finalize(1.0)
        share, sent = (world - 1) / world, []
        all_reduce, all_gather, all_to_all = comm.all_reduce, comm.all_gather, comm.all_to_all

        def reduced(tensor: Tensor) -> Work:
            sent.append(2 * share * tensor.nbytes)
            return all_reduce(tensor)

        def gathered(tensor: Tensor, *, out: Tensor) -> Work:
            sent.append((world - 1) * tensor.nbytes)
            return all_gather(tensor, out=out)

        def exchanged(tensor: Tensor, *, out: Tensor) -> Work:
            sent.append(share * tensor.nbytes)
            return all_to_all(tensor, out=out)

        comm.all_reduce, comm.all_gather, comm.all_to_all = reduced, gathered, exchanged  # type: ignore
        reducer = Adasum()
        for work in reducer.reduce(bucket, comm):
            work.wait()
        assert len(sent) == reducer.stages(world)
        assert abs(sum(sent) - reducer.bytes_sent(bucket, world)) < len(sent)

    run_ranks(world, run)
