"""compare_losses: what counts as the same, and that its cases cover whatever is registered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.compare_losses import SAME, Outcome, first_difference, read_outcomes
from benchmarks.workers.losses import CASES, DIGESTS, digest
from gradsync import spec


def record(losses: list[str], **digests: str) -> dict[str, Any]:
    return {"case": "allreduce", "losses": losses, "digests": dict.fromkeys(DIGESTS, "same") | digests}


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ([record(["a", "b", "c"]), record(["d", "e", "f"])], SAME),
        ([record(["a", "b", "x"]), record(["d", "x", "f"])], "step 2"),
        ([record(["a", "b"]), record(["d", "e", "f"])], "step 3"),
        ([record(["a", "b", "c"]), record(["d", "e", "f"], buffers="other")], "buffers"),
    ],
)
def test_first_difference_is_the_earliest_of_any_rank(new: list[dict[str, Any]], expected: str) -> None:
    old = Outcome(ranks=[record(["a", "b", "c"]), record(["d", "e", "f"])])
    assert first_difference(old, Outcome(ranks=new)) == expected


def test_first_difference_says_where_a_case_failed() -> None:
    good, bad = Outcome(ranks=[record(["a"])]), Outcome(error="SpecError")
    assert first_difference(good, bad) == "failed in new"
    assert first_difference(bad, bad) == "failed in old and new"


def test_read_outcomes_leaves_out_cases_that_a_rank_has_not_finished(tmp_path: Path) -> None:
    for rank, names in enumerate((["first", "second"], ["first"])):
        (tmp_path / f"{rank}.jsonl").write_text("".join(json.dumps({"case": name}) + "\n" for name in names))
    assert read_outcomes(tmp_path, 2) == {"first": Outcome(ranks=[{"case": "first"}] * 2)}
    assert read_outcomes(tmp_path, 3) == {}


def test_digest_sees_bits_keys_and_shapes() -> None:
    states: list[Any] = [
        {"a": torch.zeros(2), "b": 1},
        {"a": torch.tensor([0.0, -0.0]), "b": 1},
        {"a": torch.zeros(2, 1), "b": 1},
        {"a": torch.zeros(2), "c": 1},
        {"a": torch.zeros(2), "b": 1.0},
    ]
    assert len({digest(state) for state in states}) == len(states)
    assert digest({"b": 1, "a": torch.zeros(2)}) == digest(states[0])


@pytest.mark.parametrize("kind", ["strategy", "codec", "reducer", "topology"])
def test_cases_cover_everything_that_is_registered(kind: str) -> None:
    text = " ".join(case.spec for case in CASES)
    implied = {"dense", "plain"}  # what `allreduce` alone stands for
    missing = [name for name in spec.names(kind) if name not in text and name not in implied]
    assert [name for name in missing if not name.startswith("test_")] == []


def test_case_names_are_unique_and_their_specs_valid() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        spec.parse(case.spec, kind="strategy")
