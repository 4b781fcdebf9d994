"""N workers equal one process on the joined batch: every named case and random ones, on threads and real transports."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync
from gradsync.buckets import slot
from gradsync.testing import run_ranks
from tests.exactness.cases import CASES
from tests.exactness.context import Context, Outcome, run_case
from tests.exactness.randomised import random_case
from tests.support.mpi import run_mpi
from tests.support.ranks import run_processes
from tests.support.simulated import connect_on_hosts

WORLDS = (2, 3, 4)
OPTIMIZER_NAMES = ("sgd", "adamw")
DTYPES = (torch.float64, torch.float32)
ALL = tuple((optimizer, dtype) for optimizer in OPTIMIZER_NAMES for dtype in DTYPES)


class Place(NamedTuple):
    """Real processes: a strategy, a transport, and a number of ranks."""

    strategy: str
    transport: str
    world: int


# On TCP every case runs with float64, so that every strategy is within the tolerance on 2, 3 and 4 ranks, and every
# fifth also with float32. Other places run all cases, every second or every eighth, each with one of the four pairs of
# optimizer and dtype. Optimizers, pairs and cases rotate. With `pytest --exhaustive` every place runs every case with
# all four pairs: that takes ten minutes more.
PLACES = {
    **{Place("allreduce", "tcp", world): 1 for world in WORLDS},
    **{Place("sharded", "tcp", world): 1 for world in WORLDS},
    Place("allreduce", "c10d", 2): 8,
    Place("allreduce", "shm", 3): 1,
    Place("sharded", "shm", 3): 4,
    Place("allreduce", "mpi", 3): 8,
    Place("allreduce", "hierarchical", 4): 2,  # two hosts of two ranks each
}
RANDOM_SEEDS = range(1000, 1003)  # the random models that the real transports run; threads run more of them
EVERY_CASE: list[str | int] = [*CASES, *RANDOM_SEEDS]
TOLERANCE = 1e-9
GRANTED = 2.0  # in float32: at most twice as far from the float64 run as one float32 process is

USED_BY_COMPILE = ("torch._inductor.compile_fx",)  # torch.compile imports it, and hundreds of modules with it

Key = tuple[str | int, str, torch.dtype]


def run_named(
    comm: Any, case: str | int, optimizer: str, dtype: torch.dtype, num_ranks: int, strategy: str = "allreduce"
) -> Outcome:
    fn = CASES[case] if isinstance(case, str) else random_case(case)
    return run_case(fn, Context(comm, optimizer, dtype, num_ranks, strategy))


@functools.cache
def reference(case: str | int, optimizer: str, dtype: torch.dtype, num_ranks: int) -> Outcome:
    return run_named(None, case, optimizer, dtype, num_ranks)


def distance(params: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over norm, of all parameters together."""
    off = torch.cat([(params[name].to(exact[name].dtype) - exact[name]).reshape(-1).abs() for name in exact])
    return float(off.norm() / torch.cat([value.reshape(-1).abs() for value in exact.values()]).norm())


