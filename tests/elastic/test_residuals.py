"""Residuals of workers that leave an elastic run or die: handed over, taken from a copy, or said to be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic.test_survive import END_S, Outcome, started


def run_once(folder: Path, **options: Any) -> Outcome:
    with started(folder, "--max-restarts", "0", epochs=8, step_s=0.02, residuals=True, **options) as process:
        code = process.wait(END_S)
    return Outcome(folder, code, (folder / "log").read_text()[-5000:])


def residuals(folder: Path, when: str, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """The residuals of all workers at a moment, by uid."""
    found = {}
    for path in folder.glob(f"residuals.{when}.{step}.*"):
        kinds = torch.load(path)
        found[path.name.split(".", 3)[3]] = {
            f"{kind}/{name}": x for kind, own in kinds.items() for name, x in own.items()
        }
    return found


def total(of: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    first = next(iter(of.values()))
    return {name: torch.stack([own[name] for own in of.values()]).sum(0) for name in first}


def sums_around_the_change(outcome: Outcome) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The sum over the workers before worker 1 has gone, and after that."""
    (change,) = (path.name for path in outcome.folder.glob("residuals.epoch*.0.0"))
    _, epoch, step, _, _ = change.split(".")
    before = residuals(outcome.folder, "step", int(step))
    after = residuals(outcome.folder, epoch, int(step))
    assert set(before) == {"0.0", "1.0", "2.0"}, outcome.log
    assert set(after) == {"0.0", "2.0"}, outcome.log
    return total(before), total(after)


CODECS = ["int8", "topk(density=0.1)"]


@pytest.mark.alone  # beside other tests a worker may be taken for lost
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("phase", "mirror"), [("forward", True), ("leave", False)])
def test_nothing_is_lost_when_a_worker_is_killed_or_leaves(
    tmp_path: Path, codec: str, phase: str, mirror: bool
) -> None:
    strategy = f"allreduce(reducer=compressed(codec={codec}, min_numel=8))"
    outcome = run_once(tmp_path, strategy=strategy, kills=[["1.0", 9, phase]], mirror=mirror)
    before, after = sums_around_the_change(outcome)
    assert len([name for name, value in before.items() if value.any()]) == 2  # the weights; biases are not encoded
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-6, atol=1e-9)
    assert outcome.stats()["0.0"]["lost_residuals"] == []


@pytest.mark.alone
def test_residuals_of_a_killed_worker_without_a_copy_are_said_to_be_lost(tmp_path: Path) -> None:
    strategy = "allreduce(reducer=compressed(codec=int8, min_numel=8))"
    outcome = run_once(tmp_path, strategy=strategy, kills=[["1.0", 9, "forward"]])
    before, after = sums_around_the_change(outcome)
    assert any(not torch.allclose(after[name], value) for name, value in before.items())
    for stats in outcome.stats().values():
        assert stats["lost_residuals"] == ["all of worker 1, after step 8"]


def test_mirroring_is_refused_where_there_are_no_residuals(tmp_path: Path) -> None:
    outcome = run_once(tmp_path, mirror=True)
    assert outcome.code != 0
    assert "mirror_residuals=True keeps copies of error-feedback residuals, and allreduce has none" in outcome.log
