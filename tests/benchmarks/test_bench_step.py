"""bench_step: real runs of a tiny model with every option, and known times give known ratios and bounds."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench_step import VARIANTS, main, parse, runs_on, summarize
from benchmarks.support import cluster as cluster_module
from benchmarks.support.cluster import Cluster
from benchmarks.workers import step
from benchmarks.workers.step_model import MODELS
from benchmarks.workers.step_optimizer import make_plain, state_bytes
from benchmarks.workers.step_timing import step_of
from gradsync.testing import Lab
from tests.network.on_hosts import call_on_hosts
from tests.support.ranks import run_processes

TINY = ["--model", "tiny", "--rounds", "3", "--steps", "1"]
PRELOAD = ("benchmarks.workers.step",)
MODULE = ["-m", "benchmarks.workers.step"]


def _work(arguments: list[str]) -> None:
    sys.argv = ["step.py", *arguments]
    warnings.simplefilter("ignore", DeprecationWarning)  # of ZeroRedundancyOptimizer's import
    step.main()


def run_on_this_host(command: Sequence[str], *, workers: int, timeout_s: float) -> None:
    """As the benchmark's own, with workers that need not import torch."""
    assert command[1:3] == MODULE
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    run_processes(workers, _work, list(command[3:]), env=env, timeout_s=timeout_s, preload=PRELOAD)


