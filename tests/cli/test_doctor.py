"""``gradsync doctor``: this machine alone, two real workers, and what it refuses."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner, Result

from gradsync.cli.doctor import examine_all
from gradsync.cli.main import main
from gradsync.doctor import LinkReport, MachineReport
from gradsync.testing import run_ranks
from tests.support.ranks import run_processes


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments], prog_name="gradsync")


def test_doctor_alone_examines_this_machine() -> None:
    shown = doctor()
    assert shown.exit_code == 0, shown.output
    assert "GFLOP/s" in shown.output
    assert "all-reduce" not in shown.output
    found = json.loads(doctor("--json").output)
    (machine,) = (MachineReport.from_dict(each) for each in found["machines"])
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.copy_gb_per_s > 0
    assert found["links"] is None


def as_worker(*arguments: str) -> str:
    result = doctor(*arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return f"{result.exit_code} {result.stdout}"


def test_doctor_workers_measure_links_and_rank_0_prints() -> None:
    first, other = run_processes(2, as_worker, "--seconds", "0.3", "--transport", "c10d")
    assert first.startswith("0 ")
    assert other == "0 "
    for words in ("c10d, 2 workers on one host", "latency", "4 KiB", "moves, GB/s", "Use --transport shm"):
        assert words in first


def test_examine_all_agrees_on_all_ranks() -> None:
    outcomes = run_ranks(3, lambda comm: examine_all(comm, seconds=0.2))
    machines, links = outcomes[0]
    assert [machine.rank for machine in machines] == [0, 1, 2]
    assert all(abs(machine.clock_offset_s) < 0.5 for machine in machines), "they have one clock"
    assert links.hosts == ((0, 1, 2),)
    assert links.all_reduce[0][0] == 4096
    assert all(each[1] == links for each in outcomes)
    assert LinkReport.from_dict(json.loads(json.dumps(links.as_dict()))) == links


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0"], "0 is not in the range"),
        (["--transport", "pigeon"], "'pigeon' is not one of"),
        (["--seconds", "0"], "range"),
        (["--nnodes", "2"], "got no --master-addr and no --node-rank"),
        (["--nnodes", "2", "--node-rank", "1", "-n", "2"], "got no --master-addr"),
        (["--nnodes", "2", "--master-addr", "node0"], "got no --node-rank"),
    ],
)
def test_doctor_refuses_bad_options(arguments: list[str], said: str) -> None:
    result = doctor(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_doctor_under_a_launcher_refuses_to_start_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    result = doctor("-n", "2")
    assert result.exit_code == 2
    assert "a launcher has started this worker already" in result.output


def test_doctor_passes_its_options_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the arguments that reach ``gradsync run``; that it launches is covered by its own tests."""
    calls: list[list[str]] = []
    monkeypatch.setattr("gradsync.cli.launch.relaunch.run.main", lambda arguments, **_: calls.append(arguments) or 0)
    assert doctor("-n", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--json").exit_code == 0
    assert calls[0][:5] == ["--nnodes=2", "--node-rank=1", "--master-addr=h", "-n", "2"]
    assert calls[0][5:8] == ["-m", "gradsync.cli.main", "doctor"]
    assert "--json" in calls[0]
