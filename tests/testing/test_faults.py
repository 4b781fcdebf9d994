"""Faulty: faults are reproducible from the seed, and look like real ones to all ranks."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from gradsync.comm.base import Communicator, Solo
from gradsync.comm.connect import connect
from gradsync.errors import PeerLost
from gradsync.testing.faults import Faulty
from gradsync.testing.threads import run_ranks
from tests.support.ranks import run_processes

TIMEOUT_S = 0.5


class Dead(Exception):
    """How a rank that is a thread dies."""


def die() -> None:
    raise Dead


def run_sums(comm: Communicator, num_collectives: int) -> list[float]:
    """Run all-reduces; returns their sums."""
    seen = []
    for _ in range(num_collectives):
        t = torch.tensor([float(comm.rank + 1)])
        comm.all_reduce(t).wait()
        seen.append(t.item())
    return seen


def collectives_until_death(seed: int, rank: int, **faults: float) -> int:
    """How many collectives a rank takes part in before it dies."""
    solo = Solo()
    solo.rank = rank
    comm = Faulty(solo, seed=seed, on_kill=die, **faults)  # type: ignore[arg-type]
    count = 0
    try:
        while count < 1000:
            comm.barrier()
            count += 1
    except Dead:
        pass
    return count


def test_faulty_is_reproducible_from_its_seed() -> None:
    ends = [[collectives_until_death(seed, rank, kill_probability=0.05) for rank in range(4)] for seed in (0, 1, 0)]
    assert ends[0] == ends[2]
    assert ends[0] != ends[1]
    assert len(set(ends[0])) > 1, "each rank has its own faults"
    assert collectives_until_death(3, 0, kill_at=7) == 6


def test_faulty_delays_do_not_change_results() -> None:
    delays: list[float] = []

    def rank(comm: Communicator) -> list[float]:
        return run_sums(Faulty(comm, seed=1, delay_s=0.02, delay_probability=0.5), 20)

    sleep = time.sleep

    def noted_sleep(delay_s: float) -> None:
        delays.append(delay_s)
        sleep(delay_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradsync.testing.faults.time.sleep", noted_sleep)
        assert run_ranks(3, rank) == [[6.0] * 20] * 3
    assert 15 <= len(delays) <= 45, "about half of 60"
    assert all(0.0 <= delay <= 0.02 for delay in delays)


def test_faulty_dropped_rank_raises_peer_lost_on_all_ranks() -> None:
    def rank(comm: Communicator) -> PeerLost:
        comm = Faulty(comm, seed=0, drop_probability=1.0 if comm.rank == 1 else 0.0)
        start_s = time.monotonic()
        work = comm.all_reduce(torch.ones(2))
        assert not work.done()
        with pytest.raises(PeerLost) as lost:
            work.wait()
        assert TIMEOUT_S - 0.05 <= time.monotonic() - start_s < TIMEOUT_S + 2.0
        assert work.done()
        return lost.value

    errors = run_ranks(3, rank, timeout_s=TIMEOUT_S)
    assert [error.ranks for error in errors] == [(1,), (0, 2), (1,)]
    assert "this rank's part was dropped" in str(errors[1])
    assert "in all_reduce" in str(errors[1])


def test_faulty_dropped_rank_stays_dropped_in_all_groups() -> None:
    """Or its next sum would be taken for the one that the others still wait for."""

    def rank(comm: Communicator) -> tuple[int, ...]:
        comm = Faulty(comm, seed=0, drop_probability=1.0 if comm.rank == 1 else 0.0)
        other = comm.clone()
        works = [comm.all_reduce(torch.ones(1)), comm.all_reduce(torch.ones(1)), other.all_reduce(torch.ones(1))]
        lost = []
        for work in works:
            with pytest.raises(PeerLost) as error:
                work.wait()
            lost.append(error.value.rank)
        with pytest.raises(PeerLost):
            other.barrier()
        return tuple(lost)

    assert run_ranks(2, rank, timeout_s=TIMEOUT_S) == [(1, 1, 1), (0, 0, 0)]


def test_faulty_killed_thread_is_lost_to_the_others() -> None:
    ends: dict[int, BaseException] = {}

    def rank(comm: Communicator) -> None:
        try:
            run_sums(Faulty(comm, seed=0, kill_at=3 if comm.rank == 2 else None, on_kill=die), 5)
        except (Dead, PeerLost) as error:
            ends[comm.rank] = error
            raise

    with pytest.raises(Dead):
        run_ranks(3, rank, timeout_s=20.0)
    assert isinstance(ends[2], Dead)
    assert all(isinstance(ends[r], PeerLost) and ends[r].rank == 2 for r in (0, 1))  # type: ignore[attr-defined]


def test_faulty_on_kill_that_returns_drops_the_rank() -> None:
    def rank(comm: Communicator) -> None:
        comm = Faulty(comm, seed=0, kill_at=1 if comm.rank == 0 else None, on_kill=lambda: None)
        with pytest.raises(PeerLost):
            comm.barrier()

    run_ranks(2, rank, timeout_s=TIMEOUT_S)


def _kill_at_third_collective() -> list[float]:
    comm = connect(timeout_s=20.0)
    return run_sums(Faulty(comm, seed=0, kill_at=3 if comm.rank == 1 else None), 5)


def test_faulty_killed_process_is_named_by_the_others() -> None:
    start_s = time.monotonic()
    survivor, killed, other = run_processes(3, _kill_at_third_collective, expect_failure=True)
    assert killed == -signal.SIGKILL
    for error in (survivor, other):
        assert isinstance(error, PeerLost), error
        assert error.ranks == (1,)
    assert time.monotonic() - start_s < 20.0, "found out by its end, not by the timeout"


def test_faulty_splits_stay_wrapped_and_share_the_worker() -> None:
    def rank(comm: Communicator) -> None:
        faulty = Faulty(comm, seed=0)
        assert faulty.worker is comm.worker
        pair = faulty.split([0, 2])
        assert (pair is None) == (comm.rank == 1)
        if pair is not None:
            assert isinstance(pair, Faulty)
            assert pair.worker is comm.worker
            assert run_sums(pair, 2) == [3.0, 3.0]
        assert isinstance(faulty.clone(), Faulty)
        assert faulty.allocate(3, torch.float16, torch.device("cpu")).dtype == torch.float16
        faulty.note("step 1", step=1)
        comm.barrier()
        faulty.close()

    run_ranks(3, rank)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"delay_s": -1.0}, "delay_s must be 0 or more; got delay_s=-1.0"),
        ({"drop_probability": 1.5}, "drop_probability must be from 0 to 1; got drop_probability=1.5"),
        ({"kill_at": 0}, "kill_at counts collectives from 1; got kill_at=0"),
    ],
)
def test_faulty_refuses_invalid_options(faults: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Faulty(Solo(), seed=0, **faults)  # type: ignore[arg-type]
