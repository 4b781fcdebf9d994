"""Whether every survivor names a worker that is killed in mid-transfer, and how soon.

    python benchmarks/bench_kills.py --transport tcp --strategy sharded --world 3 --kills 50

Each world trains a model whose gradients take most of a step to exchange. One of its workers, a random one, gets
SIGKILL at a random moment. Every survivor must raise PeerLost with its rank, within --within-s, and end; no process and
no file of /dev/shm may be left. The benchmark fails if one of these is not so, and shows what happened instead.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

from rich.table import Table  # noqa: E402

from benchmarks.support.launch import rank_environments  # noqa: E402
from benchmarks.support.reporting import Reporting, add_saving  # noqa: E402
from benchmarks.workers.kills import PHASES, Job, Report, work  # noqa: E402
from gradsync import spec  # noqa: E402

WARM_STEPS = 3  # the first backward lays the buckets out anew
START_S = 120.0  # the first world compiles kernels
LEFT_S = 2.0  # how long the kernel may take to remove what a dead process had
SHARED_FILES = Path("/dev/shm")
TRANSPORTS = ("tcp", "shm", "c10d")  # that take workers which are started one by one, on one host


class WorldFailed(Exception):
    """A world did not start."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What a kill led to."""

    victim: int
    phase: str  # what the victim was doing
    step: int
    noticed_s: dict[int, float]  # by survivor: from the kill to its PeerLost
    ended_s: dict[int, float]  # by survivor: from the kill to the end of its process
    during: dict[int, str]  # by survivor: the collective that its PeerLost names
    problems: list[str]


def kill_one(job: Job, *, world: int, within_s: float, pause_s: float, chance: random.Random) -> Kill:
    """Start a world, kill a random worker within ``pause_s`` of its first steps, and wait for the others.

    Blocks until all workers have ended; ends those that do not do so themselves. Raises WorldFailed.
    """
    files = set(os.listdir(SHARED_FILES))
    with _started(job, world) as (workers, results, phases, steps):
        _wait_until_warm(workers, results, steps)
        time.sleep(chance.uniform(0.0, pause_s))
        victim = chance.randrange(world)
        pid = workers[victim].pid
        assert pid is not None, "a started process has an id"
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        ended_s = _wait_for_ends(workers, killed_s, within_s)
        reports = {rank: _received(results[rank]) for rank in range(world) if rank != victim}
        problems = _problems_of(reports, ended_s, victim, killed_s, within_s)
        pids = [worker.pid for worker in workers if worker.pid is not None]
        phase, step = PHASES[phases[victim]], int(steps[victim])
    problems += _left_behind(pids, files)
    return Kill(
        victim=victim,
        phase=phase,
        step=step,
        noticed_s={rank: report.raised_s - killed_s for rank, report in reports.items() if report is not None},
        ended_s={rank: seconds for rank, seconds in ended_s.items() if rank != victim},
        during={rank: report.during for rank, report in reports.items() if report is not None},
        problems=problems,
    )


@contextlib.contextmanager
def _started(job: Job, world: int) -> Iterator[tuple[list[ForkServerProcess], list[Connection], Any, Any]]:
    """The processes of a world, what they send, what each is doing, and the steps that each has done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__])
    phases, steps = context.RawArray("b", world), context.RawArray("q", world)
    workers, results = [], []
    try:
        for environment in rank_environments(world):
            receiving, sending = context.Pipe(duplex=False)
            worker = context.Process(target=work, args=(job, environment, phases, steps, sending), daemon=True)
            worker.start()
            sending.close()  # or a dead worker's end would stay open here
            workers.append(worker)
            results.append(receiving)
        yield workers, results, phases, steps
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
        for receiving in results:
            receiving.close()


def _wait_until_warm(workers: Sequence[ForkServerProcess], results: Sequence[Connection], steps: Any) -> None:
    end_s = time.monotonic() + START_S
    while min(steps) < WARM_STEPS:
        ended = [rank for rank, worker in enumerate(workers) if not worker.is_alive()]
        if ended:
            report = _received(results[ended[0]])
            raise WorldFailed(f"rank {ended[0]} ended before a worker was killed: {report}")
        if time.monotonic() > end_s:
            raise WorldFailed(f"the workers have done {list(steps)} steps in {START_S:.0f} s; expected {WARM_STEPS}.")
        time.sleep(0.005)


def _wait_for_ends(workers: Sequence[ForkServerProcess], since_s: float, within_s: float) -> dict[int, float]:
    """When each worker ended, of those that did so in time."""
    running = {worker.sentinel: rank for rank, worker in enumerate(workers)}
    ended_s: dict[int, float] = {}
    end_s = since_s + 2 * within_s  # later than it is allowed: so it is seen how late they are
    while running and (left_s := end_s - time.monotonic()) > 0:
        for sentinel in wait(list(running), timeout=left_s):
            assert isinstance(sentinel, int), "a sentinel was given"
            ended_s[running.pop(sentinel)] = time.monotonic() - since_s
    return ended_s


def _received(results: Connection) -> Report | None:
    """A worker's report; None: it has sent none."""
    try:
        report: Report | None = results.recv() if results.poll() else None
    except EOFError:
        return None
    return report


