"""The command line as a person types it, where no worker needs to start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

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


def test_help_of_run_has_our_options_first_and_all_of_torchruns() -> None:
    shown = gradsync("run", "--help").output
    ours, torchruns = shown.split("torchrun's options:")
    for option in ("-n, --nproc-per-node", "-m, --module", "--sync SPEC", "--timeout-s", "--prefix", "--verbose"):
        assert option in ours
    for option in ("--nnodes", "--node-rank", "--rdzv-endpoint", "--master-port", "--max-restarts", "--standalone"):
        assert option in torchruns
    assert "_" not in "".join(word for word in shown.split() if word.startswith("--"))


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
    ],
)
def test_a_mistake_is_said_before_any_worker_starts(
    script: str, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    result = gradsync("run", *arguments, script)
    assert result.exit_code == 2
    assert said in result.output


def test_a_script_that_is_not_there() -> None:
    result = gradsync("run", "nowhere.py")
    assert result.exit_code == 2
    assert "there is no file 'nowhere.py'" in result.output
    assert "Missing argument 'SCRIPT'" in gradsync("run", "-n", "2").output


def test_info_tells_what_there_is() -> None:
    found: dict[str, Any] = json.loads(gradsync("info", "--json").output)
    assert found["versions"]["torch"] == torch.__version__
    assert found["backends"]["gloo"] is True
    assert found["cores"]["usable"] >= 1
    assert "127.0.0.1" in {address for interface in found["interfaces"] for address in interface["addresses"]}
    assert found["place"] == {"rank": 0, "world size": 1, "on this host": 1, "source": "nothing"}
    assert found["transport"]["auto"] == "solo"
    assert "allreduce" in found["strategies"]


def test_info_says_which_transport_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = json.loads(gradsync("info", "--json").output)
    assert found["place"] == {"rank": 1, "world size": 4, "on this host": 1, "source": "torchrun"}
    assert found["transport"]["auto"] == "c10d"
    assert "4 ranks, as torchrun says" in found["transport"]["why"]
    shown = gradsync("info").output
    assert "source: torchrun" in shown
    assert "gloo: yes" in shown


def test_info_survives_half_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "RANK must be below WORLD_SIZE" in json.loads(gradsync("info", "--json").output)["transport"]["why"]
