"""The advisor's recommendations: exact choices unless others are allowed, and no change where nothing helps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from gradsync.advisor import Choice, Cost, Costs, Measurement, Network, advise, default_choices, scaling
from gradsync.advisor.comm_pattern import comm_pattern_of
from gradsync.advisor.convergence import MEASURED, REFERENCE_STEP, convergence_of
from tests.advisor.steps import measurement, network

FAST, SLOW = network(1e12), network(20e6)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_advise_changes_nothing_on_a_fast_network() -> None:
    advice = advise(measurement(), FAST, allow="all")
    assert not advice.change
    assert advice.best is advice.now
    assert advice.sentence == "your step is 100 % compute: change nothing"


def test_advise_shows_inexact_choices_without_recommending_them() -> None:
    advice = advise(measurement(), SLOW, recorded_on=FAST)
    shown = {str(row.choice): row for row in advice.rows}
    assert shown["allreduce(codec=int8)"].speedup > 2
    assert not shown["allreduce(codec=int8)"].allowed
    assert advice.best.exact
    assert "no exact choice helps: change nothing, or allow `" in advice.sentence or advice.change


def test_advise_recommends_allowed_choices() -> None:
    advice = advise(measurement(), SLOW, recorded_on=FAST, allow=["allreduce(codec=int8)"])
    assert str(advice.best.choice) == "allreduce(codec=int8)"
    assert advice.sentence.startswith("synchronization costs 59 % of your step; ")
    assert "`allreduce(codec=int8)` would take it to about " in advice.sentence


def test_advise_compares_time_to_loss_and_not_step_time() -> None:
    """PowerSGD's step is the shortest here, but it needs 1.4 times the steps."""
    texts = ["allreduce(codec=int4)", "allreduce(reducer=powersgd(rank=4))"]
    free = {"compressed(codec=int4) 2": Cost((0.0,)), "powersgd 2": Cost((0.0, 0.0))}
    costs = Costs(copy=0.0, by_strategy=free)
    advice = advise(measurement(), network(8e6), recorded_on=FAST, costs=costs, allow=texts, choices=[])
    rows = {str(row.choice): row for row in advice.rows}
    assert rows[texts[1]].step_s < rows[texts[0]].step_s < 1.3 * rows[texts[1]].step_s
    assert rows[texts[1]].steps_factor == 1.4
    assert str(advice.best.choice) == texts[0]


def test_advise_recommends_unknown_convergence_only_by_name() -> None:
    link = network(2e6)  # so slow that an exchange every 50 steps is the shortest step by far
    choices = [Choice("local_sgd(every=50)"), Choice("allreduce(codec=int4)")]
    everything = advise(measurement(), link, recorded_on=FAST, allow="all", choices=choices)
    rows = {str(row.choice): row for row in everything.rows}
    assert rows["local_sgd(every=50)"].step_s < rows["allreduce(codec=int4)"].step_s
    assert str(everything.best.choice) == "allreduce(codec=int4)"
    named = advise(measurement(), link, recorded_on=FAST, allow=["local_sgd(every=50)"], choices=choices)
    assert str(named.best.choice) == "local_sgd(every=50)"


def test_advise_needs_a_fifth_of_the_margin_for_a_bucket_size() -> None:
    link = network(64e6)  # small buckets hide a little more than one of 25 MiB
    choices = [Choice("allreduce", 1 << 20)]
    eager = advise(measurement(), link, recorded_on=FAST, choices=choices, margin=0.0)
    assert eager.change
    gain = eager.best.speedup - 1
    for margin, change in ((3 * gain, True), (6 * gain, False)):  # for a bucket size a fifth of it is enough
        assert advise(measurement(), link, recorded_on=FAST, choices=choices, margin=margin).change is change


