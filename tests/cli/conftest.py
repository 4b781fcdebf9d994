"""For all tests of commands: clear the variables by which a launcher marks its workers; a test may set them again."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _outside_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
