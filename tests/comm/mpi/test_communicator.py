"""The MPI transport under a real mpirun: bitwise results, dtypes, chunks, groups and threads."""

from __future__ import annotations

import random
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradsync
from gradsync.comm import Communicator, disconnect
from gradsync.comm.base import REDUCE_OPS, ReduceOp
from gradsync.comm.mpi import communicator as mpi_transport
from gradsync.comm.mpi import work as mpi_work
from tests.contracts.communicator import CONTRACT
from tests.support.mpi import mpirun, run_mpi

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

# -- in one world of three ---------------------------------------------------------------------------------------------

CHECKS: list[Callable[[Communicator], Any]] = []
groups_every = 4  # steps of each thread: MPI makes groups in calls that spin, on more ranks than there are cores


def check(fn: Callable[[Communicator], Any]) -> Callable[[Communicator], Any]:
    """Register a check that every rank runs. Its result must be the same on all ranks."""
    CHECKS.append(fn)
    return fn


def run_checks(exhaustive: bool) -> dict[str, tuple[Any, str]]:
    """Run all checks in one set of processes; returns each result, or the traceback."""
    global groups_every
    groups_every = 1 if exhaustive else 4
    outcomes: dict[str, tuple[Any, str]] = {}
    for fn in CHECKS:
        try:
            outcomes[fn.__name__] = (fn(gradsync.connect("mpi", timeout_s=20.0)), "")
        except BaseException:
            outcomes[fn.__name__] = (None, traceback.format_exc())
            break  # the ranks may be out of step now
    return outcomes


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, tuple[Any, str]]]:
    return run_mpi(3, run_checks, bool(request.config.getoption("exhaustive")), timeout_s=90.0)


def awkward_values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum depends on its order, with zeros of both signs, infinities and NaN among them."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    values *= torch.tensor([1e-6, 1.0, 1e4]).repeat(-(-numel // 3))[:numel]
    for at, special in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        values[at + 7 * rank :: 101] = special
    return values.to(dtype)


def in_rank_order(rows: list[Tensor], op: str) -> Tensor:
    wide = rows[0].dtype in (torch.float16, torch.bfloat16) and op == "sum"
    total = rows[0].float() if wide else rows[0].clone()
    for row in rows[1:]:
        total = COMBINE[op](total, row)
    return total.to(rows[0].dtype)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@check
def sums_are_taken_in_rank_order(comm: Communicator) -> list[bytes]:
    found = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for op in REDUCE_OPS:
            for numel in (1, 63, 1000, 60_001, 300_007):  # in one call, and by slices
                rows = [awkward_values(rank, numel, dtype) for rank in range(comm.world_size)]
                own = rows[comm.rank].clone()
                comm.all_reduce(own, op=op).wait()
                assert bits(own) == bits(in_rank_order(rows, op)), (dtype, op, numel)
                found.append(bits(own[:2000]))
    return found


@check
def other_dtypes(comm: Communicator) -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128):
        rows = [(torch.arange(200_000) % (97 + rank) - 3 * rank).to(dtype) for rank in range(comm.world_size)]
        own = rows[comm.rank].clone()
        comm.all_reduce(own).wait()
        assert torch.equal(own, in_rank_order(rows, "sum")), dtype
        gathered = torch.empty(comm.world_size, 200_000, dtype=dtype)
        comm.all_gather(rows[comm.rank], out=gathered).wait()
        assert torch.equal(gathered, torch.stack(rows)), dtype


@check
def tensors_in_many_chunks(comm: Communicator) -> None:
    """Run the whole contract with chunks of 64 bytes, as it is otherwise done above 2^31 bytes."""
    modules = {"CHUNK_BYTES": mpi_transport, "DIRECT_BYTES": mpi_transport, "STAGED_BYTES": mpi_work}
    before = {name: getattr(module, name) for name, module in modules.items()}
    try:
        for name, small in (("CHUNK_BYTES", 64), ("DIRECT_BYTES", 0), ("STAGED_BYTES", 300)):
            setattr(modules[name], name, small)
        for contract_check in CONTRACT:
            contract_check(comm)
    finally:
        for name, module in modules.items():
            setattr(module, name, before[name])


@check
def all_gather_in_place(comm: Communicator) -> Tensor:
    out = torch.zeros(comm.world_size, 1000)
    out[comm.rank] = comm.rank + 1.0
    comm.all_gather(out[comm.rank], out=out).wait()
    assert out.mean(1).tolist() == [1.0, 2.0, 3.0]
    return out


