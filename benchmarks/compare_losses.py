"""Whether a refactor changes no bits: the same seeded trainings in an old checkout and in this one.

    git worktree add --detach /tmp/old COMMIT
    python benchmarks/compare_losses.py --old /tmp/old

Every case of workers/losses.py (a strategy, a codec, a setting) is trained for 20 steps in every world: a transport and
a number of workers. A cell of the table says "same" if the losses of all ranks are the same bits in both checkouts, and
the parameters, buffers, optimizer state and saved state that they leave behind are too. Otherwise it names the first
step whose loss differs, or what differs after the last step. The exit code is then 1.

What is not deterministic is trained by one worker only: hogwild, asynchronous gossip and parameter servers with a
staleness above 0. With more workers the order of their messages decides the result, in every version. ``auto`` is
trained by at most two, with bucket sizes that are given: what else it could choose, it would choose by measured times.
When a cell differs, the old checkout is run once more. If it also differs from itself, the cell says "not repeatable",
and the exit code does not count it.

The hierarchical transport runs on two hosts made of network namespaces. Where these can't be had (they need root on
Linux), its column is left out; so is that of mpi where there is no mpirun.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

from rich.table import Table  # noqa: E402

from benchmarks.support.launch import environment, is_checkout, python_path, rank_environments  # noqa: E402
from benchmarks.support.mpirun import cores, find_mpirun, mpirun_command  # noqa: E402
from benchmarks.support.reporting import Reporting, describe_machine  # noqa: E402
from benchmarks.workers.losses import CASES, CASES_FILE, DIGESTS, Case  # noqa: E402
from gradsync.testing import Lab, LabError, lab_unavailable_reason, run_commands  # noqa: E402

SAME = "same"
NOT_REPEATABLE = "not repeatable"
MAX_FAILURES = 3  # of cases in one world; then the rest of them is given up
LOG_LINES = 12
MASTER_PORT = 29500  # of a lab, where no other program runs
# All-reduce algorithms by size in bytes, so that every one of them sums some bucket.
ALGORITHMS = [[2048, "tree"], [6144, "doubling"], [20480, "halving"], [40960, "direct"], [None, "ring"]]


@dataclass(frozen=True, kw_only=True)
class World:
    """A transport, and how many workers it connects."""

    transport: str
    workers: int
    hosts: int = 1
    algorithms: bool = False  # gradsync's own all-reduce algorithms take the place of the transport's

    @property
    def name(self) -> str:
        """As the table's columns show it."""
        return f"{self.transport} {self.workers}" + (" algorithms" if self.algorithms else "")

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return 1 if self.transport == "threads" else self.workers

    def runs(self, case: Case) -> bool:
        """Whether the case gives the same bits at every run here."""
        return case.max_workers is None or self.workers <= case.max_workers


WORLDS = (
    World(transport="solo", workers=1),
    World(transport="threads", workers=2),
    World(transport="shm", workers=2),
    World(transport="shm", workers=3),
    World(transport="c10d", workers=2),
    World(transport="c10d", workers=3, algorithms=True),
    World(transport="mpi", workers=2),
    World(transport="hierarchical", workers=4, hosts=2),
)


@dataclass(frozen=True)
class Outcome:
    """What one case gave in one world: a record of each rank, or why there is none."""

    ranks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


# -- running a checkout ------------------------------------------------------------------------------------------------


def run_world(world: World, checkout: Path, cases: Sequence[str], *, timeout_s: float) -> dict[str, Outcome]:
    """Train all cases in one launch; block until it has ended. After a case that fails, a new launch runs the rest."""
    found: dict[str, Outcome] = {}
    failures = 0
    while missing := [case for case in cases if case not in found]:
        if failures == MAX_FAILURES:
            found |= dict.fromkeys(missing, Outcome(error=f"not run: {failures} cases before it have failed"))
            break
        with tempfile.TemporaryDirectory(prefix="gradsync-losses-") as name:
            folder = Path(name)
            (folder / CASES_FILE).write_text(json.dumps(missing))
            error = launch(world, checkout, folder, timeout_s=timeout_s)
            found |= read_outcomes(folder, world.workers)
        missing = [case for case in missing if case not in found]
        if missing:
            found[missing[0]] = Outcome(error=error or "the workers ended without a result")
            failures += 1
    return found


