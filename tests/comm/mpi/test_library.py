"""When MPI is chosen as the transport, and the errors when it can not be used."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator

import pytest

import gradsync
from gradsync.comm import disconnect
from gradsync.comm.mpi import library as mpi_library
from gradsync.comm.rendezvous import requested_transport, started_by_mpi
from tests.comm.mpi.test_communicator import groups_in_several_threads
from tests.contracts.communicator import CONTRACT
from tests.support.mpi import LAUNCHERS, find_mpirun, run_mpi
from tests.support.ranks import run_processes


def run_contract_with_thread_level(level: str) -> str:
    """Run the contract where the script has initialized MPI itself, with a lesser thread level."""
    import mpi4py

    mpi4py.rc.thread_level = level
    from mpi4py import MPI

    assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
    atexit.register(MPI.Finalize)  # as mpi4py itself does at the very end of a process that was not forked
    comm = gradsync.connect("mpi", timeout_s=20.0)
    for contract_check in CONTRACT:
        contract_check(comm)
    groups_in_several_threads(comm, make_groups=False)  # making groups needs THREAD_MULTIPLE
    return comm.why


def test_mpi_works_with_thread_serialized() -> None:
    assert len(set(run_mpi(2, run_contract_with_thread_level, "serialized"))) == 1


def connect_without_launcher(thread_level: str) -> list[str]:
    """The errors of connect() without a launcher. It needs a process of its own: MPI can't be started twice."""
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        del os.environ[name]
    declared_sizes = ["4", None]
    if thread_level != "multiple":
        import mpi4py

        mpi4py.rc.thread_level = thread_level
        from mpi4py import MPI

        atexit.register(MPI.Finalize)
        declared_sizes = [None]
    refused = []
    for size in declared_sizes:
        if size:
            os.environ["OMPI_COMM_WORLD_SIZE"] = size
        else:
            os.environ.pop("OMPI_COMM_WORLD_SIZE", None)
        with pytest.raises(ValueError) as error:
            gradsync.connect("mpi", timeout_s=20.0)
        refused.append(str(error.value))
    return refused


def test_connect_mpi_explains_missing_launcher_and_thread_level() -> None:
    find_mpirun()
    ((another_library, no_launcher),) = run_processes(1, connect_without_launcher, "multiple")
    assert "MPI sees a world of one, though 4 ranks were started: mpi4py has loaded Open MPI" in another_library
    assert "no mpirun or srun is seen. Use `mpirun -n 4 python train.py`" in no_launcher
    ((too_little,),) = run_processes(1, connect_without_launcher, "funneled")
    assert "needs MPI_THREAD_SERIALIZED or more" in too_little


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)
    disconnect()
    yield monkeypatch
    disconnect()


def test_transport_variable_sets_the_default(unconnected: pytest.MonkeyPatch) -> None:
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
    assert requested_transport(("auto",), {"GRADSYNC_TRANSPORT": ""}) == "auto"


def test_connect_mpi_refuses_torchrun_workers(unconnected: pytest.MonkeyPatch) -> None:
    unconnected.setenv("TORCHELASTIC_RUN_ID", "7")
    with pytest.raises(ValueError, match="started by torchrun or `gradsync run`"):
        gradsync.connect("mpi")
    assert started_by_mpi({"PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}) == 2
    assert started_by_mpi({}) is None


def test_connect_mpi_without_mpi4py_says_how_to_install_it(unconnected: pytest.MonkeyPatch) -> None:
    unconnected.setattr(mpi_library, "_library", None)
    unconnected.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"pip install 'gradsync\[mpi\]'"):
        gradsync.connect("mpi")
