"""What each process of a run executes around the script: here without a launcher, one process at a time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gradsync.cli import worker
from tests.launching import run_launched

WORKER = [sys.executable, "-m", "gradsync.cli.worker", "--"]
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("GRADSYNC_", "TORCHELASTIC_"))}


@pytest.mark.parametrize(
    ("code", "returned", "said"),
    [(None, 0, ""), (0, 0, ""), (3, 3, ""), (-1, 255, ""), ("no data", 1, "no data\n"), ([], 1, "[]\n")],
)
def test_exit_codes_are_what_the_interpreter_makes_of_them(
    code: object, returned: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert worker._exit_code(SystemExit(code)) == returned
    assert capsys.readouterr().err == said


def test_without_a_launcher_the_traceback_is_printed_and_begins_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def deep():\n    1 / 0\n\ndeep()\n")
    errors = tmp_path / "error.json"
    done = run_launched([*WORKER, str(script)], env=BARE | {"TORCHELASTIC_ERROR_FILE": str(errors)}, timeout_s=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 4, in <module>',
    ]
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "ZeroDivisionError" in errors.read_text()


def test_a_spec_that_came_by_the_environment_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    done = run_launched([*WORKER, str(script)], env=BARE | {"GRADSYNC_SYNC": "allreduce(wrong=1)"}, timeout_s=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "allreduce takes (" in done.stderr
