"""What a training step costs: compute only, DDP and gradsync, interleaved in one run, on links of chosen rates.

    python benchmarks/bench_step.py --links same,1gbit

Two workers of one thread train a transformer of 16.9 M parameters on 4 x 64 tokens each: 68 MB of gradients a step.
Both hold every variant. Every round times all variants, in a rotating order, so that other load on the machine affects
all alike. Read the ratios and their intervals, and compare times only within one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it also runs as a file, from anywhere

from rich.table import Table  # noqa: E402

from benchmarks.support.launch import run_in_lab, run_on_this_host  # noqa: E402
from benchmarks.support.paired import PairedRatio, paired_ratio  # noqa: E402
from benchmarks.support.reporting import RESULTS, Reporting  # noqa: E402
from benchmarks.workers.step import VARIANTS  # noqa: E402
from gradsync.testing import LabError  # noqa: E402

WORKERS = 2
SAME_HOST = "same"
BASELINES = ("ddp", "compute")


def measure(link: str, *, variants: Sequence[str], rounds: int, steps: int, timeout_s: float) -> dict[str, Any]:
    """Run the workers on one link, block until they have ended, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "benchmarks.workers.step", "--variants", ",".join(variants)]
        command += ["--rounds", str(rounds), "--steps", str(steps), "--out", str(out)]
        if link == SAME_HOST:
            run_on_this_host(command, workers=WORKERS, timeout_s=timeout_s)
        else:
            run_in_lab(command, workers=WORKERS, timeout_s=timeout_s, rate=None if link == "unlimited" else link)
        measured: dict[str, Any] = json.loads(out.read_text())
        return measured


def summarize(measured: dict[str, Any], *, counted: bool, means: bool = False) -> dict[str, dict[str, Any]]:
    """Reduce each variant's steps to medians, and each round to ratios to DDP's and compute-only steps of that round.

    counted: the interface carried only one worker's traffic (loopback carries that of all).
    means: use means in place of medians, for variants that communicate in a few steps only.
    """
    middle = statistics.fmean if means else statistics.median
    rounds = {name: [middle(block) for block in blocks] for name, blocks in measured["step_s"].items()}
    summary: dict[str, dict[str, Any]] = {}
    for name, blocks in measured["step_s"].items():
        sent = statistics.median(measured["sent_bytes_per_step"][name])
        summary[name] = {
            "median_step_s": statistics.median(seconds for block in blocks for seconds in block),
            "mean_step_s": statistics.fmean(seconds for block in blocks for seconds in block),
            "sent_bytes_per_step": round(sent) if counted else None,
        }
        for baseline in BASELINES:
            measured_too = name != baseline and baseline in rounds
            ratio = paired_ratio(rounds[name], rounds[baseline]).as_dict() if measured_too else None
            summary[name][f"ratio_to_{baseline}"] = ratio
    return summary


def table_of(summaries: dict[str, dict[str, dict[str, Any]]], *, means: bool = False) -> Table:
    """The table of all links: medians, and the bytes that one worker's interface sent in a step."""
    table = Table(title="A training step, 2 workers: 16.9 M parameters, 68 MB of gradients")
    for column in ("link", "variant"):
        table.add_column(column)
    for column in (
        f"{'mean' if means else 'median'} step, ms",
        "times DDP's (95 %)",
        "times compute's (95 %)",
        "sent, MB",
    ):
        table.add_column(column, justify="right")
    for link, summary in summaries.items():
        for name, row in summary.items():
            ratios = [row[f"ratio_to_{baseline}"] for baseline in BASELINES]
            shown = ["" if ratio is None else str(PairedRatio(**ratio)) for ratio in ratios]
            sent = "" if row["sent_bytes_per_step"] is None else f"{row['sent_bytes_per_step'] / 1e6:.1f}"
            middle = row["mean_step_s" if means else "median_step_s"]
            table.add_row(link, VARIANTS[name].title, f"{middle * 1e3:.0f}", *shown, sent)
        table.add_section()
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="What a training step costs: compute only, DDP, gradsync.")
    parser.add_argument(
        "--links", default="same,1gbit", help='"same" host, "unlimited", or a rate (default: same,1gbit)'
    )
    parser.add_argument("--variants", default="compute,ddp,gradsync,gradsync_shm", help=f"of {','.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, default=20, help="pairs for the interval (default: 20)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a variant in a round (default: 5)")
    parser.add_argument("--means", action="store_true", help="compare means of steps instead of medians")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for each link (default: 1800)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args(arguments)
    options.variants = options.variants.split(",")
    unknown = [name for name in options.variants if name not in VARIANTS]
    if unknown:
        parser.error(f"--variants must be of {', '.join(VARIANTS)}; got {', '.join(unknown)}.")
    if options.rounds < 3:
        parser.error(f"--rounds must be 3 or more, for an interval; got {options.rounds}.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every link, print the table and write the JSON."""
    options = parse(arguments)
    reporting = Reporting("step", arguments)
    links: dict[str, Any] = {}
    summaries: dict[str, dict[str, dict[str, Any]]] = {}
    for link in options.links.split(","):
        variants = [name for name in options.variants if link == SAME_HOST or not VARIANTS[name].one_host_only]
        blocks = f"{options.rounds} rounds of {options.steps} steps of {', '.join(variants)}"
        with reporting.console.status(f"{link}: {blocks}"):
            try:
                links[link] = measure(
                    link,
                    variants=variants,
                    rounds=options.rounds,
                    steps=options.steps,
                    timeout_s=options.timeout_s,
                )
            except LabError as error:
                reporting.fail(f"{link}: {error}")
        summaries[link] = summarize(links[link], counted=link != SAME_HOST, means=options.means)
    reporting.console.print(table_of(summaries, means=options.means))
    reporting.write(options.results, {"summary": summaries, "measured": links})


if __name__ == "__main__":
    main()
