"""``gradsync run --elastic --resume DIR``: launchers and workers are ended in several ways, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.comm.base import Communicator
from gradsync.elastic.run_folder import MANIFEST, RunFolder, SavedState
from gradsync.engine import resume as resume_module
from gradsync.testing import run_ranks
from tests.elastic.test_survive import END_S, SCRIPT, Outcome, is_running, started, wait_until
from tests.support.launching import Launched

ENDS_WITHIN_S = 10.0  # on a busy machine; alone it takes two seconds, most of it to end the interpreters
EPOCHS = 16
STEPS = 5 * EPOCHS


def step_of(folder: Path, uid: str = "0.0") -> int:
    path = folder / f"at.{uid}"
    return int(path.read_text().split()[0]) if path.exists() else 0


def pids(folder: Path) -> list[int]:
    return [int(path.read_text().split()[1]) for path in folder.glob("at.*")]


def interrupt(
    folder: Path,
    how: Callable[[subprocess.Popen[str], list[int]], None],
    *arguments: str,
    at_step: int = 13,
    **options: Any,
) -> Outcome:
    """Start a run, and end it after some steps; all its processes have ended when this returns."""
    for path in folder.glob("at.*"):
        path.unlink()
    with started(folder, "--resume", str(folder / "state"), *arguments, **options) as process:
        wait_until(lambda: step_of(folder) >= at_step, folder)
        workers = pids(folder)
        assert len(workers) == 3
        how(process, workers)
        start_s = time.monotonic()
        wait_until(lambda: not any(map(is_running, workers)), folder)
        assert time.monotonic() - start_s < ENDS_WITHIN_S, (folder / "log").read_text()[-5000:]
        code = process.wait(END_S)
    return Outcome(folder, code, (folder / "log").read_text()[-5000:])


def go_on(folder: Path, num_workers: int = 3, *arguments: str, **options: Any) -> Outcome:
    """Start the same command again, and wait for its end."""
    with started(folder, "--resume", str(folder / "state"), *arguments, num_workers=num_workers, **options) as process:
        code = process.wait(END_S)
    return Outcome(folder, code, (folder / "log").read_text()[-5000:])


def kill_launcher(process: subprocess.Popen[str], workers: list[int]) -> None:
    process.kill()


def terminate_launcher(process: subprocess.Popen[str], workers: list[int]) -> None:
    process.terminate()


def kill_all(process: subprocess.Popen[str], workers: list[int]) -> None:
    process.kill()
    for pid in workers:
        os.kill(pid, signal.SIGKILL)


def undisturbed(folder: Path, **options: Any) -> dict[str, Any]:
    """The final state of one process on the whole batches."""
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), str(folder), json.dumps(options)]
    with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    state: dict[str, Any] = torch.load(folder / "final.0.0")
    return state


@pytest.mark.alone  # beside other tests a worker may be taken for lost
@pytest.mark.parametrize(
    ("how", "code", "num_workers"), [(kill_launcher, -signal.SIGKILL, 2), (terminate_launcher, 128 + signal.SIGTERM, 4)]
)
def test_run_goes_on_exactly_with_another_number_of_workers(
    tmp_path: Path, how: Callable[..., None], code: int, num_workers: int
) -> None:
    options = {"epochs": EPOCHS, "step_s": 0.03}
    first = interrupt(tmp_path, how, **options)
    assert first.code == code, first.log
    assert "is saved in" in first.log
    at_end = max(first.samples())
    assert at_end < STEPS
    outcome = go_on(tmp_path, num_workers, **options)
    assert outcome.code == 0, outcome.log
    assert f"going on at step {at_end} with {num_workers} workers" in outcome.log
    outcome.check_samples(STEPS, may_miss=0)  # of both runs: each sample was trained once
    outcome.check_exact(undisturbed(tmp_path / "alone", epochs=EPOCHS), finished=num_workers)


@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "dropout"), [("allreduce(codec=int8)", 0.3)])
def test_resumed_run_with_as_many_workers_is_bit_for_bit_the_undisturbed_one(
    tmp_path: Path, strategy: str, dropout: float
) -> None:
    """Residuals and random numbers included; also after a second interruption, in another epoch."""
    options = {"epochs": EPOCHS, "step_s": 0.03, "strategy": strategy, "dropout": dropout}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    assert go_on(whole, **options).code == 0
    interrupt(parts, kill_launcher, **options)
    interrupt(parts, terminate_launcher, at_step=31, **options)
    outcome = go_on(parts, **options)
    assert outcome.code == 0, outcome.log
    finals, expected = outcome.finals(), Outcome(whole, 0, "").finals()
    assert len(finals) == len(expected) == 3
    for uid, final in finals.items():
        assert final["lr"] == expected[uid]["lr"]
        assert all(torch.equal(final["model"][name], value) for name, value in expected[uid]["model"].items())


@pytest.mark.alone
def test_run_whose_processes_are_all_killed_goes_on_from_what_was_saved_last(tmp_path: Path) -> None:
    options = {"epochs": EPOCHS, "step_s": 0.03}
    saved = tmp_path / "state" / MANIFEST

    def kill_after_a_save(process: subprocess.Popen[str], workers: list[int]) -> None:
        wait_until(saved.exists, tmp_path)
        kill_all(process, workers)

    interrupt(tmp_path, kill_after_a_save, "--save-every-s", "0.3", **options)
    (tmp_path / "state" / "step-999-interrupted").mkdir()  # a save that was not committed counts for nothing
    outcome = go_on(tmp_path, **options)
    assert outcome.code == 0, outcome.log
    assert "going on at step" in outcome.log
    outcome.check_exact(undisturbed(tmp_path / "alone", epochs=EPOCHS), finished=3)

    # The state of another run, and a damaged one, are refused.
    other = go_on(tmp_path, **{**options, "strategy": "allreduce(codec=int8)"})
    assert other.code != 0
    assert "is that of another run: its setting strategy is allreduce; this run's is" in other.log
    shared = next(saved.parent.glob("step-*/shared.pt"))
    content = bytearray(shared.read_bytes())
    content[len(content) // 2] ^= 1
    shared.write_bytes(content)
    damaged = go_on(tmp_path, **options)
    assert damaged.code != 0
    assert "shared.pt is damaged: expected" in damaged.log


# -- the folder --------------------------------------------------------------------------------------------------------


def save(folder: RunFolder, step: int) -> SavedState:
    name = folder.new_name(step)
    files = {"shared.pt": folder.write(name, "shared.pt", {"step": step, "values": torch.arange(5)})}
    return SavedState(name=name, step=step, world_size=1, about={"setting": "a"}, files=files)


def test_run_folder_keeps_the_newest_complete_state(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.newest() is None
    first = save(folder, 3)
    assert folder.newest() is None  # not committed
    folder.commit(first)
    second = save(folder, 7)
    assert folder.newest() == first
    assert folder.read(first, "shared.pt")["step"] == 3
    folder.commit(second)
    assert folder.newest() == second
    assert [path.name for path in tmp_path.glob("step-*")] == [second.name]
    assert folder.find_damage(second, ["shared.pt"]) == ""
    with pytest.raises(OSError, match="No such file"):  # the other save has deleted it
        folder.commit(first)
    assert folder.newest() == second


def test_resume_refuses_a_folder_that_not_all_ranks_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_module, "PROBE_S", 0.1)

    def find(comm: Communicator) -> str:
        folder = tmp_path / ("own" if comm.rank == 1 else "shared")
        folder.mkdir(exist_ok=True)
        training: Any = None
        session: Any = None
        resume = resume_module.Resume(session, training, RunFolder(folder), None)
        with pytest.raises(ValueError, match="a folder that all workers reach") as refused:
            resume.find(comm, {})
        return str(refused.value)

    for text in run_ranks(3, find):
        assert "is not that of rank 1" in text


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1, "name": "x"}', '{"version": 1, "files": {"a": 3}}'])
def test_run_folder_refuses_a_damaged_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="damaged"):
        RunFolder(tmp_path).newest()


def test_run_folder_refuses_another_version(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"version": 99}')
    with pytest.raises(ValueError, match="expected a saved run of version 1"):
        RunFolder(tmp_path).newest()
