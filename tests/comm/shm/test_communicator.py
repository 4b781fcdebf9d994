"""The shared-memory transport: random collectives with random delays, deaths at random moments, and the sum kernels."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.shm.communicator import Shm
from gradsync.kernels.base import numba
from gradsync.kernels.shm.atomics import call_sum as call_sum_kernel
from gradsync.kernels.shm.sums import sum_address
from tests.support.ranks import run_processes

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


@numba.njit("void(i8, i8, i8, i8, i8, i8)")
def call_sum(address: int, rows: int, num_rows: int, out: int, first: int, end: int) -> None:
    call_sum_kernel(address, rows, num_rows, out, first, end)


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Pseudorandom numbers that are cheap to make: every rank makes those of all ranks, to know the right sum."""
    mixed = (torch.arange(math.prod(shape), dtype=torch.int32) * 7919 + seed * 104_729) % 1009
    return (mixed / 500 - 1 if dtype.is_floating_point else mixed % 20).view(shape).to(dtype)


def matches_sum(got: torch.Tensor, rows: list[torch.Tensor]) -> bool:
    expected = torch.stack([row.double() for row in rows]).sum(0)
    return torch.allclose(got.double(), expected, rtol=TOLERANCE.get(got.dtype, 1e-12), atol=1e-2 * len(rows))


