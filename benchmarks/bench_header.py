"""What the step header costs a rank, by the number of ranks: reduced as it is now, and gathered as it was before.

    python benchmarks/bench_header.py

Ranks are threads of one process, so a thousand fit on any machine. One rank computes an all-reduce for all of them, in
rank order. The cost is CPU time of the whole process over ranks and exchanges: what the ranks do themselves and their
part of the all-reduce, in user mode, and the switches between threads, in the kernel. A rank switches more often the
more threads are ready to run, as each call of torch gives the interpreter lock away. Every round measures all numbers
of ranks, in a rotating order; the table has the medians. What a network adds is not in it.

A thread that waits for the interpreter lock wakes up once per switch interval (5 ms by default) to ask for it. With a
thousand waiting threads that would be most of the CPU time, so the interval is 0.5 s here. Threads that wait for other
ranks give the lock away at once, as always.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

import torch  # noqa: E402
from rich import box  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.support.reporting import Reporting, add_saving  # noqa: E402
from gradsync.comm import Communicator  # noqa: E402
from gradsync.replicas.header import NUM_VALUES, Header, HeaderExchange, find_odd_rank  # noqa: E402
from gradsync.testing import run_ranks  # noqa: E402

SWITCH_INTERVAL_S = 0.5
TIMEOUT_S = 300.0
WARM_UP = 2  # exchanges

Exchange = Callable[[Header, Communicator], None]
Seconds = dict[str, list[float]]  # of each round: "user" and "system"
Measured = dict[str, dict[int, Seconds]]  # by approach and number of ranks


def reduced(header: Header, comm: Communicator) -> None:
    """Two all-reduces, as gradsync does it."""
    HeaderExchange(header, comm).wait()


def gathered(header: Header, comm: Communicator) -> None:
    """One all-gather; every rank then makes an object for each rank and compares them."""
    rows = torch.empty(comm.world_size, NUM_VALUES, dtype=torch.float64)
    comm.all_gather(header.pack(), out=rows).wait()
    headers = [Header.unpack(values) for values in rows.tolist()]
    assert find_odd_rank(headers) is None, "all ranks are in step"


APPROACHES: dict[str, Exchange] = {"reduced": reduced, "gathered": gathered}


def cost_s(exchange: Exchange, ranks: int, exchanges: int) -> tuple[float, float]:
    """The CPU time of one exchange, per rank: in user mode, and in the kernel."""
    start = end = resource.getrusage(resource.RUSAGE_SELF)
    warm_up = WARM_UP if exchanges > 1 else 0  # a single one takes many seconds

    def rank_main(comm: Communicator) -> None:
        nonlocal start, end
        for step in range(-warm_up, exchanges):
            if step == 0:
                comm.barrier()
                if comm.rank == 0:
                    start = resource.getrusage(resource.RUSAGE_SELF)
                comm.barrier()
            exchange(Header(step=step, weight=8.0, num_backwards=1, fingerprint=77, has_data=True), comm)
        comm.barrier()
        if comm.rank == 0:
            end = resource.getrusage(resource.RUSAGE_SELF)
        comm.barrier()  # threads that end take time too

    run_ranks(ranks, rank_main, timeout_s=TIMEOUT_S)
    parts = ranks * exchanges
    return (end.ru_utime - start.ru_utime) / parts, (end.ru_stime - start.ru_stime) / parts


def num_exchanges(approach: str, ranks: int, total: int) -> int:
    """How many exchanges a round measures; each of `gathered` costs a rank ``ranks`` times as much."""
    return max(1, total // (ranks**2 if approach == "gathered" else ranks))


def measure(options: argparse.Namespace, report: Callable[[str], None]) -> Measured:
    """The costs of all approaches at all numbers of ranks, round by round."""
    cases = [(approach, ranks) for approach in options.approaches for ranks in options.ranks]
    measured: Measured = {
        approach: {ranks: {"user": [], "system": []} for ranks in options.ranks} for approach in options.approaches
    }
    with switch_interval(SWITCH_INTERVAL_S):
        for number in range(options.rounds):
            for at in range(len(cases)):
                approach, ranks = cases[(at + number) % len(cases)]
                report(f"{approach}, {ranks} ranks")
                exchanges = num_exchanges(approach, ranks, options.total)
                user_s, system_s = cost_s(APPROACHES[approach], ranks, exchanges)
                measured[approach][ranks]["user"].append(user_s)
                measured[approach][ranks]["system"].append(system_s)
    return measured


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Let threads hold the interpreter lock for so long while others ask for it."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def summarize(measured: Measured) -> dict[str, Any]:
    """The medians of each case, and how much dearer the dearest number of ranks is than the cheapest."""
    summary: dict[str, Any] = {}
    for approach, by_ranks in measured.items():
        totals = {ranks: _median_sum(each["user"], each["system"]) for ranks, each in by_ranks.items()}
        user = {ranks: statistics.median(each["user"]) for ranks, each in by_ranks.items()}
        summary[approach] = {
            "cpu_s": totals,
            "user_s": user,
            "spread": max(totals.values()) / min(totals.values()),
            "user_spread": max(user.values()) / min(user.values()),
        }
    return summary


def _median_sum(user: Sequence[float], system: Sequence[float]) -> float:
    return statistics.median(map(sum, zip(user, system, strict=True)))


def show(summary: Mapping[str, Any], ranks: Sequence[int]) -> Table:
    """The table of costs."""
    table = Table(box=box.SIMPLE, title="CPU time of one header exchange, µs per rank", title_justify="left")
    table.add_column("the headers are")
    for count in ranks:
        table.add_column(f"{count:,} ranks", justify="right")
    table.add_column("largest / smallest", justify="right")
    for approach, row in summary.items():
        for name, costs, spread in ((approach, "cpu_s", "spread"), ("- of it in user mode", "user_s", "user_spread")):
            table.add_row(name, *(f"{1e6 * row[costs][count]:,.0f}" for count in ranks), f"{row[spread]:.1f}")
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; exits with an error that names the fix."""
    parser = argparse.ArgumentParser(
        description="What the step header costs a rank, by the number of ranks. Ranks are threads of this process."
    )
    parser.add_argument("--ranks", default="2,64,1024", help="numbers of ranks (default: 2,64,1024)")
    parser.add_argument(
        "--approaches", default=",".join(APPROACHES), help=f"of {', '.join(APPROACHES)} (default: all of them)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each case is measured (default: 5)")
    parser.add_argument("--total", type=int, default=8192, help="exchanges of a round, times its ranks (default: 8192)")
    add_saving(parser, files="JSON")
    options = parser.parse_args(arguments)
    try:
        options.ranks = [int(count) for count in options.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks must be whole numbers, such as 2,64,1024; got {options.ranks!r}.")
    if min(options.ranks) < 2:
        parser.error(f"--ranks must be 2 or more; got {min(options.ranks)}.")
    options.approaches = options.approaches.split(",")
    if not set(options.approaches) <= set(APPROACHES):
        parser.error(f"--approaches must be of {', '.join(APPROACHES)}; got {', '.join(options.approaches)}.")
    if options.rounds < 1 or options.total < 1:
        parser.error(f"--rounds and --total must be 1 or more; got {options.rounds} and {options.total}.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the JSON."""
    options = parse(arguments)
    reporting = Reporting("header", arguments)
    with reporting.counting(options.rounds * len(options.approaches) * len(options.ranks)) as report:
        measured = measure(options, report)
    summary = summarize(measured)
    reporting.console.print(show(summary, options.ranks))
    if not options.no_save:
        reporting.write(options.output, {"measured_s": measured, "summary": summary})


if __name__ == "__main__":
    main()
