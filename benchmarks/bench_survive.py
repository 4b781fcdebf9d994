"""Whether an elastic run goes on exactly while its workers are killed, and what each kill costs.

    python benchmarks/bench_survive.py --kills 50 --strategy allreduce
    python benchmarks/bench_survive.py --kills 50 --strategy "allreduce(codec=int8)" --hosts 2
    python benchmarks/bench_survive.py --kills 20 --torchft OTHER_VENV/bin/python

`gradsync run --elastic` trains a small model in float64. Random workers, the one with rank 0 and the heartbeat's hub
included, get SIGKILL at random moments, by seed; the launcher starts new ones. Afterwards is checked:

- every step was committed once, and each of its samples was trained in it once. A step that was begun with one set of
  members and discarded is done again with the next set; what counts is the last attempt. A worker that was killed
  between a step and its line in the log misses there: only the last line before a change of members may miss;
- the final parameters are those of an undisturbed run in one process, for exact strategies, to 1e-9;
- the *stall*: from a kill to the next committed step, less a usual step.

"What the kill times allow": a kill discards at most the one step that is under way. So of all attempts at a step,
at most one per kill may have been discarded. The table has both shares, and their difference in points.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

import torch  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.support.reporting import Reporting, add_saving  # noqa: E402
from benchmarks.workers.survive import BATCH, NUM_SAMPLES  # noqa: E402
from gradsync import spec  # noqa: E402
from gradsync.testing import Lab  # noqa: E402

SCRIPT = PROJECT / "benchmarks" / "workers" / "survive.py"
TORCHFT_SCRIPT = SCRIPT.with_name("survive_torchft.py")
EXACT = 1e-9
ALLOWED_POINTS = 0.5
STEPS_AN_EPOCH = NUM_SAMPLES // BATCH
READY_S = 120.0
MARGIN_S = 120.0  # beyond the kills, for the run to end


@dataclass(frozen=True)
class Kill:
    """One kill, and what followed."""

    uid: str
    was_rank_0: bool
    at_s: float
    stall_s: float  # from the kill to the next committed step, less the median step


class RunFailed(Exception):
    """The run did not come to its end."""


def run(options: argparse.Namespace, folder: Path, begin: Any) -> tuple[list[tuple[str, bool, float]], str]:
    """Train and kill; returns the kills (uid, whether it had rank 0, when) and the launcher's output."""
    chance = random.Random(options.seed)
    kills: list[tuple[str, bool, float]] = []
    with _launched(options, folder) as (launchers, log):
        end_s = time.monotonic() + READY_S
        while len(_alive(folder)) < options.workers:
            _check_running(launchers, log, end_s, "the workers were not ready in time")
            time.sleep(0.05)
        for _ in range(options.kills):
            begin(f"kill {len(kills) + 1}")
            wait_s = chance.expovariate(1 / options.gap_s)
            time.sleep(wait_s)
            end_s = time.monotonic() + READY_S
            killed = {uid for uid, _, _ in kills}  # the system may still be ending the last one
            while len(alive := _alive(folder, without=killed)) < options.min:
                _check_running(launchers, log, end_s, "no worker came back")
                time.sleep(0.02)
            first = min(alive, key=lambda uid: int(uid.partition(".")[0]))
            uid = chance.choice(sorted(alive))
            with contextlib.suppress(ProcessLookupError):
                os.kill(alive[uid], signal.SIGKILL)
                kills.append((uid, uid == first, time.time()))
            if any(launcher.poll() is not None for launcher in launchers):
                break  # it has come to its end before all kills
        end_s = time.monotonic() + MARGIN_S + options.kills * 2.0
        while any(launcher.poll() is None for launcher in launchers):
            if time.monotonic() > end_s:
                raise RunFailed(f"the run has not ended:\n{log.read_text()[-4000:]}")
            time.sleep(0.05)
        codes = [launcher.returncode for launcher in launchers]
        if any(codes):
            raise RunFailed(f"the launchers ended with {codes}:\n{log.read_text()[-4000:]}")
        return kills, log.read_text()


