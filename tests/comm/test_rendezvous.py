"""Finding one's place in the run from what launchers leave in the environment."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.comm.rendezvous import Place, find_place, first_of_nodelist, interface_address
from tests.ranks import run_processes

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-17",
}
PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "991",
    "SLURM_STEP_ID": "0",
}


def test_torchrun() -> None:
    place = find_place({**TORCHRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"})
    assert place == Place(
        rank=1,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="10.0.0.1",
        master_port=29400,
        source="torchrun",
    )


@pytest.mark.parametrize(
    ("environ", "source", "rank", "master_addr"),
    [(OPEN_MPI, "Open MPI", 2, "127.0.0.1"), (PMI, "PMI", 0, "127.0.0.1"), (SLURM, "Slurm", 3, "gpu07")],
)
def test_other_launchers(environ: dict[str, str], source: str, rank: int, master_addr: str) -> None:
    place = find_place(environ)
    assert (place.source, place.rank, place.master_addr) == (source, rank, master_addr)
    assert place.master_port == find_place(environ).master_port, "every rank derives the same port"
    assert 20000 <= place.master_port < 32000, "below the ports that systems hand out"


def test_two_jobs_on_one_machine_meet_at_different_ports() -> None:
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-18"}
    assert find_place(OPEN_MPI).master_port != find_place(other).master_port


def test_a_batch_script_is_not_a_worker() -> None:
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "5"}).world_size == 1


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Set MASTER_ADDR"),
    ],
)
def test_nonsense_is_named(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        find_place(environ)


def test_nodelists() -> None:
    assert first_of_nodelist("n1") == "n1"
    assert first_of_nodelist("rack[2,4]-n[010-012],other") == "rack2-n010"


def test_the_loopback_has_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("none") is None


def under_open_mpi() -> tuple[int, int, float, str]:
    """Only Open MPI's variables are left: torchrun's, which the test sets, are taken away."""
    rank, world_size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": world_size}
    os.environ |= {"OMPI_COMM_WORLD_LOCAL_SIZE": world_size, "PMIX_NAMESPACE": f"test-{os.getppid()}"}
    comm = gradsync.connect(timeout_s=20)
    total = torch.tensor([float(comm.rank)])
    comm.all_reduce(total).wait()
    return comm.rank, comm.world_size, total.item(), comm.why


def test_processes_meet_with_open_mpis_variables_alone() -> None:
    for rank, outcome in enumerate(run_processes(3, under_open_mpi)):
        assert outcome == (rank, 3, 3.0, "3 ranks, as Open MPI says; all on one host")


def with_a_group_of_the_scripts_own() -> tuple[str, float, float]:
    dist.init_process_group("gloo")
    comm = gradsync.connect(timeout_s=20)
    ours = torch.ones(1)
    comm.all_reduce(ours).wait()
    theirs = torch.ones(1)
    dist.all_reduce(theirs)
    dist.barrier()
    dist.destroy_process_group()
    return comm.why, ours.item(), theirs.item()


def test_a_process_group_of_the_scripts_own_is_used() -> None:
    assert (
        run_processes(2, with_a_group_of_the_scripts_own)
        == [("the script's own process group; all on one host", 2.0, 2.0)] * 2
    )


def test_connect_says_what_it_can() -> None:
    with pytest.raises(ValueError, match="auto, c10d, shm, hierarchical, solo, mpi"):
        gradsync.connect("carrier pigeon")
    with pytest.raises(ValueError, match="already connected over 'solo'"):
        gradsync.connect("auto") and gradsync.connect("c10d")
    with pytest.raises(ValueError, match="already connected with timeout_s"):
        gradsync.connect(timeout_s=1.5)
