"""Step records in TensorBoard, MLflow and Prometheus."""

from __future__ import annotations

import importlib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from gradsync.integrations.mlflow import MLflow
from gradsync.integrations.prometheus import Prometheus
from gradsync.integrations.tensorboard import TensorBoard
from gradsync.profiling import Breakdown, StepRecord
from gradsync.profiling.record import Change

LOST = Change(epoch=2, cause="a test", before=(0, 1), members=(0,), lost=(1,), discarded=True, stalled_s=0.25)
JOINED = Change(epoch=3, cause="a test", before=(0,), members=(0, 1), joined=(1,), healed=(1,), stalled_s=0.5)


def record(step: int, step_s: float = 0.5, **about: Any) -> StepRecord:
    parts = Breakdown(compute_s=step_s - 0.1, waiting_s=0.04, wire_s=0.06)
    return StepRecord(step=step, rank=2, began_s=0.0, step_s=step_s, parts=parts, sent_bytes=1000, **about)


class Fake:
    """A fake of TensorBoard's writer and of the mlflow module."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.metrics: list[tuple[dict[str, float], int | None]] = []
        self.params: list[dict[str, Any]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars.append((tag, scalar_value, global_step))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((metrics, step))

    def log_params(self, params: dict[str, Any]) -> None:
        self.params.append(params)


def test_tensorboard_gets_every_nth_step() -> None:
    fake = Fake()
    adapter = TensorBoard(fake, every=5, prefix="sync")
    for step in range(11):
        adapter(record(step, staleness=1.5))
    assert {step for _, _, step in fake.scalars} == {0, 5, 10}
    assert ("sync/waiting_s", 0.04, 5) in fake.scalars
    assert ("sync/sync_share", pytest.approx(0.2), 10) in fake.scalars
    assert ("sync/staleness", 1.5, 0) in fake.scalars
    with pytest.raises(ValueError, match="every=0"):
        TensorBoard(fake, every=0)


def test_tensorboard_with_the_real_writer(tmp_path: Path) -> None:
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    TensorBoard(writer, every=1)(record(0))
    writer.close()
    assert any(path.stat().st_size > 100 for path in tmp_path.iterdir())


def test_mlflow_gets_means_and_logs_params_once() -> None:
    fake = Fake()
    adapter = MLflow(fake, every=4, params={"strategy": "allreduce", "world_size": 8})
    for step in range(10):
        adapter(record(step, step_s=0.4 + 0.1 * (step % 2), staleness=None if step == 1 else 2.0))
    assert [step for _, step in fake.metrics] == [3, 7]
    assert fake.metrics[0][0]["gradsync.step_s"] == pytest.approx(0.45)
    assert fake.metrics[0][0]["gradsync.wire_s"] == pytest.approx(0.06)
    assert "gradsync.staleness" not in fake.metrics[0][0]  # not every step had one
    assert fake.metrics[1][0]["gradsync.staleness"] == 2.0
    assert fake.params == [{"gradsync.strategy": "allreduce", "gradsync.world_size": 8}]
    with pytest.raises(ValueError, match="every=0"):
        MLflow(fake, every=0)


def test_mlflow_with_the_real_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder: else MLflow wants a database
    mlflow = importlib.import_module("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as active:
        MLflow(mlflow, every=1, params={"strategy": "allreduce"})(record(0))
    found = mlflow.get_run(active.info.run_id).data
    assert found.metrics["gradsync.step_s"] == 0.5
    assert found.params["gradsync.strategy"] == "allreduce"


def test_prometheus_serves_over_http() -> None:
    with Prometheus(port=0) as adapter:
        for step in range(3):
            adapter(record(step, staleness=2.0))
        address = f"http://127.0.0.1:{adapter.port}"
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            lines = answer.read().decode().splitlines()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/", timeout=10)
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert samples['gradsync_steps_total{rank="2"}'] == "3"
    assert float(samples['gradsync_step_seconds_total{rank="2",part="waiting"}']) == pytest.approx(0.12)
    assert samples['gradsync_sent_bytes_total{rank="2"}'] == "3000"
    assert samples['gradsync_staleness_steps{rank="2"}'] == "2"
    for name in {line.split()[2] for line in lines if line.startswith("# TYPE")}:
        assert any(sample.startswith(name) for sample in samples)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}/metrics", timeout=2)


def test_changes_of_members_reach_every_integration() -> None:
    fake = Fake()
    board, flow = TensorBoard(fake, every=10), MLflow(fake, every=3)
    with Prometheus(port=0) as adapter:
        assert "gradsync_epoch" not in adapter.page()  # not an elastic run
        for one in (board, flow, adapter):
            one(record(6))
            one(record(7, discarded=True, changes=(LOST,)))
            one(record(7, changes=(JOINED,)))
        lines = adapter.page().splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert samples['gradsync_steps_total{rank="2"}'] == "2"  # a discarded step is none
    assert samples['gradsync_epoch{rank="2"}'] == "3"
    assert samples['gradsync_members{rank="2"}'] == "2"
    assert samples['gradsync_discarded_steps_total{rank="2"}'] == "1"
    assert samples['gradsync_lost_members_total{rank="2"}'] == "1"
    assert samples['gradsync_heals_total{rank="2"}'] == "1"
    assert samples['gradsync_stalled_seconds_total{rank="2"}'] == "0.75"
    assert ("gradsync/lost_members", 1.0, 7) in fake.scalars
    assert ("gradsync/members", 2.0, 7) in fake.scalars
    logged = [(metrics["gradsync.epoch"], metrics["gradsync.stalled_s"], step) for metrics, step in fake.metrics]
    assert logged == [(2.0, 0.25, 7), (3.0, 0.5, 7)]