@check
def random_collectives_in_several_groups(comm: Communicator) -> None:
    """The collectives are the same on all ranks; delays and the order of waiting differ."""
    common, own = random.Random(5), random.Random(comm.rank)
    pairs = [comm.split(ranks) for ranks in ([0, 1], [2, 0], [1, 2])]
    groups = [comm, comm.clone(), *pairs]
    under_way: list[tuple[gradsync.Work, Tensor, Tensor]] = []
    for number in range(300):
        which = common.randrange(len(groups))
        members = [[0, 1, 2], [0, 1, 2], [0, 1], [2, 0], [1, 2]][which]
        numel = common.choice([1, 30, 5000, 100_000, 250_000])
        op: ReduceOp = common.choice(REDUCE_OPS)
        if own.random() < 0.05:
            time.sleep(own.random() * 0.01)
        group = groups[which]
        if group is None:
            continue
        rows = [torch.arange(numel, dtype=torch.float32) % 613 * (number + 1 + rank) for rank in members]
        mine = rows[group.rank].clone()
        under_way.append((group.all_reduce(mine, op=op), mine, in_rank_order(rows, op)))
        if own.random() < 0.3:
            own.choice(under_way)[0].done()
        while len(under_way) > own.randrange(1, 12):
            work, got, expected = under_way.pop(own.randrange(len(under_way)))
            work.wait()
            assert torch.equal(got, expected), number
    for work, got, expected in under_way:
        work.wait()
        assert torch.equal(got, expected)


@check
def groups_in_several_threads(comm: Communicator, *, make_groups: bool = True) -> list[float]:
    groups = [comm.clone() for _ in range(3)]
    totals = [0.0] * 3

    def sum_up(at: int) -> None:
        for number in range(40):
            t = torch.full((1 + number * 4000,), float(at + comm.rank))
            groups[at].all_reduce(t).wait()
            assert t.unique().numel() == 1
            totals[at] += t[0].item()
            if make_groups and number % groups_every == 0:
                part = groups[at].clone()
                part.barrier()
                part.close()

    threads = [threading.Thread(target=sum_up, args=(at,)) for at in range(3)]
    for thread in threads[:: 1 if comm.rank else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals == [40.0 * sum(at + rank for rank in range(comm.world_size)) for at in range(3)]
    return totals


@check
def unsupported_calls_are_refused(comm: Communicator) -> None:
    closed = comm.clone()
    closed.close()
    on_meta = torch.ones(2, device="meta")
    calls: list[tuple[str, Callable[[], object]]] = [
        (
            r"moves CPU tensors; got one on meta. Use connect\('c10d'\)",
            lambda: comm.all_reduce(on_meta),
        ),
        ("moves CPU tensors", lambda: comm.broadcast(on_meta)),
        ("complex numbers have no order", lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64), op="max")),
        ("does not reduce torch.float8_e5m2", lambda: comm.all_reduce(torch.ones(2).to(torch.float8_e5m2))),
        ("is closed: all_reduce", lambda: closed.all_reduce(torch.ones(2))),
        ("is closed: split", lambda: closed.split([0])),
        ("already connected over 'mpi'", lambda: gradsync.connect("shm")),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    comm.barrier()


@check
def reconnect_after_disconnect(comm: Communicator) -> float:
    comm.barrier()
    disconnect()
    again = gradsync.connect("mpi", timeout_s=20.0)
    assert again is not comm
    assert again.why == comm.why
    t = torch.ones(1)
    again.all_reduce(t).wait()
    return t.item()


@pytest.mark.parametrize("name", [fn.__name__ for fn in CHECKS])
def test_mpi_checks_on_three_ranks(outcomes: list[dict[str, tuple[Any, str]]], name: str) -> None:
    errors = [f"rank {rank}:\n{by[name][1]}" for rank, by in enumerate(outcomes) if by.get(name, ("", ""))[1]]
    assert not errors, "\n".join(errors)
    assert all(name in by for by in outcomes), "not reached: an earlier check failed"
    for by in outcomes:
        first, result = outcomes[0][name][0], by[name][0]
        assert torch.equal(result, first) if isinstance(result, Tensor) else result == first


# -- an unchanged script -----------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import gradsync

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sync = gradsync.synchronize(model, optimizer, bucket_bytes=500, first_bucket_bytes=100)
for (x,) in gradsync.shard((torch.randn(70, 6),), global_batch_size=16, seed=1):
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
torch.save({"stats": sync.stats(), "model": model.state_dict()}, f"{sys.argv[1]}.{sync.rank}.pt")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def run_script(script: str, name: str) -> None:
    sys.argv = [script, name]
    runpy.run_path(script, run_name="__main__")


def test_mpi_script_trains_like_one_process(script: str, tmp_path: Path) -> None:
    asked = {"GRADSYNC_TRANSPORT": "mpi"}
    run_mpi(1, run_script, script, str(tmp_path / "one"), env=asked)
    ended = mpirun(2, sys.executable, script, "two", env=asked, cwd=tmp_path)
    assert ended.exit_code == 0, ended.output
    assert not ended.output.strip(), "no warnings are printed, and MPI is finalized"
    alone, *ranks = (torch.load(tmp_path / f"{name}.pt") for name in ("one.0", "two.0", "two.1"))
    assert alone["stats"]["transport"] == "mpi"
    for rank in ranks:
        assert rank["stats"]["transport"] == "mpi"
        assert "2 ranks, as Open MPI" in rank["stats"]["why"]
        assert rank["stats"]["why"].endswith("GRADSYNC_TRANSPORT=mpi")
        for name, value in rank["model"].items():
            assert torch.equal(value, ranks[0]["model"][name])
            assert torch.allclose(value, alone["model"][name], rtol=1e-9, atol=1e-12)