@contextlib.contextmanager
def _launched(options: argparse.Namespace, folder: Path) -> Iterator[tuple[list[subprocess.Popen[bytes]], Path]]:
    """The launchers: one, or one on each host of a lab."""
    log = folder / "launcher.log"
    script = [str(SCRIPT), str(folder), "--strategy", options.strategy, "--epochs", str(options.epochs)]
    script += ["--step-s", str(options.step_s)]
    module = "benchmarks.workers.forking" if options.fork else "gradsync.cli.main"
    common = [sys.executable, "-m", module, "run", "--elastic", "--timeout-s", str(options.timeout_s)]
    common += ["--max-restarts", str(options.kills + 10), "--restart-delay-s", "0"]
    paths = f"{PROJECT / 'src'}:{PROJECT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    launchers: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open(log, "ab"))
        per_host = options.workers // options.hosts
        if options.torchft:
            script[0] = str(TORCHFT_SCRIPT)
            commands = [[options.torchft, *script[:2], "--supervise", str(options.workers), *script[4:]]]
        elif options.hosts == 1:
            commands = [[*common, "-n", str(per_host), *script]]
        else:
            lab = stack.enter_context(Lab(hosts=options.hosts))
            commands = []
            for host in range(options.hosts):
                nodes = ["--nnodes", str(options.hosts), "--node-rank", str(host), "--master-addr", lab.address(0)]
                inside = ["ip", "netns", "exec", lab.namespace(host)]
                commands.append([*inside, *common, *nodes, "--master-port", "29500", "-n", str(per_host), *script])
        try:
            for command in commands:
                launchers.append(
                    subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
                )
            yield launchers, log
        finally:
            for launcher in launchers:
                if launcher.poll() is None:
                    launcher.terminate()
            for launcher in launchers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(10)
                if launcher.poll() is None:
                    launcher.kill()


def _check_running(launchers: Sequence[subprocess.Popen[bytes]], log: Path, end_s: float, why: str) -> None:
    if time.monotonic() > end_s:
        raise RunFailed(f"{why}:\n{log.read_text()[-4000:]}")
    for launcher in launchers:
        if launcher.poll() not in (None, 0):
            raise RunFailed(f"a launcher ended with {launcher.returncode}:\n{log.read_text()[-4000:]}")


def _alive(folder: Path, without: Collection[str] = ()) -> dict[str, int]:
    """The processes of the workers that train, by uid."""
    found = {}
    for path in folder.glob("ready.*"):
        uid, text = path.name.removeprefix("ready."), path.read_text()
        if text and uid not in without and not _is_over(int(text)):
            found[uid] = int(text)
    return found


