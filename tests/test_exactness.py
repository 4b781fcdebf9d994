"""N workers equal one process on the joined batch: every named case and random ones, on threads and real transports."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync
from gradsync.comm import run_ranks
from tests.exactness.cases import CASES
from tests.exactness.context import Context, Outcome, run_case
from tests.exactness.randomised import random_case
from tests.mpi import run_mpi
from tests.ranks import run_processes
from tests.simulated import connect_on_hosts

WORLDS = (2, 3, 4)
OPTIMIZER_NAMES = ("sgd", "adamw")
DTYPES = (torch.float64, torch.float32)
# Where the cases run, and with which optimizers and dtypes: all four pairs, a half that has each of them once, or one.
# `pytest --exhaustive` runs all four everywhere: that takes twice as long.
ALL = tuple((optimizer, dtype) for optimizer in OPTIMIZER_NAMES for dtype in DTYPES)
HALF, OTHER_HALF = (ALL[0], ALL[3]), (ALL[1], ALL[2])
PLACES = {
    ("c10d", 2): ALL,
    ("c10d", 3): HALF,
    ("c10d", 4): OTHER_HALF,
    ("shm", 3): HALF,
    ("mpi", 3): ALL[3:],
    ("hierarchical", 4): ALL[:1],  # two hosts of two ranks each
}
RANDOM_SEEDS = range(1000, 1003)  # the random models that the real transports run; threads run more of them
TOLERANCE = 1e-9
GRANTED = 2.0  # in float32: at most twice as far from the float64 run as one float32 process is

Key = tuple[str | int, str, torch.dtype]
Pairs = tuple[tuple[str, torch.dtype], ...]


def run_named(comm: Any, case: str | int, optimizer: str, dtype: torch.dtype, num_ranks: int) -> Outcome:
    fn = CASES[case] if isinstance(case, str) else random_case(case)
    return run_case(fn, Context(comm, optimizer, dtype, num_ranks))


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


def check_on_threads(case: str | int, optimizer: str, world: int) -> None:
    outcomes = run_ranks(world, lambda comm: run_named(comm, case, optimizer, torch.float64, world))
    check_doubles(case, optimizer, world, outcomes)


@pytest.mark.parametrize("case", CASES)
def test_threads(case: str) -> None:
    check_on_threads(case, "sgd", 3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 20), optimizer=st.sampled_from(OPTIMIZER_NAMES), world=st.sampled_from(WORLDS))
def test_random_models_on_threads(seed: int, optimizer: str, world: int) -> None:
    check_on_threads(seed, optimizer, world)


def run_everything(transport: str, pairs: Pairs) -> dict[Key, Outcome]:
    """All cases in one set of processes: starting them is what takes time."""
    if transport == "hierarchical":
        comm: gradsync.Communicator = connect_on_hosts("aabb", timeout_s=60)
    else:
        comm = gradsync.connect(transport, timeout_s=60)
    return {
        (case, optimizer, dtype): run_named(comm, case, optimizer, dtype, comm.world_size)
        for case in (*CASES, *RANDOM_SEEDS)
        for optimizer, dtype in pairs
    }


@functools.cache
def everything_on(transport: str, world: int, pairs: Pairs) -> list[dict[Key, Outcome]]:
    start = run_mpi if transport == "mpi" else run_processes
    return start(world, run_everything, transport, pairs, timeout_s=400)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_processes:
        exhaustive = metafunc.config.getoption("exhaustive")
        places = [(*place, ALL if exhaustive else pairs) for place, pairs in PLACES.items()]
        metafunc.parametrize(("transport", "world", "pairs"), places, ids=[f"{t}-{n}" for t, n in PLACES])


@pytest.mark.timeout(500)  # the first of a place runs all cases of it
@pytest.mark.parametrize("case", [*CASES, *RANDOM_SEEDS])
def test_processes(transport: str, world: int, pairs: Pairs, case: str | int) -> None:
    outcomes = everything_on(transport, world, pairs)
    for optimizer, dtype in pairs:
        check = check_doubles if dtype == torch.float64 else check_floats
        check(case, optimizer, world, [rank[case, optimizer, dtype] for rank in outcomes])
