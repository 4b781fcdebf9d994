"""Which tests of a parallel run stay together in one process: those of a file, or those that share a launched world.

The tests of most files share what the file has set up. A few long files are divided further, or one process would still
run them when the others have nothing left to do.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

# By file: what identifies a part of it. Tests of one part stay together.
PARTS = {
    "tests/contracts/test_communicator.py": r"test_contract\[\w+-\d+|test_\w+",  # a world runs the contract once
    "tests/contracts/test_loaded_weights.py": r"test_\w+",
    "tests/gpu/test_no_stall.py": r"test_\w+",
    "tests/multiprocess/test_run.py": r"test_\w+",
    "tests/test_exactness.py": r"test_processes\[\w+-\w+-\d+|test_\w+",  # a place runs its cases once
}


def part_of(nodeid: str) -> str:
    """The part that a test belongs to."""
    file, _, test = nodeid.partition("::")
    part = re.match(PARTS.get(file, ""), test)
    return f"{file}::{part[0]}" if part and part[0] else file


class PartScheduling(LoadScopeScheduling):
    """xdist's scheduler, with the parts above."""

    def _split_scope(self, nodeid: str) -> str:
        return part_of(nodeid)