class RandomCollectives:
    """One rank's part in a random sequence of collectives, which the seed makes the same on all ranks."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self.comm = comm
        self.rng = random.Random(seed)  # which collectives: the same on all ranks
        self.own = random.Random(seed * 1000 + comm.rank)  # delays: different on every rank
        self.buffers = {dtype: comm.allocate(60_000, dtype, torch.device("cpu")) for dtype in DTYPES}
        self.wrong_results: list[str] = []

    def run(self, count: int) -> list[str]:
        for number in range(count):
            self.collective(number)
        return self.wrong_results

    def collective(self, number: int) -> None:
        n, rank, rng = self.comm.world_size, self.comm.rank, self.rng
        kind = rng.choice(
            ["all_reduce"] * 3 + ["in_place"] * 3 + ["all_gather", "broadcast", "reduce_scatter", "all_to_all"]
        )
        dtype = rng.choice(DTYPES)
        size = rng.choice([1, 7, 64, 1000, 33_000, rng.randrange(1, 120_000)])
        src = rng.randrange(n)
        if self.own.random() < 0.1:
            time.sleep(self.own.random() * 0.003)
        if kind == "in_place":
            self.in_place(number, rng.randrange(1, 5))
            return
        if kind in ("all_reduce", "broadcast", "all_gather"):
            rows = [values((size,), dtype, number * 100 + r) for r in range(n)]
            mine = rows[rank].clone()
            if kind == "all_reduce":
                self.comm.all_reduce(mine).wait()
                good = matches_sum(mine, rows)
            elif kind == "broadcast":
                self.comm.broadcast(mine, src).wait()
                good = torch.equal(mine, rows[src])
            else:
                out = torch.empty(n, size, dtype=dtype)
                self.comm.all_gather(mine, out=out).wait()
                good = torch.equal(out, torch.stack(rows))
        else:
            size = min(size, 40_000)
            tables = [values((n, size), dtype, number * 100 + r) for r in range(n)]
            if kind == "reduce_scatter":
                out = torch.empty(size, dtype=dtype)
                self.comm.reduce_scatter(tables[rank], out=out).wait()
                good = matches_sum(out, [table[rank] for table in tables])
            else:
                out = torch.empty(n, size, dtype=dtype)
                self.comm.all_to_all(tables[rank], out=out).wait()
                good = torch.equal(out, torch.stack([table[rank] for table in tables]))
        self.note(number, kind, dtype, size, good)

    def in_place(self, number: int, num_buckets: int) -> None:
        """Reduce several buckets at once and wait for them in the order of the plan, as an engine does."""
        dtypes = self.rng.sample(DTYPES, num_buckets)
        sizes = [self.rng.randrange(1, 60_000) for _ in dtypes]
        works = []
        for at, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
            self.buffers[dtype][:size].copy_(values((size,), dtype, number * 100 + at * 10 + self.comm.rank))
            works.append(self.comm.all_reduce(self.buffers[dtype][:size]))
            if self.own.random() < 0.2:
                time.sleep(self.own.random() * 0.002)
            if self.own.random() < 0.5:
                works[0].done()
        for work in works:
            work.wait()
        for at, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
            rows = [values((size,), dtype, number * 100 + at * 10 + r) for r in range(self.comm.world_size)]
            self.note(number, "in_place", dtype, size, matches_sum(self.buffers[dtype][:size], rows))

    def note(self, number: int, kind: str, dtype: torch.dtype, size: int, good: bool) -> None:
        if not good:
            self.wrong_results.append(f"{number}: {kind} {dtype} of {size}")


def run_random_collectives(seed: int, count: int) -> tuple[list[str], int]:
    comm = gradsync.connect("shm", timeout_s=30)
    assert isinstance(comm, Shm)
    assert comm._control is not None
    return RandomCollectives(comm, seed).run(count), comm._control.last_sequence


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_shm_random_collectives_match_float64_sum(world: int, exhaustive: bool) -> None:
    count = 1000 if exhaustive else 120
    outcomes = run_processes(world, run_random_collectives, world, count, timeout_s=250)
    for wrong, last_sequence in outcomes:
        assert wrong == []
        assert last_sequence == outcomes[0][1] > count


def wait_in_different_orders() -> list[float]:
    comm = gradsync.connect("shm", timeout_s=20)
    one, two = comm.clone(), comm.clone()
    buffers = [group.allocate(10_000, torch.float32, torch.device("cpu")) for group in (one, two)]
    for _ in range(20):
        works = []
        for group, buffer in zip((one, two), buffers, strict=True):
            buffer.fill_(1.0)
            works.append(group.all_reduce(buffer))
        for work in works if comm.rank == 0 else reversed(works):
            work.wait()
    return [float(buffer.sum()) for buffer in buffers]


def test_shm_groups_may_be_waited_for_in_any_order() -> None:
    assert run_processes(2, wait_in_different_orders) == [[20_000.0, 20_000.0]] * 2


def reduce_twice(seed: int) -> list[bytes]:
    """The bits of the same sums, computed twice."""
    comm = gradsync.connect("shm", timeout_s=20)
    seen = []
    for _ in range(2):
        buffer = comm.allocate(5_000, torch.float32, torch.device("cpu"))
        buffer.copy_(values((5_000,), torch.float32, seed + comm.rank))
        comm.all_reduce(buffer).wait()
        staged = values((300_000,), torch.float32, seed + comm.rank)
        comm.all_reduce(staged).wait()
        seen.append(buffer.numpy().tobytes() + staged.numpy().tobytes())
    return seen


def test_shm_sums_are_bitwise_equal_on_every_run_and_rank() -> None:
    assert len({bits for rank in run_processes(3, reduce_twice, 5) for bits in rank}) == 1


def die_at_a_random_moment(seed: int) -> str:
    comm = gradsync.connect("shm", timeout_s=5)
    rng = random.Random(seed)
    victim, after_s = rng.randrange(comm.world_size), rng.random() * 0.3
    if comm.rank == victim:
        # From a thread, so that the signal may arrive in the middle of compiled code.
        threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start_s = time.monotonic()
    try:
        while time.monotonic() - start_s < 20:
            RandomCollectives(comm, seed).run(10)  # it also allocates and frees segments
    except gradsync.PeerLost as lost:
        in_time = time.monotonic() - start_s < after_s + 5 + 2
        return "raised" if lost.ranks == (victim,) and in_time else f"{lost} (in time: {in_time}; {victim=})"
    return "never noticed"


@pytest.mark.alone  # it watches a clock, and other tests' MPI ranks make files in /dev/shm too
def test_shm_notices_kill_at_random_moment_and_leaves_no_files(exhaustive: bool) -> None:
    before = set(os.listdir("/dev/shm"))
    for seed in range(50 if exhaustive else 6):
        outcomes = run_processes(3, die_at_a_random_moment, seed, expect_failure=True, timeout_s=40)
        assert sorted(str(outcome) for outcome in outcomes) == ["-9", "raised", "raised"], f"{seed=}"
        assert set(os.listdir("/dev/shm")) <= before


def mapped_segment_names() -> list[str]:
    comm = gradsync.connect("shm", timeout_s=20)
    comm.allocate(1000, torch.float32, torch.device("cpu"))
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [
        line.split(maxsplit=5)[-1] for line in lines if "gradsync" in line and ".so" not in line and "/src/" not in line
    ]


def test_segments_have_no_name_in_the_file_system() -> None:
    for names in run_processes(2, mapped_segment_names):
        assert names
        assert all(name == "/memfd:gradsync (deleted)" for name in names)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("op", "combine"), [("sum", torch.add), ("max", torch.maximum), ("min", torch.minimum)])
def test_sum_kernel_widens_and_rounds_16_bit_floats_like_torch(dtype: torch.dtype, op: str, combine: Any) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty_like(every)
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(8):
        other = every[torch.randperm(len(every), generator=shuffle)]
        rows = np.array([every.data_ptr(), other.data_ptr()])
        call_sum(sum_address(dtype, op), rows.ctypes.data, 2, out.data_ptr(), 0, len(every))
        expected = combine(every.float(), other.float()).to(dtype)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out[~out.isnan()], expected[~out.isnan()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8, torch.int32, torch.uint64, torch.bool])
@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_sum_kernel_writes_only_to_its_target(dtype: torch.dtype, num_rows: int) -> None:
    inputs = [values((5000,), dtype, seed) for seed in range(num_rows)]
    expected = torch.stack([row.double() for row in inputs]).sum(0).to(dtype)
    for target in (*range(num_rows), "out", "everywhere"):
        rows = [row.clone() for row in inputs]
        out = rows[target] if isinstance(target, int) else torch.zeros_like(expected)
        addresses = np.array([row.data_ptr() for row in rows])
        place = 0 if target == "everywhere" else out.data_ptr()
        call_sum(sum_address(dtype, "sum"), addresses.ctypes.data, num_rows, place, 10, 4990)
        for row, was in zip([*rows, out], [*inputs, torch.zeros_like(expected)], strict=True):
            written = (target == "everywhere" and row is not out) or (target != "everywhere" and row is out)
            whole = expected if written else was
            assert torch.allclose(row[10:4990].double(), whole[10:4990].double(), rtol=1e-5, atol=1e-5)
            if row is not out or target == "out":
                assert torch.equal(row[:10], was[:10])
                assert torch.equal(row[4990:], was[4990:])
