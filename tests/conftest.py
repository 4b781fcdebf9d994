"""For all tests: how they are started, and what they share."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
STARTED = str(HERE / "started")
# These come first, because they take longest: at the end of a run on two cores neither should wait for the other.
LONG = (
    "test_exactness.py",
    "contracts/test_communicator.py",
    "comm/test_mpi.py",
    "comm/test_mpi_losses.py",
    "multiprocess/test_run.py",
    "comm/test_hierarchical.py",
    "multiprocess/test_lost_peers.py",
    "comm/test_shm.py",
    "contracts/test_codec_contract.py",
    "benchmarks/test_bench_convergence.py",
    "network/test_compressed_bytes.py",
    "network/test_hierarchical.py",
    "comm/test_algorithms.py",
    "examples/test_char_lm.py",
)

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would everything that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What the user's own `gradsync tune-comm` has measured is no part of the tests.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="gradsync-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run everything that is otherwise sampled")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # it only hands out tests to the workers, and need not import torch for that
    import torch

    from tests.compiling import compile_once

    # Ranks that are threads or processes share two cores, so none of them brings a pool of its own.
    torch.set_num_threads(1)
    compile_once()
    # What tests start begins and ends quicker; see started/sitecustomize.py.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTED, os.environ.get("PYTHONPATH")]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    turns = {HERE / name: turn for turn, name in enumerate(LONG)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # or each gc.collect() of a test would look through all of torch


@pytest.fixture
def exhaustive(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("exhaustive"))
