"""The contract of ``Communicator``, for every transport: a list of checks that each rank of a group runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm.base import REDUCE_OPS, Communicator, SourceSlice, Work
from gradsync.errors import OutOfStep

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
PATIENCE_S = 20.0

Check = Callable[[Communicator], Any]
CONTRACT: list[Check] = []


def contract(check: Check) -> Check:
    """Register a check. Every rank runs it; its result must be the same, bit for bit, on all ranks."""
    CONTRACT.append(check)
    return check


def inputs(size: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Every rank's input, by rank: any rank can compute all of them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int64:
        return [torch.randint(-(2**40), 2**40, shape, generator=generator) for _ in range(size)]
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


def reduced(values: list[Tensor], op: str) -> Tensor:
    stack = torch.stack(values) if values[0].dtype == torch.int64 else torch.stack(values).double()
    return {"sum": stack.sum(0), "max": stack.amax(0), "min": stack.amin(0)}[op]


def assert_reduced(got: Tensor, values: list[Tensor], op: str) -> None:
    expected = reduced(values, op)
    if op == "sum" and got.is_floating_point():
        error = (got.double() - expected).abs()
        size = torch.stack(values).double().abs().sum(0)  # each addition may round by half a unit of what it has so far
        assert (error <= len(values) * torch.finfo(got.dtype).eps * size).all(), (got, expected)
    else:
        assert torch.equal(got, expected.to(got.dtype)), (got, expected)


# -- the contract -------------------------------------------------------------------------------------------------


@contract
def all_reduce_overwrites_with_the_reduction(comm: Communicator) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        for op in REDUCE_OPS:
            for shape in ((), (7,), (3, 1, 1001)):
                values = inputs(comm.world_size, shape, dtype)
                t = values[comm.rank].clone()
                comm.all_reduce(t, op=op).wait()
                assert_reduced(t, values, op)
                results.append(t)
    return results


@contract
def all_reduce_from_gives_the_bits_of_all_reduce(comm: Communicator) -> list[Tensor]:
    results = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for numel in (1, 100, 10_003):
            values = inputs(comm.world_size, (numel,), dtype, seed=numel)[comm.rank]
            plain, sparse = (comm.allocate(numel, dtype, torch.device("cpu")) for _ in range(2))
            plain.copy_(values * 0.3)
            sparse.copy_(plain)
            first, end = comm.owned_range(sparse)
            third = (end - first) // 3 // 64 * 64
            sources = []
            for start, stop in ((first, first + third), (first + 2 * third, end)):  # the middle is in the buffer
                sources.append(SourceSlice(start, values[start:stop].clone(), 0.3))
                sparse[start:stop] = torch.nan
            comm.all_reduce(plain).wait()
            comm.all_reduce_from(sparse, sources[::-1]).wait()
            assert torch.equal(sparse, plain)
            results.append(sparse)
    whole = comm.allocate(5, torch.float32, torch.device("cpu")).fill_(torch.nan)
    Communicator.all_reduce_from(comm, whole, [SourceSlice(0, torch.arange(5.0), 0.5)]).wait()  # the default copies
    assert torch.equal(whole, torch.arange(5.0) * 0.5 * comm.world_size)
    return results


@contract
def slices_are_reduced_to_their_owners_and_gathered(comm: Communicator) -> list[Tensor]:
    results = []
    for dtype in (torch.float64, torch.float32, torch.float16):
        for share in (64, 128 * 79):
            numel = share * comm.world_size
            values = inputs(comm.world_size, (numel,), dtype, seed=share)
            first, end = comm.rank * share, (comm.rank + 1) * share
            for is_bucket in (True, False):
                buffer = (
                    comm.allocate(numel, dtype, torch.device("cpu")) if is_bucket else torch.empty(numel, dtype=dtype)
                )
                buffer.copy_(values[comm.rank])
                sources = []
                if comm.owned_range(buffer) != (0, 0):
                    assert comm.owned_range(buffer) == (first, end)
                    sources = [
                        SourceSlice(first + 64 * at, buffer[first + 64 * at : end].clone(), 1.0) for at in (0, 1)
                    ]
                    sources = sources[share > 64 :][:1]
                    buffer[sources[0].first : end] = torch.nan
                comm.reduce_slices(buffer, sources).wait()
                assert_reduced(buffer[first:end].clone(), [value[first:end] for value in values], "sum")
                comm.gather_slices(buffer).wait()
                assert_reduced(buffer.clone(), values, "sum")
                results.append(buffer.clone())
    return results


@contract
def all_gather_puts_rows_in_rank_order(comm: Communicator) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        for shape in ((), (5,), (2, 3)):
            values = inputs(comm.world_size, shape, dtype)
            out = torch.empty(comm.world_size, *shape, dtype=dtype)
            comm.all_gather(values[comm.rank], out=out).wait()
            assert torch.equal(out, torch.stack(values))
            results.append(out)
    return results


@contract
def reduce_scatter_gives_each_rank_its_row(comm: Communicator) -> None:
    for dtype in DTYPES:
        for op in REDUCE_OPS:
            values = inputs(comm.world_size, (comm.world_size, 2, 3), dtype)
            given = values[comm.rank].clone()
            out = torch.empty(2, 3, dtype=dtype)
            comm.reduce_scatter(given, out=out, op=op).wait()
            assert_reduced(out, [value[comm.rank] for value in values], op)


@contract
def all_to_all_transposes_rows(comm: Communicator) -> None:
    for dtype in DTYPES:
        values = inputs(comm.world_size, (comm.world_size, 4), dtype)
        out = torch.empty(comm.world_size, 4, dtype=dtype)
        comm.all_to_all(values[comm.rank], out=out).wait()
        assert torch.equal(out, torch.stack([value[comm.rank] for value in values]))
        assert torch.equal(values[comm.rank], inputs(comm.world_size, (comm.world_size, 4), dtype)[comm.rank])


@contract
def broadcast_copies_from_any_rank(comm: Communicator) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        for src in range(comm.world_size):
            values = inputs(comm.world_size, (2, 5), dtype)
            t = values[comm.rank].clone()
            comm.broadcast(t, src).wait()
            assert torch.equal(t, values[src])
            results.append(t)
    return results


@contract
def send_and_recv_keep_their_order(comm: Communicator) -> None:
    if comm.world_size == 1:
        for call in (comm.send, comm.recv):
            with pytest.raises(ValueError, match="world of one"):
                call(torch.ones(1), 0)
        return
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for dtype in DTYPES:
        values = inputs(comm.world_size, (3, 2), dtype)
        works, got = [], []
        for number in range(3):  # messages of a pair arrive in the order they were sent
            got.append(torch.empty(3, 2, dtype=dtype))
            works.append(comm.recv(got[-1], before))
            works.append(comm.send(values[comm.rank] + number, after))
        for work in works:
            work.wait()
        for number, t in enumerate(got):
            assert torch.equal(t, values[before] + number)


@contract
def collectives_accept_empty_tensors(comm: Communicator) -> None:
    n = comm.world_size
    for dtype in DTYPES:
        for shape in ((0,), (3, 0)):
            empty = torch.empty(shape, dtype=dtype)
            rows = torch.empty(n, *shape, dtype=dtype)
            comm.all_reduce(empty).wait()
            comm.all_gather(empty, out=rows).wait()
            comm.reduce_scatter(rows, out=empty).wait()
            comm.all_to_all(rows, out=rows.clone()).wait()
            comm.broadcast(empty, n - 1).wait()
    all_reduce_overwrites_with_the_reduction(comm)


@contract
def all_reduce_of_a_slice_writes_only_the_slice(comm: Communicator) -> Tensor:
    values = inputs(comm.world_size, (10,), torch.float64)
    buffer = values[comm.rank].clone()
    comm.all_reduce(buffer[3:6]).wait()
    assert_reduced(buffer[3:6], [value[3:6] for value in values], "sum")
    beside = [0, 1, 2, 6, 7, 8, 9]
    assert torch.equal(buffer[beside], values[comm.rank][beside])
    return buffer[3:6].clone()


@contract
def collectives_refuse_bad_arguments_before_anything_is_sent(comm: Communicator) -> None:
    n = comm.world_size
    square, rows = torch.zeros(3, 3), torch.zeros(n, 3)
    apart = torch.zeros(3, 6)[:, ::2]
    calls: list[tuple[str, Callable[[], object]]] = [
        (r"tensor must be contiguous; got strides \(6, 2\)", lambda: comm.all_reduce(apart)),
        (r"tensor must be contiguous", lambda: comm.broadcast(apart)),
        (r"tensor must be contiguous", lambda: comm.all_gather(apart, out=torch.zeros(n, 3, 3))),
        (r"out must be contiguous", lambda: comm.reduce_scatter(torch.zeros(n, 3, 3), out=apart)),
        (r"must be contiguous", lambda: comm.all_to_all(torch.zeros(n, 6)[:, ::2], out=rows)),
        (r"must be contiguous", lambda: comm.all_to_all(rows, out=torch.zeros(n, 6)[:, ::2])),
        (rf"shape \({n}, 3, 3\).*got \({n + 1}, 3, 3\)", lambda: comm.all_gather(square, out=torch.zeros(n + 1, 3, 3))),
        (r"torch.float32.*got .*torch.float64", lambda: comm.all_gather(square, out=torch.zeros(n, 3, 3).double())),
        (rf"shape \({n}, 3\).*got \({n}, 4\)", lambda: comm.reduce_scatter(torch.zeros(n, 4), out=torch.zeros(3))),
        (rf"got \({n + 1}, 3\)", lambda: comm.all_to_all(rows, out=torch.zeros(n + 1, 3))),
        (rf"got \({n + 1}, 3\)", lambda: comm.all_to_all(torch.zeros(n + 1, 3), out=torch.zeros(n + 1, 3))),
        (r"op must be one of sum, max, min; got 'mean'", lambda: comm.all_reduce(square, op="mean")),  # type: ignore[arg-type]
        (r"op must be one of", lambda: comm.reduce_scatter(rows, out=torch.zeros(3), op="avg")),  # type: ignore[arg-type]
        (rf"src must be a rank from 0 to {n - 1}; got src={n}", lambda: comm.broadcast(square, n)),
        (r"ranks must be distinct", lambda: comm.split([0, 0])),
        (r"ranks must be distinct", lambda: comm.split([])),
        (rf"from 0 to {n - 1}; got \[{n}\]", lambda: comm.split([n])),
    ]
    if n > 1:
        calls += [
            (rf"dst must be a rank from 0 to {n - 1}; got dst={n}", lambda: comm.send(square, n)),
            (r"src must be a rank", lambda: comm.recv(square, -1)),
            (r"tensor must be contiguous", lambda: comm.send(apart, (comm.rank + 1) % n)),
            (r"tensor must be contiguous", lambda: comm.recv(apart, (comm.rank + 1) % n)),
        ]
    for number, (message, call) in enumerate(calls):
        try:
            call()
            got = "nothing was refused"
        except ValueError as error:
            got = str(error)
        assert re.search(message, got), f"call {number}: expected {message!r}; {got}"
    broadcast_copies_from_any_rank(comm)  # the ranks are still in step


def _calls_that_differ(comm: Communicator) -> dict[str, Callable[[Communicator], object]]:
    """By what differs: a call that rank 1 makes with another argument than the other ranks."""
    n, odd = comm.world_size, comm.rank == 1

    def gathered(group: Communicator, numel: int, dtype: torch.dtype = torch.float32) -> Work:
        return group.all_gather(torch.zeros(numel, dtype=dtype), out=torch.zeros(n, numel, dtype=dtype))

    def exchanged(group: Communicator, numel: int) -> Work:
        return group.all_to_all(torch.zeros(n, numel), out=torch.zeros(n, numel))

    wide = torch.float64 if odd else torch.float32
    return {
        "fewer values": lambda group: group.all_reduce(torch.ones(3 if odd else 40)),
        "more values": lambda group: group.all_reduce(torch.ones(70_000 if odd else 40)),
        "nothing": lambda group: group.all_reduce(torch.ones(0 if odd else 40)),
        "dtype": lambda group: group.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32)),
        "op": lambda group: group.all_reduce(torch.ones(4), op="max" if odd else "sum"),
        "kind": lambda group: gathered(group, 4) if odd else group.all_reduce(torch.ones(4)),
        "root": lambda group: group.broadcast(torch.ones(4), 1 if odd else 0),
        "values that are gathered": lambda group: gathered(group, 2 if odd else 9),
        "dtype that is gathered": lambda group: gathered(group, 4, wide),
        "values that are exchanged": lambda group: exchanged(group, 2 if odd else 9),
        "values that are scattered": lambda group: group.reduce_scatter(
            torch.zeros(n, 2 if odd else 9), out=torch.zeros(2 if odd else 9)
        ),
        "barrier": lambda group: group.barrier() if odd else group.all_reduce(torch.ones(1)),
    }


@contract
def different_calls_raise_on_every_rank(comm: Communicator) -> list[str]:
    if comm.world_size == 1:
        return []
    found = []
    for name, call in _calls_that_differ(comm).items():
        group = comm.clone()  # broken afterwards
        ones = torch.ones(4)
        group.all_reduce(ones).wait()
        start_s = time.monotonic()
        try:
            work = call(group)
            if isinstance(work, Work):
                work.wait()
            got = "no error"
        except OutOfStep as error:
            got = str(error)
        assert re.search(r"the ranks make different calls: ranks? 0.* asked for .*; rank 1 asked for", got), (name, got)
        assert time.monotonic() - start_s < comm.timeout_s / 2, name
        with pytest.raises(OutOfStep):  # the ranks no longer agree on how far they have come
            group.all_reduce(torch.ones(4)).wait()
        comm.barrier()  # other groups go on
        found.append(name)
    return found


@contract
def different_calls_are_found_without_waiting(comm: Communicator) -> None:
    if comm.world_size == 1:
        return
    group = comm.clone()
    own = [torch.ones(100 + number) for number in range(5)]
    works = [group.all_reduce(t) for t in own]
    works.append(group.all_reduce(torch.ones(7 + comm.rank)))
    for t, work in zip(own, works, strict=False):
        work.wait()
        assert torch.equal(t, torch.full_like(t, comm.world_size))
    end_s = time.monotonic() + PATIENCE_S
    while not works[-1].done():
        assert time.monotonic() < end_s
        time.sleep(0.001)
    with pytest.raises(OutOfStep, match=r"rank 0 asked for all_reduce\(sum\) of 7 float32 values; rank 1 asked"):
        works[-1].wait()
    comm.barrier()


@contract
def works_may_be_waited_for_in_any_order(comm: Communicator) -> list[Tensor]:
    values = [inputs(comm.world_size, (50 + number,), torch.float64, seed=number) for number in range(6)]
    own = [value[comm.rank].clone() for value in values]
    works = [comm.all_reduce(t) for t in own]
    for work in reversed(works):
        work.wait()
        work.wait()
    for t, value in zip(own, values, strict=True):
        assert_reduced(t, value, "sum")
    return own


@contract
def done_becomes_true_without_waiting(comm: Communicator) -> Tensor:
    values = inputs(comm.world_size, (20,), torch.float64)
    t = values[comm.rank].clone()
    work = comm.all_reduce(t)
    end_s = time.monotonic() + PATIENCE_S
    while not work.done():
        assert time.monotonic() < end_s
        time.sleep(0.001)
    assert_reduced(t, values, "sum")
    work.wait()
    return t


@contract
def barrier_returns_after_the_last_rank_has_called_it(comm: Communicator) -> None:
    for late in range(comm.world_size):
        if comm.rank == late:
            time.sleep(0.05)
        came_s = time.monotonic()
        comm.barrier()
        left_s = time.monotonic()
        times = torch.empty(comm.world_size, 2, dtype=torch.float64)
        comm.all_gather(torch.tensor([came_s, left_s], dtype=torch.float64), out=times).wait()
        assert times[:, 1].min() >= times[:, 0].max(), times


@contract
def clones_have_an_order_of_their_own(comm: Communicator) -> list[Tensor]:
    first, second = comm.clone(), comm.clone()
    assert (first.rank, first.world_size, first.timeout_s) == (comm.rank, comm.world_size, comm.timeout_s)
    assert first.worker is comm.worker
    values = [inputs(comm.world_size, (9,), torch.float64, seed=seed) for seed in range(3)]
    own = [value[comm.rank].clone() for value in values]
    groups = [comm, first, second]
    order = list(range(3))
    order = order[comm.rank % 3 :] + order[: comm.rank % 3]  # every rank begins with another group
    works = [groups[index].all_reduce(own[index]) for index in order]
    for work in works:
        work.wait()
    for t, value in zip(own, values, strict=True):
        assert_reduced(t, value, "sum")
    rows = torch.arange(comm.world_size) * 10 + comm.rank
    received = [torch.empty_like(rows) for _ in groups]
    # The first exchange of a group may have to connect its members: it must not wait for them.
    works = [groups[index].all_to_all(rows, out=received[index]) for index in order]
    for work in works:
        work.wait()
    for out in received:
        assert torch.equal(out, torch.arange(comm.world_size) + comm.rank * 10)
    for group in (first, second):
        group.close()
        group.close()
    return own


@contract
def split_makes_groups_in_the_order_given(comm: Communicator) -> None:
    values = inputs(comm.world_size, (4,), torch.float64)
    everyone = list(range(comm.world_size))
    halves = [everyone[::2][::-1], everyone[1::2]]
    for ranks in [half for half in halves if half]:
        group = comm.split(ranks)
        assert (group is None) == (comm.rank not in ranks)
        if group is None:
            continue
        assert (group.rank, group.world_size) == (ranks.index(comm.rank), len(ranks))
        assert group.worker is comm.worker
        out = torch.empty(len(ranks), 4, dtype=torch.float64)
        group.all_gather(values[comm.rank], out=out).wait()
        assert torch.equal(out, torch.stack([values[rank] for rank in ranks]))
        last = group.split([group.world_size - 1])  # a group of a group
        assert (last is None) == (group.rank != group.world_size - 1)
        if last is not None:
            t = values[comm.rank].clone()
            last.all_reduce(t).wait()
            assert torch.equal(t, values[comm.rank])
        group.barrier()
    comm.barrier()
