"""Files of notes: whatever ended the run, what there was is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsync.profiling import load
from gradsync.profiling.files import read_notes
from tests.profiling.notes import a_step, write_rank, write_run


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path) / "rank-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 200])
    run = load(tmp_path)
    assert len(run.steps(0)) == 11
    assert len(run.steps(1)) == 12
    assert run.num_steps == 11


def test_a_rank_that_left_nothing_is_left_out(tmp_path: Path) -> None:
    write_rank(tmp_path, 1, [a_step(n, 1) for n in range(4)])
    (tmp_path / "rank-0.jsonl").write_text('{"format": 1, "me')
    run = load(tmp_path)
    assert list(run.notes) == [1]
    assert run.world_size == 2
    assert run.steps(1)[0].parts.waiting_s == 0.0  # nobody is there to say otherwise


def test_steps_that_only_one_rank_has_completed_are_told_as_far_as_known(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [a_step(n, 0, late_ms=40) for n in range(6)])
    write_rank(tmp_path, 1, [a_step(n, 1, late_ms=40) for n in range(4)])
    steps = load(tmp_path).steps(0)
    assert steps[3].parts.waiting_s == pytest.approx(0.040)
    assert steps[5].parts.waiting_s == 0.0
    assert steps[5].parts.wire_s == pytest.approx(0.070)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no worker came as far as"):
        load(tmp_path)
    (tmp_path / "rank-0.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="does not begin as the notes of a rank do"):
        load(tmp_path)
    (tmp_path / "rank-0.jsonl").write_text(json.dumps({"format": 99, "meta": {}}) + "\n")
    with pytest.raises(ValueError, match="has format 99"):
        load(tmp_path)


def test_notes_survive_their_file(tmp_path: Path) -> None:
    raw = a_step(3, 1, late_ms=7, codec=True)
    notes = read_notes(write_rank(tmp_path, 1, [raw]))
    assert notes is not None
    assert notes.steps[3].to_json() == raw.to_json()
    assert notes.plans[0][1] == (8_000_000, ["body.weight"])
