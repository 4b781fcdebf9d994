"""The MPI transport when a rank is killed, frozen or missing, and how processes end then."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
from torch import nn

import gradsync
from tests.support.mpi import SURVIVORS_GO_ON, mpirun, run_mpi, run_mpi_from_scratch

pytestmark = pytest.mark.alone  # it measures how late a loss is noticed

TIMEOUT_S = 2.0
LATEST_S = TIMEOUT_S + 2.0
ULFM = ("--with-ft", "ulfm")  # the option that makes Open MPI itself survive a loss, on every network


def train_until_lost() -> tuple[tuple[int, ...], int | None, float]:
    """Train; rank 1 is killed in mid-step. Returns how a survivor saw it."""
    comm = gradsync.connect("mpi", timeout_s=TIMEOUT_S)
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    gradsync.synchronize(model, optimizer, bucket_bytes=200_000, first_bucket_bytes=100_000)
    if comm.rank == 1:
        steps = iter(range(4))
        # In mid-step: some buckets are on their way, the others will never be sent.
        model[2].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL) if next(steps) == 3 else None)
    while True:
        step_s = time.monotonic()
        try:
            optimizer.zero_grad()
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
        except gradsync.PeerLost as lost:
            seen_s = time.monotonic() - step_s
            with pytest.raises(gradsync.PeerLost):
                comm.clone()
            return lost.ranks, lost.step, seen_s


def test_mpi_names_killed_rank() -> None:
    """Over sockets, where Open MPI itself sees the end of the process, as between hosts."""
    options = (*ULFM, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self")
    first, killed, last = run_mpi_from_scratch(
        3, train_until_lost, options=options, timeout_s=40.0, expect_failure=True
    )
    assert killed is None
    for survivor in (first, last):
        assert isinstance(survivor, tuple), survivor
        assert survivor[:2] == ((1,), 3)
        assert survivor[2] <= LATEST_S


FROZEN = """
import os, signal, subprocess
import torch
import gradsync

comm = gradsync.connect("mpi", timeout_s=2.0)
comm.all_reduce(torch.ones(100_000)).wait()
if comm.rank == 1:
    subprocess.Popen(["sh", "-c", f"sleep 8; kill -9 {os.getpid()}"])  # else mpirun would wait for it for ever
    os.kill(os.getpid(), signal.SIGSTOP)
comm.all_reduce(torch.ones(100_000)).wait()
"""

REPORT = """
import os, subprocess, sys

ended = subprocess.run([sys.executable, "-c", sys.argv[1]], stderr=subprocess.PIPE, text=True)
print(os.environ["OMPI_COMM_WORLD_RANK"], ended.returncode, *ended.stderr.splitlines()[-1:], flush=True)
"""


def test_mpi_processes_exit_after_a_loss() -> None:
    """MPI_Finalize would wait for the frozen rank."""
    ended = mpirun(3, sys.executable, "-c", REPORT, FROZEN, options=SURVIVORS_GO_ON, timeout_s=40.0)
    lines = [line for line in ended.output.splitlines() if line[:2] in ("0 ", "1 ", "2 ")]
    assert [line[:5] for line in sorted(lines)] == ["0 1 g", "1 -9", "2 1 g"], ended.output
    assert lines[-1].startswith("1"), "the survivors have ended while it was still there"
    for line in lines[:2]:
        assert "gradsync.errors.PeerLost: rank 1 was lost" in line


def connect_late() -> str:
    """MPI is there, but rank 1 does not come to connect()."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        time.sleep(TIMEOUT_S + 2.0)
        return ""
    with pytest.raises(gradsync.PeerLost) as lost:
        gradsync.connect("mpi", timeout_s=TIMEOUT_S)
    return str(lost.value)


def test_mpi_connect_names_missing_rank() -> None:
    first, _, last = run_mpi(3, connect_late, timeout_s=40.0)
    assert first == last == f"rank 1 was lost in connect, noticed after {TIMEOUT_S} s: it did not come to connect()"
