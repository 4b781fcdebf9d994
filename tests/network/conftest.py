"""Tests marked `netns` run on real network namespaces, or say why they can't."""

from __future__ import annotations

import os

import pytest

from benchmarks.netlab import why_unavailable


@pytest.fixture(scope="session")
def lack_of_namespaces() -> str | None:
    return why_unavailable()


@pytest.fixture(autouse=True)
def _namespaces(request: pytest.FixtureRequest, lack_of_namespaces: str | None) -> None:
    if request.node.get_closest_marker("netns") is None or lack_of_namespaces is None:
        return
    if os.environ.get("CI", "").lower() in ("1", "true"):
        # A check that quietly does not run is worse than one that fails.
        pytest.fail(lack_of_namespaces)
    pytest.skip(lack_of_namespaces)