def check_bits(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.digests == outcomes[0].digests, f"rank {rank}'s bits differ from rank 0's after some step"
        for name, param in outcome.params.items():
            assert torch.equal(param, outcomes[0].params[name]), f"rank {rank} ended with another {name}"


def check_doubles(case: str | int, optimizer: str, world: int, outcomes: list[Outcome]) -> None:
    check_bits(outcomes)
    exact = reference(case, optimizer, torch.float64, world)
    for name, param in outcomes[0].params.items():
        off = float((param - exact.params[name]).norm() / exact.params[name].norm().clamp_min(1e-30))
        assert off <= TOLERANCE, f"{name} is {off:.1e} away from one process on the joined batch"


def check_floats(case: str | int, optimizer: str, world: int, outcomes: list[Outcome]) -> None:
    check_bits(outcomes)
    exact, single = (reference(case, optimizer, dtype, world) for dtype in DTYPES)
    off, granted = distance(outcomes[0].params, exact.params), GRANTED * distance(single.params, exact.params)
    assert off <= granted, f"in float32 {off:.2e} away from the float64 run; {granted:.2e} is granted"


def check_on_threads(case: str | int, optimizer: str, world: int, strategy: str = "allreduce") -> None:
    outcomes = run_ranks(world, lambda comm: run_named(comm, case, optimizer, torch.float64, world, strategy))
    check_doubles(case, optimizer, world, outcomes)


@pytest.mark.parametrize("case", CASES)
def test_compressed_reducer_is_exact_with_the_dense_codec(case: str, exhaustive: bool) -> None:
    """Two ranks exchange in one stage, three ranks in two. The cases alternate between them."""
    worlds = (2, 3) if exhaustive else (2 + EVERY_CASE.index(case) % 2,)
    for world in worlds:
        check_on_threads(case, "sgd", world, "allreduce(codec=dense)")


# They need what a sharded optimizer refuses: a second optimizer for some of the parameters.
NOT_SHARDED = {"sparse_embeddings"}


@pytest.mark.parametrize("seed", range(0, 16 * 37, 37))
def test_sharded_optimizer_is_exact_for_random_models(seed: int) -> None:
    check_on_threads(seed, OPTIMIZER_NAMES[seed % 2], WORLDS[seed % 3], "sharded")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 20), optimizer=st.sampled_from(OPTIMIZER_NAMES), world=st.sampled_from(WORLDS))
def test_random_models_on_threads(seed: int, optimizer: str, world: int) -> None:
    check_on_threads(seed, optimizer, world)


def share_of(place: Place, *, exhaustive: bool) -> dict[str | int, list[tuple[str, torch.dtype]]]:
    """The cases that run at a place, and the pairs that each of them runs with."""
    possible = [case for case in EVERY_CASE if place.strategy != "sharded" or case not in NOT_SHARDED]
    if exhaustive:
        return {case: list(ALL) for case in possible}
    shift, stride = list(PLACES).index(place), PLACES[place]
    share: dict[str | int, list[tuple[str, torch.dtype]]] = {}
    for turn, case in enumerate(possible[shift % stride :: stride]):
        share[case] = [ALL[(turn + shift) % len(ALL)]]
        if place.transport == "tcp":
            optimizer = OPTIMIZER_NAMES[(turn + shift) % 2]
            dtypes = DTYPES if turn % 5 == shift % 5 else DTYPES[:1]
            share[case] = [(optimizer, dtype) for dtype in dtypes]
    return share


def run_share(
    strategy: str, transport: str, share: dict[str | int, list[tuple[str, torch.dtype]]]
) -> dict[Key, Outcome]:
    """Run all cases of a place in one set of processes: starting the processes takes most of the time."""
    if transport == "shm":
        slot.STREAMED_BYTES = 0  # so that the small gradients of these models are read in place and streamed too
    if transport == "hierarchical":
        comm: gradsync.Communicator = connect_on_hosts("aabb", timeout_s=60)
    else:
        comm = gradsync.connect(transport, timeout_s=60)
    return {
        (case, optimizer, dtype): run_named(comm, case, optimizer, dtype, comm.world_size, strategy)
        for case, pairs in share.items()
        for optimizer, dtype in pairs
    }


@functools.cache
def everything_on(place: Place, exhaustive: bool) -> list[dict[Key, Outcome]]:
    share = share_of(place, exhaustive=exhaustive)
    start = run_mpi if place.transport == "mpi" else run_processes
    return start(place.world, run_share, place.strategy, place.transport, share, timeout_s=600, preload=USED_BY_COMPILE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_processes:
        exhaustive = metafunc.config.getoption("exhaustive")
        runs = [(place, case) for place in PLACES for case in share_of(place, exhaustive=exhaustive)]
        ids = ["-".join(map(str, (*place, case))) for place, case in runs]
        metafunc.parametrize(("place", "case"), runs, ids=ids)


@pytest.mark.timeout(700)  # the first test of a place runs all its cases
def test_processes(place: Place, case: str | int, exhaustive: bool) -> None:
    outcomes = everything_on(place, exhaustive)
    for optimizer, dtype in share_of(place, exhaustive=exhaustive)[case]:
        check = check_doubles if dtype == torch.float64 else check_floats
        check(case, optimizer, place.world, [rank[case, optimizer, dtype] for rank in outcomes])
