"""The all-reduce algorithms: against the plain sum, the same bits on all ranks, many at once, and with lost peers."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import threading
import time

import pytest
import torch
from torch import Tensor

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.allreduce import primitives
from gradsync.comm.allreduce.algorithms import ALGORITHMS
from gradsync.comm.allreduce.selector import SelectedAllReduce
from gradsync.comm.allreduce.table import Machine, Table
from gradsync.comm.base import REDUCE_OPS, ReduceOp, Work
from gradsync.comm.checked import Checked
from gradsync.comm.connect import connect
from gradsync.testing import run_ranks
from tests.contracts.communicator import DTYPES, assert_reduced, inputs
from tests.contracts.test_communicator import late_peer, run_all
from tests.support.ranks import run_processes

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def with_algorithms(comm: Communicator) -> SelectedAllReduce:
    """The communicator with all algorithms available by name."""
    selected = SelectedAllReduce(comm, [], ["here"] * comm.world_size)
    selected.open_p2p_group()
    return selected


def always(comm: Communicator, algorithm: str) -> SelectedAllReduce:
    """The communicator, with one algorithm for all sizes, in all groups."""
    tables = [
        Table(
            transport=comm.transport,
            world_size=size,
            num_hosts=1,
            machine=Machine("here", 2),
            rules=((None, algorithm),),
        )
        for size in range(1, comm.world_size + 1)
    ]
    return SelectedAllReduce(comm, tables, ["here"] * comm.world_size)


cached_inputs = functools.cache(inputs)  # threads share them


def reduce_once(comm: SelectedAllReduce, algorithm: str, size: int, dtype: torch.dtype, op: ReduceOp) -> Tensor:
    values = cached_inputs(comm.world_size, (size,), dtype, seed=size)
    t = values[comm.rank].clone()
    comm.all_reduce_by(algorithm, t, op=op).wait()
    if comm.rank == 0:  # the others' bits are compared with these
        assert_reduced(t, values, op)
    return t


def reduce_with_all(comm: SelectedAllReduce) -> list[bytes]:
    """Every algorithm at sizes that do not divide evenly, every dtype and op; returns the bits of all results."""
    n, results = comm.world_size, []
    for algorithm in ALGORITHMS:
        for size in (0, 1, n - 1, n, n + 1, 1000, 100_003):
            results.append(reduce_once(comm, algorithm, size, torch.float32, "sum"))
        for dtype in DTYPES if n < 6 else [torch.bfloat16]:
            for op in REDUCE_OPS:
                results.append(reduce_once(comm, algorithm, n + 1, dtype, op))
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in results]


@pytest.mark.parametrize("world", range(2, 10))
def test_algorithms_give_the_plain_sum_and_the_same_bits_on_all_ranks(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitives, "PIECE_BYTES", 40_000)  # several pieces, the last one shorter
    results = run_ranks(world, lambda comm: reduce_with_all(with_algorithms(comm)))
    assert all(bits == results[0] for bits in results)


@each_algorithm
def test_algorithms_give_the_same_sum_for_any_piece_size(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece_bytes in (4, 12, 400):
        monkeypatch.setattr(primitives, "PIECE_BYTES", piece_bytes)
        run_ranks(3, lambda comm: reduce_once(with_algorithms(comm), algorithm, 101, torch.float32, "sum"))


@each_algorithm
@pytest.mark.parametrize("world", [3, 6])
def test_algorithms_give_the_same_bits_on_every_run_whichever_rank_is_late(algorithm: str, world: int) -> None:
    """Values of very different size, so that any other order of summation would show."""
    drawn = torch.randn(world, 5000, generator=torch.Generator().manual_seed(1))
    rows = drawn * torch.logspace(-6, 6, world)[torch.arange(5000)[None] % world]

    def bits(comm: Communicator, seed: int) -> bytes:
        delays = random.Random(f"{seed} {comm.rank}")
        selected, seen = with_algorithms(comm), b""
        for _ in range(3):
            t = rows[comm.rank].clone()
            time.sleep(delays.random() * 0.01)
            selected.all_reduce_by(algorithm, t).wait()
            seen = t.numpy().tobytes()
        return seen

    runs = [run_ranks(world, lambda comm, seed=seed: bits(comm, seed)) for seed in range(2)]  # type: ignore[misc]
    assert len({seen for run in runs for seen in run}) == 1


@each_algorithm
def test_algorithms_give_the_same_signed_zeros_and_nans_on_all_ranks(algorithm: str) -> None:
    """Where a + b is not b + a, to the bit."""

    def bits(comm: Communicator) -> bytes:
        selected, seen = with_algorithms(comm), b""
        for op in REDUCE_OPS:
            nan = torch.full((50,), 0x7FC00000 + comm.rank, dtype=torch.int32).view(torch.float32)
            zero = torch.full((50,), 0.0 if comm.rank % 3 else -0.0)
            t = torch.cat([nan, zero])
            selected.all_reduce_by(algorithm, t, op=op).wait()
            seen += t.numpy().tobytes()
        return seen

    assert len(set(run_ranks(4, bits))) == 1


def test_direct_sums_in_rank_order() -> None:
    rows = inputs(5, (1000,), torch.float32)

    def bits(comm: Communicator) -> bool:
        t, expected = rows[comm.rank].clone(), rows[comm.rank].clone()
        with_algorithms(comm).all_reduce_by("direct", t).wait()
        comm.all_reduce(expected).wait()
        return torch.equal(t, expected)

    assert all(run_ranks(5, bits))


@pytest.mark.parametrize(("algorithm", "world"), [("direct", 9), ("tree", 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_direct_and_tree_round_16_bit_sums_once(algorithm: str, world: int, dtype: torch.dtype) -> None:
    """1000 plus several thirds of its last place: if each addition were rounded, the sum would stay 1000."""
    third = 1000 * torch.finfo(dtype).eps / 3

    def total(comm: Communicator) -> Tensor:
        t = torch.full((5,), 1000.0 if comm.rank == 0 else third).to(dtype)
        with_algorithms(comm).all_reduce_by(algorithm, t).wait()
        return t

    expected = (torch.full((5,), 1000.0) + (world - 1) * torch.tensor(third).to(dtype).float()).to(dtype)
    assert expected[0] > 1000
    for t in run_ranks(world, total):
        assert torch.equal(t, expected)


def test_all_reduce_by_sums_complex_numbers_and_refuses_wrong_arguments() -> None:
    def total(comm: Communicator) -> list[complex]:
        selected = with_algorithms(comm)
        with pytest.raises(ValueError, match=r"algorithm must be one of native, ring, .*; got 'rings'"):
            selected.all_reduce_by("rings", torch.zeros(2))
        with pytest.raises(ValueError, match="complex numbers have no order"):
            selected.all_reduce_by("ring", torch.zeros(2, dtype=torch.complex64), op="max")
        t = torch.tensor([1 + 2j, comm.rank * 1j])
        selected.all_reduce_by("halving", t).wait()
        return t.tolist()  # type: ignore[no-any-return]

    assert run_ranks(3, total) == [[3 + 6j, 3j]] * 3


def test_all_reduce_by_works_with_autograd_and_inference_mode() -> None:
    def total(comm: Communicator) -> float:
        selected = with_algorithms(comm)
        weight = torch.ones(3, requires_grad=True)
        square = weight * weight
        selected.all_reduce_by("ring", square).wait()  # as with a backend: no change that autograd would complain of
        square.sum().backward()
        with torch.inference_mode():
            t = torch.ones(3)
        selected.all_reduce_by("tree", t).wait()
        return float(square.detach().sum() + t.sum())

    assert run_ranks(2, total) == [12.0, 12.0]


# -- several at once --------------------------------------------------------------------------------------------------


def many_at_once(comm: Communicator, seed: int) -> int:
    """Rounds of several all-reduces at once, waited for in each rank's own order, with users' messages in between."""
    selected = with_algorithms(comm)
    n, rank = comm.world_size, comm.rank
    plan, timing = random.Random(seed), random.Random(f"{seed} {rank}")
    for number in range(6):
        sizes = [plan.choice([1, 2, n + 1, 300, 5000, plan.randrange(1, 40_000)]) for _ in range(8)]
        names = [plan.choice([*ALGORITHMS, "native"]) for _ in sizes]
        given = [inputs(n, (size,), torch.float32, seed=number * 100 + at) for at, size in enumerate(sizes)]
        mine = [values[rank].clone() for values in given]
        received = torch.empty(7)
        works: list[Work] = []
        for at, (t, name) in enumerate(zip(mine, names, strict=True)):
            works.append(selected.all_reduce_by(name, t))
            if at == 3:  # the user's messages, which must not be mixed up with those of the algorithms
                works.append(selected.send(torch.full((7,), float(rank)), (rank + 1) % n))
                works.append(selected.recv(received, (rank - 1) % n))
            if timing.random() < 0.3:
                works[timing.randrange(len(works))].done()
            if timing.random() < 0.1:
                time.sleep(timing.random() * 0.01)
        timing.shuffle(works)
        for work in works:
            work.wait()
            assert work.done()
            work.wait()
        assert torch.equal(received, torch.full((7,), float((rank - 1) % n)))
        for t, values in zip(mine, given, strict=True):
            assert_reduced(t, values, "sum")
    return 1


@pytest.mark.parametrize("world", [2, 4, 5])
def test_concurrent_all_reduces_never_mix_their_messages(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitives, "PIECE_BYTES", 30_000)
    assert run_ranks(world, lambda comm: many_at_once(comm, seed=world)) == [1] * world


def wait_for_groups_in_any_order(comm: Communicator) -> list[float]:
    """Two groups, waited for in opposite orders, and a barrier of the one before the other's all-reduce."""
    one, two = with_algorithms(comm.clone()), with_algorithms(comm.clone())
    sums = []
    for name in ALGORITHMS:
        mine = [torch.full((1000,), float(comm.rank)) for _ in range(2)]
        works = [group.all_reduce_by(name, t) for group, t in zip((one, two), mine, strict=True)]
        for work in works if comm.rank % 2 else reversed(works):
            work.wait()
        third = torch.ones(10)
        work = one.all_reduce_by(name, third)
        if comm.rank == 0:
            comm.barrier()  # the other ranks call it only after they have this rank's part of the all-reduce
            work.wait()
        else:
            work.wait()
            comm.barrier()
        sums.append(float(mine[0][0] + mine[1][0] + third[0]))
    for group in (one, two):
        group.close()
    return sums


