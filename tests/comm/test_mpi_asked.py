"""When MPI is the transport, and what is said when it can not be."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator

import pytest

import gradsync
from gradsync.comm import disconnect, mpi_library
from gradsync.comm.rendezvous import said_transport, started_by_mpi
from tests.comm.test_mpi import groups_in_threads_do_not_disturb_each_other
from tests.contracts.communicator import CONTRACT
from tests.mpi import LAUNCHERS, find_mpirun, run_mpi
from tests.ranks import run_processes


def with_a_lesser_thread_level(level: str) -> str:
    """The script has initialized MPI itself, and not for every thread."""
    import mpi4py

    mpi4py.rc.thread_level = level
    from mpi4py import MPI

    assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
    atexit.register(MPI.Finalize)  # as mpi4py itself does at the very end of a process that was not forked
    comm = gradsync.connect("mpi", timeout_s=20.0)
    for part_of_the_contract in CONTRACT:
        part_of_the_contract(comm)
    groups_in_threads_do_not_disturb_each_other(comm, make_more=False)  # that is what takes more
    return comm.why


def test_a_library_that_allows_one_thread_at_a_time_is_used_so() -> None:
    assert len(set(run_mpi(2, with_a_lesser_thread_level, "serialized"))) == 1


def outside_of_mpirun(thread_level: str) -> list[str]:
    """Without a launcher MPI is a world of one. (In a process of its own: MPI can't be begun twice.)"""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]
    said = ["4", None]
    if thread_level != "multiple":
        import mpi4py

        mpi4py.rc.thread_level = thread_level
        from mpi4py import MPI

        atexit.register(MPI.Finalize)
        said = [None]
    refused = []
    for size in said:
        if size:
            os.environ["OMPI_COMM_WORLD_SIZE"] = size
        else:
            os.environ.pop("OMPI_COMM_WORLD_SIZE", None)
        with pytest.raises(ValueError) as error:
            gradsync.connect("mpi", timeout_s=20.0)
        refused.append(str(error.value))
    return refused


def test_it_says_why_it_can_not_be() -> None:
    find_mpirun()
    ((another_library, no_launcher),) = run_processes(1, outside_of_mpirun, "multiple")
    assert "MPI sees a world of one, though 4 ranks were started: mpi4py has loaded Open MPI" in another_library
    assert "no mpirun or srun is seen. Use `mpirun -n 4 python train.py`" in no_launcher
    ((too_little,),) = run_processes(1, outside_of_mpirun, "funneled")
    assert "needs MPI_THREAD_SERIALIZED or more" in too_little


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    disconnect()
    yield monkeypatch
    disconnect()


def test_the_environment_asks_where_the_script_leaves_it_open(unconnected: pytest.MonkeyPatch) -> None:
    unconnected.setenv("GRADSYNC_TRANSPORT", "carrier pigeon")
    with pytest.raises(ValueError, match=r"GRADSYNC_TRANSPORT must be one of auto, .*mpi; got 'carrier pigeon'"):
        gradsync.connect()
    unconnected.setenv("GRADSYNC_TRANSPORT", "c10d")
    with pytest.raises(ValueError, match="transport='c10d' needs a launcher"):
        gradsync.connect()
    assert gradsync.connect("solo").why == "one worker: nothing to talk to", "the script has the last word"
    disconnect()
    unconnected.setenv("GRADSYNC_TRANSPORT", "solo")
    assert gradsync.connect().why == "one worker: nothing to talk to; GRADSYNC_TRANSPORT=solo"
    assert said_transport(("auto",), {"GRADSYNC_TRANSPORT": ""}) == "auto"


def test_torchruns_workers_are_not_mpis(unconnected: pytest.MonkeyPatch) -> None:
    unconnected.setenv("TORCHELASTIC_RUN_ID", "7")
    with pytest.raises(ValueError, match="started by torchrun or `gradsync run`"):
        gradsync.connect("mpi")
    assert started_by_mpi({"PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}) == 2
    assert started_by_mpi({}) is None


def test_without_mpi4py_it_says_how_to_get_it(unconnected: pytest.MonkeyPatch) -> None:
    unconnected.setattr(mpi_library, "_library", None)
    unconnected.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"pip install 'gradsync\[mpi\]'"):
        gradsync.connect("mpi")
