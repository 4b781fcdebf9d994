"""Elastic runs with real launchers and workers that are killed, stopped and told to leave in every phase of a step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.launching import GRADSYNC, Launched

SCRIPT = Path(__file__).with_name("trained.py")
END_S = 150.0
LOG_CHARS = 50_000  # shown of a log
EXACT = 1e-9
BATCH = 12

Run = Callable[..., "Outcome"]


class Outcome:
    """What an elastic run has left behind."""

    def __init__(self, folder: Path, code: int, log: str) -> None:
        self.folder = folder
        self.code = code
        self.log = log

    def finals(self) -> dict[str, Any]:
        return {path.name.removeprefix("final."): torch.load(path) for path in self.folder.glob("final.*")}

    def stats(self) -> dict[str, Any]:
        return {path.name.removeprefix("stats."): json.loads(path.read_text()) for path in self.folder.glob("stats.*")}

    def samples(self) -> dict[int, list[int]]:
        """The samples that were trained in each committed step, as far as workers could write them down."""
        found = defaultdict(list)
        for path in self.folder.glob("steps.*"):
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    found[json.loads(line)["step"]] += json.loads(line)["samples"]
        return dict(found)

    def check_samples(self, num_steps: int, *, may_miss: int) -> None:
        """No sample was trained twice, and none is missing but those of workers that died before they wrote."""
        samples = self.samples()
        assert sorted(samples) == list(range(1, num_steps + 1)), self.log
        assert all(len(set(each)) == len(each) for each in samples.values()), self.log
        assert sum(BATCH - len(each) for each in samples.values()) <= may_miss, self.log

    def check_exact(self, alone: dict[str, Any], *, finished: int) -> None:
        """Every worker that finished has the parameters of one process that was never disturbed."""
        finals = self.finals()
        assert len(finals) == finished, self.log
        for final in finals.values():
            assert final["steps"] == alone["steps"]
            assert final["lr"] == alone["lr"]
            for name, value in alone["model"].items():
                torch.testing.assert_close(final["model"][name], value, rtol=0.0, atol=EXACT)


def environment() -> dict[str, str]:
    ours = ("GRADSYNC_", "TORCHELASTIC_", "PET_", "OMP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {"OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(folder: Path, *arguments: str, num_workers: int = 3, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [*GRADSYNC, "run", "--elastic", "-n", str(num_workers), "--timeout-s", "20", "--restart-delay-s", "0.02"]
    with open(folder / "log", "w") as log:
        process = Launched(
            [*command, *arguments, str(SCRIPT), str(folder), json.dumps(options)],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # its workers end with it
        process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(*arguments: str, **options: Any) -> Outcome:
        with started(tmp_path, *arguments, **options) as process:
            try:
                code = process.wait(END_S)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the run has not ended:\n{(tmp_path / 'log').read_text()[-LOG_CHARS:]}")
        return Outcome(tmp_path, code, (tmp_path / "log").read_text()[-LOG_CHARS:])

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The final state of one process on the whole batches."""

    def train(**options: Any) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("alone")
        command = [sys.executable, str(SCRIPT), str(folder), json.dumps(options)]
        with Launched(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        state: dict[str, Any] = torch.load(folder / "final.0.0")
        return state

    return train


@pytest.mark.parametrize(("victim", "transport"), [("0.0", "auto"), ("2.0", "auto"), ("0.0", "tcp"), ("2.0", "c10d")])
def test_run_goes_on_exactly_when_a_worker_is_killed_in_any_phase(
    run: Run, alone: Callable[..., dict[str, Any]], victim: str, transport: str
) -> None:
    kills = [[victim, 4, "hook"]]
    slot = victim.partition(".")[0]
    for number, phase in enumerate(["forward", "backward", "step", "hook"], start=1):
        kills.append([f"{slot}.{number}", 3, phase])
    given = [] if transport == "auto" else ["--transport", transport]
    outcome = run(*given, kills=kills, epochs=24, step_s=0.02)
    assert outcome.code == 0, outcome.log
    assert outcome.log.count("was killed by SIGKILL") == 5, outcome.log
    outcome.check_samples(24 * 5, may_miss=5 * BATCH)
    outcome.check_exact(alone(epochs=24), finished=3)


def test_two_workers_die_at_once_and_one_goes_on_alone(run: Run, alone: Callable[..., dict[str, Any]]) -> None:
    outcome = run(kills=[["0.0", 5, "hook"], ["1.0", 5, "hook"]], epochs=24, step_s=0.02)
    assert outcome.code == 0, outcome.log
    outcome.check_samples(120, may_miss=2 * BATCH)
    outcome.check_exact(alone(epochs=24), finished=3)
    assert min(len(change["members"]) for change in outcome.stats()["2.0"]["changes"]) == 1


def test_worker_dies_while_it_is_healed_and_while_others_connect(
    run: Run, alone: Callable[..., dict[str, Any]]
) -> None:
    kills = [["1.0", 4, "forward"], ["1.1", 1, "healing"], ["1.2", 1, "connecting"], ["0.0", 3, "connecting"]]
    outcome = run(kills=kills, epochs=24, step_s=0.02)
    assert outcome.code == 0, outcome.log
    outcome.check_samples(120, may_miss=4 * BATCH)
    outcome.check_exact(alone(epochs=24), finished=3)


@pytest.mark.parametrize("lost", [["0.0"], ["0.0", "1.0"]])
def test_rank_without_data_gets_the_last_step_although_a_worker_dies(
    run: Run, alone: Callable[..., dict[str, Any]], lost: list[str]
) -> None:
    # The last step of an epoch has two samples: worker 2 takes part in it without data, and makes no step of its own.
    outcome = run(kills=[[uid, 6, "backward"] for uid in lost], epochs=6, samples=62, step_s=0.02)
    assert outcome.code == 0, outcome.log
    outcome.check_exact(alone(epochs=6, samples=62), finished=3)


@pytest.mark.parametrize("strategy", ["allreduce(codec=int8)", "allreduce(reducer=powersgd)"])
def test_run_with_a_codec_goes_on_and_trains_every_sample_once(run: Run, strategy: str) -> None:
    outcome = run(kills=[["0.0", 4, "hook"], ["2.0", 30, "backward"]], epochs=24, step_s=0.02, strategy=strategy)
    assert outcome.code == 0, outcome.log
    outcome.check_samples(120, may_miss=2 * BATCH)
    finals = outcome.finals().values()
    assert len(finals) == 3
    first = next(iter(finals))["model"]
    assert all(torch.equal(final["model"][name], first[name]) for final in finals for name in first)  # bit for bit


def test_worker_dies_between_two_epochs_of_the_data_where_another_is_further(
    run: Run, alone: Callable[..., dict[str, Any]]
) -> None:
    outcome = run(kills=[["0.0", 2, "end"]], skips_barrier=["2.0", 2], epochs=24, step_s=0.02)
    assert outcome.code == 0, outcome.log
    outcome.check_samples(120, may_miss=0)
    outcome.check_exact(alone(epochs=24), finished=3)


def test_worker_dies_in_the_middle_of_an_accumulation(run: Run, alone: Callable[..., dict[str, Any]]) -> None:
    outcome = run(kills=[["1.0", 4, "hook"], ["0.0", 9, "forward"]], epochs=24, step_s=0.02, accumulate=2)
    assert outcome.code == 0, outcome.log
    outcome.check_exact(alone(epochs=24, accumulate=2), finished=3)


@pytest.mark.alone  # beside other tests a worker may be taken for lost, and then a step is done again
def test_worker_leaves_in_order_after_sigterm(run: Run, alone: Callable[..., dict[str, Any]]) -> None:
    outcome = run(kills=[["1.0", 6, "leave"]], epochs=30, step_s=0.02)
    assert outcome.code == 0, outcome.log
    outcome.check_samples(150, may_miss=0)  # no step is lost
    outcome.check_exact(alone(epochs=30), finished=2)
    assert outcome.stats()["0.0"]["discarded_steps"] == 0


@pytest.mark.alone
def test_stopped_worker_is_given_up_and_rejoins_when_it_wakes_up(
    tmp_path: Path, alone: Callable[..., dict[str, Any]]
) -> None:
    options: dict[str, Any] = {"kills": [["1.0", 6, "stop"]], "epochs": 30, "step_s": 0.05}
    with started(tmp_path, "--timeout-s", "3", **options) as process:
        path = tmp_path / "at.0.0"
        wait_until(lambda: path.exists() and int(path.read_text().split()[0]) > 20, tmp_path)  # the others went on
        os.kill(int((tmp_path / "at.1.0").read_text().split()[1]), signal.SIGCONT)
        code = process.wait(END_S)
    outcome = Outcome(tmp_path, code, (tmp_path / "log").read_text()[-LOG_CHARS:])
    assert code == 0, outcome.log
    assert "it joins again" in outcome.log
    outcome.check_samples(150, may_miss=BATCH)
    outcome.check_exact(alone(epochs=30), finished=3)


def test_workers_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, epochs=1000, step_s=0.05) as process:
        wait_until(lambda: len(list(tmp_path.glob("at.*"))) == 3, tmp_path)
        pids = [int(path.read_text().split()[1]) for path in tmp_path.glob("at.*")]
        process.kill()
        process.wait()
        wait_until(lambda: not any(is_running(pid) for pid in pids), tmp_path)


def test_elastic_run_refuses_what_could_not_go_on(run: Run) -> None:
    outcome = run(strategy="sharded", epochs=1)
    assert outcome.code != 0
    assert "sharded can't be used in an elastic run" in outcome.log


def wait_until(condition: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + END_S
    while True:
        with contextlib.suppress(IndexError, ValueError):  # a file that is being written
            if condition():
                return
        assert time.monotonic() < end, (folder / "log").read_text()[-LOG_CHARS:]
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
