"""Whether step records are accurate, and what recording costs.

    python benchmarks/bench_recording.py              # both, some 3 minutes on 2 cores; root for the link
    python benchmarks/bench_recording.py --only truth

Truth: steps with a planted sleep, a link of known rate, a single worker; the records are compared with the planted
times and with a stopwatch. Cost: training steps with and without recording, alternating in one process.
Writes a dated JSON to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from rich.table import Table  # noqa: E402

from benchmarks.support.launch import run_in_lab, run_on_this_host  # noqa: E402
from benchmarks.support.paired import paired_ratio  # noqa: E402
from benchmarks.support.reporting import RESULTS, Reporting  # noqa: E402
from gradsync.profiling import Breakdown, load  # noqa: E402
from gradsync.testing import LabError  # noqa: E402

COMPUTE_MS, LATE_MS = 100.0, 100.0
RATE_BITS, RATE_NUMEL = 200e6, 1_250_000  # 200 Mbit/s, 5 MB of gradients
ALLOWED = 0.05
Case = Callable[[Path, list[str]], list[dict[str, Any]]]


def run(arguments: Sequence[str], *, workers: int, timeout_s: float, rate: str | None = None) -> None:
    """Run the worker in several processes; in a lab, on links of a rate, if one is given."""
    command = [sys.executable, "-m", "benchmarks.workers.recording", *arguments]
    if rate is not None:
        run_in_lab(command, workers=workers, timeout_s=timeout_s, rate=rate)
    else:
        run_on_this_host(command, workers=workers, timeout_s=timeout_s)


def stopwatch(folder: Path, rank: int, what: str) -> list[float]:
    """The times that a worker has measured itself, step by step."""
    values: list[float] = json.loads((folder / f"stopwatch-{rank}.json").read_text())[what]
    return values


def planted(name: str, folder: Path, rank: int, expected_s: dict[str, float]) -> list[dict[str, Any]]:
    """Compare the medians recorded on a rank with the planted times, and the sum of the parts with the stopwatch."""
    steps = load(folder).typical(rank)
    measured_s = statistics.median(stopwatch(folder, rank, "step_s")[step.step] for step in steps)
    whole_s = statistics.median(step.parts.step_s for step in steps)
    about = {"case": name, "rank": rank}
    rows: list[dict[str, Any]] = [
        {**about, "what": "sum of the parts", "expected_s": measured_s, "recorded_s": whole_s}
    ]
    for part, seconds in expected_s.items():
        recorded_s = statistics.median(float(getattr(step.parts, f"{part}_s")) for step in steps)
        rows.append({**about, "what": part, "expected_s": seconds, "recorded_s": recorded_s})
    for row in rows:
        row["error"] = row["recorded_s"] / row["expected_s"] - 1.0
    return rows


def truth(cases: Sequence[str], *, steps: int) -> list[dict[str, Any]]:
    """Plant, record and compare: a late rank, a link of a known rate, a single worker."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        with tempfile.TemporaryDirectory() as made:
            rows += CASES[case](Path(made), ["--compute-ms", str(COMPUTE_MS), "--steps", str(steps), "--out", made])
    return rows


def _late(transport: str) -> Case:
    def measure(folder: Path, common: list[str]) -> list[dict[str, Any]]:
        late = ["--late-ms", str(LATE_MS), "--transport", transport]
        run(["plant", *common, *late], workers=2, timeout_s=120.0)
        first_s, last_s = (stopwatch(folder, rank, "paused_s") for rank in range(2))
        late_s = statistics.median(last - first for first, last in zip(first_s[2:], last_s[2:], strict=True))
        name, quick = f"a late rank, {transport}", {"compute": statistics.median(first_s), "waiting": late_s}
        return planted(name, folder, 0, quick) + planted(name, folder, 1, {"compute": statistics.median(last_s)})

    return measure


def _link(folder: Path, common: list[str]) -> list[dict[str, Any]]:
    rate = f"{RATE_BITS / 1e6:.0f}mbit"
    run(["plant", *common, "--numel", str(RATE_NUMEL)], workers=2, timeout_s=120.0, rate=rate)
    sent = statistics.median(stopwatch(folder, 0, "sent_bytes")[2:])
    return planted(f"a link of {rate}", folder, 0, {"wire": sent * 8 / RATE_BITS})


