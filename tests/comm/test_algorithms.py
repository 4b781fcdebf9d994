"""Our own all-reduce algorithms: against the plain sum, the same bits on all ranks, many at once, and peers lost."""

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
from gradsync.comm import Communicator, run_ranks
from gradsync.comm import steps as steps_module
from gradsync.comm.algorithms import ALGORITHMS
from gradsync.comm.base import REDUCE_OPS, ReduceOp, Work
from gradsync.comm.choice import Machine, Table
from gradsync.comm.chosen import Chosen
from gradsync.comm.connect import connect
from tests.contracts.communicator import DTYPES, assert_reduced, inputs
from tests.contracts.test_communicator import late_peer, run_all
from tests.ranks import run_processes

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def own(comm: Communicator) -> Chosen:
    """The communicator with our algorithms at hand, by name."""
    chosen = Chosen(comm, [], ["here"] * comm.world_size)
    chosen.open_mail()
    return chosen


def always(comm: Communicator, algorithm: str) -> Chosen:
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
    return Chosen(comm, tables, ["here"] * comm.world_size)


brought = functools.cache(inputs)  # threads share them


def reduce_once(comm: Chosen, algorithm: str, size: int, dtype: torch.dtype, op: ReduceOp) -> Tensor:
    values = brought(comm.world_size, (size,), dtype, seed=size)
    t = values[comm.rank].clone()
    comm.all_reduce_by(algorithm, t, op=op).wait()
    if comm.rank == 0:  # the others' bits are compared with these
        assert_reduced(t, values, op)
    return t


def all_of_them(comm: Chosen) -> list[bytes]:
    """Every algorithm at sizes that cut badly, every dtype and op; returns the bits of all results."""
    n, results = comm.world_size, []
    for algorithm in ALGORITHMS:
        for size in (0, 1, n - 1, n, n + 1, 1000, 100_003):
            results.append(reduce_once(comm, algorithm, size, torch.float32, "sum"))
        for dtype in DTYPES if n < 6 else [torch.bfloat16]:
            for op in REDUCE_OPS:
                results.append(reduce_once(comm, algorithm, n + 1, dtype, op))
    return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in results]


@pytest.mark.parametrize("world", range(2, 10))
def test_any_world_and_size_agrees_with_the_plain_sum_and_on_all_ranks(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "PIECE_BYTES", 40_000)  # several pieces, the last one shorter
    told = run_ranks(world, lambda comm: all_of_them(own(comm)))
    assert all(bits == told[0] for bits in told)


