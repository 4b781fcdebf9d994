"""Whether a change has made a step slower: an old checkout and this one, alternating in one run.

    git worktree add --detach /tmp/old COMMIT
    python benchmarks/bench_versions.py --old /tmp/old

Each version has workers of its own: two, or in cases such as 2x4 two hosts of four each. Every round times both
versions, in alternating order, while the other's workers sleep. The step is that of bench_step.py. Read the ratios and
their intervals.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

from rich.table import Table  # noqa: E402

from benchmarks.support.launch import free_port, is_checkout, python_path, run_in_lab, run_on_this_host  # noqa: E402
from benchmarks.support.paired import paired_ratio  # noqa: E402
from benchmarks.support.reporting import RESULTS, Reporting  # noqa: E402
from benchmarks.workers.step_model import MODELS  # noqa: E402
from gradsync.testing import LabError  # noqa: E402


class Case(NamedTuple):
    """What both versions run: two hosts with a link between them, or one host."""

    link: str
    transport: str
    strategy: str
    ranks_per_host: int = 1

    @property
    def workers(self) -> int:
        return 2 * self.ranks_per_host


CASES = {
    "same_host": Case("same", "shm", "allreduce"),
    "int8_1gbit": Case("1gbit", "c10d", "allreduce(codec=int8)"),
    "int8_2x2_1gbit": Case("1gbit", "hierarchical", "allreduce(codec=int8)", ranks_per_host=2),
    "int8_2x4_1gbit": Case("1gbit", "hierarchical", "allreduce(codec=int8)", ranks_per_host=4),
    "exact_1gbit": Case("1gbit", "c10d", "allreduce"),
    "exact_tcp_1gbit": Case("1gbit", "tcp", "allreduce"),
    "sharded_tcp_1gbit": Case("1gbit", "tcp", "sharded"),
    "diloco_same_host": Case("same", "shm", "diloco(every=50)"),
}


def measure(
    case: str, versions: Sequence[Path], *, model: str, rounds: int, steps: int, timeout_s: float
) -> list[dict[str, Any]]:
    """Run both versions' workers in turns, block until all have ended, and return what rank 0 of each wrote."""
    chosen = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "turn"
        counter.write_text("0")
        outs = [Path(folder) / f"version{group}.json" for group in range(len(versions))]
        jobs: list[Callable[[], None]] = []
        for group, version in enumerate(versions):
            worker = [sys.executable, "-m", "benchmarks.workers.versions", "--model", model]
            worker += ["--transport", chosen.transport, "--strategy", chosen.strategy, "--group", str(group)]
            worker += ["--rounds", str(rounds), "--steps", str(steps)]
            worker += ["--counter", str(counter), "--out", str(outs[group]), "--timeout-s", str(timeout_s)]
            command = ["env", f"PYTHONPATH={python_path(version)}", f"MASTER_PORT={free_port()}", *worker]
            jobs.append(_running(command, chosen, timeout_s))
        run_at_once(jobs)
        return [json.loads(out.read_text()) for out in outs]


def _running(command: Sequence[str], case: Case, timeout_s: float) -> Callable[[], None]:
    if case.link == "same":
        return lambda: run_on_this_host(command, workers=case.workers, timeout_s=timeout_s)
    return lambda: run_in_lab(
        command, workers=case.workers, timeout_s=timeout_s, rate=case.link, ranks_per_host=case.ranks_per_host
    )


def run_at_once(jobs: Sequence[Callable[[], None]]) -> None:
    """Run each in a thread; raise the first error."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Whether a change has made a step slower: old and new in turns.")
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--cases", default="same_host,int8_1gbit", help=f"of {','.join(CASES)}")
    parser.add_argument("--model", choices=MODELS, default="gpt", help="of bench_step.py (default: gpt)")
    parser.add_argument("--rounds", type=int, default=40, help="pairs for the interval (default: 40)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a version in a round (default: 4)")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for each case (default: 1800)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args(arguments)
    options.cases = options.cases.split(",")
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"--cases must be of {', '.join(CASES)}; got {', '.join(unknown)}.")
    if not is_checkout(options.old):
        parser.error(f"--old must be a checkout, with src/gradsync in it; got {options.old}.")
    if options.rounds < 3:
        parser.error(f"--rounds must be 3 or more, for an interval; got {options.rounds}.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, print the table and write the JSON."""
    options = parse(arguments)
    reporting = Reporting("versions", arguments)
    table = Table(title="A training step: this version against an older one")
    for column in ("case", "old, ms", "new, ms", "new : old (95 %)", "same bits"):
        table.add_column(column)
    found: dict[str, Any] = {}
    for case in options.cases:
        with reporting.console.status(f"{case}: {options.rounds} rounds of {options.steps} steps of each version"):
            try:
                old, new = measure(
                    case,
                    [options.old.resolve(), PROJECT],
                    model=options.model,
                    rounds=options.rounds,
                    steps=options.steps,
                    timeout_s=options.timeout_s,
                )
            except LabError as error:
                reporting.fail(f"{case}: {error}")
        medians = [[statistics.median(block) for block in one["blocks"]] for one in (old, new)]
        ratio = paired_ratio(medians[1], medians[0])
        middle_ms = [statistics.median(values) * 1e3 for values in medians]
        same_bits = old["parameter_sums"] == new["parameter_sums"]
        table.add_row(case, *(f"{ms:.1f}" for ms in middle_ms), str(ratio), "yes" if same_bits else "no")
        found[case] = {"median_ms": middle_ms, "new_to_old": ratio.as_dict(), "same_bits": same_bits}
    reporting.console.print(table)
    reporting.write(options.results, {"summary": found})


if __name__ == "__main__":
    main()
