"""For all tests of commands: none of them is a worker that a launcher has started, unless it says so itself."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def outside_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