def test_groups_may_be_waited_for_in_any_order() -> None:
    assert run_ranks(3, wait_for_groups_in_any_order) == [[9.0] * len(ALGORITHMS)] * 3


@each_algorithm
def test_algorithm_fulfils_the_communicator_contract(algorithm: str) -> None:
    for results in run_ranks(3, lambda comm: run_all(Checked(always(comm, algorithm)))):
        assert [error for _, error in results.values() if error] == []


# -- with real processes ----------------------------------------------------------------------------------------------


def in_processes(transport: str) -> list[bytes]:
    comm = connect(transport, timeout_s=30)
    primitives.PIECE_BYTES = 100_000  # type: ignore[misc]
    bits = reduce_with_all(with_algorithms(comm))
    assert bits == reduce_with_all(with_algorithms(comm)), "another run, other bits"
    many_at_once(comm, seed=comm.world_size)
    wait_for_groups_in_any_order(comm)
    return bits


@pytest.mark.parametrize(("transport", "world"), [("c10d", 2), ("c10d", 3), ("c10d", 4), ("shm", 3)])
def test_algorithms_over_real_transports(transport: str, world: int) -> None:
    results = run_processes(world, in_processes, transport, timeout_s=100)
    assert all(bits == results[0] for bits in results)


def contract_of(algorithm: str) -> list[str]:
    results = run_all(Checked(always(connect("c10d", timeout_s=20).unchecked(), algorithm)))
    return [error for _, error in results.values() if error]


