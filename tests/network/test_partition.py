"""Elastic runs on hosts whose cable is cut while they train: who goes on, who waits, and that no step counts twice."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.testing import Lab
from tests.elastic.test_survive import BATCH, END_S, SCRIPT, Outcome, alone, environment  # noqa: F401 - a fixture
from tests.support.launching import GRADSYNC, NETWORK, Launched

TIMEOUT_S = 2
CUT_AT = 8  # steps; and from there on slowly, until the test says go
EPOCHS = 24
STEPS = 5 * EPOCHS


pytestmark = pytest.mark.netns


@pytest.fixture(autouse=True, scope="module")
def _needs_nft() -> None:
    if shutil.which("nft") is None:
        missing = "cuts need the command 'nft' (Debian: nftables)"
        assert os.environ.get("CI") != "true", missing
        pytest.skip(missing)


class Run:
    """A run on the hosts of a lab, under way."""

    def __init__(self, lab: Lab, folder: Path, processes: list[subprocess.Popen[str]]) -> None:
        self.lab = lab
        self.folder = folder
        self.processes = processes

    def log(self) -> str:
        return "\n".join(f"-- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("log*")))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + END_S
        while True:
            with contextlib.suppress(OSError, IndexError, ValueError):  # a file that is not there, or being written
                if condition():
                    return
            assert time.monotonic() < end, f"{what}\n{self.log()}"
            assert not any(process.poll() for process in self.processes), self.log()
            time.sleep(0.02)

    def step(self, uid: str) -> int:
        return int((self.folder / f"at.{uid}").read_text().split()[0])

    def wait_for_step(self, uid: str, step: int) -> None:
        self.wait_until(lambda: self.step(uid) >= step, f"worker {uid} has not come to step {step}")

    def wait_until_together(self, uids: list[str], after_epoch: int) -> None:
        def together() -> bool:
            changes = [json.loads((self.folder / f"change.{uid}").read_text()) for uid in uids]
            return all(c[0] > after_epoch and c[1:] == [len(uids), "0"] for c in changes)

        self.wait_until(together, "they are not together again")

    def finish(self) -> Outcome:
        (self.folder / "go").touch()
        for process in self.processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                pytest.fail(f"the run has not ended\n{self.log()}")
        return Outcome(self.folder, max(process.returncode for process in self.processes), self.log())


@contextlib.contextmanager
def running(folder: Path, *arguments: str, hosts: int = 2, per_host: int = 2, **options: Any) -> Iterator[Run]:
    given = {"epochs": EPOCHS, "step_s": 0.01, "hold_at": CUT_AT, **options}
    with Lab(hosts=hosts) as lab, contextlib.ExitStack() as stack:
        processes = []
        for host in range(hosts):
            log = stack.enter_context(open(folder / f"log{host}", "w"))
            command = [*GRADSYNC, "run", "--elastic", "--nnodes", str(hosts), "--node-rank", str(host)]
            command += ["--store", f"{lab.address(0)}:29500", "-n", str(per_host), "--timeout-s", str(TIMEOUT_S)]
            process = Launched(
                [*command, *arguments, str(SCRIPT), str(folder), json.dumps(given)],
                cwd=folder,
                env=environment() | {NETWORK: lab.namespace(host)},
                stdout=log,
                stderr=log,
                text=True,
            )
            stack.callback(_end, process)
            processes.append(process)
        yield Run(lab, folder, processes)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()  # its workers end with it
    process.wait()


ALL = ["0.0", "1.0", "2.0", "3.0"]


def check_steps(outcome: Outcome) -> None:
    """Every sample of every step is trained once, in the epoch in which the step was committed."""
    found: dict[int, dict[int, list[int]]] = {}
    for path in outcome.folder.glob("steps.*"):
        for line in filter(lambda line: line.endswith("}"), path.read_text().splitlines()):
            each = json.loads(line)
            found.setdefault(each["step"], {}).setdefault(each["epoch"], []).extend(each["samples"])
    assert sorted(found) == list(range(1, STEPS + 1)), outcome.log
    for epochs in found.values():
        samples = epochs[max(epochs)]  # one that was committed on the other side only was thrown away
        assert len(set(samples)) == len(samples) <= BATCH, outcome.log


@pytest.mark.alone  # beside other tests a worker may be taken for lost although the cut is short
def test_run_pauses_where_it_is_cut_off_and_ends_as_an_undisturbed_one(
    tmp_path: Path,
    alone: Callable[..., dict[str, Any]],  # noqa: F811
) -> None:
    with running(tmp_path) as run:
        run.wait_for_step("0.0", CUT_AT)
        run.lab.cut(1)  # for less than the timeout: nobody is given up
        time.sleep(0.3 * TIMEOUT_S)
        run.lab.heal(1)
        run.wait_for_step("2.0", run.step("0.0") + 4)
        assert not list(tmp_path.glob("change.*")), run.log()
        run.lab.cut(1)
        run.wait_until(lambda: json.loads((tmp_path / "change.0.0").read_text())[1] == 2, "host 0 does not go on")
        waiting = run.step("2.0")
        run.wait_for_step("0.0", run.step("0.0") + 5)
        assert run.step("2.0") == waiting, "the side without the store waits"
        run.lab.heal(1)
        run.wait_until_together(ALL, 2)
        outcome = run.finish()
    assert outcome.code == 0, outcome.log
    check_steps(outcome)
    outcome.check_exact(alone(epochs=EPOCHS), finished=4)
    assert outcome.log.count("it joins again") == 2


def test_run_with_a_codec_pauses_where_nothing_can_be_sent(tmp_path: Path) -> None:
    with running(tmp_path, strategy="allreduce(codec=int8)") as run:
        run.wait_for_step("0.0", CUT_AT)
        run.lab.cut(1, receives=False)  # it hears the others, and they do not hear it
        run.wait_until(lambda: json.loads((tmp_path / "change.0.0").read_text())[1] == 2, "host 0 does not go on")
        waiting = run.step("2.0")
        run.wait_for_step("0.0", run.step("0.0") + 5)
        assert run.step("2.0") == waiting, "the side without the store waits"
        run.lab.heal(1)
        run.wait_until_together(ALL, 2)
        outcome = run.finish()
    assert outcome.code == 0, outcome.log
    check_steps(outcome)
    check_equal(outcome)


def check_equal(outcome: Outcome) -> None:
    finals = list(outcome.finals().values())
    assert len(finals) == 4
    for final in finals[1:]:
        assert final["steps"] == finals[0]["steps"]
        for name, value in finals[0]["model"].items():
            assert torch.equal(final["model"][name], value), name  # bit for bit


def test_sides_diverge_and_are_merged_by_the_samples_that_each_has_trained(tmp_path: Path) -> None:
    with running(tmp_path, "--on-partition", "diverge", strategy="diverging") as run:
        run.wait_for_step("0.0", CUT_AT)
        run.lab.cut(1)
        run.wait_until(lambda: json.loads((tmp_path / "change.0.0").read_text())[1:] == [2, "0"], "host 0 stops")
        run.wait_until(lambda: json.loads((tmp_path / "change.2.0").read_text())[1:] == [2, "1@node1"], "host 1 stops")
        run.wait_for_step("2.0", run.step("2.0") + 5)
        run.lab.heal(1)
        run.wait_until_together(ALL, 2)
        outcome = run.finish()
    assert outcome.code == 0, outcome.log
    check_equal(outcome)
    merges = {path.name: torch.load(path) for path in tmp_path.glob("merge.*")}
    assert sorted(merges) == [f"merge.{uid}" for uid in ALL], outcome.log
    records = list(merges.values())
    assert sum(record["share"] for record in records) == pytest.approx(1.0)
    for at, after in enumerate(records[0]["after"]):
        mean = sum(record["share"] * record["before"][at] for record in records)
        torch.testing.assert_close(after, mean, rtol=0.0, atol=1e-12)
    changes = outcome.stats()["0.0"]["changes"]
    (merge,) = [change["merge"] for change in changes if change["merge"] is not None]
    assert merge["samples"].keys() == {"0", "1@node1"}
    assert all(count > 0 and count % BATCH == 0 for count in merge["samples"].values())
    for uid, side in (("0.0", "0"), ("3.0", "1@node1")):
        expected = merge["samples"][side] / sum(merge["samples"].values()) / 2
        assert merges[f"merge.{uid}"]["share"] == pytest.approx(expected)
    assert merge["distance"] > 0
    assert merge["split_s"] > TIMEOUT_S
    assert "the sides of a partition of" in outcome.log


def test_sides_of_local_sgd_diverge_and_are_merged(tmp_path: Path) -> None:
    options = {"strategy": "local_sgd(every=2)", "settle": True}
    with running(tmp_path, "--on-partition", "diverge", **options) as run:
        run.wait_for_step("0.0", CUT_AT)
        run.lab.cut(1)
        run.wait_until(lambda: json.loads((tmp_path / "change.0.0").read_text())[1:] == [2, "0"], "host 0 stops")
        run.wait_until(lambda: json.loads((tmp_path / "change.2.0").read_text())[1] == 2, "host 1 stops")
        run.wait_for_step("2.0", run.step("2.0") + 5)
        run.lab.heal(1)
        run.wait_until_together(ALL, 2)
        outcome = run.finish()
    assert outcome.code == 0, outcome.log
    check_equal(outcome)
    merges = [change["merge"] for change in outcome.stats()["0.0"]["changes"] if change["merge"] is not None]
    assert len(merges) == 1
    assert all(count > 0 for count in merges[0]["samples"].values())
    assert merges[0]["distance"] > 0
