"""The contract of all reducers. A new reducer is tested by being registered."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan, plan_buckets
from gradsync.comm import Communicator
from gradsync.reducers import Driver, Reducer
from gradsync.testing import run_ranks

EXACT = ["plain", "compressed(codec=dense)"]
CODECS = [f"compressed(codec={name}, min_numel=1)" for name in spec.names("codec") if name != "chain"]
OTHERS = [
    "compressed(codec=int8, feedback='ef21')",
    "compressed(codec=chain(topk, int8))",
    "powersgd(alternating=True)",
]
REDUCERS = [name for name in spec.names("reducer") if not name.startswith("test_")] + EXACT[1:] + CODECS + OTHERS


def make_plan(comm: Communicator, seed: int) -> BucketPlan:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (5, 7), (1,), (0,), (2, 3, 4), ()]
    params = {f"p{at}": Parameter(torch.zeros(shape, dtype=torch.float64)) for at, shape in enumerate(shapes)}
    plan = BucketPlan(plan_buckets(list(params.items()), cap_bytes=200), [], params, comm)
    for param in params.values():
        param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
    return plan


def reduce_all(comm: Communicator, reducer: Reducer, seed: int) -> list[torch.Tensor]:
    plan = make_plan(comm, seed + comm.rank)
    reducer.attach(plan, comm)
    driver = Driver(reducer, comm, len(plan.buckets))
    # Buckets become ready in another order on every rank; the driver keeps to the plan's.
    order = torch.randperm(len(plan.buckets), generator=torch.Generator().manual_seed(comm.rank)).tolist()
    for at in order:
        plan.buckets[at].finalize(1.0 / comm.world_size)
        driver.add(plan.buckets[at])
    driver.drain()
    for bucket in plan.buckets:
        bucket.publish()
    return [slot.view.clone() for bucket in plan.buckets for slot in bucket.slots]


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_reduce_gives_the_mean_with_equal_bits_on_all_ranks(name: str, world: int) -> None:
    ranks = run_ranks(world, lambda comm: reduce_all(comm, spec.parse(name, "reducer"), seed=3))
    for grads in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, ranks[0], strict=True))
    if name in EXACT:
        given = run_ranks(world, lambda comm: [s.param.grad for s in make_plan(comm, 3 + comm.rank).slots()])
        for at, mean in enumerate(ranks[0]):
            assert torch.allclose(mean, torch.stack([grads[at] for grads in given]).mean(0), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", REDUCERS)
def test_reduce_yields_as_many_collectives_as_stages(name: str) -> None:
    def run(comm: Communicator) -> list[int]:
        reducer = spec.parse(name, "reducer")
        plan = make_plan(comm, comm.rank)
        reducer.attach(plan, comm)
        counts = []
        for bucket in plan.buckets:
            bucket.finalize(1.0)
            works = 0
            for work in reducer.reduce(bucket, comm):
                work.wait()
                works += 1
            counts.append(works - reducer.stages(comm.world_size))
        return counts

    assert all(count == 0 for world in (1, 2, 3) for counts in run_ranks(world, run) for count in counts)


@pytest.mark.parametrize("name", REDUCERS)
def test_bytes_sent_and_state_dict_by_parameter_name(name: str) -> None:
    def run(comm: Communicator) -> None:
        reducer, other = spec.parse(name, "reducer"), spec.parse(name, "reducer")
        plan = make_plan(comm, comm.rank)
        reducer.attach(plan, comm)
        assert all(reducer.bytes_sent(bucket, comm.world_size) > 0 for bucket in plan.buckets)
        reduce_all(comm, reducer, seed=1)
        reducer.end_step(finite=True)
        names = {slot.name for slot in plan.slots()}
        state = reducer.state_dict()
        assert set(state) <= {"steps", "own", "shared", "kept", "usual"}
        for kinds in (state.get("own", {}), state.get("shared", {})):
            assert all(set(by_name) <= names for by_name in kinds.values()), "keyed by parameter, never by bucket"
        other.attach(plan, comm)
        other.load_state_dict(state)
        assert _same(other.state_dict(), state)
        with pytest.raises((ValueError, KeyError)):
            other.load_state_dict({"no such parameter": torch.ones(1)})

    run_ranks(2, run)


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other
