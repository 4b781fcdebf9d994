"""``gradsync tune-comm``: a real small run, its output and its file, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gradsync.cli.main import main
from gradsync.comm.allreduce.table import CHOICES, load_tables, this_machine
from tests.support.launching import GRADSYNC, run_launched
from tests.support.ranks import run_processes

QUICK = ("--max-bytes", "16K", "--rounds", "1")


@pytest.fixture(autouse=True)
def _own_config_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRADSYNC_COLLECTIVES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def gradsync(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="gradsync")


def test_tune_measures_and_saves(tmp_path: Path) -> None:
    command = [*GRADSYNC, "tune-comm", "-n", "2", "--transport", "c10d", *QUICK]
    done = run_launched(command, timeout_s=100, env={**os.environ, "COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    path = tmp_path / "gradsync" / "collectives.json"
    (table,) = load_tables(path)
    assert table.group == ("c10d", 2, 1)
    assert table.machine == this_machine()
    assert "all-reduce over c10d, 2 workers on one host" in done.stdout
    for word in (*CHOICES, "4 KiB", "16 KiB", "◂", "GB/s"):
        assert word in done.stdout
    assert "64 KiB" not in done.stdout
    assert "until now: native everywhere, as nothing was measured" in done.stdout
    assert f"Saved to {path}." in done.stdout
    assert "Runs of 2 workers on" in done.stdout


def as_worker(folder: str, *arguments: str) -> str:
    os.environ["XDG_CONFIG_HOME"] = folder
    result = gradsync("tune-comm", *QUICK, *arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return f"{result.exit_code} {result.output}"


def test_tune_under_a_launcher_uses_its_workers(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    named = {"GRADSYNC_COLLECTIVES": str(path)}
    first, other = run_processes(2, as_worker, str(tmp_path), "--transport", "shm", env=named)
    assert first.startswith("0 ")
    assert f"GRADSYNC_COLLECTIVES={path}" in first
    assert other == "0 ", "only rank 0 prints"
    assert [table.group for table in load_tables(path)] == [("shm", 2, 1)]


def test_tune_dry_run_saves_nothing(tmp_path: Path) -> None:
    first, _ = run_processes(2, as_worker, str(tmp_path), "--dry-run", "--transport", "c10d")
    assert "Nothing is saved: this was a dry run." in first
    assert list(tmp_path.iterdir()) == []


def test_tune_reports_a_broken_file_on_all_workers(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text("[]")
    for output in run_processes(2, as_worker, str(tmp_path), "--output", str(path)):
        assert output.startswith(f"1 Error: {path}: it must be an object")
    assert path.read_text() == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected -n, the number of workers"),
        (["-n", "1"], "expected at least 2 workers, since one has no peers; got 1"),
        (["-n", "x"], "'x' is not a valid integer"),
        (["-n", "2", "--rounds", "0"], "0 is not in the range x>=1"),
        (["-n", "2", "--max-bytes", "1K"], "expected a number of bytes of at least 4096, such as 64K; got '1K'"),
        (["-n", "2", "--max-bytes", "lots"], "got 'lots'"),
        (["-n", "2", "--transport", "pigeon"], "'pigeon' is not one of"),
        (["-n", "2", "--output", "/dev/null/x.json"], "/dev/null/x.json"),
        (["-n", "2", "--output", "/"], "is a directory"),
    ],
)
def test_tune_refuses_bad_options_before_any_worker_starts(arguments: list[str], said: str) -> None:
    result = gradsync("tune-comm", *arguments)
    assert result.exit_code in (1, 2)
    assert said in result.output


def test_tune_refuses_a_broken_file_before_any_worker_starts(tmp_path: Path) -> None:
    (tmp_path / "gradsync").mkdir()
    (tmp_path / "gradsync" / "collectives.json").write_text("{}")
    result = gradsync("tune-comm", "-n", "2")
    assert result.exit_code == 1
    assert f"{tmp_path}/gradsync/collectives.json: format must be 1; got None." in result.output


def test_tune_under_a_launcher_refuses_to_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    result = gradsync("tune-comm", "-n", "2")
    assert result.exit_code == 2
    assert "a launcher has started this one already" in result.output
