"""``find_launch_info`` for each launcher's environment, and processes that connect by it."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.comm.rendezvous import LaunchInfo, find_launch_info, first_of_nodelist, interface_address
from tests.support.ranks import run_processes

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


def test_find_launch_info_of_torchrun() -> None:
    info = find_launch_info({**TORCHRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"})
    assert info == LaunchInfo(
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
def test_find_launch_info_of_other_launchers(environ: dict[str, str], source: str, rank: int, master_addr: str) -> None:
    info = find_launch_info(environ)
    assert (info.source, info.rank, info.master_addr) == (source, rank, master_addr)
    assert info.master_port == find_launch_info(environ).master_port, "every rank derives the same port"
    assert 20000 <= info.master_port < 32000, "below the ephemeral ports"


def test_master_ports_of_two_jobs_differ() -> None:
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-18"}
    assert find_launch_info(OPEN_MPI).master_port != find_launch_info(other).master_port


def test_find_launch_info_takes_a_slurm_batch_script_for_a_world_of_one() -> None:
    assert find_launch_info({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "5"}).world_size == 1


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Set MASTER_ADDR"),
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE is not.*gradsync run"),
        ({"RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, "RANK=1 is set, but WORLD_SIZE is not"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "RANK=1 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set, but RANK is not"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 is set, but OMPI_COMM_WORLD_RANK is not"),
        ({"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2 is set, but OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_RANK": "0"}, "PMI_RANK=0 is set, but PMI_SIZE is not"),
        ({"PET_NNODES": "2"}, "PET_NNODES=2 asks for several nodes"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4 asks for several nodes"),
        (TORCHRUN, "MASTER_ADDR is not"),
        ({**TORCHRUN, "MASTER_ADDR": "n1"}, "MASTER_PORT is not"),
        ({**TORCHRUN, "MASTER_ADDR": "n1", "MASTER_PORT": "70000"}, "MASTER_PORT must be a number from 1 to 65535"),
        (
            {**TORCHRUN, "MASTER_ADDR": "n1", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "x"},
            "COUNT must",
        ),
    ],
)
def test_find_launch_info_refuses_an_incomplete_environment(environ: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        find_launch_info(environ)


@pytest.mark.parametrize(
    "environ", [{}, {"WORLD_SIZE": "1"}, {"PET_NNODES": "1"}, {"PET_NNODES": "1:1"}, {"RANK": "", "MASTER_ADDR": "n1"}]
)
def test_find_launch_info_without_a_launcher_is_a_world_of_one(environ: dict[str, str]) -> None:
    assert find_launch_info(environ) == LaunchInfo(rank=0, world_size=1, source="nothing")


def connect_without_world_size() -> str:
    del os.environ["WORLD_SIZE"]
    with pytest.raises(ValueError, match="WORLD_SIZE is not") as refused:
        gradsync.connect()
    assert gradsync.connect("solo").world_size == 1  # on request
    return str(refused.value)


def test_connect_refuses_an_incomplete_environment() -> None:
    assert all("each process would train alone" in error for error in run_processes(2, connect_without_world_size))


def connect_by_ipv6(address: str, transport: str) -> tuple[float, list[float]]:
    os.environ["MASTER_ADDR"] = address
    comm = gradsync.connect(transport, timeout_s=20)
    total = torch.ones(1)
    comm.all_reduce(total).wait()
    out = torch.empty(comm.world_size, 1)
    comm.all_to_all(torch.full((comm.world_size, 1), float(comm.rank)), out=out).wait()
    return total.item(), out.view(-1).tolist()


@pytest.mark.parametrize(("address", "transport"), [("::1", "c10d"), ("[::1]", "shm")])
def test_connect_by_an_ipv6_address(address: str, transport: str) -> None:
    assert run_processes(2, connect_by_ipv6, address, transport) == [(2.0, [0.0, 1.0])] * 2


def test_first_of_nodelist() -> None:
    assert first_of_nodelist("n1") == "n1"
    assert first_of_nodelist("rack[2,4]-n[010-012],other") == "rack2-n010"


def test_interface_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("none") is None


def connect_under_open_mpi() -> tuple[int, int, float, str]:
    """With Open MPI's variables instead of torchrun's, which ``run_processes`` sets."""
    rank, world_size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": world_size}
    os.environ |= {"OMPI_COMM_WORLD_LOCAL_SIZE": world_size, "PMIX_NAMESPACE": f"test-{os.getppid()}"}
    comm = gradsync.connect(timeout_s=20)
    total = torch.tensor([float(comm.rank)])
    comm.all_reduce(total).wait()
    return comm.rank, comm.world_size, total.item(), comm.why


def test_connect_with_open_mpis_variables_only() -> None:
    for rank, outcome in enumerate(run_processes(3, connect_under_open_mpi)):
        assert outcome == (rank, 3, 3.0, "3 ranks, as Open MPI says; all on one host")


def connect_in_a_process_group() -> tuple[str, float, float]:
    dist.init_process_group("gloo")
    comm = gradsync.connect(timeout_s=20)
    ours = torch.ones(1)
    comm.all_reduce(ours).wait()
    theirs = torch.ones(1)
    dist.all_reduce(theirs)
    dist.barrier()
    dist.destroy_process_group()
    return comm.why, ours.item(), theirs.item()


def test_connect_adopts_the_scripts_process_group() -> None:
    assert (
        run_processes(2, connect_in_a_process_group)
        == [("the script's own process group; all on one host", 2.0, 2.0)] * 2
    )


def test_connect_refuses_wrong_and_conflicting_arguments() -> None:
    with pytest.raises(ValueError, match="auto, tcp, c10d, shm, hierarchical, solo, mpi"):
        gradsync.connect("carrier pigeon")
    with pytest.raises(ValueError, match="already connected over 'solo'"):
        gradsync.connect("auto") and gradsync.connect("c10d")
    with pytest.raises(ValueError, match="already connected with timeout_s"):
        gradsync.connect(timeout_s=1.5)