def test_algorithm_fulfils_the_communicator_contract_over_gloo() -> None:
    assert run_processes(3, contract_of, "halving", timeout_s=180) == [[], [], []]


def train(algorithm: str) -> list[Tensor]:
    """A few steps of a small model whose gradients are reduced by one algorithm, in two buckets."""
    comm = always(connect("c10d", timeout_s=20).unchecked(), algorithm)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(comm.rank)
    with gradsync.synchronize(model, optimizer, comm=comm, bucket_bytes=200_000):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_training_with_an_algorithm_equals_training_with_native() -> None:
    native, ours = (run_processes(3, train, algorithm) for algorithm in ("native", "tree"))
    for mine, first, plain in zip(ours[1], ours[0], native[0], strict=True):
        assert torch.equal(mine, first)
        torch.testing.assert_close(mine, plain)


def poll_messages() -> float:
    """``done()`` alone finds that a send and a receive are over."""
    comm = connect("c10d", timeout_s=20).unchecked()
    peer, t = 1 - comm.rank, torch.zeros(3)
    if comm.rank == 1:
        time.sleep(0.3)
    works = [comm.recv(t, peer), comm.send(torch.ones(3), peer)]
    end_s = time.monotonic() + 10
    while not all(work.done() for work in works):
        assert time.monotonic() < end_s
        time.sleep(0.005)
    for work in works:
        work.wait()
    comm.barrier()
    return t.sum().item()


