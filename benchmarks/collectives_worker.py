"""One worker of bench_collectives: every way to all-reduce lives in it at once, and they are timed in turn.

Started by bench_collectives.py through mpirun, once for each rank; rank 0 writes what was measured, and how far it is,
into `--folder`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import gradsync
from benchmarks.sizes import show_size
from benchmarks.step_worker import order_of_round
from gradsync.comm.c10d import C10d
from gradsync.comm.shm import Shm

if TYPE_CHECKING:  # importing it starts MPI, which only a worker may do
    from mpi4py import MPI

TIMING_S = 0.005  # how long a timing lasts at least: short calls are repeated in it
PERIOD = 65_537  # values after which a check's pattern repeats: a prime, so no chunk of a transport fits into it
MEASURED, PROGRESS = "measured.json", "progress.json"  # what rank 0 writes
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What the variants of one process share."""

    mpi: MPI.Intracomm
    shm: Shm
    rank: int
    world_size: int
    data: Tensor  # private memory of the largest size: all variants but the buckets begin in the same place
    copy: Tensor  # as much again, for memcpy to write to


@dataclass(frozen=True, kw_only=True)
class Job:
    """A variant at one size, ready to run as often as asked."""

    run: Callable[[], object]
    given: Tensor  # what `run` reads
    result: Tensor  # where it leaves its result
    sums: bool = True  # the result is the sum over the ranks; else it is what was given
    finish: Callable[[], object] = lambda: None  # blocks until what `run` began is over


Prepare = Callable[[Ground, int], Job]  # the number of float32 values; all ranks call it, in the same order


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A column of the table."""

    title: str
    prepare: Prepare
    ours: bool = False  # the others are the peers that it is compared with
    needs_cuda: bool = False


def _memcpy(ground: Ground, numel: int) -> Job:
    source, target = ground.data[:numel], ground.copy[:numel]
    read, written = source.numpy(), target.numpy()
    # A call of NumPy's costs less than one of torch's, and large copies are as fast.
    return Job(run=lambda: np.copyto(written, read), given=source, result=target, sums=False)


def _gloo(ground: Ground, numel: int) -> Job:
    tensor = ground.data[:numel]
    return Job(run=lambda: dist.all_reduce(tensor), given=tensor, result=tensor)


def _mpi(ground: Ground, numel: int) -> Job:
    from mpi4py import MPI

    tensor = ground.data[:numel]
    memory = [tensor.numpy(), numel, MPI.FLOAT]  # with its type and length said, nothing is looked up in a call
    mpi, in_place = ground.mpi, MPI.IN_PLACE
    return Job(run=lambda: mpi.Allreduce(in_place, memory), given=tensor, result=tensor)


def _nccl(ground: Ground, numel: int) -> Job:
    tensor = torch.zeros(numel, device="cuda")
    return Job(run=lambda: dist.all_reduce(tensor), given=tensor, result=tensor, finish=torch.cuda.synchronize)


def _bucket(ground: Ground, numel: int) -> Job:
    tensor = ground.shm.allocate(numel, torch.float32, CPU)
    return Job(run=lambda: ground.shm.all_reduce(tensor).wait(), given=tensor, result=tensor)


def _tensor(ground: Ground, numel: int) -> Job:
    tensor = ground.data[:numel]
    return Job(run=lambda: ground.shm.all_reduce(tensor).wait(), given=tensor, result=tensor)


# A new peer or path to compare is one entry here.
VARIANTS: dict[str, Variant] = {
    "memcpy": Variant(title="memcpy", prepare=_memcpy),
    "gloo": Variant(title="Gloo", prepare=_gloo),
    "mpi": Variant(title="Open MPI", prepare=_mpi),
    "nccl": Variant(title="NCCL", prepare=_nccl, needs_cuda=True),
    "bucket": Variant(title="gradsync bucket", prepare=_bucket, ours=True),
    "tensor": Variant(title="gradsync tensor", prepare=_tensor, ours=True),
}


# -- are the results right? -----------------------------------------------------------------------------------------


def pattern_of(rank: int) -> Tensor:
    """One period of a rank's values: whole and small, so that every order of summing gives the same bits."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1001, (PERIOD,), generator=generator).float()