def _problems_of(
    reports: dict[int, Report | None], ended_s: dict[int, float], victim: int, killed_s: float, within_s: float
) -> list[str]:
    problems = []
    for rank, report in reports.items():
        if rank not in ended_s:
            problems.append(f"rank {rank} has not ended {2 * within_s:.1f} s after rank {victim} was killed")
        if report is None:
            problems.append(f"rank {rank} has reported nothing after rank {victim} was killed")
        elif report.ranks != (victim,):
            problems.append(f"rank {rank} must name rank {victim}; it raised {report.error}: {report.text}")
        elif report.raised_s - killed_s > within_s:
            problems.append(f"rank {rank} took {report.raised_s - killed_s:.1f} s to name rank {victim}")
    return problems


def _left_behind(pids: Sequence[int], files: set[str]) -> list[str]:
    """The processes of the workers' groups, and the new files of /dev/shm, that are still there."""
    end_s = time.monotonic() + LEFT_S
    while True:
        left = [f"process group {pid} is left" for pid in pids if _has_processes(pid)]
        left += [f"{SHARED_FILES / name} is left" for name in sorted(set(os.listdir(SHARED_FILES)) - files)]
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.01)


def _has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# -- the report -------------------------------------------------------------------------------------------------------


def summarize(kills: Sequence[Kill]) -> dict[str, Any]:
    """Medians and maxima over all survivors, and what the victims were doing."""
    spans: dict[str, dict[str, float]] = {}
    for name in ("noticed_s", "ended_s"):
        seconds = [second for kill in kills for second in getattr(kill, name).values()]
        spans[name] = {"median": statistics.median(seconds), "max": max(seconds)} if seconds else {}
    return {
        "kills": len(kills),
        "survivors": sum(len(kill.noticed_s) for kill in kills),
        "kills_with_problems": sum(bool(kill.problems) for kill in kills),
        **spans,
        "phases": dict(Counter(kill.phase for kill in kills)),
        "during": dict(Counter(what for kill in kills for what in kill.during.values())),
    }


def table_of(options: argparse.Namespace, summary: dict[str, Any]) -> Table:
    """The summary as a table."""
    title = f"{options.transport}, {options.strategy}, {options.world} workers, {summary['kills']} kills"
    table = Table(title=title, show_header=False)
    table.add_row("survivors that reported", f"{summary['survivors']}")
    table.add_row("kills with a problem", f"{summary['kills_with_problems']}")
    for name, what in (("noticed_s", "from the kill to PeerLost"), ("ended_s", "from the kill to the survivor's end")):
        span = summary[name]
        table.add_row(what, f"median {span['median']:.3f} s, max {span['max']:.3f} s" if span else "-")
    for name, what in (("phases", "the victim was in"), ("during", "survivors were in")):
        counts = sorted(summary[name].items(), key=lambda item: -item[1])
        table.add_row(what, ", ".join(f"{key or 'no collective'} {count}" for key, count in counts))
    return table


# -- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Whether every survivor names a killed worker, and how soon.")
    parser.add_argument("--kills", type=int, default=50, help="each in a world of its own (default: 50)")
    parser.add_argument("--transport", default="tcp", help=f"of {', '.join(TRANSPORTS)} (default: tcp)")
    parser.add_argument("--strategy", default="allreduce", help="of gradsync.synchronize (default: allreduce)")
    parser.add_argument("--world", type=int, default=3, help="workers (default: 3)")
    parser.add_argument("--layers", type=int, default=4, help="of 4 MiB of gradients each (default: 4)")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="of the communicator (default: 10)")
    parser.add_argument("--within-s", type=float, default=5.0, help="in which survivors must raise (default: 5)")
    parser.add_argument("--pause-s", type=float, default=0.5, help="the kill is within this time (default: 0.5)")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    add_saving(parser, files="JSON")
    options = parser.parse_args(arguments)
    for name, least in (("kills", 1), ("world", 2), ("layers", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be {least} or more; got {getattr(options, name)}.")
    if options.transport not in TRANSPORTS:
        parser.error(f"--transport must be of {', '.join(TRANSPORTS)}; got {options.transport!r}.")
    try:
        spec.parse(options.strategy, kind="strategy")
    except ValueError as error:
        parser.error(f"--strategy: {error}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill workers, print the table, write the JSON; exit with 1 if a survivor did not do what it must."""
    options = parse(arguments)
    reporting = Reporting("kills", arguments)
    job = Job(
        transport=options.transport, strategy=options.strategy, layers=options.layers, timeout_s=options.timeout_s
    )
    chance = random.Random(options.seed)
    kills: list[Kill] = []
    with reporting.counting(options.kills) as begin:
        for number in range(options.kills):
            begin(f"kill {number + 1}")
            try:
                kill = kill_one(
                    job, world=options.world, within_s=options.within_s, pause_s=options.pause_s, chance=chance
                )
            except WorldFailed as error:
                reporting.fail(error)
            kills.append(kill)
            for problem in kill.problems:
                reporting.console.print(f"kill {number + 1}: {problem}", markup=False)
    summary = summarize(kills)
    reporting.console.print(table_of(options, summary))
    if not options.no_save:
        found = {"job": dataclasses.asdict(job), "world": options.world, "seed": options.seed, "summary": summary}
        reporting.write(options.output, {**found, "each": [dataclasses.asdict(kill) for kill in kills]})
    if summary["kills_with_problems"]:
        reporting.fail(f"{summary['kills_with_problems']} of {len(kills)} kills did not end as they must.")


if __name__ == "__main__":
    main()