def run_in_lab(
    command: Sequence[str], *, workers: int, timeout_s: float, rate: str | None, ranks_per_host: int = 1
) -> None:
    """As the benchmark's own, with workers that need not import torch."""
    assert command[1:3] == MODULE
    with Lab(hosts=workers // ranks_per_host, rate=rate) as lab:
        call_on_hosts(lab, _work, list(command[3:]), per_host=ranks_per_host, timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "run_on_this_host", run_on_this_host)
    monkeypatch.setattr(cluster_module, "run_in_lab", run_in_lab)


def run_bench(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run the benchmark; returns the JSON that it wrote."""
    main([*TINY, *arguments, "--results", str(folder), "--timeout-s", "150"])
    (written,) = folder.glob("*-step.json")
    report: dict[str, Any] = json.loads(written.read_text())
    return report


def test_bench_step_compares_worlds_on_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = ["compute", "compute_adam", "ddp", "ddp_view", "ddp_zero", "gradsync", "gradsync_shm"]
    options = ["--links", "same", "--world", "2,3", "--optimizer", "adamw", "--variants", ",".join(variants)]
    report = run_bench(options, tmp_path)
    shown = capsys.readouterr().out
    for expected in ("same, 3 ranks", "AdamW", "bound, ms", "times bound", "optimizer state, MB", "ZeroRedundancy"):
        assert expected in shown
    assert (report["model"], report["optimizer"]) == ("tiny", "adamw")
    assert list(report["summary"]) == ["same", "same, 3 ranks"]
    for summary in report["summary"].values():
        assert list(summary) == variants
        # The sharded optimizer of torch leaves each rank a part of the two moments.
        assert 0 < summary["ddp_zero"]["optimizer_state_bytes"] < summary["ddp"]["optimizer_state_bytes"]
        for name in variants:
            row = summary[name]
            assert row["peak_bytes"] >= 0
            assert row["sent_bytes_per_step"] is None
            assert row["bound_s"] > 0
            assert row["ratio_to_bound"]["num_pairs"] == 3


@pytest.mark.netns
def test_bench_step_counts_the_bytes_of_hosts_with_several_ranks(tmp_path: Path) -> None:
    variants = ["compute", "gradsync_shm", "gradsync_hierarchical", "int8_hierarchical"]
    options = ["--links", "100mbit", "--hosts", "2", "--ranks-per-host", "2", "--variants", ",".join(variants)]
    report = run_bench(options, tmp_path)
    summary = report["summary"]["100mbit, 2 hosts x 2 ranks"]
    assert list(summary) == ["compute", "gradsync_hierarchical", "int8_hierarchical"]  # shm needs one host
    gradients = report["measured"]["100mbit, 2 hosts x 2 ranks"]["gradient_bytes"]
    assert gradients == sum(param.nbytes for param in MODELS["tiny"].build().parameters())
    assert summary["gradsync_hierarchical"]["sent_bytes_per_step"] > gradients


def measured_of(step_s: dict[str, float], *, sent_bytes: int = 0, gradient_bytes: int = 0) -> dict[str, Any]:
    """Three rounds on a machine that gets slower: each variant takes its time, then twice and thrice that."""
    return {
        "step_s": {name: [[seconds * drift] for drift in (1, 2, 3)] for name, seconds in step_s.items()},
        "sent_bytes_per_step": {name: [sent_bytes] * 3 for name in step_s},
        "gradient_bytes": gradient_bytes,
        "peak_bytes": dict.fromkeys(step_s, 10),
        "optimizer_state_bytes": dict.fromkeys(step_s, 0),
    }


def test_bench_step_bound_is_compute_where_nothing_limits_the_link() -> None:
    measured = measured_of({"compute": 0.1, "ddp": 0.13}, gradient_bytes=10**9)
    for link in ("same", "unlimited"):
        row = summarize(measured, Cluster(link=link, world=2))["ddp"]
        assert row["bound_s"] == pytest.approx(0.2)
        assert row["ratio_to_bound"]["ratio"] == pytest.approx(1.3)
        assert row["ratio_to_compute"]["ratio"] == pytest.approx(1.3)


@pytest.mark.parametrize(
    ("world", "per_host", "wire_s"), [(2, 1, 1.0), (4, 1, 1.5), (8, 1, 1.75), (4, 2, 1.0), (8, 4, 1.0), (8, 2, 1.5)]
)
def test_bench_step_bound_of_exact_sums_counts_hosts(world: int, per_host: int, wire_s: float) -> None:
    measured = measured_of({"compute": 0.1, "ddp": 4.0}, gradient_bytes=125_000_000, sent_bytes=7)
    row = summarize(measured, Cluster(link="1gbit", world=world, ranks_per_host=per_host))["ddp"]
    assert row["bound_s"] == pytest.approx(wire_s)


def test_bench_step_bound_of_compressed_sums_counts_their_bytes() -> None:
    measured = measured_of({"compute": 0.1, "int8": 1.0}, gradient_bytes=125_000_000, sent_bytes=31_250_000)
    summary = summarize(measured, Cluster(link="1gbit", world=2))
    # Rounds of 0.1, 0.2 and 0.3 s of compute against 0.25 s on the wire.
    assert summary["int8"]["bound_s"] == pytest.approx(0.25)
    assert summary["compute"]["bound_s"] == pytest.approx(0.2)


def test_bench_step_bound_follows_the_optimizer() -> None:
    measured = measured_of({"compute": 0.1, "compute_adam": 0.2, "onebit_adam": 0.3, "ddp": 0.3})
    summary = summarize(measured, Cluster(link="same", world=2))
    assert summary["onebit_adam"]["ratio_to_bound"]["ratio"] == pytest.approx(1.5)
    assert summary["ddp"]["ratio_to_bound"]["ratio"] == pytest.approx(3.0)
    assert summary["onebit_adam"]["ratio_to_compute_adam"]["ratio"] == pytest.approx(1.5)


def test_bench_step_has_no_bound_without_compute() -> None:
    row = summarize(measured_of({"ddp": 0.3}), Cluster(link="same", world=2))["ddp"]
    assert (row["bound_s"], row["ratio_to_bound"]) == (None, None)


def test_bench_step_measures_every_link_with_every_world() -> None:
    options = parse(["--links", "same,1gbit", "--world", "2,4"])
    assert [cluster.name for cluster in options.clusters] == ["same", "same, 4 ranks", "1gbit", "1gbit, 4 hosts"]


def test_bench_step_leaves_out_variants_that_a_cluster_can_not_run() -> None:
    one_host, hosts = Cluster(link="same", world=4), Cluster(link="1gbit", world=4)
    both = Cluster(link="1gbit", world=4, ranks_per_host=2)
    found = {name: [runs_on(name, cluster) for cluster in (one_host, hosts, both)] for name in VARIANTS}
    assert found["gradsync_shm"] == [True, False, False]
    assert found["gradsync_hierarchical"] == [False, False, True]
    assert found["ddp"] == [True, True, True]


@pytest.mark.parametrize(("name", "tensors", "millions"), [("gpt", 52, 16.9), ("resnet", 155, 3.0), ("gpt2", 148, 124)])
def test_bench_step_model_has_its_size(name: str, tensors: int, millions: float) -> None:
    with torch.device("meta"):
        params = list(MODELS[name].build().parameters())
    assert len(params) == tensors
    assert sum(param.numel() for param in params) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("name", ["resnet", "tiny"])
def test_bench_step_model_learns_its_batch(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name].build(), MODELS[name].make_batch(torch.Generator().manual_seed(1))
    optimizer = make_plain(model.parameters(), "sgd")
    step = step_of(model, optimizer, batch)
    before = batch.loss(model).item()
    for _ in range(3):
        step()
    assert batch.loss(model).item() < before
    assert state_bytes(optimizer) == 0
