"""``gradsync profile``: a script runs unchanged, and is reported up to where it ended, however it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from gradsync.advisor import Choice
from gradsync.cli import environment
from gradsync.cli.environment import advice_for, measurement_of, read_environment
from gradsync.cli.main import main
from gradsync.cli.profile_view import duration, show, size
from gradsync.comm import Communicator
from gradsync.profiling import load
from gradsync.profiling.summary import summarize, verdict
from gradsync.testing import run_ranks
from tests.profiling.raw_records import write_run
from tests.support.launching import GRADSYNC, Launched, run_launched

SCRIPT = """
    import os, signal, sys, time
    import torch
    import gradsync

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradsync.synchronize(model, optimizer)
    torch.manual_seed(sync.rank)
    for step in range(10_000):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if sys.argv[1] == "dies" and step == 6 and sync.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "limps" and sync.rank == 1:
            time.sleep(0.03)
        if sys.argv[1] == "dawdles":
            time.sleep(0.05)
            print("step", step, flush=True)
    print("never comes here")
"""


def command(folder: Path, *options: str) -> list[str]:
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    files = ["--report", str(folder / "report.html"), "--trace", str(folder / "trace.json")]
    return [*GRADSYNC, "profile", *files, *options]


def run(folder: Path, *options: str, way: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [*command(folder, *options), str(folder / "train.py"), way]
    return run_launched(whole, env=env, timeout_s=100)


def recorded(folder: Path) -> dict[str, Any]:
    page = (folder / "report.html").read_text()
    data: dict[str, Any] = json.loads(page.split('id="data">')[1].split("</script>")[0])
    return data


def test_profile_refuses_an_elastic_run_and_says_how_to_record_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    result = CliRunner().invoke(main, ["profile", "--elastic", str(tmp_path / "train.py")])
    assert result.exit_code == 2
    assert "workers that stay the same" in result.output
    assert "set_recording" in result.output


def test_profile_of_one_worker(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "1", "--steps", "12", way="runs")
    assert done.returncode == 0, done.stderr
    assert "never comes here" not in done.stdout
    for part in ("compute", "pack", "waiting", "wire", "scaling efficiency"):
        assert part in done.stdout
    assert "one worker has no peers to synchronize with" in done.stdout
    data = recorded(tmp_path)
    assert data["summary"]["num_steps"] == 12
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "step" for event in trace) == 12


def test_profile_of_two_workers_with_advice(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "--steps", "12", "--network-s", "0.1", way="runs")
    assert done.returncode == 0, done.stderr
    for part in ("ranks", "buckets", "what if"):
        assert part in done.stdout
    assert "synchronization costs" in done.stdout or "change nothing" in done.stdout
    data = recorded(tmp_path)
    assert [rank["rank"] for rank in data["summary"]["ranks"]] == [0, 1]
    assert data["limit_bytes_per_s"] > 0
    assert data["advice"]["now"] == "allreduce"
    assert len(data["advice"]["rows"]) > 3
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("cat") == "step" for event in trace) == 24


def test_report_figures_agree_with_each_other(tmp_path: Path) -> None:
    """With a straggler, whose step the advisor predicts, and ranks that wait for it; and with few bytes."""
    done = run(tmp_path, "-n", "2", "--steps", "10", "--network-s", "0.1", way="limps")
    assert done.returncode == 0, done.stderr
    data = recorded(tmp_path)
    summary, now = data["summary"], data["advice"]["rows"][0]
    parts = summary["parts"]
    share = 1 - parts["compute_s"] / sum(parts.values())
    assert summary["straggler"] == 1
    assert share > 0.2, "rank 0 waits"
    assert data["verdict"].startswith(f"synchronization costs {100 * share:.0f} % of your step; it is the stragglers")
    assert "balance=True" in data["verdict"]
    assert 1 - summary["efficiency"] == pytest.approx(share)
    assert now["share"] == pytest.approx(share)
    assert now["step_s"] == pytest.approx(summary["step_s"])
    assert all(
        row["share"] == pytest.approx(max(0.0, 1 - parts["compute_s"] / row["step_s"]))
        for row in data["advice"]["rows"]
    )
    assert f"{100 * share:.0f} %" in next(line for line in done.stdout.splitlines() if "(what ran)" in line)
    assert now["bytes_per_step"] == summary["sent_bytes"]
    in_buckets = sum(bucket["sent_bytes"] for bucket in summary["buckets"])
    assert summary["sent_bytes"] == pytest.approx(in_buckets + summary["header_bytes"])
    resized = next(row for row in data["advice"]["rows"] if row["choice"].startswith("allreduce, bucket_bytes"))
    assert resized["bytes_per_step"] == summary["sent_bytes"], "the same gradients, and the same header"
    for rank in data["timelines"][0]["ranks"]:
        for why in ("waiting", "wire"):
            drawn = sum(
                end - start for kind, start, end, _, name, *_ in rank["spans"] if (kind, name) == ("stopped", why)
            )
            counted = rank["parts"][data["parts"].index(why)]
            assert drawn == pytest.approx(counted, abs=0.5), "stalls of less than 0.05 ms are not drawn"


def test_profile_reports_a_run_that_is_killed(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "-n",
        "2",
        "--transport",
        "c10d",
        "--to-the-end",
        "--record-dir",
        str(tmp_path / "records"),
        way="dies",
    )
    assert done.returncode != 0
    assert "this is what there was until then" in done.stdout
    data = recorded(tmp_path)
    assert data["summary"]["num_steps"] == 7
    assert "ended with code" in data["note"]
    assert "the run did not come to its end" in data["no_advice"]
    assert load(tmp_path / "records").num_steps == 7


def test_profile_reports_a_run_that_is_interrupted(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole = [*command(tmp_path, "-n", "2", "--to-the-end"), str(tmp_path / "train.py"), "dawdles"]
    with Launched(whole, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        started = time.monotonic()
        while "step 5" not in process.stdout.readline():
            assert time.monotonic() - started < 60
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "this is what there was until then" in rest
    assert recorded(tmp_path)["summary"]["num_steps"] >= 5


def test_measure_environment_by_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, late_ms=40, wire_ms=30)
    here = threading.local()
    monkeypatch.setattr(environment, "connect", lambda: here.comm)
    monkeypatch.setattr(environment, "default_choices", lambda: (Choice("allreduce"), Choice("allreduce(codec=fp16)")))

    def work(comm: Communicator) -> None:
        here.comm = comm
        environment.measure_environment(tmp_path, seconds=0.1)

    run_ranks(2, work)
    found = read_environment(tmp_path)
    assert found["network"]["bytes_per_s"] > 0
    advice = advice_for(load(tmp_path), found)
    assert advice["now"] == "allreduce"
    assert {row["choice"] for row in advice["rows"]} >= {"allreduce", "allreduce(codec=fp16)"}


def test_measure_environment_saves_the_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    here = threading.local()
    monkeypatch.setattr(environment, "connect", lambda: here.comm)

    def closed(comm: Communicator, *, seconds: float) -> None:
        raise ValueError("this communicator is closed")

    monkeypatch.setattr(environment, "measure_network", closed)

    def work(comm: Communicator) -> None:
        here.comm = comm
        environment.measure_environment(tmp_path, seconds=0.1)

    run_ranks(2, work)
    assert "this communicator is closed" in advice_for(load(tmp_path), read_environment(tmp_path))["problem"]


def test_profile_refuses_bad_folders(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('no model here')")
    missing = CliRunner().invoke(main, ["profile", "-n", "2", "--report", str(tmp_path / "no" / "r.html"), "train.py"])
    assert missing.exit_code == 2
    assert "there is no folder" in missing.output
    write_run(tmp_path)
    script = str(tmp_path / "train.py")
    taken = CliRunner().invoke(main, ["profile", "-n", "2", "--record-dir", str(tmp_path), script])
    assert taken.exit_code == 2
    assert "holds what another run has recorded" in taken.output


def test_profile_view_shows_the_planted_figures(tmp_path: Path) -> None:
    summary = summarize(load(write_run(tmp_path, late_ms=40, wire_ms=30)))
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(console, summary, verdict(summary), {"problem": "the network was not measured"}, note="It ended early.")
    text = console.export_text()
    assert "allreduce over c10d, 2 workers on 2 hosts; means of 10 of 12 steps" in text
    assert "It ended early." in text
    assert text.count("█") == 78
    assert "20 ms" in text  # waiting, by the mean
    assert "60.6 %" in text
    assert "the straggler" in text
    assert "the network was not measured" in text
    console.file.close()


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0, "0 µs"), (4.2e-5, "42 µs"), (0.0123, "12.3 ms"), (0.456, "456 ms"), (1.5, "1.5 s")]
)
def test_duration_and_size_choose_suitable_units(seconds: float, said: str) -> None:
    assert duration(seconds) == said
    assert (size(12), size(4.5e3), size(6.7e7)) == ("12 B", "4.5 kB", "67 MB")


def test_measurement_of_run_is_what_the_advisor_reads(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, late_ms=40, wire_ms=30))
    found = measurement_of(run)
    assert found.step_s == pytest.approx(0.132)
    assert found.after_s == pytest.approx(0.005)
    assert found.waiting_s == 0.0  # of the slowest rank
    assert found.exposed_s == pytest.approx(0.030)
    assert [gradient.name for gradient in found.gradients] == ["head.bias", "head.weight", "body.weight"]
    assert found.gradients[2].shape == (2000, 1000)
    assert found.world_size == 2
    assert found.ranks_per_host == 1
    assert advice_for(run, read_environment(tmp_path)) == {
        "problem": "the network was not measured: the run did not come to its end"
    }


def test_profile_refuses_unwritable_outputs_before_any_worker_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('no worker should have started')")
    for option in (
        ["--report", "/proc/report.html"],
        ["--trace", "/proc/trace.json"],
        ["--record-dir", "/proc/records"],
    ):
        result = CliRunner().invoke(main, ["profile", "-n", "2", *option, str(tmp_path / "train.py")])
        assert result.exit_code in (1, 2)
        assert f"{option[1]} can't be " in result.output
