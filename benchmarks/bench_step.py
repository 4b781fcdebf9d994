"""What a training step costs: compute only, DDP, ZeRO and gradsync, interleaved in one run, on links of chosen rates.

    python benchmarks/bench_step.py --links same,1gbit
    python benchmarks/bench_step.py --model resnet --links same --world 2,4,8
    python benchmarks/bench_step.py --optimizer adamw --links 1gbit --hosts 2 --ranks-per-host 2

Workers of one thread train a transformer of 16.9 M parameters on 4 x 64 tokens each (68 MB of gradients a step), a
ResNet of 155 small tensors, or GPT-2. Every worker holds every variant. Every round times all variants, in a rotating
order, so that other load on the machine affects all alike. Read the ratios and their intervals, and compare times only
within one run.

The bound of a step is max(compute, wire). Wire is the time that a host's link, full duplex, needs for the bytes of an
exact float32 sum over n hosts, 2(n-1)/n of the gradients; or, for a variant that sends less, for the bytes that the
interface counted. Compute is the variant `compute`, or `compute_adam` for those that train with AdamW regardless of
--optimizer. A variant that shards the optimizer computes less than that, so it can be below the bound.

Memory is by how much the resident set of a rank has grown at most while the variant was built and took its first steps.
"""

from __future__ import annotations

import argparse
import importlib.util
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

from benchmarks.support.bounds import exact_wire_bytes, step_bounds  # noqa: E402
from benchmarks.support.cluster import DEFAULT_WORLD, Cluster  # noqa: E402
from benchmarks.support.paired import PairedRatio, paired_ratio  # noqa: E402
from benchmarks.support.reporting import RESULTS, Reporting  # noqa: E402
from benchmarks.workers.step import VARIANTS  # noqa: E402
from benchmarks.workers.step_model import MODELS  # noqa: E402
from benchmarks.workers.step_optimizer import OPTIMIZERS  # noqa: E402
from gradsync.testing import LabError  # noqa: E402

WIDTH = 200  # the table has many columns
COMPUTE = ("compute", "compute_adam")
BASELINES = {"ddp": "DDP's", "compute": "compute's", "compute_adam": "AdamW's"}  # the others go by their own name
Summary = dict[str, dict[str, Any]]  # by variant


