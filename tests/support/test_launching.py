"""Launched: a command forked from the fork server behaves like one that was started; both are compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launching import GRADSYNC, Launched, launch_gradsync_by_fork, run_launched

SCRIPT = """
import atexit, json, os, signal, sys, threading, time

if __name__ == "__main__":
    mode = sys.argv[1]
    if mode == "show":
        seen = {"argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "stdin": sys.stdin.read()}
        seen |= {"environ": dict(os.environ), "leads": os.getpgrp() == os.getpid() == os.getsid(0)}
        seen |= {"main": sys.modules["__main__"].__file__, "sigint": str(signal.getsignal(signal.SIGINT))[:20]}
        print(json.dumps(seen))
        print("and this", file=sys.stderr)
    elif mode == "exit":
        atexit.register(print, "after the threads")
        threading.Timer(0.2, print, ["a thread"]).start()
        sys.exit(json.loads(sys.argv[2]))
    elif mode == "raise":
        raise ValueError("boom")
    elif mode == "wait":
        print("up", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "shown.py").write_text(SCRIPT)
    return str(tmp_path / "shown.py")


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "FOR": "both"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )


def launch(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return run_launched(command, cwd=folder, env={**os.environ, "FOR": "both"}, timeout_s=120)


@pytest.mark.parametrize("mode", [["show", "a b"], ["exit", "0"], ["exit", "null"], ["exit", "-1"], ["exit", '"no"']])
@pytest.mark.parametrize("as_module", [False, True])
def test_launched_behaves_like_a_started_process(script: str, tmp_path: Path, mode: list[str], as_module: bool) -> None:
    command = [sys.executable, *(["-m", "shown"] if as_module else [script]), *mode]
    one, other = launch(command, tmp_path), start(command, tmp_path)
    if mode[0] == "show":
        seen, expected = json.loads(one.stdout), json.loads(other.stdout)
        if as_module:  # its own name is known only when it has been found
            seen["argv"][0], expected["argv"][0] = "", ""
        assert seen == expected
        assert (one.returncode, one.stderr) == (other.returncode, other.stderr)
    else:
        assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)


def test_launched_exception_is_printed_with_exit_code_1(script: str, tmp_path: Path) -> None:
    done = launch([sys.executable, script, "raise"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "ValueError: boom"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_launched_is_a_child_and_a_group_signal_ends_it(script: str, number: signal.Signals) -> None:
    with Launched([sys.executable, script, "wait"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert process.poll() is None
        os.killpg(process.pid, number)
        assert process.wait(10) == -number
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, 0)


def test_run_launched_ends_a_process_at_its_timeout(script: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_launched([sys.executable, script, "wait"], timeout_s=0.3)
    assert time.monotonic() - began_s < 20


def test_launch_gradsync_by_fork_patches_popen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launch_gradsync_by_fork(monkeypatch)
    done = subprocess.run([*GRADSYNC, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gradsync, version ")
    with subprocess.Popen([*GRADSYNC, "--help"], stdout=subprocess.DEVNULL) as process:
        assert type(process) is Launched
    assert subprocess.run(["true"]).returncode == 0
