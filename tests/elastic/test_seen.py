"""An elastic run whose workers are killed is seen: in its statistics, logs, metrics, report and trace."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gradsync.cli.profile_view import show
from gradsync.cli.terminal import make_console
from gradsync.profiling import load
from gradsync.profiling.record import Change
from gradsync.profiling.report import write_report
from gradsync.profiling.summary import summarize, verdict
from gradsync.profiling.trace import write_trace
from tests.elastic.test_survive import Run, run

__all__ = ["run"]  # a fixture


def test_kills_are_seen_in_statistics_logs_metrics_report_and_trace(run: Run, tmp_path: Path) -> None:
    outcome = run(kills=[["0.0", 8, "hook"], ["2.0", 16, "forward"]], epochs=24, step_s=0.02, record=True)
    assert outcome.code == 0, outcome.log

    survivor = outcome.stats()["1.0"]
    changes = [Change.from_dict(change) for change in survivor["changes"]]
    events = [(change.lost, change.joined, change.healed, change.discarded) for change in changes]
    assert events == [
        ((0,), (), (), True),
        ((), (0,), (0,), False),
        ((2,), (), (), True),
        ((), (2,), (2,), False),
    ], outcome.log
    for change in changes:
        parts = (change.agreeing_s, change.connecting_s, change.restoring_s, change.attaching_s)
        assert sum(parts) <= change.stalled_s
        assert change.connecting_s > 0.0
        assert change.attaching_s > 0.0
        assert change.over == "shm"
        assert (change.healed_bytes > 3 * 8 * (9 * 40 + 41)) == bool(change.healed)  # weights, and two moments
    assert changes[1].before == (1, 2)
    assert changes[1].members == (0, 1, 2)
    assert (survivor["discarded_steps"], survivor["lost_members"], survivor["heals"]) == (2, 2, 2)
    newcomer = [Change.from_dict(change) for change in outcome.stats()["0.1"]["changes"]]
    assert (newcomer[0].before, newcomer[0].joined, newcomer[0].discarded) == ((), (0,), False)

    said = [line for line in outcome.log.splitlines() if re.match(r"\d\d:\d\d:\d\d epoch", line)]  # the launcher
    assert len(said) == 4, outcome.log
    assert "epoch 2 with 2 workers: worker 0 lost; a step is done again; stalled" in said[0]
    assert "worker 0 joined" in said[1]
    assert "of state copied over shm" in said[1]

    lines = (tmp_path / "metrics.1.0").read_text().splitlines()
    samples = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert samples["gradsync_epoch"] == survivor["epoch"]
    assert samples["gradsync_members"] == 3
    assert samples["gradsync_discarded_steps_total"] == samples["gradsync_lost_members_total"] == 2
    assert samples["gradsync_heals_total"] == 2
    assert abs(samples["gradsync_stalled_seconds_total"] - survivor["stalled_s"]) < 1e-6

    recorded = load(tmp_path / "records")
    assert sorted(recorded.raw) == [0, 1, 2]  # by slot: the worker in the place of a dead one goes on with its file
    assert [step.step for step in recorded.steps(1)] == list(range(120))
    assert [step.step for step in recorded.discarded[1]] == [change.step for change in changes if change.discarded]
    assert [change.epoch for change in recorded.changes] == [2, 3, 4, 5]
    assert len(recorded.steps(0)) < 120  # while its place was empty, the others went on
    write_report(recorded, tmp_path / "report.html")
    data = json.loads((tmp_path / "report.html").read_text().split('id="data">')[1].split("</script>")[0])
    assert [change["lost"] for change in data["summary"]["changes"]] == [[0], [], [2], []]
    write_trace(recorded, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    again = {event["name"] for event in trace if event["pid"] == 1 and event["name"].endswith("(discarded)")}
    assert again == {f"step {change.step} (discarded)" for change in changes if change.discarded}
    flags = [event["name"] for event in trace if event["ph"] == "i" and event["pid"] == 1]
    assert len(flags) == 4
    taken = next(event for event in trace if event["name"] == "epoch 2" and event["pid"] == 1)
    assert abs(taken["dur"] - changes[0].stalled_s * 1e6) < 1.0

    summary = summarize(recorded)
    console = make_console(log_width=160)
    with console.capture() as captured:
        show(console, summary, verdict(summary), {"problem": ""})
    assert "members" in captured.get()
    assert "worker 0 lost" in captured.get()
