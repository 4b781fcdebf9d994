"""bench_kills, made small: workers that are killed at random moments, and survivors that do not do what they must."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import bench_kills
from benchmarks.bench_kills import main
from benchmarks.workers.kills import Report

KILLS = 3


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_every_survivor_names_a_worker_killed_under_sharded(
    transport: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # (tests/multiprocess/test_lost_peers.py has allreduce.)
    options = ["--kills", str(KILLS), "--strategy", "sharded", "--transport", transport, "--layers", "2"]
    main([*options, "--pause-s", "0.1", "--within-s", "30", "--timeout-s", "60", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("*-kills.json")
    found = json.loads(path.read_text())
    assert found["summary"]["survivors"] == 2 * KILLS
    assert found["summary"]["kills_with_problems"] == 0
    for kill in found["each"]:
        assert sorted(kill["noticed_s"]) == sorted(kill["ended_s"]) == [str(r) for r in range(3) if r != kill["victim"]]
        assert kill["step"] >= bench_kills.WARM_STEPS
    assert "kills with a problem" in capsys.readouterr().out


def report(error: str, ranks: tuple[int, ...], raised_s: float) -> Report:
    return Report(error=error, text="what it says", ranks=ranks, during="", raised_s=raised_s)


@pytest.mark.parametrize(
    ("survivor", "ended_s", "complaint"),
    [
        (report("PeerLost", (2,), 100.3), {0: 0.4}, ""),
        (report("PeerLost", (1,), 100.3), {0: 0.4}, "rank 0 must name rank 2; it raised PeerLost: what it says"),
        (report("CollectiveFailed", (), 100.3), {0: 0.4}, "rank 0 must name rank 2; it raised CollectiveFailed"),
        (report("PeerLost", (2,), 106.0), {0: 6.4}, "rank 0 took 6.0 s to name rank 2"),
        (report("PeerLost", (2,), 100.3), {}, "rank 0 has not ended 10.0 s after rank 2 was killed"),
        (None, {0: 0.4}, "rank 0 has reported nothing after rank 2 was killed"),
    ],
)
def test_bench_kills_reports_what_a_survivor_did_wrong(
    survivor: Report | None, ended_s: dict[int, float], complaint: str
) -> None:
    problems = bench_kills._problems_of({0: survivor}, ended_s, victim=2, killed_s=100.0, within_s=5.0)
    assert len(problems) == bool(complaint)
    assert all(problem.startswith(complaint) for problem in problems)


def test_bench_kills_finds_processes_and_files_that_are_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_kills, "SHARED_FILES", tmp_path)
    monkeypatch.setattr(bench_kills, "LEFT_S", 0.0)
    (tmp_path / "old").touch()
    files = set(os.listdir(tmp_path))
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as left:
        (tmp_path / "new").touch()
        problems = bench_kills._left_behind([left.pid], files)
        left.kill()
    assert problems == [f"process group {left.pid} is left", f"{tmp_path / 'new'} is left"]
    (tmp_path / "new").unlink()
    assert bench_kills._left_behind([left.pid], files) == []
