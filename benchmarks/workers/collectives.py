"""One worker of bench_collectives: it connects all transports at once, and times their all-reduces in turn.

Started by bench_collectives.py through mpirun, once for each rank; rank 0 writes the measurements and its progress
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
from benchmarks.support.sizes import show_size
from benchmarks.workers.step_timing import order_of_round
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.shm.communicator import Shm

if TYPE_CHECKING:  # importing it starts MPI, which only a worker may do
    from mpi4py import MPI

TIMING_S = 0.005  # how long a timing lasts at least: short calls are repeated in it
PERIOD = 65_537  # values after which a check's pattern repeats: a prime, so no chunk of a transport fits into it
MEASURED, PROGRESS = "measured.json", "progress.json"  # what rank 0 writes
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The communicators and buffers that the variants of one process share."""

    mpi: MPI.Intracomm
    shm: Shm
    rank: int
    world_size: int
    data: Tensor  # private memory of the largest size, which all variants but the buckets use
    copy: Tensor  # as large, the destination of memcpy


@dataclass(frozen=True, kw_only=True)
class Job:
    """A variant at one size, ready to run as often as asked."""

    run: Callable[[], object]
    given: Tensor  # what `run` reads
    result: Tensor  # where it leaves its result
    sums: bool = True  # the result is the sum over the ranks; else a copy of `given`
    finish: Callable[[], object] = lambda: None  # blocks until what `run` started has ended


