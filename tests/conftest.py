"""For all tests: how they are started, and what they share."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest
import torch

# Ranks that are threads or processes share two cores, so none of them brings a pool of its own.
torch.set_num_threads(1)

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What the user's own `gradsync tune-comm` has measured is no part of the tests.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="gradsync-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run everything that is otherwise sampled")


@pytest.fixture
def exhaustive(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("exhaustive"))
