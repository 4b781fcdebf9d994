"""The examples for unequal workers: a slow one gets less, and lock-free ones learn."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

from tests.ranks import run_processes

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run_example(name: str, arguments: list[str]) -> str:
    """Run it in this process; returns what it prints."""
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def test_balance() -> None:
    told, nothing = run_processes(2, run_example, "balance.py", ["--epochs", "1", "--nap-ms", "0.3"])
    assert "epoch 0: " in told
    assert nothing == ""
    fast, slow = (int(part) for part in told.split("parts (")[1].split(")")[0].split(","))
    assert fast + slow == 52
    assert fast > slow


def test_hogwild() -> None:
    told, nothing = run_processes(2, run_example, "hogwild.py", ["--steps", "300"])
    assert "updates [300, 300]" in told
    assert nothing == ""
    assert float(told.split("%")[0]) > 65.0, "half of it would be by chance"
