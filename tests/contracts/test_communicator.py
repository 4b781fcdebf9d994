"""The communicator's contract on every transport. A new transport is tested by being listed in ``WORLDS``."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm.base import Communicator, Solo
from gradsync.comm.connect import connect
from gradsync.errors import PeerLost
from gradsync.testing.faults import Faulty
from gradsync.testing.threads import run_ranks
from tests.contracts.communicator import CONTRACT, Check
from tests.support.mpi import run_mpi
from tests.support.ranks import run_processes

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class World:
    """A transport and a number of ranks."""

    name: str
    size: int
    run: Callable[[int, Check, float], list[Any]]  # (size, check, timeout_s) to every rank's result


def _solo(size: int, check: Check, timeout_s: float) -> list[Any]:
    return [check(Solo(timeout_s=timeout_s))]


def _threads(size: int, check: Check, timeout_s: float) -> list[Any]:
    return run_ranks(size, check, timeout_s=timeout_s)


def _faulty(size: int, check: Check, timeout_s: float) -> list[Any]:
    return run_ranks(size, lambda comm: check(Faulty(comm, seed=11, delay_s=0.003)), timeout_s=timeout_s)


def _c10d(size: int, check: Check, timeout_s: float) -> list[Any]:
    return run_processes(size, _connected, "c10d", check, timeout_s, timeout_s=180.0)


def _tcp(size: int, check: Check, timeout_s: float) -> list[Any]:
    return run_processes(size, _connected, "tcp", check, timeout_s, timeout_s=180.0)


def _shm(size: int, check: Check, timeout_s: float) -> list[Any]:
    return run_processes(size, _connected, "shm", check, timeout_s, timeout_s=180.0)


def _mpi(size: int, check: Check, timeout_s: float) -> list[Any]:
    return run_mpi(size, _connected, "mpi", check, timeout_s)


def _connected(transport: str, check: Check, timeout_s: float) -> Any:
    return check(connect(transport, timeout_s=timeout_s))


WORLDS = [
    World("solo", 1, _solo),
    *(World("threads", size, _threads) for size in (2, 3, 5)),
    *(World("tcp", size, _tcp) for size in (2, 3, 4)),
    *(World("c10d", size, _c10d) for size in (2, 3)),
    *(World("shm", size, _shm) for size in (2, 3, 5)),
    *(World("mpi", size, _mpi) for size in (2, 3)),
    World("faulty", 3, _faulty),
]


def run_all(comm: Communicator) -> dict[str, tuple[Any, str]]:
    """The whole contract in one group, so that processes start once: what each check returned, or its traceback."""
    results: dict[str, tuple[Any, str]] = {}
    for check in CONTRACT:
        try:
            results[check.__name__] = (check(comm), "")
        except BaseException:
            results[check.__name__] = (None, traceback.format_exc())
            break  # the ranks may be out of step now
    return results


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world.name}-{world.size}")
def results(request: pytest.FixtureRequest) -> list[dict[str, tuple[Any, str]]]:
    """The results of ``run_all`` on every rank of a world."""
    world: World = request.param
    return world.run(world.size, run_all, TIMEOUT_S)


@pytest.mark.parametrize("name", [check.__name__ for check in CONTRACT])
def test_contract(results: list[dict[str, tuple[Any, str]]], name: str) -> None:
    errors = [f"rank {rank}:\n{own[name][1]}" for rank, own in enumerate(results) if own.get(name, ("", ""))[1]]
    assert not errors, "\n".join(errors)
    assert all(name in own for own in results), "not reached: an earlier check failed"
    for result in [own[name][0] for own in results]:
        _assert_same_bits(result, results[0][name][0])


def _assert_same_bits(one: Any, other: Any) -> None:
    if isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            _assert_same_bits(a, b)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, str):
        assert one == other
    else:
        assert one is other is None


OF_THREE = pytest.mark.parametrize(
    "world", [world for world in WORLDS if world.size == 3], ids=lambda world: f"{world.name}-{world.size}"
)


def late_peer(comm: Communicator) -> tuple[int, ...]:
    """Rank 1 does not take part in the second all-reduce; returns the ranks that the others' PeerLost names."""
    comm.all_reduce(torch.ones(2)).wait()
    if comm.rank == 1:
        time.sleep(2 * comm.timeout_s + 1.0)
        return ()
    start_s = time.monotonic()
    with pytest.raises(PeerLost) as lost:
        comm.all_reduce(torch.ones(2)).wait()
    assert comm.timeout_s - 0.1 <= time.monotonic() - start_s <= comm.timeout_s + 2.0
    return lost.value.ranks


@OF_THREE
def test_all_reduce_names_a_late_peer_in_time(world: World) -> None:
    assert world.run(world.size, late_peer, 1.0) == [(1,), (), (1,)]


def leave_early(comm: Communicator) -> float:
    """Rank 1 exits while the others use a group without it."""
    pair = comm.split([0, 2])
    if pair is None:
        return 0.0
    if comm.rank == 2:
        time.sleep(0.3)
    t = torch.tensor([1.0 + comm.rank])
    pair.all_reduce(t).wait()
    return t.item()


@OF_THREE
def test_split_goes_on_after_a_rank_outside_it_has_left(world: World) -> None:
    assert world.run(world.size, leave_early, TIMEOUT_S) == [4.0, 0.0, 4.0]
