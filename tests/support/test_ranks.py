"""run_processes: results come back in rank order, failures with their traceback, and no process is left behind."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from gradsync.errors import PeerLost
from tests.support.ranks import RankFailed, run_processes


def _add(number: float, tensor: torch.Tensor) -> tuple[int, str, float]:
    return int(os.environ["RANK"]), os.environ["WORLD_SIZE"], number + tensor.sum().item()


def test_run_processes_returns_results_in_rank_order() -> None:
    assert run_processes(3, _add, 1.0, torch.ones(100_000)) == [(rank, "3", 100_001.0) for rank in range(3)]


def _fail_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise PeerLost(rank=(0, 2), step=7, after_s=1.5, reason="it is only a test")
    time.sleep(0.2)


def test_run_processes_failure_shows_rank_and_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed with exit code 1.*_fail_on_one.*only a test"):
        run_processes(2, _fail_on_one)


def test_run_processes_returns_an_expected_exception() -> None:
    first, error = run_processes(2, _fail_on_one, expect_failure=True)
    assert first is None
    assert isinstance(error, PeerLost)
    assert (error.ranks, error.step, error.after_s) == ((0, 2), 7, 1.5)
    assert "_fail_on_one" in "".join(error.__notes__)


class _Unpicklable(Exception):
    def __reduce__(self) -> str:
        raise TypeError("stays at home")


def _end_in_other_ways() -> object:
    rank = int(os.environ["RANK"])
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        print("written before the wait", flush=True)
        time.sleep(60.0)
    if rank == 2:
        raise _Unpicklable(lambda: None)
    if rank == 3:
        os._exit(5)
    return lambda: None


def test_run_processes_distinguishes_kinds_of_failure() -> None:
    killed, late, unpicklable, left, result = run_processes(5, _end_in_other_ways, timeout_s=2.0, expect_failure=True)
    assert killed == -signal.SIGKILL
    assert isinstance(late, TimeoutError)
    assert "written before the wait" in str(late)
    assert "_end_in_other_ways" in str(late), "a late rank's stack is shown"
    assert isinstance(unpicklable, RankFailed)
    assert "_Unpicklable" in str(unpicklable)
    assert left == 5
    assert isinstance(result, Exception), "a result that can't be pickled is a failure"


def _process_id() -> int:
    return os.getpid()


def test_run_processes_leaves_no_process_behind() -> None:
    for pid in run_processes(2, _process_id):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _compile(folder: str) -> int:
    sys.path.insert(0, folder)
    triple = importlib.import_module("compiled_by_ranks").triple
    Path(folder, os.environ["RANK"]).touch()
    end_s = time.monotonic() + 30.0
    while not all(Path(folder, rank).exists() for rank in "01"):
        assert time.monotonic() < end_s, "the other rank did not come"
        time.sleep(0.001)
    assert triple(2) == 6
    return sum(triple.stats.cache_misses.values())


def test_compile_once_compiles_a_function_once_for_all_ranks(tmp_path: Path) -> None:
    code = "import numba\n\n\n@numba.njit(cache=True)\ndef triple(x):\n    return 3 * x\n"
    (tmp_path / "compiled_by_ranks.py").write_text(code)
    assert sorted(run_processes(2, _compile, str(tmp_path))) == [0, 1]