def launch(world: World, checkout: Path, folder: Path, *, timeout_s: float) -> str:
    """Run the workers of a world; block until they have ended. Returns what went wrong; empty if nothing did."""
    env = {
        "PYTHONPATH": python_path(checkout),
        "PYTHONSAFEPATH": "1",  # the current folder may be a checkout too
        "MKL_CBWR": "COMPATIBLE",  # otherwise the bits of a product depend on where its factors lie in memory
        "XDG_CONFIG_HOME": str(folder),  # no table of all-reduce algorithms other than ours
    }
    if world.algorithms:
        table = folder / "algorithms.json"
        table.write_text(json.dumps(algorithm_table(world)))
        env["GRADSYNC_COLLECTIVES"] = str(table)
    worker = ["-m", "benchmarks.workers.losses", "--transport", world.transport, "--workers", str(world.workers)]
    worker += ["--checkout", str(checkout), "--folder", str(folder)]
    logs = [folder / f"{number}.log" for number in range(world.workers)]
    try:
        if world.hosts > 1:
            _run_on_hosts(world, worker, env, timeout_s=timeout_s, logs=logs)
        else:
            command, places = _command_and_places(world, worker)
            envs = [place | env for place in places]
            run_commands([command] * len(envs), envs=envs, timeout_s=timeout_s, logs=logs[: len(envs)])
    except LabError as error:
        lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()[-LOG_LINES:]]
        return "\n".join([str(error), *lines])
    return ""


