"""The curve of an unchanged script: its loss, its steps, the last step of all ranks; and summaries of curves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradsync
from gradsync.compare import Curve, CurveWriter, Limits, load_curve, summarize
from gradsync.compare.curve import AHEAD, NEVER, LimitReached, _shared_counts
from gradsync.compare.page import headline, render
from gradsync.compare.summary import ComparisonSummary, common_loss


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Any]:
    """Start writing a curve of the training in this process."""
    made: list[CurveWriter] = []

    def start(**limits: Any) -> Path:
        made.append(CurveWriter(tmp_path, Limits(**limits)))
        return tmp_path

    yield start
    for writer in made:
        writer.remove()
    assert torch.autograd.backward.__module__ == "torch.autograd", "torch is restored"


def train(
    steps: int, *, accumulate: int = 1, scaler: torch.amp.GradScaler | None = None, strategy: str = "allreduce"
) -> int:
    """Losses of 1, 2, 3, ...; returns how many steps there were."""
    model = nn.Linear(2, 1)
    adam = strategy.startswith("onebit_adam")
    optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(model.parameters(), lr=0.0)
    done = 0
    with gradsync.synchronize(model, optimizer, strategy, accumulate=accumulate, scaler=scaler):
        try:
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                loss = model(torch.ones(1, 2)).sum() * 0.0 + step
                (loss if scaler is None else scaler.scale(loss)).backward()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                done += 1
        except LimitReached:
            return done
    return done


def test_curve_loss_is_what_backward_is_called_on(write: Any) -> None:
    folder = write(steps=4)
    assert train(10) == 3, "the fourth step ends the script"
    curve = load_curve(folder)
    assert curve.steps == (1, 2, 3, 4)
    assert curve.loss == (1.0, 2.0, 3.0, 4.0)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert curve.bytes == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("strategy", "steps", "not_yet"),
    [
        ("allreduce", 4, ""),
        ("onebit_adam(warmup_steps=4)", 4, "still in its warm-up of 4 steps, which are exact"),
        ("onebit_adam(warmup_steps=3)", 4, ""),
        ("diloco(every=5)", 4, "no exchange yet, as every=5"),
        ("local_sgd(every=2, exact_steps=9)", 4, "still in its exact steps"),
        ("local_sgd(every=2)", 5, ""),
    ],
)
def test_curve_says_what_a_strategy_has_not_yet_done(write: Any, strategy: str, steps: int, not_yet: str) -> None:
    folder = write(steps=steps)
    train(10, strategy=strategy)
    assert load_curve(folder).not_yet == not_yet


def test_curve_bytes_are_counted_at_the_interface(tmp_path: Path) -> None:
    writer = CurveWriter(tmp_path, Limits(steps=2), interface="lo")
    train(5)
    writer.remove()
    counted = load_curve(tmp_path).bytes
    assert len(counted) == 2
    assert 0.0 <= counted[0] <= counted[1] <= float(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def test_curve_counts_an_accumulation_as_one_step(write: Any) -> None:
    folder = write(steps=2)
    train(10, accumulate=3)
    assert load_curve(folder).loss == (2.0, 5.0)


def test_curve_divides_out_the_loss_scale(write: Any) -> None:
    folder = write(steps=3)
    train(5, scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    assert load_curve(folder).loss == (1.0, 2.0, 3.0)


def test_curve_ignores_a_second_model(write: Any) -> None:
    folder = write(steps=50)
    train(3)
    train(4)
    assert load_curve(folder).steps == (1, 2, 3)


def test_curve_time_limit_sets_a_later_last_step(write: Any) -> None:
    folder = write(seconds=1e-9)
    other = _shared_counts(folder / "counts", 1)
    assert other[0] == NEVER
    assert train(100) == AHEAD, "rank 0 sets the last step after its first one"
    assert int(np.memmap(folder / "counts", np.int64, "r")[0]) == 1 + AHEAD


def test_shared_counts_are_one_file(tmp_path: Path) -> None:
    one, other = (_shared_counts(tmp_path / "counts", 3) for _ in range(2))
    one[2] = 7
    assert list(other) == [NEVER, 0, 7, 0]


def lines(rank: int, world: int, losses: list[Any]) -> str:
    steps = [
        {"step": at + 1, "seconds": at + rank, "bytes": 10.0 * at * (1 + rank), "loss": loss}
        for at, loss in enumerate(losses)
    ]
    return "".join(json.dumps(line) + "\n" for line in [{"rank": rank, "world_size": world}, *steps])


def test_load_curve_averages_ranks_up_to_the_last_common_step(tmp_path: Path) -> None:
    (tmp_path / "rank-0.jsonl").write_text(lines(0, 2, [4.0, 2.0, 1.0]))
    (tmp_path / "rank-1.jsonl").write_text(lines(1, 2, [2.0, None]) + '{"step": 3, "sec')  # killed in mid-line
    curve = load_curve(tmp_path)
    assert curve == Curve((1, 2), (1.0, 2.0), (0.0, 15.0), (3.0, 2.0)), "bytes are the mean over the ranks"


@pytest.mark.parametrize("present", [[], [0], [0, 1]])
def test_load_curve_refuses_a_run_without_steps(tmp_path: Path, present: list[int]) -> None:
    for rank in present:
        (tmp_path / f"rank-{rank}.jsonl").write_text(lines(rank, 2, []))
    with pytest.raises(ValueError, match="no step was seen on some rank"):
        load_curve(tmp_path)


def curve_of(losses: list[float | None], *, pace: float = 1.0, sent: float = 1.0) -> Curve:
    steps = range(1, len(losses) + 1)
    return Curve(tuple(steps), tuple(pace * at for at in steps), tuple(sent * at for at in steps), tuple(losses))


def test_summarize_at_the_lowest_common_loss() -> None:
    fast = curve_of([5.0, 4.0, 3.0, 2.0, 1.5], pace=0.1, sent=5.0)
    slow = curve_of([5.0, 4.5, 4.0, 3.0, 2.0])
    target = common_loss([fast, slow])
    assert target == 3.0, "as low or lower at two of the last three steps"
    rows = [summarize("slow", slow, target=target), summarize("fast", fast, target=target)]
    assert [row.seconds_to_loss for row in rows] == pytest.approx([4.0, 0.3])
    assert [row.bytes_to_loss for row in rows] == [4.0, 15.0]
    assert headline([row.as_dict() for row in rows], target) == "To a loss of 3, fast is 13.33 times as fast as slow."
    silent = curve_of([None, None])
    assert common_loss([fast, silent]) is None
    assert summarize("silent", silent, target=None).final_loss is None


@pytest.mark.parametrize("lucky", [5, 40, 99])
def test_lowest_reached_ignores_a_lucky_batch(lucky: int) -> None:
    falling: list[float | None] = [10.0 - 0.05 * step for step in range(100)]
    plain, noisy = curve_of(falling), curve_of([*falling[:lucky], -1000.0, *falling[lucky + 1 :]])
    assert min(loss for loss in noisy.smoothed() if loss is not None) < -100
    assert noisy.lowest_reached() == pytest.approx(plain.lowest_reached(), abs=0.3)
    at, without = noisy.first_at(7.0), plain.first_at(7.0)
    assert at is not None
    assert without is not None
    assert abs(at - without) <= 5, "as far as one batch moves the average"


def test_first_at_needs_most_of_a_window() -> None:
    dips = curve_of([9.0, 5.0, 9.0, 9.0, 5.0, 9.0, 5.0, 5.0, 9.0])
    assert dips.first_at(5.0) == 4, "from there on two of three steps are as low"
    assert dips.first_at(4.0) is None
    assert dips.lowest_reached() == 5.0
    assert curve_of([None, 9.0, None, 5.0, 5.0]).first_at(5.0) == 3, "steps without a loss are skipped"
    assert curve_of([2.0]).first_at(2.0) == 0


def test_lowest_reached_of_a_run_that_diverges() -> None:
    diverged = curve_of([4.0, 3.0, 2.0, *[float("nan")] * 5])
    assert diverged.lowest_reached() == 3.0
    assert diverged.first_at(3.0) == 1
    assert common_loss([diverged, curve_of([4.0, 3.5, 1.0, 1.0, 1.0])]) == 3.0
    assert common_loss([curve_of([float("nan")] * 4)]) is None


def test_render_embeds_the_curves_and_loads_nothing(tmp_path: Path) -> None:
    times = tuple(float(at) for at in range(2000))
    curve = Curve(tuple(range(1, 2001)), times, times, (*times[:-1], float("nan")))
    rows = [
        summarize("a</script>", curve, target=None),
        ComparisonSummary(strategy="b", failure="ValueError: no\nmore"),
    ]
    curves = {"a</script>": {**vars(curve), "smoothed": curve.smoothed()}}
    page = render(
        {"title": "<train>", "target_loss": None, "runs": [row.as_dict() for row in rows], "curves": curves, "sent": ""}
    )
    assert "{{" not in page
    assert "&lt;train&gt;" in page
    assert "failed: ValueError: no<" in page
    embedded = page.split('type="application/json">')[1].split("</script>")[0]
    assert "NaN" not in embedded, "browsers can't parse it"
    data = json.loads(embedded)
    shown = data["curves"]["a</script>"]
    assert len(shown["steps"]) <= 601
    assert shown["steps"][-1] == 2000
    assert shown["loss"][-1] is None
    for asks in (" src=", "@import", "url(", "fetch(", "XMLHttpRequest"):
        assert asks not in page


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"seconds": 0.0}])
def test_limits_refuse_impossible_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Limits(**wrong)


def test_limits_survive_the_environment() -> None:
    limits = Limits(steps=5, seconds=2.5)
    assert Limits.from_environment(limits.as_environment()) == limits
    assert Limits.from_environment({}) == Limits()
    assert CurveWriter.from_environment({}) is None