def measure(cluster: Cluster, variants: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers on one cluster, block until they have ended, and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "measured.json"
        command = [sys.executable, "-m", "benchmarks.workers.step", "--variants", ",".join(variants)]
        command += ["--model", options.model, "--optimizer", options.optimizer]
        command += ["--rounds", str(options.rounds), "--steps", str(options.steps), "--out", str(out)]
        cluster.run(command, timeout_s=options.timeout_s)
        measured: dict[str, Any] = json.loads(out.read_text())
        return measured


def summarize(
    measured: dict[str, Any], cluster: Cluster, *, means: bool = False, baselines: Sequence[str] = tuple(BASELINES)
) -> Summary:
    """Reduce each variant's steps to medians, and each round to ratios to the baselines and the bound of that round.

    means: use means in place of medians, for variants that communicate in a few steps only.
    """
    middle = statistics.fmean if means else statistics.median
    rounds = {name: [middle(block) for block in blocks] for name, blocks in measured["step_s"].items()}
    summary: Summary = {}
    for name, blocks in measured["step_s"].items():
        sent = statistics.median(measured["sent_bytes_per_step"][name])
        compute = COMPUTE[1] if VARIANTS[name].adam and COMPUTE[1] in rounds else COMPUTE[0]
        wire_bytes = 0.0
        if name not in COMPUTE:
            exact = exact_wire_bytes(measured["gradient_bytes"], cluster.hosts)
            wire_bytes = sent if VARIANTS[name].sends_less else exact
        bounds = step_bounds(rounds[compute], wire_bytes, cluster) if compute in rounds else None
        summary[name] = {
            "median_step_s": statistics.median(seconds for block in blocks for seconds in block),
            "mean_step_s": statistics.fmean(seconds for block in blocks for seconds in block),
            # Loopback carries the traffic of all ranks, an interface of a lab that of one host.
            "sent_bytes_per_step": None if cluster.on_this_host else round(sent),
            "peak_bytes": measured["peak_bytes"][name],
            "optimizer_state_bytes": measured["optimizer_state_bytes"][name],
            "bound_s": None if bounds is None else statistics.median(bounds),
            "ratio_to_bound": None if bounds is None else paired_ratio(rounds[name], bounds).as_dict(),
        }
        for baseline in baselines:
            measured_too = name != baseline and baseline in rounds
            ratio = paired_ratio(rounds[name], rounds[baseline]).as_dict() if measured_too else None
            summary[name][f"ratio_to_{baseline}"] = ratio
    return summary


def table_of(
    summaries: dict[str, Summary], *, title: str, means: bool = False, baselines: Sequence[str] = tuple(BASELINES)
) -> Table:
    """The table of all clusters; the bytes are those that the interface of one host sent in a step."""
    measured = {name for summary in summaries.values() for name in summary}
    baselines = [baseline for baseline in baselines if baseline in measured]
    middle = "mean" if means else "median"
    table = Table(title=title)
    for column in ("link", "variant"):
        table.add_column(column)
    for column in (f"{middle} step, ms", *(_title_of_ratio(name) for name in baselines), "bound, ms", "times bound"):
        table.add_column(column, justify="right")
    for column in ("sent, MB", "memory, MB", "optimizer state, MB"):
        table.add_column(column, justify="right")
    for cluster, summary in summaries.items():
        for name, row in summary.items():
            ratios = [row[f"ratio_to_{baseline}"] for baseline in baselines]
            shown = ["" if ratio is None else str(PairedRatio(**ratio)) for ratio in ratios]
            bound = ["", ""]
            if row["bound_s"] is not None:
                bound = [f"{row['bound_s'] * 1e3:.0f}", f"{row['ratio_to_bound']['ratio']:.2f}"]
            sizes = [row["sent_bytes_per_step"], row["peak_bytes"], row["optimizer_state_bytes"]]
            megabytes = ["" if size is None else f"{size / 1e6:.1f}" for size in sizes]
            step_ms = f"{row[f'{middle}_step_s'] * 1e3:.0f}"
            table.add_row(cluster, VARIANTS[name].title, step_ms, *shown, *bound, *megabytes)
        table.add_section()
    return table


def _title_of_ratio(baseline: str) -> str:
    return f"times {BASELINES.get(baseline, baseline)} (95 %)"


def title_of(measured: dict[str, Any], *, model: str, optimizer: str) -> str:
    """The heading of the table: what is trained, and how many bytes of gradients it has."""
    size, tensors = measured["gradient_bytes"], measured["num_tensors"]
    what = f"{MODELS[model].title} of {size / 4e6:.1f} M parameters in {tensors} tensors"
    return f"A training step: {what}, {size / 1e6:.0f} MB of gradients, {OPTIMIZERS[optimizer][0].__name__}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="What a training step costs: compute only, DDP, ZeRO, gradsync.")
    parser.add_argument(
        "--links", default="same,1gbit", help='"same" host, "unlimited", or a rate (default: same,1gbit)'
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="gpt",
        help="gpt: 16.9 M parameters; resnet: 155 small tensors; gpt2: 124 M parameters, about 1.5 GB a rank and "
        "variant; tiny: to try the options (default: gpt)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="of all variants but those with adam in their names, which train with AdamW (default: sgd)",
    )
    parser.add_argument("--variants", default="compute,ddp,gradsync,gradsync_shm", help=f"of {','.join(VARIANTS)}")
    parser.add_argument(
        "--baselines",
        default=",".join(BASELINES),
        help=f"variants that the others are compared with, where they are measured (default: {','.join(BASELINES)})",
    )
    parser.add_argument("--world", help="numbers of ranks, such as 2,4,8 (default: 2)")
    parser.add_argument("--hosts", type=int, help="hosts in a lab, in place of --world: hosts x ranks per host")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks on each host of a lab (default: 1)")
    parser.add_argument("--rounds", type=int, default=20, help="pairs for the interval (default: 20)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a variant in a round (default: 5)")
    parser.add_argument("--means", action="store_true", help="compare means of steps instead of medians")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for each link (default: 1800)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args(arguments)
    for several in ("variants", "baselines"):
        names = getattr(options, several).split(",")
        setattr(options, several, names)
        unknown = [name for name in names if name not in VARIANTS]
        if unknown:
            parser.error(f"--{several} must be of {', '.join(VARIANTS)}; got {', '.join(unknown)}.")
    for name in options.variants:
        package = VARIANTS[name].needs
        if package and importlib.util.find_spec(package) is None:
            parser.error(f"--variants {name} needs {package}, which is not installed. Try: pip install {package}")
    if options.rounds < 3:
        parser.error(f"--rounds must be 3 or more, for an interval; got {options.rounds}.")
    if options.hosts is not None and options.world is not None:
        parser.error("--hosts and --world both say how many ranks there are; got both. Give one of them.")
    try:
        options.clusters = clusters_of(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def clusters_of(options: argparse.Namespace) -> list[Cluster]:
    """Every link with every number of ranks. Raises ValueError."""
    if options.hosts is not None:
        worlds = [options.hosts * options.ranks_per_host]
    else:
        worlds = [_whole(world) for world in (options.world or str(DEFAULT_WORLD)).split(",")]
    return [
        Cluster(link=link, world=world, ranks_per_host=options.ranks_per_host)
        for link in options.links.split(",")
        for world in worlds
    ]


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--world must be whole numbers, such as 2,4,8; got {text!r}.")
    return int(text)


def runs_on(name: str, cluster: Cluster) -> bool:
    """Whether a variant can run on a cluster."""
    variant = VARIANTS[name]
    if variant.hierarchical:
        return 1 < cluster.hosts < cluster.world
    return cluster.on_this_host or not variant.one_host_only


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every cluster, print the table and write the JSON."""
    options = parse(arguments)
    reporting = Reporting("step", arguments, log_width=WIDTH)
    found: dict[str, Any] = {}
    summaries: dict[str, Summary] = {}
    title = ""
    for cluster in options.clusters:
        variants = [name for name in options.variants if runs_on(name, cluster)]
        blocks = f"{options.rounds} rounds of {options.steps} steps of {', '.join(variants)}"
        with reporting.console.status(f"{cluster.name}: {blocks}"):
            try:
                measured = measure(cluster, variants, options)
            except LabError as error:
                reporting.fail(f"{cluster.name}: {error}")
        found[cluster.name] = measured
        summaries[cluster.name] = summarize(measured, cluster, means=options.means, baselines=options.baselines)
        title = title_of(measured, model=options.model, optimizer=options.optimizer)
    reporting.console.print(table_of(summaries, title=title, means=options.means, baselines=options.baselines))
    setting = {"model": options.model, "optimizer": options.optimizer}
    reporting.write(options.results, {**setting, "summary": summaries, "measured": found})


if __name__ == "__main__":
    main()