def fill(tensor: Tensor, pattern: Tensor) -> None:
    """Repeat the pattern over the tensor."""
    for start in range(0, tensor.numel(), PERIOD):
        piece = tensor[start : start + PERIOD]
        piece.copy_(pattern[: piece.numel()])


def find_mistake(tensor: Tensor, pattern: Tensor) -> str:
    """Say where the tensor is not the repeated pattern; empty if it is nowhere."""
    for start in range(0, tensor.numel(), PERIOD):
        piece = tensor[start : start + PERIOD].cpu()
        expected = pattern[: piece.numel()]
        wrong = (piece != expected).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return f"value {start + at} of {tensor.numel()} must be {expected[at]:g}; got {piece[at]:g}"
    return ""


def check(job: Job, ground: Ground, patterns: Sequence[Tensor]) -> str:
    """Run once on known values; say what is wrong with the result on any rank, empty if nothing is."""
    fill(job.given, patterns[ground.rank])
    if not job.sums:
        job.result.zero_()
    ground.mpi.Barrier()
    job.run()
    job.finish()
    expected = torch.stack(list(patterns)).sum(0) if job.sums else patterns[ground.rank]
    mistakes = ground.mpi.allgather(find_mistake(job.result, expected))
    return "; ".join(f"rank {rank}: {mistake}" for rank, mistake in enumerate(mistakes) if mistake)


# -- how long do they take? -----------------------------------------------------------------------------------------


def time_calls(job: Job, ground: Ground, repetitions: int) -> float:
    """Time so many calls on this rank, after one untimed that wakes caches and connections."""
    job.run()
    job.finish()
    ground.mpi.Barrier()
    start = time.perf_counter()
    for _ in range(repetitions):
        job.run()
    job.finish()
    return time.perf_counter() - start


def find_repetitions(job: Job, ground: Ground) -> int:
    """Find how many calls last TIMING_S; the same number on all ranks."""
    repetitions = 1
    while True:
        taken_s = max(ground.mpi.allgather(time_calls(job, ground, repetitions)))
        if taken_s >= TIMING_S:
            return repetitions
        # At most tenfold: one slow call among the first would else stand for all.
        repetitions = math.ceil(repetitions * min(10.0, 1.2 * TIMING_S / taken_s))


def measure(jobs: dict[str, dict[int, Job]], ground: Ground, *, rounds: int, tell: Callable[[str], None]) -> Any:
    """Time every variant at every size in every round: {"call_s": {variant: {size: [a round's]}}, "repetitions": ...}.

    All take their turn at one size before the next size comes, so what is compared was measured close together.
    """
    repetitions: dict[str, dict[int, int]] = {name: {} for name in jobs}
    for name, by_size in jobs.items():
        for size, job in by_size.items():
            tell(f"warming {VARIANTS[name].title} at {show_size(size)}")
            with naming(name, size):
                repetitions[name][size] = find_repetitions(job, ground)

    sizes = list(next(iter(jobs.values())))
    call_s: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in jobs}
    for number in range(rounds):
        gc.collect()
        for size in sizes:
            for name in order_of_round(list(jobs), number):
                tell(f"round {number + 1} of {rounds}: {VARIANTS[name].title} at {show_size(size)}")
                with naming(name, size):
                    taken_s = time_calls(jobs[name][size], ground, repetitions[name][size])
                slowest_s = max(ground.mpi.allgather(taken_s))
                call_s[name][size].append(round(slowest_s / repetitions[name][size], 10))
    return {"call_s": call_s, "repetitions": repetitions}


@contextlib.contextmanager
def naming(name: str, size: int) -> Iterator[None]:
    """Have an error say which variant it came from."""
    try:
        yield
    except Exception as error:
        error.add_note(f"(in {VARIANTS[name].title} at {show_size(size)})")
        raise


