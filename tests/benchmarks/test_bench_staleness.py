"""bench_staleness, made small: its data, its tuning, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bench_staleness
from benchmarks.bench_staleness import (
    MODES,
    NUM_TRAINED,
    NUM_TUNED,
    Data,
    accuracy,
    batches,
    load,
    main,
    parse,
    train_alone,
    tune,
)


def test_bench_staleness_shards_the_digits_evenly() -> None:
    options = parse(["--workers", "3", "--epochs", "2", "--batch", "20"])
    parts = load()
    assert [len(x) for x, _ in parts] == [len(y) for _, y in parts] == [NUM_TRAINED, NUM_TUNED, 360]
    assert sum(len(x) for x, _ in parts) == 1797
    train = parts[0]
    each = [list(batches(train, options, 0, rank)) for rank in range(3)]
    assert [len(part) for part in each] == [2 * (NUM_TRAINED // 3 // 20)] * 3
    rows = [row for part in each for x, _ in part[: len(part) // 2] for row in x]
    assert len(torch.stack(rows).unique(dim=0)) == len(rows)  # no digit is read twice, by one worker or by two


def test_bench_staleness_takes_the_smallest_good_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = {0.1: 0.90, 0.2: 0.957, 0.4: 0.96, 0.8: 0.5}
    asked: list[int] = []

    def look_up(rate: float, unseen: Data) -> float:
        asked.append(len(unseen[0]))
        return accuracies[rate]

    monkeypatch.setattr(bench_staleness, "train_alone", lambda options, rate, seed: rate)
    monkeypatch.setattr(bench_staleness, "accuracy", look_up)
    options = parse(["--rates", "0.1,0.2,0.4,0.8", "--seeds", "0"])
    assert tune(options, lambda text: None)[0] == 0.2
    assert asked == [NUM_TUNED] * 4  # never the digits of the test


def test_bench_staleness_trains_in_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--workers", "3", "--batch", "16", "--epochs", "4", "--seeds", "0", "--rates", "0.25"]
    main([*options, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*-staleness.json")
    found = json.loads(path.read_text())
    assert found["rate"] == 0.25
    assert found["modes"].keys() == MODES.keys()
    alone = accuracy(train_alone(parse(options), 0.25, seed=0), load()[2])
    together = found["modes"]["synchronous"]["accuracy"]
    assert together == pytest.approx(alone, abs=0.01)  # 3 workers are one process on the whole batch
    late = found["modes"]["asynchronous, plain"]["staleness"]
    # In turn, 3 workers are 2 updates late. At the start, before all have pulled, an update may be less late.
    assert late["2"] >= sum(late.values()) - 6
    assert late.keys() == {"0", "1", "2"}
    assert "below synchronous" in capsys.readouterr().out
