"""Signals to commands that start workers: all processes end, and the exit code says which signal it was."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradsync.testing import lab_unavailable_reason
from tests.multiprocess.test_run import ORPHANS_END_S, START_S, finish, wait_for_files, wait_until_gone
from tests.support.launching import GRADSYNC, WORKER_COMM, Launched

SCRIPT = """
import os, torch, gradsync
model = torch.nn.Linear(30, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = gradsync.synchronize(model, optimizer)
with open(f"up{sync.rank}", "w") as file:
    file.write(str(os.getpid()))
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 30)).square().mean().backward()
    optimizer.step()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a gradsync command in ``tmp_path``, leading a process group of its own, as a terminal's job does."""
    (tmp_path / "train.py").write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        pipe = subprocess.PIPE
        process = Launched([*GRADSYNC, *arguments], cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        return process

    yield start
    orphans = [int(path.read_text()) for path in tmp_path.glob("up*")]
    for process in started:
        for pid in [process.pid, *descendants(process.pid), *orphans]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and that these have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: list[int] = []
    for child in children.get(pid, []):
        found += [child, *descendants(child)]
    return found


def wait_for_workers(process: subprocess.Popen[str], count: int) -> list[int]:
    """Wait until a command has started ``count`` workers; returns all processes that it has started."""
    end = time.monotonic() + START_S
    while True:
        found = descendants(process.pid)
        names = []
        for pid in found:
            with contextlib.suppress(OSError):
                names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        if names.count(WORKER_COMM) >= count:
            return found
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, names
        time.sleep(0.05)


def end_by(process: subprocess.Popen[str], how: signal.Signals, whom: str) -> None:
    if whom == "group":
        os.killpg(process.pid, how)
    else:
        os.kill(process.pid, how)


@pytest.mark.parametrize(
    ("how", "whom", "code"),
    [
        (signal.SIGINT, "group", 130),
        (signal.SIGKILL, "parent", -9),
    ],
)
def test_compare_ends_its_training_on_signals(
    start: Start, tmp_path: Path, how: signal.Signals, whom: str, code: int
) -> None:
    process = start("compare", "-n", "2", "--sync", "allreduce; allreduce(codec=int8)", "--seconds", "600", "train.py")
    pids = [int(pid) for pid in wait_for_files(tmp_path, "up*", 2)]
    pids += descendants(process.pid)
    assert len(pids) >= 3, "the launcher and two workers"
    end_by(process, how, whom)
    returned, _, err = finish(process)
    assert returned == code
    assert how == signal.SIGKILL or f"ended by {how.name}" in err
    wait_until_gone(pids, within_s=ORPHANS_END_S if how == signal.SIGKILL else 0.5)
    left = [path.name for path in tmp_path.glob("gradsync_*")]
    assert how == signal.SIGKILL or not left, "compare removes its temporary files"


def test_compare_ends_its_training_on_a_network_lab(start: Start, tmp_path: Path) -> None:
    if lack := lab_unavailable_reason():
        pytest.skip(lack)
    process = start("compare", "-n", "2", "--sync", "allreduce", "--link", "1gbit", "--seconds", "600", "train.py")
    pids = [int(pid) for pid in wait_for_files(tmp_path, "up*", 2)]
    end_by(process, signal.SIGTERM, "parent")
    assert finish(process)[0] == 143
    wait_until_gone(pids, within_s=0.5)
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"gradsync-lab-{process.pid}-" not in names


@pytest.mark.parametrize(
    ("command", "how", "whom"),
    [
        (["profile", "-n", "2", "train.py"], signal.SIGHUP, "parent"),
        (["doctor", "-n", "2", "--seconds", "60"], signal.SIGINT, "group"),
        (["tune-comm", "-n", "2", "--rounds", "1000"], signal.SIGTERM, "parent"),
    ],
)
def test_measuring_commands_end_their_workers_on_signals(
    start: Start, command: list[str], how: signal.Signals, whom: str
) -> None:
    process = start(*command)
    pids = wait_for_workers(process, 2)
    end_by(process, how, whom)
    returned, _, err = finish(process)
    assert returned == 128 + how
    assert f"ended by {how.name}" in err
    wait_until_gone(pids, within_s=0.5)
