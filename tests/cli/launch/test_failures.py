"""Failure reports: their contents, which of several is the root cause, and how they are printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsync import PeerLost
from gradsync.cli.launch.failures import Attempt, Failure, failure_report, given_up_report, group_by_outcome, root_cause

LOST = PeerLost(rank=2, reason="its process is gone", after_s=0.1, step=12)


def report_and_read(
    error: BaseException, attempt: Attempt, *, rank: int = 0, exit_code: int = 1, told: bool = False
) -> Failure:
    try:
        raise error
    except BaseException as raised:
        text = failure_report(raised, raised.__traceback__, rank=rank, was_told_to_end=told)
    attempt.write_failure(rank, text)
    return attempt.read_failure(rank, exit_code, was_told_to_end=False)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = Attempt(tmp_path, 0)
    attempt.open()
    return attempt


def test_failure_report_holds_the_error(attempt: Attempt) -> None:
    failure = report_and_read(ValueError("boom\nand more"), attempt, rank=1)
    assert failure.headline() == "rank 1 failed: ValueError: boom"
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert failure.traceback.endswith("ValueError: boom\nand more\n")
    assert failure.line() == "rank 1: ValueError: boom"


def test_failure_report_is_in_torchelastics_format() -> None:
    report = json.loads(failure_report(KeyError("x"), None, rank=0, was_told_to_end=False))["message"]
    assert report["message"] == "KeyError: 'x'"
    assert report["extraInfo"]["timestamp"].isdigit()
    assert "KeyError" in report["extraInfo"]["py_callstack"]


@pytest.mark.parametrize(
    ("failure", "headline", "line"),
    [
        (
            Failure(rank=1, at_s=0, exit_code=-9),
            "rank 1 was killed by SIGKILL (out of memory? `dmesg` would say so)",
            "rank 1: killed by SIGKILL",
        ),
        (Failure(rank=1, at_s=0, exit_code=-11), "rank 1 was killed by SIGSEGV", "rank 1: killed by SIGSEGV"),
        (Failure(rank=1, at_s=0, exit_code=3), "rank 1 exited with code 3", "rank 1: exited with code 3"),
        (
            Failure(rank=1, at_s=0, exit_code=1, kind="SystemExit", message="no data"),
            "rank 1 exited: no data",
            "rank 1: exited with code 1",
        ),
        (
            Failure(rank=1, at_s=0, exit_code=-15, was_told_to_end=True),
            "rank 1 was killed by SIGTERM",
            "rank 1: ended by the launcher",
        ),
    ],
)
def test_failure_headline_and_line(failure: Failure, headline: str, line: str) -> None:
    assert failure.headline() == headline
    assert failure.line() == line


def test_root_cause_ignores_a_finished_rank() -> None:
    finished = Failure(rank=0, at_s=0, exit_code=0)
    assert finished.line() == "rank 0: had finished"
    assert root_cause([finished]) is None


def test_root_cause_is_the_earliest_that_is_no_consequence(attempt: Attempt) -> None:
    lost = report_and_read(LOST, attempt, rank=0)
    assert lost.is_consequence
    assert root_cause([lost]) is None
    late = Failure(rank=3, at_s=lost.at_s + 2, exit_code=1, kind="ValueError")
    early = Failure(rank=2, at_s=lost.at_s + 1, exit_code=1, kind="ValueError")
    assert root_cause([lost, late, early]) is early
    assert lost.line() == "rank 0: PeerLost: rank 2 was lost at step 12, noticed after 0.1 s: its process is gone"


def test_root_cause_prefers_a_fatal_signal() -> None:
    raised = Failure(rank=0, at_s=1.0, exit_code=1, kind="OSError")
    killed = Failure(rank=1, at_s=1.1, exit_code=-9)  # seen late: the launcher polls
    assert root_cause([raised, killed]) is killed


def test_failure_is_a_consequence_through_wrapped_errors(attempt: Attempt) -> None:
    wrapped = RuntimeError("the epoch failed")
    wrapped.__cause__ = LOST
    assert report_and_read(wrapped, attempt).is_consequence
    assert report_and_read(RuntimeError("[...] Connection closed by peer [127.0.0.1]:1"), attempt).is_consequence
    assert not report_and_read(RuntimeError("CUDA out of memory"), attempt).is_consequence
    around = ValueError("around")
    around.__context__ = wrapped
    wrapped.__cause__ = around  # a ring of causes must not hang
    assert not report_and_read(around, attempt).is_consequence


def test_root_cause_ignores_errors_after_the_launchers_signal(attempt: Attempt) -> None:
    told = report_and_read(OSError("a DataLoader's worker was killed"), attempt, rank=1, told=True)
    assert root_cause([told]) is None
    assert told.line() == "rank 1: ended by the launcher"
    assert report_and_read(LOST, attempt, rank=1, told=True).line().startswith("rank 1: PeerLost: rank 2 was lost")


def test_root_cause_is_a_rank_that_was_given_up(attempt: Attempt) -> None:
    attempt.write_failure(0, given_up_report("it did not come to barrier", "Stack:\n", rank=0))
    given_up = attempt.read_failure(0, 143, was_told_to_end=True)
    assert root_cause([given_up, report_and_read(LOST, attempt, rank=1)]) is given_up
    assert given_up.headline() == "rank 0 was given up by the others, while it was here: it did not come to barrier"


def test_attempt_open_clears_the_last_one(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 0)
    for _ in range(2):
        attempt.open()
        assert not attempt.has_failed()
        assert not attempt.has_failure_report(0)
        assert attempt.read_grace_s(0) == 0
        attempt.mark_failed()
        attempt.write_grace_s(0, 7.5)
        assert report_and_read(ValueError(), attempt).kind == "ValueError"
        assert attempt.has_failed()
        assert attempt.read_grace_s(0) == 7.5


def test_attempt_ignores_a_missing_folder(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "gone", 0)
    attempt.write_failure(0, "{}")
    assert attempt.read_failure(0, 2, was_told_to_end=False).headline() == "rank 0 exited with code 2"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (Failure(rank=0, at_s=0, exit_code=1, kind="ValueError"), 1),
        (Failure(rank=0, at_s=0, exit_code=3), 3),
        (Failure(rank=0, at_s=0, exit_code=255, kind="SystemExit", message="-1"), 255),
        (Failure(rank=0, at_s=0, exit_code=1, kind="SystemExit", message="no data"), 1),
        (Failure(rank=0, at_s=0, exit_code=-9), 137),
        (Failure(rank=0, at_s=0, exit_code=-15, kind="ValueError"), 1),
    ],
)
def test_failure_launcher_code(failure: Failure, code: int) -> None:
    assert failure.launcher_code == code


@pytest.mark.parametrize(
    ("asked", "code", "headline"),
    [
        (3, 3, "rank 0 exited with code 3"),
        (-1, 255, "rank 0 exited with code 255"),
        ("7", 1, "rank 0 exited: 7"),
        ("no data", 1, "rank 0 exited: no data"),
    ],
)
def test_failure_report_holds_the_requested_exit_code(
    attempt: Attempt, asked: int | str, code: int, headline: str
) -> None:
    """The process is still ending, so the launcher does not know its code yet, and passes 1."""
    failure = report_and_read(SystemExit(asked), attempt, exit_code=1)
    assert failure.launcher_code == code
    assert failure.headline() == headline


def test_group_by_outcome_joins_ranks_that_ended_alike(attempt: Attempt) -> None:
    lost = [PeerLost(rank=0, reason="its process is gone", after_s=0.1 * rank, step=7) for rank in range(1, 100)]
    failures = [report_and_read(error, attempt, rank=at) for at, error in enumerate(lost, start=1)]
    failures[4] = Failure(rank=5, at_s=0, exit_code=-11)
    said = "PeerLost: rank 0 was lost at step 7, noticed after 0.1 to 9.9 s: its process is gone"
    assert group_by_outcome(failures) == [f"ranks 1-4, 6-99: {said}", "rank 5: killed by SIGSEGV"]


def test_failure_of_a_finished_rank_that_was_told_to_end(attempt: Attempt) -> None:
    attempt.write_finished(0)
    assert attempt.read_failure(0, 143, was_told_to_end=True).line() == "rank 0: had finished"
    assert attempt.read_failure(1, 143, was_told_to_end=True).line() == "rank 1: ended by the launcher"
