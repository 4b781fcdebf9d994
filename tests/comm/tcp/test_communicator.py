"""The ``tcp`` transport beyond the contract: many collectives at once, late readers, order of sums, and its memory."""

from __future__ import annotations

import time
from functools import reduce

import pytest
import torch

import gradsync
from gradsync.comm.tcp.communicator import WHOLE_BYTES, Tcp
from gradsync.comm.tcp.mesh import StagingPool
from tests.support.ranks import run_processes

MIB = 1 << 20


def connected(timeout_s: float = 30) -> Tcp:
    comm = gradsync.connect("tcp", timeout_s=timeout_s).unchecked()
    assert isinstance(comm, Tcp)
    return comm


def values_of(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=draw).mul(4).to(dtype)


def reduce_many(seed: int) -> None:
    """Several at once, of all kinds and sizes; the ranks come late and wait in orders of their own."""
    comm = connected()
    n, rank = comm.world_size, comm.rank
    draw = torch.Generator().manual_seed(seed)
    own_draw = torch.Generator().manual_seed(seed + 1 + rank)
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32)
    for number in range(6):
        works, checks = [], []
        for part in range(6):
            numel = int(10 ** float(torch.empty(1).uniform_(0, 6.3, generator=draw)))
            dtype = dtypes[int(torch.randint(len(dtypes), (1,), generator=draw))]
            all_values = [values_of(r, numel, dtype, 10 * number + part) for r in range(n)]
            wide = dtype if dtype in (torch.float32, torch.float64, torch.int32) else torch.float32
            total = reduce(torch.add, [each.to(wide) for each in all_values]).to(dtype)  # in rank order
            own = all_values[rank].clone()
            kind = int(torch.randint(3, (1,), generator=draw))
            if kind == 0:
                works.append(comm.all_reduce(own))
                checks.append((own, total))
            elif kind == 1:
                src = int(torch.randint(n, (1,), generator=draw))
                works.append(comm.broadcast(own, src))
                checks.append((own, all_values[src]))
            else:
                padded = own[: numel // n * n].view(n, -1)
                out = torch.zeros_like(padded[0])
                works.append(comm.reduce_scatter(padded, out=out))
                checks.append((out, total[: numel // n * n].view(n, -1)[rank]))
            if int(torch.randint(4, (1,), generator=own_draw)) == 0:
                time.sleep(0.01)
        for index in torch.randperm(len(works), generator=own_draw).tolist():
            works[index].wait()
            assert works[index].done()
            assert torch.equal(*checks[index]), (number, index)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_overlapping_collectives_give_the_sums_in_rank_order(world_size: int) -> None:
    run_processes(world_size, reduce_many, 11 * world_size)


def reduce_with_a_late_reader() -> None:
    """More than the kernel buffers: the sums must not overwrite values that are not sent yet."""
    comm = connected()
    comm.barrier()
    values = torch.arange(24 * MIB, dtype=torch.float32).remainder_(1000.0).add_(comm.rank)
    expected = values.mul(comm.world_size).add_(sum(range(comm.world_size)) - comm.world_size * comm.rank)
    if comm.rank == 1:
        time.sleep(0.5)
    start_s = time.monotonic()
    work = comm.all_reduce(values)
    started_s = time.monotonic() - start_s
    work.wait()
    assert torch.equal(values, expected)
    assert comm.rank == 1 or started_s < 0.4, "starting does not wait for the peer"


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_sends_values_before_their_sums_overwrite_them(world_size: int) -> None:
    run_processes(world_size, reduce_with_a_late_reader)


def wait_at_places_of_its_own() -> None:
    """Rank 1 waits for each all-reduce before it starts the next one; the others start all of them first."""
    comm = connected()
    tensors = [torch.full((6 * MIB,), float(comm.rank + number)) for number in range(4)]
    works = []
    for tensor in tensors:
        works.append(comm.all_reduce(tensor))
        if comm.rank == 1:
            works[-1].wait()
    for work in works:
        work.wait()
    for number, tensor in enumerate(tensors):
        assert bool((tensor == 3 + 3 * number).all())


def test_replies_pass_calls_that_a_peer_has_not_made_yet() -> None:
    run_processes(3, wait_at_places_of_its_own)


def sum_halves_that_round() -> tuple[list[float], list[float]]:
    comm = connected()
    small = [2048.0, 1.0, 1.0][comm.rank]  # 2048 + 1 is 2048 in float16; 2048 + (1 + 1) is 2050
    few, many = (torch.full((numel,), small, dtype=torch.float16) for numel in (4, WHOLE_BYTES))
    for tensor in (few, many):
        comm.all_reduce(tensor).wait()
    return few.tolist(), many[:4].tolist()


def test_16_bit_sums_are_rounded_once() -> None:
    for few, many in run_processes(3, sum_halves_that_round):
        assert few == many == [2050.0] * 4


def refuse() -> None:
    comm = connected()
    with pytest.raises(ValueError, match="complex numbers have no order"):
        comm.all_reduce(torch.zeros(2, dtype=torch.complex64), op="max")
    with pytest.raises(ValueError, match="can't be reduced"):
        comm.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2))
    comm.barrier()


def test_all_reduce_refuses_what_has_no_sum_before_it_sends() -> None:
    run_processes(2, refuse)


def test_staging_pool_reuses_the_best_fit_and_keeps_few() -> None:
    pool = StagingPool()
    pool.give_back(pool.take(StagingPool.MAX_FREE_BYTES + 1))
    buffers = [pool.take(size) for size in (10, 30, 20, 50, 40)]
    for buffer in buffers:
        pool.give_back(buffer)
    assert pool.take(15).numel() == 20
    assert pool.take(45).numel() == 50
    assert pool.take(10).numel() == 30, "the one of 10 bytes was dropped"


def plan_of_default_buckets() -> tuple[int, int]:
    """The largest bucket over TCP by default, and with a size of the user's."""
    sizes = []
    for given in (None, 32 * MIB):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = gradsync.synchronize(model, optimizer, bucket_bytes=given, comm=connected())
        sizes.append(max(sync.stats()["bucket_bytes"]))
        sync.close()
    return sizes[0], sizes[1]


def test_exact_buckets_are_small_enough_to_start_early() -> None:
    for default, given in run_processes(2, plan_of_default_buckets):
        assert default <= 5 * MIB < given
