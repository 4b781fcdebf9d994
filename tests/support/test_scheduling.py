"""The parts of a parallel run: every file that is divided exists, and its tests fall into several parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scheduling import PARTS, part_of

ROOT = Path(__file__).resolve().parents[2]


def test_part_of_a_test_is_its_file_or_a_world_in_it() -> None:
    assert part_of("tests/spec/test_spec.py::test_parse[a]") == "tests/spec/test_spec.py"
    assert part_of("tests/gpu/test_no_stall.py::test_codecs[a]") == "tests/gpu/test_no_stall.py::test_codecs"
    exactness = "tests/test_exactness.py::test_processes[sharded-tcp-2"
    assert part_of(f"{exactness}-gan]") == part_of(f"{exactness}-1001]") == exactness
    assert part_of("tests/test_exactness.py::test_processes[sharded-tcp-3-gan]") != exactness


@pytest.mark.parametrize("file", PARTS)
def test_divided_files_have_several_parts(file: str) -> None:
    names = [line.split("(")[0][4:] for line in (ROOT / file).read_text().splitlines() if line.startswith("def test_")]
    assert len({part_of(f"{file}::{name}") for name in names}) == len(names) > 1
