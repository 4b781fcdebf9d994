"""Fixtures for tests that start ``gradsync run`` with scripts of their own."""

from __future__ import annotations

import os
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.launching import GRADSYNC, Launched

Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start ``gradsync run`` in ``tmp_path``, leading a process group of its own, as a terminal's job does.

    from_scratch: as a process that has yet to import everything, as its workers have. Only one test needs it, and each
    would take many seconds.
    """
    started: list[subprocess.Popen[str]] = []
    ours = ("GRADSYNC_", "TORCHELASTIC_", "PET_", "OMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment["TMPDIR"] = str(tmp_path)  # a launcher that is killed can't remove its folder

    def launch(*arguments: str, from_scratch: bool = False) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [*GRADSYNC, "run", *arguments]
        start = subprocess.Popen if from_scratch else Launched
        process = start(
            command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()  # its workers end with it
        process.communicate()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    def write(name: str, text: str) -> str:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return write
