"""Where this process stands in the run: read from what torchrun, Open MPI, PMI or Slurm leave in the environment.

Beside the command line, this is the only place that reads ``os.environ``.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gradsync.comm.choice import TableFile, table_file

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's rank, the world it is in, and where rank 0 can be met."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    source: str  # who said so: "torchrun", "Open MPI", "PMI", "Slurm", or "nothing" for a world of one


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """Read this process's place from the environment; a world of one when no launcher has spoken.

    >>> from gradsync.comm.rendezvous import find_place
    >>> find_place({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).rank
    1
    >>> find_place({}).source
    'nothing'
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return _place(environ, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", job="")
    if "OMPI_COMM_WORLD_RANK" in environ:
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return _place(environ, "Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in names), job=job)
    # Only a process that srun started has a step: the batch script itself has SLURM_NTASKS too, and is no worker.
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        job = environ.get("SLURM_JOB_ID", "") + "." + environ.get("SLURM_STEP_ID", "")
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        return _place(environ, "Slurm", *names, job=job)
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return _place(environ, "PMI", *names, job=environ.get("PMI_ID", "") or environ.get("PMI_PORT", ""))
    return Place(rank=0, world_size=1, source="nothing")


def said_transport(known: Collection[str], environ: Mapping[str, str] = os.environ) -> str:
    """The transport that ``GRADSYNC_TRANSPORT`` asks for, for scripts that leave it open; "auto" when it is not set.

    >>> from gradsync.comm.rendezvous import said_transport
    >>> said_transport(("auto", "mpi"), {"GRADSYNC_TRANSPORT": "mpi"}), said_transport(("auto", "mpi"), {})
    ('mpi', 'auto')
    """
    name = environ.get("GRADSYNC_TRANSPORT") or "auto"
    if name not in known:
        raise ValueError(f"GRADSYNC_TRANSPORT must be one of {', '.join(known)}; got {name!r}.")
    return name


def said_table_file() -> TableFile:
    """Where the measured all-reduce algorithms are kept: see choice.py."""
    return table_file(os.environ)


def started_by_mpi(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks were started, as far as the environment says; None when no launcher has spoken.

    Refuses torchrun's: its workers are not MPI's, even where the launcher itself was started by MPI.

    >>> from gradsync.comm.rendezvous import started_by_mpi
    >>> started_by_mpi({"OMPI_COMM_WORLD_SIZE": "4"})
    4
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        raise ValueError(
            "transport='mpi' needs ranks that MPI has started; these were started by torchrun or `gradsync run`. "
            "Use `mpirun -n 4 python train.py`, or another transport."
        )
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), None)


def own_addresses() -> list[str]:
    """The IPv4 addresses of this host under which others may reach it."""
    found = [interface_address(name) for _, name in socket.if_nameindex()]
    return [address for address in found if address is not None and not address.startswith("127.")]


def _place(
    environ: Mapping[str, str], source: str, rank: str, size: str, local_rank: str, local_size: str, *, job: str
) -> Place:
    numbers = {}
    for name in (rank, size):
        if not environ.get(name, "").strip().isdigit():
            raise ValueError(f"{name} must be a whole number, as {source} sets it; got {environ.get(name)!r}.")
        numbers[name] = int(environ[name])
    if not numbers[rank] < numbers[size]:
        raise ValueError(f"{rank} must be below {size}; got {numbers[rank]} and {numbers[size]}.")
    on_this_host = int(re.split(r"\D", environ.get(local_size, "1"))[0] or 1)  # Slurm writes "4(x2)"
    master_addr = environ.get("MASTER_ADDR", "")
    if not master_addr and numbers[size] > 1:
        master_addr = _first_host(environ, source, alone_on_host=on_this_host == numbers[size], size=size)
    port = environ.get("MASTER_PORT", "")
    return Place(
        rank=numbers[rank],
        world_size=numbers[size],
        local_rank=int(environ.get(local_rank, "0")),
        local_world_size=on_this_host,
        master_addr=master_addr,
        # Every rank derives the same port from the job's name, so jobs side by side do not meet each other.
        master_port=int(port) if port else 20000 + zlib.crc32(job.encode()) % 12000,
        source=source,
    )


def _first_host(environ: Mapping[str, str], source: str, *, alone_on_host: bool, size: str) -> str:
    if alone_on_host:
        return "127.0.0.1"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    if source == "Slurm" and nodes:
        return first_of_nodelist(nodes)
    raise ValueError(
        f"{source} says there are {environ.get(size)} ranks on several hosts, but not where rank 0 is. "
        "Set MASTER_ADDR to the address of rank 0's host on every rank (with mpirun: -x MASTER_ADDR=...)."
    )


def first_of_nodelist(nodes: str) -> str:
    """The first host of Slurm's compact list.

    >>> from gradsync.comm.rendezvous import first_of_nodelist
    >>> first_of_nodelist("gpu[007-009,12],login1"), first_of_nodelist("a1,a2"), first_of_nodelist("r[1-2]n[03-04]")
    ('gpu007', 'a1', 'r1n03')
    """
    depth = 0
    for at, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            nodes = nodes[:at]
            break
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes)


def choose_gloo_interface(master_addr: str) -> None:
    """Have Gloo use the interface that leads to rank 0, unless the user named one.

    Gloo by itself takes the address that the host's own name resolves to: on many machines the loopback, which no
    other host can reach.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not hasattr(socket, "if_nameindex"):
        return
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master_addr, 9))  # a datagram socket: this asks for the route and sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return  # Gloo's own choice then; if it can't connect either, its error names the address
    for _, name in socket.if_nameindex():
        if interface_address(name) == address:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def gloo_addresses() -> list[str]:
    """Where peers may reach this process: at the address that Gloo has; if nobody chose that, at all there are."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = interface_address(name) if name else None
    return [*own_addresses(), "127.0.0.1"] if address is None else [address]


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface, or None when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
