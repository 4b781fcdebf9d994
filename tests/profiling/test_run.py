"""Recorded runs in files: complete up to the point where a run ended, however it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsync.profiling import load
from gradsync.profiling.run import read_raw_records
from tests.profiling.raw_records import a_step, write_rank, write_run


def test_load_ignores_a_truncated_last_line(tmp_path: Path) -> None:
    path = write_run(tmp_path) / "rank-0.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 200])
    run = load(tmp_path)
    assert len(run.steps(0)) == 11
    assert len(run.steps(1)) == 12
    assert run.num_steps == 11


def test_load_ignores_a_rank_without_records(tmp_path: Path) -> None:
    write_rank(tmp_path, 1, [a_step(n, 1) for n in range(4)])
    (tmp_path / "rank-0.jsonl").write_text('{"format": 1, "me')
    run = load(tmp_path)
    assert list(run.raw) == [1]
    assert run.world_size == 2
    assert run.steps(1)[0].parts.waiting_s == 0.0  # no other rank's times are known


def test_run_builds_records_of_steps_that_only_one_rank_completed(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [a_step(n, 0, late_ms=40) for n in range(6)])
    write_rank(tmp_path, 1, [a_step(n, 1, late_ms=40) for n in range(4)])
    steps = load(tmp_path).steps(0)
    assert steps[3].parts.waiting_s == pytest.approx(0.040)
    assert steps[5].parts.waiting_s == 0.0
    assert steps[5].parts.wire_s == pytest.approx(0.070)


def test_load_refuses_folders_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no worker came as far as"):
        load(tmp_path)
    (tmp_path / "rank-0.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="does not begin as the records of a rank do"):
        load(tmp_path)
    (tmp_path / "rank-0.jsonl").write_text(json.dumps({"format": 99, "meta": {}}) + "\n")
    with pytest.raises(ValueError, match="has format 99"):
        load(tmp_path)


def test_raw_records_survive_their_file(tmp_path: Path) -> None:
    raw = a_step(3, 1, late_ms=7, codec=True)
    found = read_raw_records(write_rank(tmp_path, 1, [raw]))
    assert found is not None
    assert found.steps[3].to_json() == raw.to_json()
    assert found.plans[0][1] == (8_000_000, ["body.weight"])