Prepare = Callable[[Setup, int], Job]  # the number of float32 values; all ranks call it, in the same order


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A column of the table."""

    title: str
    prepare: Prepare
    ours: bool = False  # the others are the peers that it is compared with
    needs_cuda: bool = False


def _memcpy(setup: Setup, numel: int) -> Job:
    source, target = setup.data[:numel], setup.copy[:numel]
    read, written = source.numpy(), target.numpy()
    # NumPy's call overhead is smaller than torch's, and large copies are as fast.
    return Job(run=lambda: np.copyto(written, read), given=source, result=target, sums=False)


def _gloo(setup: Setup, numel: int) -> Job:
    tensor = setup.data[:numel]
    return Job(run=lambda: dist.all_reduce(tensor), given=tensor, result=tensor)


def _mpi(setup: Setup, numel: int) -> Job:
    from mpi4py import MPI

    tensor = setup.data[:numel]
    memory = [tensor.numpy(), numel, MPI.FLOAT]  # with type and length given, mpi4py looks up nothing in a call
    mpi, in_place = setup.mpi, MPI.IN_PLACE
    return Job(run=lambda: mpi.Allreduce(in_place, memory), given=tensor, result=tensor)


def _nccl(setup: Setup, numel: int) -> Job:
    tensor = torch.zeros(numel, device="cuda")
    return Job(run=lambda: dist.all_reduce(tensor), given=tensor, result=tensor, finish=torch.cuda.synchronize)


def _bucket(setup: Setup, numel: int) -> Job:
    tensor = setup.shm.allocate(numel, torch.float32, CPU)
    return Job(run=lambda: setup.shm.all_reduce(tensor).wait(), given=tensor, result=tensor)


def _tensor(setup: Setup, numel: int) -> Job:
    tensor = setup.data[:numel]
    return Job(run=lambda: setup.shm.all_reduce(tensor).wait(), given=tensor, result=tensor)


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
    """Where the tensor differs from the repeated pattern; empty if nowhere."""
    for start in range(0, tensor.numel(), PERIOD):
        piece = tensor[start : start + PERIOD].cpu()
        expected = pattern[: piece.numel()]
        wrong = (piece != expected).nonzero()
        if len(wrong):
            at = int(wrong[0])
            return f"value {start + at} of {tensor.numel()} must be {expected[at]:g}; got {piece[at]:g}"
    return ""


def check(job: Job, setup: Setup, patterns: Sequence[Tensor]) -> str:
    """Run once on known values; returns what is wrong with the result on any rank, empty if nothing is."""
    fill(job.given, patterns[setup.rank])
    if not job.sums:
        job.result.zero_()
    setup.mpi.Barrier()
    job.run()
    job.finish()
    expected = torch.stack(list(patterns)).sum(0) if job.sums else patterns[setup.rank]
    mistakes = setup.mpi.allgather(find_mistake(job.result, expected))
    return "; ".join(f"rank {rank}: {mistake}" for rank, mistake in enumerate(mistakes) if mistake)


# -- how long do they take? -----------------------------------------------------------------------------------------


def time_calls(job: Job, setup: Setup, repetitions: int) -> float:
    """Time ``repetitions`` calls on this rank, after an untimed one that warms caches and connections."""
    job.run()
    job.finish()
    setup.mpi.Barrier()
    start = time.perf_counter()
    for _ in range(repetitions):
        job.run()
    job.finish()
    return time.perf_counter() - start


def find_repetitions(job: Job, setup: Setup) -> int:
    """Find how many calls last TIMING_S; the same number on all ranks."""
    repetitions = 1
    while True:
        taken_s = max(setup.mpi.allgather(time_calls(job, setup, repetitions)))
        if taken_s >= TIMING_S:
            return repetitions
        # At most tenfold: otherwise one slow first call would determine the number.
        repetitions = math.ceil(repetitions * min(10.0, 1.2 * TIMING_S / taken_s))


def measure(jobs: dict[str, dict[int, Job]], setup: Setup, *, rounds: int, report: Callable[[str], None]) -> Any:
    """Time every variant at every size in every round: {"call_s": {variant: {size: [a round's]}}, "repetitions": ...}.

    All variants are timed at one size before the next, so that compared times are measured close together.
    """
    repetitions: dict[str, dict[int, int]] = {name: {} for name in jobs}
    for name, by_size in jobs.items():
        for size, job in by_size.items():
            report(f"warming {VARIANTS[name].title} at {show_size(size)}")
            with named_errors(name, size):
                repetitions[name][size] = find_repetitions(job, setup)

    sizes = list(next(iter(jobs.values())))
    call_s: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in jobs}
    for number in range(rounds):
        gc.collect()
        for size in sizes:
            for name in order_of_round(list(jobs), number):
                report(f"round {number + 1} of {rounds}: {VARIANTS[name].title} at {show_size(size)}")
                with named_errors(name, size):
                    taken_s = time_calls(jobs[name][size], setup, repetitions[name][size])
                slowest_s = max(setup.mpi.allgather(taken_s))
                call_s[name][size].append(round(slowest_s / repetitions[name][size], 10))
    return {"call_s": call_s, "repetitions": repetitions}


@contextlib.contextmanager
def named_errors(name: str, size: int) -> Iterator[None]:
    """Add the variant and the size to an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"(in {VARIANTS[name].title} at {show_size(size)})")
        raise


class Progress:
    """Reports progress to the benchmark that started this worker, through a file, and fails when that process ends."""

    def __init__(self, path: Path, *, steps: int, reader: int, silent: bool) -> None:
        self._path = path
        self._steps = steps
        self._reader = reader
        self._silent = silent
        self._done = 0

    def report(self, doing: str) -> None:
        """Report the step that begins now; the one before it counts as done."""
        if self._silent:
            return
        if not Path(f"/proc/{self._reader}").exists():  # killed, so it could not end mpirun
            raise RuntimeError(f"process {self._reader}, which started this benchmark, has ended.")
        half = self._path.with_suffix(".half")
        half.write_text(json.dumps({"done": self._done, "of": self._steps, "doing": doing}))
        half.replace(self._path)  # atomic, as the benchmark may be reading
        self._done += 1


# -- the worker -----------------------------------------------------------------------------------------------------


def connect_peers(mpi: MPI.Intracomm, *, largest: int, cuda: bool, timeout_s: float) -> Setup:
    """Connect all transports of this process. Blocks: all ranks call it."""
    if cuda:
        torch.cuda.set_device(int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]))
    # This initialises torch.distributed: Gloo, and NCCL too.
    comm = gradsync.connect("c10d", timeout_s=timeout_s).unchecked()
    group = comm.clone()
    assert isinstance(group, C10d), "a clone is of the same kind"
    assert (comm.rank, comm.world_size) == (mpi.rank, mpi.size), "both read Open MPI's environment"
    data, copy = (torch.zeros(largest // 4) for _ in range(2))
    shm = Shm(group, why="the benchmark asks for it")
    return Setup(mpi=mpi, shm=shm, rank=mpi.rank, world_size=mpi.size, data=data, copy=copy)


def work(mpi: MPI.Intracomm, options: argparse.Namespace) -> None:
    """Check, then measure; rank 0 writes the result or the mistakes."""
    names, sizes = options.variants.split(","), [int(size) for size in options.sizes.split(",")]
    cells = len(names) * len(sizes)
    path, steps = options.folder / PROGRESS, cells * (2 + options.rounds)
    progress = Progress(path, steps=steps, reader=options.reader, silent=mpi.rank != 0)
    cuda = any(VARIANTS[name].needs_cuda for name in names)
    setup = connect_peers(mpi, largest=max(sizes), cuda=cuda, timeout_s=options.timeout_s)

    jobs: dict[str, dict[int, Job]] = {name: {} for name in names}
    patterns = [pattern_of(rank) for rank in range(setup.world_size)]
    wrong: list[str] = []
    for name in names:
        for size in sizes:
            progress.report(f"checking {VARIANTS[name].title} at {show_size(size)}")
            with named_errors(name, size):
                jobs[name][size] = job = VARIANTS[name].prepare(setup, size // 4)
                mistake = check(job, setup, patterns)
                job.given.zero_()  # repeated sums of zeros stay zero
            if mistake:
                wrong.append(f"{VARIANTS[name].title} at {show_size(size)}: {mistake}")
    gc.freeze()
    gc.disable()
    measured = {"wrong": wrong} if wrong else measure(jobs, setup, rounds=options.rounds, report=progress.report)
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
    # MPI waits for ever for a missing rank. This prints each rank's stack, and ends it.
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
        MPI.COMM_WORLD.Abort(1)  # a regular exit would wait for the other ranks


if __name__ == "__main__":
    main()