def test_gloo_messages_can_be_polled_and_may_be_late() -> None:
    assert run_processes(2, poll_messages) == [3.0, 3.0]


# -- when a peer is lost ----------------------------------------------------------------------------------------------


def killed_in_the_middle(transport: str, algorithm: str) -> str:
    comm = with_algorithms(connect(transport, timeout_s=20))
    comm.all_reduce_by(algorithm, torch.ones(10)).wait()
    if comm.rank == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    end_s = time.monotonic() + 10
    works: list[Work] = []

    def go_on() -> None:
        while time.monotonic() < end_s:
            works[:] = [comm.all_reduce_by(algorithm, torch.ones(size)) for size in (500_000, 5)]
            for work in works:
                work.wait()

    with pytest.raises(gradsync.PeerLost) as lost:
        go_on()
    for work in works:
        with contextlib.suppress(gradsync.PeerLost):
            work.wait()
        assert work.done()
    with pytest.raises(gradsync.PeerLost):
        comm.all_reduce_by(algorithm, torch.ones(5))
    assert time.monotonic() < end_s
    return str(lost.value.ranks)


@pytest.mark.parametrize(
    ("transport", "algorithm"), [("c10d", "ring"), ("c10d", "tree"), ("c10d", "direct"), ("shm", "halving")]
)
def test_all_reduce_by_names_a_peer_that_dies_in_the_middle(transport: str, algorithm: str) -> None:
    outcomes = run_processes(3, killed_in_the_middle, transport, algorithm, expect_failure=True, timeout_s=40)
    assert outcomes == ["(1,)", -9, "(1,)"]


def be_late_for_a_ring() -> tuple[int, ...]:
    return late_peer(always(connect("c10d", timeout_s=1.0).unchecked(), "ring"))


def test_all_reduce_by_names_a_late_peer_in_time() -> None:
    assert run_processes(3, be_late_for_a_ring) == [(1,), (), (1,)]


def leave_with_work_under_way() -> str:
    comm = with_algorithms(connect("c10d", timeout_s=20).unchecked())
    comm.barrier()
    t = torch.ones(2_000_000)
    if comm.rank == 1:
        comm.all_reduce_by("ring", t)
        return "left"  # in order, but with work under way that the other ranks need
    time.sleep(0.5)
    try:
        comm.all_reduce_by("ring", t).wait()
    except gradsync.PeerLost as lost:
        return str(lost.ranks)
    return "nothing"


def test_all_reduce_by_names_a_peer_that_leaves_with_work_under_way() -> None:
    assert run_processes(3, leave_with_work_under_way, timeout_s=40) == ["(1,)", "left", "(1,)"]


@each_algorithm
def test_all_reduce_by_raises_peer_lost_when_a_ranks_thread_fails(algorithm: str) -> None:
    survivors: list[int] = []
    all_have_begun = threading.Barrier(3)

    def one_fails(comm: Communicator) -> None:
        selected = with_algorithms(comm)
        selected.all_reduce_by(algorithm, torch.ones(100)).wait()
        works = [selected.all_reduce_by(algorithm, torch.ones(100)) for _ in range(2) if comm.rank != 2]
        all_have_begun.wait(10)
        if comm.rank == 2:
            raise ZeroDivisionError
        for work in [*works, *works]:
            with pytest.raises(gradsync.PeerLost):
                work.wait()
            assert work.done()
        with pytest.raises(gradsync.PeerLost):
            selected.all_reduce_by(algorithm, torch.ones(100))
        survivors.append(comm.rank)

    with pytest.raises(ZeroDivisionError):
        run_ranks(3, one_fails, timeout_s=10)
    assert sorted(survivors) == [0, 1]
