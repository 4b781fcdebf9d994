"""What a worker says of its failure, which of several is the cause, and how a person reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsync import PeerLost
from gradsync.cli.failures import Attempt, Failure, describe, describe_given_up, root_cause

LOST = PeerLost(rank=2, reason="its process is gone", after_s=0.1, step=12)


def word_of(
    error: BaseException, attempt: Attempt, *, rank: int = 0, exit_code: int = 1, told: bool = False
) -> Failure:
    try:
        raise error
    except BaseException as raised:
        text = describe(raised, raised.__traceback__, rank=rank, was_told_to_end=told)
    attempt.write_failure(rank, text)
    return attempt.read_failure(rank, exit_code, was_told_to_end=False)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    attempt = Attempt(tmp_path, 0)
    attempt.open()
    return attempt


def test_a_worker_says_what_it_raised(attempt: Attempt) -> None:
    failure = word_of(ValueError("boom\nand more"), attempt, rank=1)
    assert failure.headline() == "rank 1 failed: ValueError: boom"
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert failure.traceback.endswith("ValueError: boom\nand more\n")
    assert failure.line() == "rank 1: ValueError: boom"


def test_the_word_is_also_one_that_torchelastic_reads() -> None:
    word = json.loads(describe(KeyError("x"), None, rank=0, was_told_to_end=False))["message"]
    assert word["message"] == "KeyError: 'x'"
    assert word["extraInfo"]["timestamp"].isdigit()
    assert "KeyError" in word["extraInfo"]["py_callstack"]


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
def test_how_a_person_reads_it(failure: Failure, headline: str, line: str) -> None:
    assert failure.headline() == headline
    assert failure.line() == line


def test_a_rank_that_had_finished_is_no_failure() -> None:
    finished = Failure(rank=0, at_s=0, exit_code=0)
    assert finished.line() == "rank 0: had finished"
    assert root_cause([finished]) is None


def test_the_cause_is_the_earliest_that_no_other_caused(attempt: Attempt) -> None:
    lost = word_of(LOST, attempt, rank=0)
    assert lost.is_consequence
    assert root_cause([lost]) is None
    late = Failure(rank=3, at_s=lost.at_s + 2, exit_code=1, kind="ValueError")
    early = Failure(rank=2, at_s=lost.at_s + 1, exit_code=1, kind="ValueError")
    assert root_cause([lost, late, early]) is early
    assert lost.line() == "rank 0: PeerLost: rank 2 was lost at step 12, noticed after 0.1 s: its process is gone"


def test_a_sudden_death_comes_before_what_was_raised_meanwhile() -> None:
    raised = Failure(rank=0, at_s=1.0, exit_code=1, kind="OSError")
    killed = Failure(rank=1, at_s=1.1, exit_code=-9)  # seen late: the launcher looks now and then
    assert root_cause([raised, killed]) is killed


def test_what_follows_from_a_lost_peer_is_known_through_other_errors(attempt: Attempt) -> None:
    wrapped = RuntimeError("the epoch failed")
    wrapped.__cause__ = LOST
    assert word_of(wrapped, attempt).is_consequence
    assert word_of(RuntimeError("[...] Connection closed by peer [127.0.0.1]:1"), attempt).is_consequence
    assert not word_of(RuntimeError("CUDA out of memory"), attempt).is_consequence
    around = ValueError("around")
    around.__context__ = wrapped
    wrapped.__cause__ = around  # a ring of causes must not hang
    assert not word_of(around, attempt).is_consequence


def test_what_was_raised_after_the_launcher_asked_is_no_cause(attempt: Attempt) -> None:
    told = word_of(OSError("a DataLoader's worker was killed"), attempt, rank=1, told=True)
    assert root_cause([told]) is None
    assert told.line() == "rank 1: ended by the launcher"
    assert word_of(LOST, attempt, rank=1, told=True).line().startswith("rank 1: PeerLost: rank 2 was lost")


def test_a_rank_that_was_given_up_is_the_cause(attempt: Attempt) -> None:
    attempt.write_failure(0, describe_given_up("it did not come to barrier", "Stack:\n", rank=0))
    given_up = attempt.read_failure(0, 143, was_told_to_end=True)
    assert root_cause([given_up, word_of(LOST, attempt, rank=1)]) is given_up
    assert given_up.headline() == "rank 0 was given up by the others, while it was here: it did not come to barrier"


def test_a_new_attempt_forgets_the_last(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 0)
    for _ in range(2):
        attempt.open()
        assert not attempt.has_failed()
        assert not attempt.has_word(0)
        assert attempt.read_patience_s(0) == 0
        attempt.say_failed()
        attempt.write_patience_s(0, 7.5)
        assert word_of(ValueError(), attempt).kind == "ValueError"
        assert attempt.has_failed()
        assert attempt.read_patience_s(0) == 7.5


def test_a_worker_without_its_launchers_folder_goes_on(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "gone", 0)
    attempt.write_failure(0, "{}")
    assert attempt.read_failure(0, 2, was_told_to_end=False).headline() == "rank 0 exited with code 2"