def test_advise_needs_the_whole_margin_for_a_codec() -> None:
    choices = [Choice("allreduce(codec=fp16)")]
    eager = advise(measurement(), SLOW, recorded_on=FAST, choices=choices, allow="all", margin=0.0)
    assert eager.change
    gain = 1 / eager.best.rank_by - 1
    for margin, change in ((0.8 * gain, True), (1.2 * gain, False)):
        advice = advise(measurement(), SLOW, recorded_on=FAST, choices=choices, allow="all", margin=margin)
        assert advice.change is change


def test_advise_distinguishes_stragglers_from_the_wire() -> None:
    advice = advise(measurement(exposed_s=0.3, waiting_s=0.29), FAST)
    assert "it is waiting for slower ranks and not the wire" in advice.sentence
    assert not advice.change
    mixed = advise(measurement(waiting_s=0.01, exposed_s=0.01), SLOW, recorded_on=FAST, allow=["allreduce(codec=int8)"])
    assert "it is the wire, not the stragglers" in mixed.sentence


def test_advice_lists_what_ran_first_and_survives_json() -> None:
    ran = Choice("allreduce(codec=int8)", 9 << 20)  # which is its usual size
    advice = advise(measurement(choice=ran), FAST)
    assert str(advice.now.choice) == "allreduce(codec=int8)"
    assert [str(row.choice) for row in advice.rows].count("allreduce(codec=int8)") == 1
    assert advice.now.allowed, "what runs may go on"
    data = json.loads(json.dumps(advice.as_dict()))
    assert data["rows"][0]["choice"] == data["now"]
    assert {"step_s", "share", "risk", "note", "steps_factor", "bytes_per_step"} <= set(data["rows"][0])
    step = measurement()
    assert Measurement.from_dict(json.loads(json.dumps(step.as_dict()))) == step
    assert Network.from_dict(json.loads(json.dumps(SLOW.as_dict()))) == SLOW
    costs = Costs.typical()
    assert Costs.from_dict(json.loads(json.dumps(costs.as_dict()))) == costs


def test_advise_is_deterministic() -> None:
    one, other = (advise(measurement(), SLOW, recorded_on=FAST, allow="all") for _ in range(2))
    assert one == other


def test_scaling_covers_2_to_1024_ranks() -> None:
    rows = scaling(measurement(), network(500e6), recorded_on=FAST)
    assert {row["choice"] for row in rows} == {str(choice) for choice in default_choices()}
    exact = [row for row in rows if row["choice"] == "allreduce"]
    assert [row["world_size"] for row in exact] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert all(0 < row["efficiency"] <= 1.001 for row in exact)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"allow": "everything"}, "'exact', 'all' or a list"), ({"world_size": 0}, "at least 1")],
)
def test_advise_refuses_bad_arguments(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        advise(measurement(), FAST, **given)


def test_convergence_of_every_default_choice_is_known() -> None:
    for choice in default_choices():
        known = convergence_of(comm_pattern_of(choice.strategy))
        assert known.risk != "unknown", f"{choice} needs a line in convergence.py"
        assert known.note


def test_convergence_table_agrees_with_the_benchmark() -> None:
    """Recompute the factors from the committed curves; of each spec the newest counts."""
    factors: dict[str, float] = {}
    for path in sorted(RESULTS.glob("*convergence.json")):
        curves = json.loads(path.read_text())["curves"]
        exact = curves["allreduce"]
        target = exact["loss"][exact["steps"].index(REFERENCE_STEP)]
        for text, curve in curves.items():
            if convergence_of(comm_pattern_of(text)) in MEASURED.values():
                factors[text] = _steps_to(curve, target) / REFERENCE_STEP
    for text, factor in factors.items():
        assert convergence_of(comm_pattern_of(text)).steps_factor == pytest.approx(factor, abs=0.03), text
    assert {convergence_of(comm_pattern_of(text)) for text in factors} == set(MEASURED.values())


def _steps_to(curve: dict[str, list[float]], target: float) -> float:
    pairs = list(zip(curve["steps"], curve["loss"], strict=True))
    for (before, high), (after, low) in itertools.pairwise(pairs):
        if low <= target:
            return before + (high - target) / (high - low) * (after - before)
    raise AssertionError("the curve never reached the target")