def _command_and_places(world: World, worker: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """The command that starts workers on this host, and the environment of each process that it is started in."""
    if world.transport == "mpi":
        mpirun = find_mpirun()
        assert mpirun is not None, "available_worlds() leaves mpi out where there is no mpirun"
        return [*mpirun_command(mpirun, world.workers), sys.executable, *worker], [environment()]
    return [sys.executable, *worker], rank_environments(world.workers) if world.processes > 1 else [environment()]


def _run_on_hosts(
    world: World, worker: Sequence[str], env: Mapping[str, str], *, timeout_s: float, logs: Sequence[Path]
) -> None:
    with Lab(hosts=world.hosts) as lab:
        launcher = [sys.executable, "-m", "gradsync.cli.main", "run", "--nnodes", str(world.hosts)]
        launcher += ["-n", str(world.workers // world.hosts)]
        launcher += ["--master-addr", lab.address(0), "--master-port", str(MASTER_PORT)]
        commands = [[*launcher, "--node-rank", str(host), *worker] for host in range(world.hosts)]
        lab.run(commands, env=environment() | dict(env), timeout_s=timeout_s, logs=logs[: world.hosts])


def algorithm_table(world: World) -> dict[str, Any]:
    """A file of ``gradsync tune-comm`` that chooses every algorithm for some size."""
    table = {"transport": world.transport, "world_size": world.workers, "num_hosts": world.hosts}
    return {"format": 1, "tables": [table | {"host": "any", "num_cores": 1, "rules": ALGORITHMS}]}


def read_outcomes(folder: Path, workers: int) -> dict[str, Outcome]:
    """The cases that every rank has finished."""
    ranks: list[dict[str, dict[str, Any]]] = []
    for rank in range(workers):
        file = folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        ranks.append({record["case"]: record for record in map(json.loads, lines)})
    finished = [case for case in ranks[0] if all(case in records for records in ranks)]
    return {case: Outcome(ranks=[records[case] for records in ranks]) for case in finished}


# -- comparing ---------------------------------------------------------------------------------------------------------


def first_difference(old: Outcome, new: Outcome) -> str:
    """``SAME``, or the first step (from 1) at which a rank's losses differ, or what differs after the last step."""
    failed = [name for name, outcome in (("old", old), ("new", new)) if outcome.error]
    if failed:
        return f"failed in {' and '.join(failed)}"
    pairs = list(zip(old.ranks, new.ranks, strict=True))
    steps = [step for one, other in pairs if (step := _first_step(one["losses"], other["losses"])) is not None]
    if steps:
        return f"step {min(steps)}"
    for part in DIGESTS:
        if any(one["digests"][part] != other["digests"][part] for one, other in pairs):
            return part
    return SAME


def _first_step(old: Sequence[str], new: Sequence[str]) -> int | None:
    for step, (one, other) in enumerate(zip(old, new, strict=False), start=1):
        if one != other:
            return step
    return None if len(old) == len(new) else min(len(old), len(new)) + 1


def compare_world(
    world: World, old: Path, new: Path, cases: Sequence[str], *, timeout_s: float
) -> tuple[dict[str, str], dict[str, str]]:
    """The verdict on every case in one world, and the log of each that has failed."""
    # Both checkouts at once if there are cores for it. Most of the time goes into importing torch.
    with ThreadPoolExecutor(max_workers=2 if cores() >= 2 * world.processes else 1) as pool:
        outcomes = list(pool.map(lambda checkout: run_world(world, checkout, cases, timeout_s=timeout_s), (old, new)))
    verdicts = {case: first_difference(outcomes[0][case], outcomes[1][case]) for case in cases}
    logs = {case: outcome.error for found in outcomes for case, outcome in found.items() if outcome.error}
    doubted = [case for case, verdict in verdicts.items() if verdict != SAME and case not in logs]
    if doubted:
        again = run_world(world, old, doubted, timeout_s=timeout_s)
        for case in doubted:
            if first_difference(outcomes[0][case], again[case]) != SAME:
                verdicts[case] = NOT_REPEATABLE
    return verdicts, logs


# -- the command line --------------------------------------------------------------------------------------------------


def available_worlds(transports: Sequence[str]) -> tuple[list[World], dict[str, str]]:
    """The worlds of these transports that this machine can run, and why it can't run the others."""
    lacks: dict[str, str] = {}
    if "mpi" in transports and find_mpirun() is None:
        lacks["mpi"] = "there is no mpirun; the extra [dev] brings one"
    if "hierarchical" in transports and (lack := lab_unavailable_reason()) is not None:
        lacks["hierarchical"] = lack
    return [world for world in WORLDS if world.transport in transports and world.transport not in lacks], lacks


def describe_checkout(checkout: Path) -> dict[str, Any]:
    """Its commit, and whether its sources have been changed since."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    return {"commit": git("rev-parse", "HEAD"), "modified": git("status", "--porcelain", "--", "src") != ""}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    transports = list(dict.fromkeys(world.transport for world in WORLDS))
    parser = argparse.ArgumentParser(description="Whether a refactor changes no bits: old and new train alike.")
    parser.add_argument("--old", type=Path, required=True, help="a checkout of the version to compare with")
    parser.add_argument("--new", type=Path, default=PROJECT, help="the other checkout (default: this one)")
    parser.add_argument("--transports", default=",".join(transports), help="which ones (default: all)")
    parser.add_argument("--only", default="", help="only cases whose name has this text in it")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for one launch of workers (default: 600)")
    parser.add_argument("--json", type=Path, help="a file for the result")
    options = parser.parse_args(arguments)
    options.transports = options.transports.split(",")
    unknown = [name for name in options.transports if name not in transports]
    if unknown:
        parser.error(f"--transports must be of {', '.join(transports)}; got {', '.join(unknown)}.")
    for option in ("old", "new"):
        checkout = getattr(options, option)
        if not is_checkout(checkout):
            parser.error(f"--{option} must be a checkout, with src/gradsync in it; got {checkout}.")
    options.cases = [case for case in CASES if options.only in case.name]
    if not options.cases:
        parser.error(f"--only must be a part of a case's name, such as int8; got {options.only!r}.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all worlds, print the table and end with code 1 if anything differs."""
    options = parse(arguments)
    started, began_s = datetime.now(UTC), time.monotonic()
    console = Reporting("losses", arguments).console
    old, new = options.old.resolve(), options.new.resolve()
    worlds, lacks = available_worlds(options.transports)
    verdicts: dict[str, dict[str, str]] = {}
    logs: dict[str, str] = {}
    for world in worlds:
        cases = [case.name for case in options.cases if world.runs(case)]
        with console.status(f"{world.name}: {len(cases)} cases in both checkouts"):
            verdicts[world.name], failed = compare_world(world, old, new, cases, timeout_s=options.timeout_s)
        logs |= {case: f"{world.name}: {case}\n{log}" for case, log in failed.items() if case not in logs}
    taken_s = time.monotonic() - began_s
    console.print(table_of([case.name for case in options.cases], verdicts))
    for log in logs.values():  # of each case that failed, in the first world in which it did
        console.print(log, "\n", markup=False, highlight=False)
    for transport, lack in lacks.items():
        console.print(f"{transport} is left out: {lack}", markup=False)
    found = [verdict for column in verdicts.values() for verdict in column.values()]
    different = [verdict for verdict in found if verdict not in (SAME, NOT_REPEATABLE)]
    console.print(
        f"{found.count(SAME)} of {len(found)} are the same, {len(different)} differ or failed, "
        f"{found.count(NOT_REPEATABLE)} are not repeatable; {taken_s:.0f} s."
    )
    if options.json is not None:
        report = {
            "date": started.isoformat(timespec="seconds"),
            "command": shlex.join(["python", "benchmarks/compare_losses.py", *(arguments or sys.argv[1:])]),
            "machine": describe_machine(),
            "old": describe_checkout(old),
            "new": describe_checkout(new),
            "seconds": round(taken_s, 1),
            "left_out": lacks,
            "verdicts": verdicts,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
        console.print(f"Written to {options.json}")
    if different:
        sys.exit(1)


def table_of(cases: Sequence[str], verdicts: Mapping[str, Mapping[str, str]]) -> Table:
    """A row for each case, a column for each world."""
    table = Table(title="Losses and final state, bit for bit: the old checkout against the new one")
    table.add_column("case", overflow="fold")
    for world in verdicts:
        table.add_column(world)
    for case in cases:
        table.add_row(case.replace("[", r"\["), *(column.get(case, "-") for column in verdicts.values()))
    return table


if __name__ == "__main__":
    main()
