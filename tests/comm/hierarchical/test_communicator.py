"""The hierarchical transport on simulated hosts: shared memory within a host, torch.distributed between hosts."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch

import gradsync
from gradsync.comm.base import Work
from gradsync.comm.checked import Checked
from gradsync.comm.hierarchical import communicator as hierarchical
from gradsync.comm.topology import describe_hosts, ranks_by_host
from tests.comm.shm.test_communicator import RandomCollectives, values
from tests.contracts.communicator import CONTRACT
from tests.contracts.test_communicator import _assert_same_bits, run_all
from tests.support.ranks import run_processes
from tests.support.simulated import connect_on_hosts

CPU = torch.device("cpu")
# Consecutive ranks; a host with one more rank; a host with a single rank; interleaved ranks with one leader.
LAYOUTS = (("aabb", 8), ("aabbb", 8), ("aabbc", 8), ("abab", 1))
TIMEOUT_S = 1.5


def use_small_chunks() -> None:
    """Split tensors that are quick to check into many chunks, and each chunk over several leaders."""
    hierarchical.CHUNK_BYTES, hierarchical.LEADER_BYTES, hierarchical.MIN_HIERARCHICAL_BYTES = 160_000, 32_000, 10_000


def contract_and_random_collectives(
    hosts: str, leaders: int, count: int
) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    comm = connect_on_hosts(hosts, timeout_s=30, leaders=leaders)
    outcome = run_all(Checked(comm))
    use_small_chunks()
    return outcome, RandomCollectives(comm.clone(), seed=len(hosts)).run(count)


@pytest.mark.parametrize(("hosts", "leaders"), LAYOUTS)
def test_hierarchical_keeps_the_contract_and_random_collectives_match(
    hosts: str, leaders: int, exhaustive: bool
) -> None:
    outcomes = run_processes(
        len(hosts), contract_and_random_collectives, hosts, leaders, 1000 if exhaustive else 80, timeout_s=100
    )
    for rank, (outcome, wrong) in enumerate(outcomes):
        assert "".join(error for _, error in outcome.values()) == "", f"{rank=}"
        assert list(outcome) == [check.__name__ for check in CONTRACT]
        for name, (result, _) in outcome.items():
            _assert_same_bits(result, outcomes[0][0][name][0])
        assert wrong == []


def reduce_many_at_once(hosts: str, seed: int) -> list[int]:
    """Run all-reduces of one size at once, in shared and private memory, with different delays on every rank."""
    use_small_chunks()
    comm = connect_on_hosts(hosts, timeout_s=30)
    own = random.Random(seed * 100 + comm.rank)
    shared = [comm.allocate(20_000, torch.float32, CPU) for _ in range(6)]
    wrong = []
    for attempt in range(4):
        tensors: list[torch.Tensor] = []
        works: list[Work] = []
        for number in range(12):
            tensors.append(shared[number // 2] if number % 2 else torch.empty(20_000))
            tensors[-1].fill_(float((number + 1) << (3 * comm.rank)))
            works.append(comm.all_reduce(tensors[-1]))
            if own.random() < 0.3:
                time.sleep(own.random() * 0.01)
            if own.random() < 0.3:
                own.choice(works).done()
        for number in own.sample(range(12), 12):
            works[number].wait()
        expected = [sum((number + 1) << (3 * rank) for rank in range(comm.world_size)) for number in range(12)]
        wrong += [attempt for t, total in zip(tensors, expected, strict=True) if not (t == total).all()]
    return wrong


@pytest.mark.parametrize("hosts", ["aabb", "aabbb"])
def test_hierarchical_concurrent_reduces_do_not_mix_sums(hosts: str) -> None:
    assert run_processes(len(hosts), reduce_many_at_once, hosts, 7) == [[]] * len(hosts)


def wait_in_different_orders() -> list[float]:
    comm = connect_on_hosts("aabb", timeout_s=20)
    groups = [comm, comm.clone(), comm.clone()]
    buffers = [group.allocate(100_000, torch.float32, CPU) for group in groups]
    shift = comm.rank % 3
    for _ in range(5):
        for buffer in buffers:
            buffer.fill_(1.0)
        works = [group.all_reduce(buffer) for group, buffer in zip(groups, buffers, strict=True)]
        # A send and a plain torch.distributed collective too: waiting for them must advance the others.
        works.append(comm.all_to_all(torch.ones(4, 1), out=torch.empty(4, 1)))
        peer = comm.rank ^ 1
        works += [comm.send(torch.ones(1), peer), comm.recv(torch.empty(1), peer)]
        for work in works[shift:] + works[:shift]:
            work.wait()
    return [float(buffer.sum()) for buffer in buffers]


def test_hierarchical_groups_may_be_waited_for_in_any_order() -> None:
    assert run_processes(4, wait_in_different_orders) == [[400_000.0] * 3] * 4


def reduce_twice(hosts: str) -> list[bytes]:
    """The bits of the same sums, computed twice, in shared and in private memory."""
    comm = connect_on_hosts(hosts, timeout_s=20)
    seen = []
    for size in (5_000, 2_500_000) * 2:
        buffer = comm.allocate(size, torch.float32, CPU)
        private = values((size,), torch.float32, 5 + comm.rank)
        buffer.copy_(private)
        for tensor in (buffer, private):
            comm.all_reduce(tensor).wait()
            seen.append(tensor.numpy().tobytes())
    return seen


def test_hierarchical_sums_are_bitwise_equal_in_any_memory() -> None:
    for small, small_too, large, large_too, *again in run_processes(5, reduce_twice, "aabbb"):
        assert small == small_too
        assert large == large_too
        assert again == [small, small, large, large]


def reduce_unusual_dtypes() -> tuple[list[Any], list[str]]:
    comm = connect_on_hosts("aab", timeout_s=20)
    yes = torch.tensor([comm.rank == 1, True, False])
    comm.all_reduce(yes).wait()
    waves = torch.full((2,), complex(comm.rank, 1))
    comm.all_reduce(waves).wait()
    leaf = torch.ones(2, requires_grad=True)
    comm.all_reduce(leaf).wait()
    short = torch.full((3,), comm.rank, dtype=torch.int16)  # Gloo can't sum them, and would not move them
    comm.broadcast(short, 2).wait()
    with torch.inference_mode():
        own = torch.zeros(1)
    comm.reduce_scatter(torch.ones(3, 1), out=own).wait()
    refused = []
    for tensor, op in ((torch.ones(2, dtype=torch.int16), "sum"), (waves, "max")):
        try:
            comm.all_reduce(tensor, op=op)  # type: ignore[arg-type]
        except ValueError as error:
            refused.append(str(error))
    comm.barrier()
    return [yes.view(torch.uint8).tolist(), waves.tolist(), leaf.tolist(), short.tolist(), own.tolist()], refused


def test_hierarchical_moves_or_refuses_unusual_dtypes() -> None:
    for results, refused in run_processes(3, reduce_unusual_dtypes):
        assert results == [[1, 1, 0], [3 + 3j] * 2, [3.0, 3.0], [2, 2, 2], [3.0]]
        assert "between hosts Gloo sums float32" in refused[0]
        assert "torch.int16" in refused[0]
        assert "op must be sum" in refused[1]


def die_at_a_random_moment(hosts: str, seed: int) -> str:
    use_small_chunks()
    comm = connect_on_hosts(hosts, timeout_s=TIMEOUT_S)
    rng = random.Random(seed)
    victim, after_s = rng.randrange(comm.world_size), 0.1 + rng.random() * 0.4
    collectives = RandomCollectives(comm, seed)
    comm.barrier()
    start_s = time.monotonic()
    if comm.rank == victim:
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        while time.monotonic() - start_s < 20:
            collectives.run(1)
    except gradsync.PeerLost as lost:
        waited_s = time.monotonic() - start_s - after_s
        good = lost.ranks == (victim,) and waited_s < TIMEOUT_S + 2
        return "raised" if good else f"{waited_s:.1f} s after rank {victim} died: {lost}"
    return "never noticed"


@pytest.mark.alone
def test_hierarchical_notices_kill_on_all_hosts(exhaustive: bool) -> None:
    for seed in range(40 if exhaustive else 3):
        outcomes = run_processes(5, die_at_a_random_moment, "aabbb", seed, expect_failure=True, timeout_s=40)
        assert sorted(str(outcome) for outcome in outcomes) == ["-9", *["raised"] * 4], f"{seed=}"


def be_late(late: int, kind: str) -> tuple[tuple[int, ...], float, str]:
    comm = connect_on_hosts("aabbb", timeout_s=TIMEOUT_S)
    bucket = comm.allocate(300_000, torch.float32, CPU)
    comm.barrier()
    start_s = time.monotonic()
    try:
        if comm.rank == late:
            time.sleep(TIMEOUT_S + 2.5)
        if kind == "bucket":
            comm.all_reduce(bucket).wait()
        else:
            comm.all_to_all(torch.ones(5, 1), out=torch.empty(5, 1)).wait()
        comm.barrier()
    except gradsync.PeerLost as lost:
        return lost.ranks, time.monotonic() - start_s, str(lost)
    return (), 0.0, "no rank was late"


@pytest.mark.alone
@pytest.mark.parametrize(("late", "kind"), [(4, "bucket"), (1, "all_to_all")])
def test_hierarchical_names_late_rank_on_all_hosts(late: int, kind: str) -> None:
    outcomes = run_processes(5, be_late, late, kind, timeout_s=40)
    for rank, (ranks, waited_s, text) in enumerate(outcomes):
        assert ranks == (late,), text
        if rank == late:
            assert "gave this rank up" in text
        else:
            assert waited_s <= TIMEOUT_S + 2.0, text


def leave_early() -> float:
    """Rank 1 leaves while the others use a group without it; that is no loss."""
    comm = connect_on_hosts("aabb", timeout_s=20)
    three = comm.split([0, 2, 3])
    if three is None:
        return 0.0
    if comm.rank == 3:
        time.sleep(0.3)
    t = torch.ones(100_000)
    three.all_reduce(t).wait()
    return t.mean().item()


def test_hierarchical_split_ignores_rank_that_left_outside_it() -> None:
    assert run_processes(4, leave_early) == [3.0, 0.0, 3.0, 3.0]


def describe_and_close() -> tuple[str, str, str, str]:
    comm = connect_on_hosts("aabbb", timeout_s=20)
    pair, across = comm.split([3, 4]), comm.split([1, 2])
    comm.close()
    comm.close()
    try:
        comm.all_reduce(torch.ones(1))
    except ValueError as error:
        return comm.why, "" if pair is None else pair.why, "" if across is None else across.why, str(error)
    return ("",) * 4


def test_hierarchical_why_describes_hosts_and_close_is_final() -> None:
    outcomes = run_processes(5, describe_and_close)
    for why, _, _, refused in outcomes:
        assert why == "simulated hosts; 2 hosts with 2 and 3 ranks: shared memory within, c10d across"
        assert "is closed" in refused
        assert "this communicator is closed: all_reduce is no longer possible" in refused
    assert "1 host x 2 ranks" in outcomes[4][1]
    assert "2 hosts x 1 rank" in outcomes[1][2]


def test_ranks_by_host_orders_hosts_by_first_rank() -> None:
    assert ranks_by_host("baab") == [[0, 3], [1, 2]]
    assert describe_hosts([[0, 1], [2, 3]]) == "2 hosts x 2 ranks"
    assert describe_hosts([[0], [1, 2], [3]]) == "3 hosts with 1, 2 and 1 ranks"
