"""``gradsync run`` and ``gradsync info`` on the command line, where no worker needs to start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from gradsync import spec
from gradsync.cli.launch.capacity import free_bytes
from gradsync.cli.main import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('no worker should have started')")
    return str(path)


def gradsync(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="gradsync")


def test_version_and_help() -> None:
    assert gradsync("--version").output.startswith("gradsync, version ")
    assert {"run", "info"} <= set(gradsync("--help").output.split())


def test_run_help_lists_own_options_first_and_all_of_torchruns() -> None:
    shown = gradsync("run", "--help").output
    ours, torchruns = shown.split("torchrun's options:")
    for option in ("-n, --nproc-per-node", "-m, --module", "--sync SPEC", "--timeout-s", "--prefix", "--verbose"):
        assert option in ours
    for option in ("--nnodes", "--node-rank", "--rdzv-endpoint", "--master-port", "--max-restarts", "--standalone"):
        assert option in torchruns
    assert "_" not in "".join(word for word in shown.split() if word.startswith("--"))
    words = " ".join(ours.split())
    assert "[default: 1]" in words.partition("-m, --module")[0], "the default number of workers"
    builtin = [name for name in spec.names("strategy") if not name.startswith("test_")]  # other tests register theirs
    for name in (*builtin, "c10d, shm, hierarchical"):
        assert name in words


def test_run_warns_of_too_many_workers(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradsync.cli.run._launch", lambda *given, **named: 0)
    monkeypatch.setattr("gradsync.cli.run.free_bytes", lambda: 22 << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    many = " ".join(gradsync("run", "-n", "100", script).output.split())
    assert many.startswith("warning: 100 workers share 2 cores")
    assert "warning: 100 workers need at least 26 GiB of memory (each 270 MiB, without the model" in many
    assert gradsync("run", "-n", "2", script).output == ""


def test_free_bytes_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24000000 kB\nMemAvailable:       1000 kB\n")
    assert free_bytes(meminfo, tmp_path) == 1000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("70000\n")
    assert free_bytes(meminfo, tmp_path) == 1000 << 10
    (tmp_path / "memory.max").write_text("100000\n")
    assert free_bytes(meminfo, tmp_path) == 30000
    stat = tmp_path / "memory.stat"
    stat.write_text("anon 20000\nfile 50000\ninactive_file 45000\nactive_file 5000\n")
    assert free_bytes(meminfo, tmp_path) == 75000, "the kernel frees inactive file cache"
    stat.write_text("inactive_file 90000\n")
    assert free_bytes(meminfo, tmp_path) == 100000, "never more than the limit"
    assert free_bytes(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sync", "alreduce"], "unknown strategy 'alreduce'; expected one of: allreduce"),
        (["--sync", "allreduce("], "'(' was never closed"),
        (["-n", "many"], "expected a number, auto, cpu, gpu or xpu"),
        (["-n", "0"], "expected at least 1 worker; got 0"),
        (["--timeout-s", "0"], "0.0 is not in the range x>0"),
        (["--max-restart", "1"], "--max-restarts"),
        (["--max-restarts", "x"], "'x' is not a valid integer"),
        (["--nnodes", "3:2"], "min_nodes must be > 0 and <= max_nodes"),
        (["--nnodes", "a"], "invalid literal for int()"),
        (["--no-python", "--sync", "allreduce"], "--sync and --timeout-s reach Python scripts only"),
        (["--keep-going", "--max-restarts", "1"], "Choose one"),
        (["--nnodes", "2"], "expected the address of node 0 for --nnodes 2; got none"),
    ],
)
def test_run_refuses_bad_options_before_any_worker_starts(
    script: str, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    result = gradsync("run", *arguments, script)
    assert result.exit_code == 2
    assert said in result.output


def test_run_refuses_a_missing_script() -> None:
    result = gradsync("run", "nowhere.py")
    assert result.exit_code == 2
    assert "there is no file 'nowhere.py'" in result.output
    assert "Missing argument 'SCRIPT'" in gradsync("run", "-n", "2").output


def test_info_lists_the_machine() -> None:
    found: dict[str, Any] = json.loads(gradsync("info", "--json").output)
    assert found["versions"]["torch"] == torch.__version__
    assert found["backends"]["gloo"] is True
    assert found["cores"]["usable"] >= 1
    assert "127.0.0.1" in {address for interface in found["interfaces"] for address in interface["addresses"]}
    assert found["place"] == {"rank": 0, "world size": 1, "on this host": 1, "source": "nothing"}
    assert found["transport"]["auto"] == "solo"
    assert "allreduce" in found["strategies"]


def test_info_names_the_transport_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    found = json.loads(gradsync("info", "--json").output)
    assert found["place"] == {"rank": 1, "world size": 4, "on this host": 1, "source": "torchrun"}
    assert found["transport"]["auto"] == "tcp"
    assert "4 ranks, as torchrun says" in found["transport"]["why"]
    shown = gradsync("info").output
    assert "source: torchrun" in shown
    assert "gloo: yes" in shown


def test_info_survives_an_incomplete_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "RANK must be below WORLD_SIZE" in json.loads(gradsync("info", "--json").output)["transport"]["why"]