class Progress:
    """Tells the benchmark that started this worker how far it is, through a file, and ends with it."""

    def __init__(self, path: Path, *, steps: int, reader: int, silent: bool) -> None:
        self._path = path
        self._steps = steps
        self._reader = reader
        self._silent = silent
        self._done = 0

    def tell(self, doing: str) -> None:
        """Say what begins now, and that what came before it is over."""
        if self._silent:
            return
        if not Path(f"/proc/{self._reader}").exists():  # killed, so it could not end mpirun
            raise RuntimeError(f"process {self._reader}, which asked for these figures, is gone.")
        half = self._path.with_suffix(".half")
        half.write_text(json.dumps({"done": self._done, "of": self._steps, "doing": doing}))
        half.replace(self._path)  # it never reads half a file
        self._done += 1


# -- the worker -----------------------------------------------------------------------------------------------------


def meet(mpi: MPI.Intracomm, *, largest: int, cuda: bool, timeout_s: float) -> Ground:
    """Connect all the peers of this process. Blocks: all ranks call it."""
    if cuda:
        torch.cuda.set_device(int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
    comm = gradsync.connect("c10d", timeout_s=timeout_s)  # initialises torch.distributed: Gloo, and NCCL beside it
    group = comm.clone()
    assert isinstance(group, C10d), "a clone is of the same kind"
    assert (comm.rank, comm.world_size) == (mpi.rank, mpi.size), "both read Open MPI's environment"
    data, copy = (torch.zeros(largest // 4) for _ in range(2))
    shm = Shm(group, why="the benchmark asks for it")
    return Ground(mpi=mpi, shm=shm, rank=mpi.rank, world_size=mpi.size, data=data, copy=copy)


def work(mpi: MPI.Intracomm, options: argparse.Namespace) -> None:
    """Check, then measure; rank 0 writes the result or the mistakes."""
    names, sizes = options.variants.split(","), [int(size) for size in options.sizes.split(",")]
    cells = len(names) * len(sizes)
    path, steps = options.folder / PROGRESS, cells * (2 + options.rounds)
    progress = Progress(path, steps=steps, reader=options.reader, silent=mpi.rank != 0)
    cuda = any(VARIANTS[name].needs_cuda for name in names)
    ground = meet(mpi, largest=max(sizes), cuda=cuda, timeout_s=options.timeout_s)

    jobs: dict[str, dict[int, Job]] = {name: {} for name in names}
    patterns = [pattern_of(rank) for rank in range(ground.world_size)]
    wrong: list[str] = []
    for name in names:
        for size in sizes:
            progress.tell(f"checking {VARIANTS[name].title} at {show_size(size)}")
            with naming(name, size):
                jobs[name][size] = job = VARIANTS[name].prepare(ground, size // 4)
                mistake = check(job, ground, patterns)
                job.given.zero_()  # sums of zeros stay what they are, however often they are taken
            if mistake:
                wrong.append(f"{VARIANTS[name].title} at {show_size(size)}: {mistake}")
    gc.freeze()
    gc.disable()
    measured = {"wrong": wrong} if wrong else measure(jobs, ground, rounds=options.rounds, tell=progress.tell)
    if mpi.rank == 0:
        (options.folder / MEASURED).write_text(json.dumps(measured))


def main() -> None:
    """Read the command line, and start MPI; an error anywhere ends all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--reader", type=int, required=True)  # the process that waits for what is written there
    options = parser.parse_args()
    # MPI waits without end for a rank that does not come. This shows where each rank is, and ends it.
    faulthandler.dump_traceback_later(options.timeout_s, exit=True)
    torch.set_num_threads(1)

    import mpi4py

    mpi4py.rc.thread_level = "funneled"  # only this thread calls it: Open MPI then takes no locks
    from mpi4py import MPI

    try:
        work(MPI.COMM_WORLD, options)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)  # leaving in order would wait for the other ranks


if __name__ == "__main__":
    main()
