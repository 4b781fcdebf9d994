"""Configuration of the test run: order, environment, and fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
STARTUP = str(HERE / "support/startup")
# These run first, because they take longest: otherwise one core would idle at the end of a run on two.
LONG = (
    "test_exactness.py",
    "gpu/test_no_stall.py",
    "contracts/test_communicator.py",
    "comm/mpi/test_communicator.py",
    "comm/mpi/test_lost_ranks.py",
    "multiprocess/test_run.py",
    "multiprocess/test_lost_peers.py",
    "comm/hierarchical/test_communicator.py",
    "contracts/test_strategy.py",
    "multiprocess/test_signals.py",
    "multiprocess/test_hash_seeds.py",
    "reducers/test_spikes.py",
    "contracts/test_loaded_weights.py",
    "engine/test_saved_state.py",
    "contracts/test_codec_contract.py",
    "comm/allreduce/test_algorithms.py",
    "network/test_compressed_bytes.py",
    "cli/test_serve.py",
    "comm/tcp/test_mesh.py",
    "benchmarks/test_bench_convergence.py",
    "comm/shm/test_communicator.py",
    "examples/test_char_lm.py",
)

# A shell that starts the tests in the background makes them ignore SIGINT; their own processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests must not read what the user's own `gradsync tune-comm` has measured.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="gradsync-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run everything that is otherwise sampled")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # the xdist controller only distributes tests, and need not import torch
    import torch

    from tests.support.compiling import compile_once

    # Ranks that are threads or processes share two cores, so none of them gets a thread pool.
    torch.set_num_threads(1)
    compile_once()
    # Processes that tests start begin and end faster: see support/startup/sitecustomize.py.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STARTUP, os.environ.get("PYTHONPATH")]))


@pytest.hookimpl(optionalhook=True)  # it is a hook of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.support.scheduling import PartScheduling

    return PartScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    positions = {HERE / name: position for position, name in enumerate(LONG)}
    items.sort(key=lambda item: positions.get(item.path, len(positions)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # or each gc.collect() of a test would scan all of torch


@pytest.fixture
def exhaustive(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("exhaustive"))


@pytest.fixture(scope="session")
def missing_for_lab() -> str | None:
    from gradsync.testing import lab_unavailable_reason

    return lab_unavailable_reason()


@pytest.fixture(autouse=True)
def _require_namespaces(request: pytest.FixtureRequest) -> None:
    """Skip a test marked `netns` where network namespaces can't be made; fail it where CI=true."""
    if request.node.get_closest_marker("netns") is None:
        return
    missing = request.getfixturevalue("missing_for_lab")
    if missing is None:
        return
    if os.environ.get("CI", "").lower() in ("1", "true"):
        # A check that quietly does not run is worse than one that fails.
        pytest.fail(missing)
    pytest.skip(missing)