@each_algorithm
def test_pieces_of_any_size_give_the_same_sum(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece_bytes in (4, 12, 400):
        monkeypatch.setattr(steps_module, "PIECE_BYTES", piece_bytes)
        run_ranks(3, lambda comm: reduce_once(own(comm), algorithm, 101, torch.float32, "sum"))


@each_algorithm
@pytest.mark.parametrize("world", [3, 6])
def test_the_same_bits_on_every_run_and_rank_whoever_is_late(algorithm: str, world: int) -> None:
    """Values of very different size, so that any other order of summation would show."""
    drawn = torch.randn(world, 5000, generator=torch.Generator().manual_seed(1))
    rows = drawn * torch.logspace(-6, 6, world)[torch.arange(5000)[None] % world]

    def bits(comm: Communicator, seed: int) -> bytes:
        delays = random.Random(f"{seed} {comm.rank}")
        chosen, seen = own(comm), b""
        for _ in range(3):
            t = rows[comm.rank].clone()
            time.sleep(delays.random() * 0.01)
            chosen.all_reduce_by(algorithm, t).wait()
            seen = t.numpy().tobytes()
        return seen

    runs = [run_ranks(world, lambda comm, seed=seed: bits(comm, seed)) for seed in range(2)]  # type: ignore[misc]
    assert len({seen for run in runs for seen in run}) == 1


@each_algorithm
def test_zeros_of_both_signs_and_all_kinds_of_nan_are_the_same_on_all_ranks(algorithm: str) -> None:
    """Where a + b is not b + a, to the bit."""

    def bits(comm: Communicator) -> bytes:
        chosen, seen = own(comm), b""
        for op in REDUCE_OPS:
            nan = torch.full((50,), 0x7FC00000 + comm.rank, dtype=torch.int32).view(torch.float32)
            zero = torch.full((50,), 0.0 if comm.rank % 3 else -0.0)
            t = torch.cat([nan, zero])
            chosen.all_reduce_by(algorithm, t, op=op).wait()
            seen += t.numpy().tobytes()
        return seen

    assert len(set(run_ranks(4, bits))) == 1


def test_direct_has_the_bits_of_a_sum_in_rank_order() -> None:
    rows = inputs(5, (1000,), torch.float32)

    def bits(comm: Communicator) -> bool:
        t, expected = rows[comm.rank].clone(), rows[comm.rank].clone()
        own(comm).all_reduce_by("direct", t).wait()
        comm.all_reduce(expected).wait()
        return torch.equal(t, expected)

    assert all(run_ranks(5, bits))


@pytest.mark.parametrize(("algorithm", "world"), [("direct", 9), ("tree", 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_sums_that_meet_at_one_rank_are_rounded_once(algorithm: str, world: int, dtype: torch.dtype) -> None:
    """A thousand and eight times a third of its last place: rounded each time, nothing would be added at all."""
    third = 1000 * torch.finfo(dtype).eps / 3

    def total(comm: Communicator) -> Tensor:
        t = torch.full((5,), 1000.0 if comm.rank == 0 else third).to(dtype)
        own(comm).all_reduce_by(algorithm, t).wait()
        return t

    expected = (torch.full((5,), 1000.0) + (world - 1) * torch.tensor(third).to(dtype).float()).to(dtype)
    assert expected[0] > 1000
    for t in run_ranks(world, total):
        assert torch.equal(t, expected)


def test_complex_numbers_are_summed_and_what_has_no_meaning_is_refused() -> None:
    def total(comm: Communicator) -> list[complex]:
        chosen = own(comm)
        with pytest.raises(ValueError, match=r"algorithm must be one of native, ring, .*; got 'rings'"):
            chosen.all_reduce_by("rings", torch.zeros(2))
        with pytest.raises(ValueError, match="complex numbers have no order"):
            chosen.all_reduce_by("ring", torch.zeros(2, dtype=torch.complex64), op="max")
        t = torch.tensor([1 + 2j, comm.rank * 1j])
        chosen.all_reduce_by("halving", t).wait()
        return t.tolist()  # type: ignore[no-any-return]

    assert run_ranks(3, total) == [[3 + 6j, 3j]] * 3


def test_autograd_and_inference_mode_are_not_in_the_way() -> None:
    def total(comm: Communicator) -> float:
        chosen = own(comm)
        weight = torch.ones(3, requires_grad=True)
        square = weight * weight
        chosen.all_reduce_by("ring", square).wait()  # as with a backend: no change that autograd would complain of
        square.sum().backward()
        with torch.inference_mode():
            t = torch.ones(3)
        chosen.all_reduce_by("tree", t).wait()
        return float(square.detach().sum() + t.sum())

    assert run_ranks(2, total) == [12.0, 12.0]


# -- several at once --------------------------------------------------------------------------------------------------


def many_at_once(comm: Communicator, seed: int) -> int:
    """Rounds of several all-reduces at once, waited for in each rank's own order, with users' messages in between."""
    chosen = own(comm)
    n, rank = comm.world_size, comm.rank
    plan, moods = random.Random(seed), random.Random(f"{seed} {rank}")
    for number in range(6):
        sizes = [plan.choice([1, 2, n + 1, 300, 5000, plan.randrange(1, 40_000)]) for _ in range(8)]
        names = [plan.choice([*ALGORITHMS, "native"]) for _ in sizes]
        given = [inputs(n, (size,), torch.float32, seed=number * 100 + at) for at, size in enumerate(sizes)]
        mine = [values[rank].clone() for values in given]
        letter = torch.empty(7)
        works: list[Work] = []
        for at, (t, name) in enumerate(zip(mine, names, strict=True)):
            works.append(chosen.all_reduce_by(name, t))
            if at == 3:  # of the same shape on all ranks, and not for our own messages to meet
                works.append(chosen.send(torch.full((7,), float(rank)), (rank + 1) % n))
                works.append(chosen.recv(letter, (rank - 1) % n))
            if moods.random() < 0.3:
                works[moods.randrange(len(works))].done()
            if moods.random() < 0.1:
                time.sleep(moods.random() * 0.01)
        moods.shuffle(works)
        for work in works:
            work.wait()
            assert work.done()
            work.wait()
        assert torch.equal(letter, torch.full((7,), float((rank - 1) % n)))
        for t, values in zip(mine, given, strict=True):
            assert_reduced(t, values, "sum")
    return 1


@pytest.mark.parametrize("world", [2, 4, 5])
def test_many_at_once_never_get_each_others_messages(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "PIECE_BYTES", 30_000)
    assert run_ranks(world, lambda comm: many_at_once(comm, seed=world)) == [1] * world


def groups_in_any_order(comm: Communicator) -> list[float]:
    """Two groups, waited for in opposite orders, and a barrier of the one before the other's all-reduce."""
    one, two = own(comm.clone()), own(comm.clone())
    sums = []
    for name in ALGORITHMS:
        mine = [torch.full((1000,), float(comm.rank)) for _ in range(2)]
        works = [group.all_reduce_by(name, t) for group, t in zip((one, two), mine, strict=True)]
        for work in works if comm.rank % 2 else reversed(works):
            work.wait()
        third = torch.ones(10)
        work = one.all_reduce_by(name, third)
        if comm.rank == 0:
            comm.barrier()  # the others come here only after they have this rank's part of the all-reduce
            work.wait()
        else:
            work.wait()
            comm.barrier()
        sums.append(float(mine[0][0] + mine[1][0] + third[0]))
    for group in (one, two):
        group.close()
    return sums


def test_groups_may_be_waited_for_in_any_order() -> None:
    assert run_ranks(3, groups_in_any_order) == [[9.0] * len(ALGORITHMS)] * 3


@each_algorithm
def test_the_whole_contract_holds(algorithm: str) -> None:
    for told in run_ranks(3, lambda comm: run_all(always(comm, algorithm))):
        assert [error for _, error in told.values() if error] == []


# -- with real processes ----------------------------------------------------------------------------------------------


def in_processes(transport: str) -> list[bytes]:
    comm = connect(transport, timeout_s=30)
    steps_module.PIECE_BYTES = 100_000  # type: ignore[misc]
    bits = all_of_them(own(comm))
    assert bits == all_of_them(own(comm)), "another run, other bits"
    many_at_once(comm, seed=comm.world_size)
    groups_in_any_order(comm)
    return bits


@pytest.mark.parametrize(("transport", "world"), [("c10d", 2), ("c10d", 3), ("c10d", 4), ("shm", 3)])
def test_it_holds_over_real_transports(transport: str, world: int) -> None:
    told = run_processes(world, in_processes, transport, timeout_s=100)
    assert all(bits == told[0] for bits in told)


def contract_of(algorithm: str) -> list[str]:
    told = run_all(always(connect("c10d", timeout_s=20), algorithm))
    return [error for _, error in told.values() if error]


def test_the_whole_contract_holds_over_gloo() -> None:
    assert run_processes(3, contract_of, "halving", timeout_s=60) == [[], [], []]


def train(algorithm: str) -> list[Tensor]:
    """A few steps of a small model whose gradients go by one algorithm, in two buckets."""
    comm = always(connect("c10d", timeout_s=20), algorithm)
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


def test_a_model_trains_as_it_does_by_the_native_one() -> None:
    native, ours = (run_processes(3, train, algorithm) for algorithm in ("native", "tree"))
    for mine, first, plain in zip(ours[1], ours[0], native[0], strict=True):
        assert torch.equal(mine, first)
        torch.testing.assert_close(mine, plain)


def asked_letters() -> float:
    """A send and a receive are found to be over by asking alone."""
    comm = connect("c10d", timeout_s=20)
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


def test_a_gloo_message_may_be_late_and_may_be_asked_for() -> None:
    assert run_processes(2, asked_letters) == [3.0, 3.0]


# -- when a peer is lost ----------------------------------------------------------------------------------------------


def killed_in_the_middle(transport: str, algorithm: str) -> str:
    comm = own(connect(transport, timeout_s=20))
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
def test_a_peer_that_dies_in_the_middle_is_lost_to_the_others(transport: str, algorithm: str) -> None:
    outcomes = run_processes(3, killed_in_the_middle, transport, algorithm, expect_failure=True, timeout_s=40)
    assert outcomes == ["(1,)", -9, "(1,)"]


def late_for_a_ring() -> tuple[int, ...]:
    return late_peer(always(connect("c10d", timeout_s=1.0), "ring"))


def test_a_peer_that_does_not_come_is_named_in_time() -> None:
    assert run_processes(3, late_for_a_ring) == [(1,), (), (1,)]


def leaves_unfinished() -> str:
    comm = own(connect("c10d", timeout_s=20))
    comm.barrier()
    t = torch.ones(2_000_000)
    if comm.rank == 1:
        comm.all_reduce_by("ring", t)
        return "left"  # in order, but with work under way that needs the others
    time.sleep(0.5)
    try:
        comm.all_reduce_by("ring", t).wait()
    except gradsync.PeerLost as lost:
        return str(lost.ranks)
    return "nothing"


def test_a_rank_that_leaves_with_work_under_way_is_lost_to_the_others() -> None:
    assert run_processes(3, leaves_unfinished, timeout_s=40) == ["(1,)", "left", "(1,)"]


@each_algorithm
def test_a_rank_whose_thread_fails_is_lost_to_the_others(algorithm: str) -> None:
    lost_to: list[int] = []
    all_have_begun = threading.Barrier(3)

    def one_fails(comm: Communicator) -> None:
        chosen = own(comm)
        chosen.all_reduce_by(algorithm, torch.ones(100)).wait()
        works = [chosen.all_reduce_by(algorithm, torch.ones(100)) for _ in range(2) if comm.rank != 2]
        all_have_begun.wait(10)
        if comm.rank == 2:
            raise ZeroDivisionError
        for work in [*works, *works]:
            with pytest.raises(gradsync.PeerLost):
                work.wait()
            assert work.done()
        with pytest.raises(gradsync.PeerLost):
            chosen.all_reduce_by(algorithm, torch.ones(100))
        lost_to.append(comm.rank)

    with pytest.raises(ZeroDivisionError):
        run_ranks(3, one_fails, timeout_s=10)
    assert sorted(lost_to) == [0, 1]
