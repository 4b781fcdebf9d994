"""The options of elastic runs: what is refused before any worker starts, and with which words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gradsync.cli.launch.elastic_options import ElasticSettings
from gradsync.cli.launch.folder_lock import FolderLock
from gradsync.cli.main import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('no worker should have started')")
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments], prog_name="gradsync")


TWO_NODES = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", "29500"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--min", "2"], "--min is for elastic runs; got no --elastic. Give --elastic too."),
        (["--max", "2"], "--max is for elastic runs"),
        (["--restart-delay-s", "1"], "--restart-delay-s is for elastic runs"),
        (["--grace-s", "1"], "--grace-s is for elastic runs"),
        (["--resume", "state"], "--resume is for elastic runs"),
        (["--save-every-s", "9"], "--save-every-s is for elastic runs"),
        (["--elastic", "--save-every-s", "9"], "got no --resume. Give --resume DIR too."),
        (["--elastic", "--resume", "/proc/none"], "expected a folder that can be written to; got /proc/none"),
        (["--store", "a:1"], "--store is for elastic runs"),
        (["--on-partition", "pause"], "--on-partition is for elastic runs"),
        (["--partition-timeout-s", "9"], "--partition-timeout-s is for elastic runs"),
        (["--elastic", "--on-partition", "split"], "'split' is not one of 'pause', 'diverge'"),
        (["--elastic", "--partition-timeout-s", "-1"], "-1.0 is not in the range x>=0"),
        (["--chaos", "kill 1/30s"], "--chaos is for elastic runs"),
        (["--chaos-seed", "1"], "--chaos-seed is for elastic runs"),
        (["--elastic", "--keep-going"], "got --keep-going too. Choose one."),
        (["--elastic", "--servers", "1"], "got --servers too. Choose one."),
        (["--elastic", "--min", "0"], "0 is not in the range x>=1"),
        (["--elastic", "-n", "2", "--max", "1"], "expected --max of at least 2, the workers with which the run begins"),
        (["--elastic", "-n", "2", "--min", "3"], "expected --min of at most 2, the most workers that can come"),
        (["--elastic", "--redirects", "3"], "--redirects has no place in an elastic run"),
        (["--elastic", "--log-dir", "logs"], "Use --prefix, and redirect the launcher's output"),
        (["--elastic", "--no-python"], "--no-python has no place in an elastic run"),
        (["--elastic", "--rdzv-backend", "c10d"], "Give --master-addr and --master-port"),
        (["--elastic", "--shutdown-timeout", "3"], "workers may take --grace-s to leave"),
        (["--elastic", "--nnodes", "x"], "expected N or MIN:MAX"),
        (["--elastic", "--nnodes", "3:2"], "expected"),
        (["--elastic", "--nnodes", "2"], "expected the address of node 0 for --nnodes 2; got none"),
        (["--elastic", "--nnodes", "2", "--store", "node0"], "expected HOST:PORT, as in node0:29500; got 'node0'"),
        (["--elastic", "--nnodes", "2", "--store", "node0:0"], "expected HOST:PORT"),
        (["--elastic", *TWO_NODES, "--store", "node0:29500"], "got both. Choose one."),
        (["--elastic", *TWO_NODES, "--standalone"], "--standalone is for one node"),
        (["--elastic", *TWO_NODES, "--node-rank", "-1"], "expected 0, 1, ...; got -1"),
        (["--elastic", "--store", "node0:29500"], "--store is for several nodes"),
        (["--elastic", "--master-port", "29500"], "--master-addr and --master-port is for several nodes"),
        (["--elastic", "--chaos", "burn 1/3s"], "expected one of the faults kill, stop, cut; got 'burn'"),
        (["--elastic", "--chaos", "cut 1/3s"], "this run has one node"),
        (["--elastic", "--chaos-seed", "1"], "got no --chaos. Give --chaos too."),
    ],
)
def test_elastic_options_are_refused(
    script: str, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    result = run(*arguments, script)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_folder_lock_is_held_by_inheriting_processes(tmp_path: Path) -> None:
    with FolderLock(tmp_path, wait_s=0.0) as lock:
        worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=lock.descriptors)
    with worker, pytest.raises(click.ClickException, match="another run uses"), FolderLock(tmp_path, wait_s=0.2):
        pass
    assert worker.poll() == 1  # it has ended, without a line to read
    with FolderLock(tmp_path, wait_s=0.0):
        pass


def test_elastic_cut_needs_root(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = run("--elastic", *TWO_NODES, "--chaos", "cut 1/60s", script)
    assert result.exit_code == 2
    assert "--chaos 'cut' is not possible here: it needs" in result.output


def test_elastic_options_and_their_defaults(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ElasticSettings] = []

    def record(settings: ElasticSettings, command: list[str], folder: Path) -> int:
        made.append(settings)
        return 0

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("gradsync.cli.run.run_elastic", record)
    assert run("--elastic", "-n", "3", script).exit_code == 0
    assert (
        run("--elastic", "-n", "2", "--nnodes", "2:4", "--store", "[::1]:29500", "--min", "3", "--max-restarts", "0",
            "--restart-delay-s", "0", "--grace-s", "5", "--chaos", "stop 1/9s", "--chaos-seed", "4", "--timeout-s", "7",
            script).exit_code == 0
    )  # fmt: skip
    one, several = made
    assert (one.workers, one.min_workers, one.max_workers, one.address, one.node_rank) == (3, 1, 3, None, None)
    assert (one.max_restarts, one.restart_delay_s, one.grace_s, one.faults) == (100, 0.1, 30.0, ())
    assert (several.min_nodes, several.max_nodes, several.address) == (2, 4, ("::1", 29500))
    assert (several.min_workers, several.max_workers) == (3, 8)
    assert (several.max_restarts, several.restart_delay_s, several.grace_s) == (0, 0.0, 5.0)
    assert (several.faults[0].mean_s, several.chaos_seed, several.longest_fault_s) == (9.0, 4, 14.0)


def test_elastic_options_have_a_section_in_the_help_of_run_only() -> None:
    shown = CliRunner().invoke(main, ["run", "--help"]).output
    ours, elastic, _ = shown.replace("torchrun's options:", "Elastic runs:").split("Elastic runs:")
    assert "--elastic" in elastic
    assert "--grace-s" in elastic
    assert "--elastic" not in ours
    assert "--elastic" not in CliRunner().invoke(main, ["profile", "--help"]).output
