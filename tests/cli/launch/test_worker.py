"""The main program of a worker: here without a launcher, one process at a time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gradsync.cli.launch import worker
from tests.support.launching import run_launched

WORKER = [sys.executable, "-m", "gradsync.cli.launch.worker", "--"]
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("GRADSYNC_", "TORCHELASTIC_"))}


@pytest.mark.parametrize(
    ("code", "returned", "said"),
    [(None, 0, ""), (0, 0, ""), (3, 3, ""), (-1, 255, ""), ("no data", 1, "no data\n"), ([], 1, "[]\n")],
)
def test_worker_exit_codes_are_those_of_the_interpreter(
    code: object, returned: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert worker._exit_code(SystemExit(code)) == returned
    assert capsys.readouterr().err == said


def test_worker_without_a_launcher_prints_the_scripts_traceback(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def deep():\n    1 / 0\n\ndeep()\n")
    errors = tmp_path / "error.json"
    done = run_launched([*WORKER, str(script)], env=BARE | {"TORCHELASTIC_ERROR_FILE": str(errors)}, timeout_s=180)
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
    ]
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in errors.read_text()


def test_worker_checks_the_spec_in_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    done = run_launched([*WORKER, str(script)], env=BARE | {"GRADSYNC_SYNC": "allreduce(wrong=1)"}, timeout_s=180)
    assert (done.returncode, done.stdout) == (1, "")
    assert "allreduce takes (" in done.stderr