def _is_over(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


# -- what came of it --------------------------------------------------------------------------------------------------


def check(
    options: argparse.Namespace, folder: Path, kills: Sequence[tuple[str, bool, float]]
) -> tuple[dict[str, Any], list[Kill]]:
    """Compare what was trained with what should have been."""
    lines = _lines(folder)
    attempts = {(line["step"], line["members"]) for line in lines}
    ended = [line for line in lines if "samples" in line]
    committed: dict[int, int] = {}  # the members, by number, with which each step was made
    for line in ended:
        committed[line["step"]] = max(committed.get(line["step"], 0), line["members"])
    ended = [line for line in ended if line["members"] == committed[line["step"]]]
    trained: dict[int, Counter[int]] = {}
    for line in ended:
        trained.setdefault(line["step"], Counter()).update(line["samples"])
    missing = unexplained = 0
    per_epoch: dict[int, Counter[int]] = {}
    for step, samples in trained.items():
        per_epoch.setdefault((step - 1) // STEPS_AN_EPOCH, Counter()).update(samples)
        absent = BATCH - len(samples)
        missing += absent
        if committed.get(step + 1) == committed[step]:
            unexplained += absent  # nobody was lost between this step and the next
    discarded = len(attempts) - len(committed)
    found, stalls = _stalls(ended, kills)
    summary: dict[str, Any] = {
        "kills": len(kills),
        "kills_of_rank_0": sum(was_first for _, was_first, _ in kills),
        "steps": len(committed),
        "expected_steps": options.epochs * STEPS_AN_EPOCH,
        "times_begun_anew": _times_begun_anew(lines),
        "samples_twice": sum(sum(samples.values()) - len(samples) for samples in per_epoch.values()),
        "samples_missing_in_logs_of_killed_workers": missing - unexplained,
        "samples_missing": unexplained,
        "discarded_attempts": discarded,
        "committed_percent": 100 * len(committed) / len(attempts),
        "points_below_what_kills_allow": 100 * (discarded - len(kills)) / len(attempts),
        **stalls,
    }
    if options.strategy == "allreduce":
        summary["largest_difference"] = _difference(options, folder)
    return summary, found


def check_torchft(
    options: argparse.Namespace, folder: Path, kills: Sequence[tuple[str, bool, float]]
) -> tuple[dict[str, Any], list[Kill]]:
    """The same figures of a run of torchft, whose loaders go on after a discarded step, and begin anew in newcomers."""
    lines = _lines(folder)
    ended = [line for line in lines if not line["discarded"]]
    steps = {line["step"] for line in ended}
    trained: Counter[tuple[int, int]] = Counter()
    for line in ended:
        trained.update((line["epoch"], sample) for sample in line["samples"])
    drawn = {(line["epoch"], sample) for line in lines for sample in line["samples"]}
    found, stalls = _stalls(ended, kills)
    summary = {
        "kills": len(kills),
        "steps": len(steps),
        "expected_steps": options.epochs * STEPS_AN_EPOCH,
        "samples_of_a_step": sum(len(line["samples"]) for line in ended) / max(1, len(steps)),
        "samples_expected_in_a_step": BATCH,
        "samples_twice": sum(trained.values()) - len(trained),
        "samples_drawn_and_lost": len(drawn - set(trained)),
        "discarded_steps_of_workers": len(lines) - len(ended),
        **stalls,
    }
    return summary, found


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in folder.glob("steps.*")
        for line in path.read_text().splitlines()
        if line.endswith("}")  # the last one of a killed worker may be cut off
    ]


def _times_begun_anew(lines: Sequence[dict[str, Any]]) -> int:
    """How often an epoch began more than a step before the last one had ended: its members had lost the state."""
    steps: dict[int, list[int]] = {}
    for line in lines:
        steps.setdefault(line["members"], []).append(line["step"])
    newest = times = 0
    for members in sorted(steps):
        times += min(steps[members]) < newest
        newest = max(steps[members])
    return times


def _stalls(
    ended: Sequence[dict[str, Any]], kills: Sequence[tuple[str, bool, float]]
) -> tuple[list[Kill], dict[str, float | None]]:
    """What each kill cost, and a summary."""
    times = sorted({line["step"]: line["at_s"] for line in sorted(ended, key=lambda line: -line["at_s"])}.items())
    usual_s = statistics.median(later - earlier for (_, earlier), (_, later) in itertools.pairwise(times))
    found = []
    for uid, was_first, at_s in kills:
        after = [seconds for _, seconds in times if seconds > at_s]
        if after:
            found.append(Kill(uid, was_first, at_s, max(0.0, min(after) - at_s - usual_s)))
    stalls = sorted(kill.stall_s for kill in found)
    return found, {
        "usual_step_s": usual_s,
        "stall_median_s": statistics.median(stalls) if stalls else None,
        "stall_95_s": stalls[min(len(stalls) - 1, int(0.95 * len(stalls)))] if stalls else None,
        "stall_max_s": stalls[-1] if stalls else None,
    }


def _difference(options: argparse.Namespace, folder: Path) -> float:
    """The largest difference of a final parameter from that of an undisturbed run in one process."""
    alone = folder / "alone"
    alone.mkdir()
    command = [sys.executable, str(SCRIPT), str(alone), "--epochs", str(options.epochs), "--step-s", "0"]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    one, other = (torch.load(path / "final.pt", weights_only=True) for path in (folder, alone))
    if one["lr"] != other["lr"]:
        return float("inf")
    return max(float((one["model"][name] - value).abs().max()) for name, value in other["model"].items())


def problems(summary: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    found = []
    if summary["steps"] != summary["expected_steps"]:
        found.append(f"{summary['steps']} steps were committed; expected {summary['expected_steps']}.")
    if summary["times_begun_anew"]:
        found.append(f"training began anew {summary['times_begun_anew']} times, though some workers were alive.")
    if summary["samples_twice"]:
        found.append(f"{summary['samples_twice']} samples were trained twice.")
    if summary["samples_missing"]:
        found.append(f"{summary['samples_missing']} samples are in no log, and nobody was lost in their step.")
    if summary["points_below_what_kills_allow"] > ALLOWED_POINTS:
        found.append(f"{summary['discarded_attempts']} attempts were discarded, in {summary['kills']} kills.")
    if summary.get("largest_difference", 0.0) > EXACT:
        found.append(f"parameters differ by {summary['largest_difference']:.2e} from the undisturbed run's.")
    return found


def table_of(options: argparse.Namespace, summary: dict[str, Any]) -> Table:
    """The summary as a table."""
    what = "torchft" if options.torchft else options.strategy
    title = f"{what}, {options.workers} workers on {options.hosts} host(s), {summary['kills']} kills"
    table = Table(title=title, show_header=False)
    for name, value in summary.items():
        table.add_row(name.replace("_", " "), f"{value:.3g}" if isinstance(value, float) else str(value))
    return table


# -- the command line -------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Whether an elastic run goes on exactly while workers are killed.")
    parser.add_argument("--kills", type=int, default=30, help="(default: 30)")
    parser.add_argument("--gap-s", type=float, default=3.0, help="the mean time between two kills (default: 3)")
    parser.add_argument("--workers", type=int, default=4, help="in all (default: 4)")
    parser.add_argument("--hosts", type=int, default=1, help="network namespaces; 1: none (default: 1)")
    parser.add_argument("--min", type=int, default=2, help="kill only while so many train (default: 2)")
    parser.add_argument("--strategy", default="allreduce", help="of gradsync.synchronize (default: allreduce)")
    parser.add_argument("--step-s", type=float, default=0.05, help="the time that a step computes (default: 0.05)")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="of the run (default: 10)")
    parser.add_argument("--fork", action="store_true", help="fork the workers: they start without importing torch")
    parser.add_argument(
        "--torchft", metavar="PYTHON", default="", help="train with torchft instead: a Python that has torchft 0.2.0"
    )
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments (default: 0)")
    add_saving(parser, files="JSON")
    options = parser.parse_args(arguments)
    for name in ("kills", "workers", "hosts"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more; got {getattr(options, name)}.")
    if not 1 <= options.min <= options.workers:
        parser.error(f"--min must be from 1 to --workers; got {options.min}.")
    if options.torchft and not Path(options.torchft).is_file():
        parser.error(f"--torchft: expected a Python; there is none at {options.torchft!r}.")
    if options.torchft and options.hosts > 1:
        parser.error(f"--torchft runs on one host; got --hosts {options.hosts}.")
    try:
        spec.parse(options.strategy, kind="strategy")
    except ValueError as error:
        parser.error(f"--strategy: {error}")
    if options.workers % options.hosts:
        parser.error(f"--workers must be a multiple of --hosts; got {options.workers} and {options.hosts}.")
    # Long enough for all kills, and some steps beyond: each kill takes a gap, and a little for those who come back.
    back_s = 0.3 if options.fork else 1.0
    steps = options.kills * (options.gap_s + back_s) / (options.step_s + 0.01)
    options.epochs = max(2, round(steps / STEPS_AN_EPOCH))
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print the table, write the JSON; exit with 1 if something is not as it must be."""
    options = parse(arguments)
    reporting = Reporting("survive", arguments)
    with tempfile.TemporaryDirectory(prefix="gradsync_survive_") as name, reporting.counting(options.kills) as begin:
        folder = Path(name)
        try:
            kills, log = run(options, folder, begin)
        except RunFailed as error:
            reporting.fail(error)
        summary, each = (check_torchft if options.torchft else check)(options, folder, kills)
    reporting.console.print(table_of(options, summary))
    found = [] if options.torchft else problems(summary)
    for problem in found:
        reporting.console.print(problem, markup=False)
    if not options.no_save:
        given = {name: value for name, value in vars(options).items() if isinstance(value, str | int | float)}
        reporting.write(options.output, {**given, "summary": summary, "each": [asdict(kill) for kill in each]})
    if found:
        reporting.console.print(log[-3000:], markup=False)
        reporting.fail(f"{len(found)} problem(s).")


if __name__ == "__main__":
    main()