def _alone(folder: Path, common: list[str]) -> list[dict[str, Any]]:
    run(["plant", *common], workers=1, timeout_s=120.0)
    rows = planted("nothing to send", folder, 0, {"compute": statistics.median(stopwatch(folder, 0, "paused_s"))})
    parts = Breakdown.mean([step.parts for step in load(folder).typical(0)])
    stopped_s = parts.waiting_s + parts.wire_s
    about = {"case": "nothing to send", "rank": 0, "what": "waiting and wire", "expected_s": 0.0}
    # An error relative to 0 has no percentage: it is given as a share of the step.
    return [*rows, {**about, "recorded_s": stopped_s, "error": stopped_s / parts.step_s}]


CASES: dict[str, Case] = {"late_c10d": _late("c10d"), "late_shm": _late("shm"), "link": _link, "alone": _alone}


def overhead(kinds: Sequence[str], *, rounds: int, steps: int) -> dict[str, Any]:
    """The ratio of steps with recording to steps without, with and without files, by wall time and by CPU time."""
    found: dict[str, Any] = {}
    for name in kinds:
        extra = ["--files"] if name == "files" else []
        with tempfile.TemporaryDirectory() as made:
            sizes = ["--rounds", str(rounds), "--steps", str(steps), "--out", made]
            run(["overhead", *sizes, *extra], workers=2, timeout_s=900.0)
            measured = json.loads((Path(made) / "overhead.json").read_text())
        found[name] = {"step_s": statistics.median(s for block in measured["wall_s"]["silent"] for s in block)}
        for clock in ("wall_s", "cpu_s"):
            medians = {kind: [statistics.median(block) for block in blocks] for kind, blocks in measured[clock].items()}
            found[name][clock] = paired_ratio(medians["recorded"], medians["silent"]).as_dict()
        found[name]["measured"] = measured
    return found


def truth_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The table of recorded and planted times; an error that is too large is red."""
    table = Table(title="recorded against planted")
    for column in ("case", "rank", "what", "expected, ms", "recorded, ms", "off by"):
        table.add_column(column, justify="left" if column in ("case", "what") else "right")
    for row in rows:
        style = "" if abs(row["error"]) <= (0.02 if row["what"] == "sum of the parts" else ALLOWED) else "red"
        times = [f"{1e3 * row[key]:.2f}" for key in ("expected_s", "recorded_s")]
        table.add_row(row["case"], str(row["rank"]), row["what"], *times, f"{row['error']:+.1%}", style=style)
    return table


def overhead_table(found: dict[str, Any]) -> Table:
    """The table of what recording costs."""
    table = Table(title="a step with recording, over one without (95 %)")
    for column in ("what", "step, ms", "by the clock", "by the processor's"):
        table.add_column(column)
    for name, row in found.items():
        ratios = [f"{row[c]['ratio']:.4f} ({row[c]['low']:.4f}-{row[c]['high']:.4f})" for c in ("wall_s", "cpu_s")]
        table.add_row(name, f"{1e3 * row['step_s']:.1f}", *ratios)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description="Whether step records are accurate, and what recording costs.")
    parser.add_argument("--only", choices=("truth", "overhead"))
    parser.add_argument("--rounds", type=int, default=20, help="of the cost (default: 20)")
    parser.add_argument("--steps", type=int, default=10, help="timed in each round (default: 10)")
    parser.add_argument("--planted-steps", type=int, default=30, help="of each truth (default: 30)")
    parser.add_argument("--kinds", default="memory,files", help="where records go (default: memory,files)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of the truth (default: {','.join(CASES)})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args(arguments)
    reporting = Reporting("recording", arguments)
    found: dict[str, Any] = {}
    try:
        if options.only != "overhead":
            found["truth"] = truth(options.cases.split(","), steps=options.planted_steps)
            reporting.console.print(truth_table(found["truth"]))
        if options.only != "truth":
            found["overhead"] = overhead(options.kinds.split(","), rounds=options.rounds, steps=options.steps)
            reporting.console.print(overhead_table(found["overhead"]))
    except LabError as error:
        reporting.fail(error)
    reporting.write(options.results, found)


if __name__ == "__main__":
    main()
