"""This process's rank, world size and rank 0's address (``LaunchInfo``), from the environment that a launcher sets.

Understands torchrun, Open MPI, PMI and Slurm. Also: addresses and network interfaces of this host. Beside the command
line, this is the only module that reads ``os.environ``.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradsync.comm.allreduce.table import TableFile, table_file
from gradsync.comm.tcp.handshake import plain_address

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # Linux: those of all interfaces
# Variables with a process's rank, each with the one for the number of ranks.
RANK_AND_SIZE = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


@dataclass(frozen=True, kw_only=True)
class LaunchInfo:
    """This process's rank, its world, and where rank 0 can be reached."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    source: str  # where it comes from: "torchrun", "Open MPI", "PMI", "Slurm", or "nothing" for a world of one
    attempt: int = 0  # how often the launcher has restarted all workers


def find_launch_info(environ: Mapping[str, str] = os.environ) -> LaunchInfo:
    """Read a launcher's variables from the environment; a world of one if there are none.

    >>> from gradsync.comm.rendezvous import find_launch_info
    >>> environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    >>> find_launch_info(environ).rank
    1
    >>> find_launch_info({}).source
    'nothing'
    """
    if environ.get("RANK") and environ.get("WORLD_SIZE"):
        return _launch_info(environ, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", job="")
    if environ.get("OMPI_COMM_WORLD_RANK") and environ.get("OMPI_COMM_WORLD_SIZE"):
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return _launch_info(environ, "Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in names), job=job)
    # Only a process that srun started has a step. The batch script itself has SLURM_NTASKS too, but is not a worker.
    if "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        job = environ.get("SLURM_JOB_ID", "") + "." + environ.get("SLURM_STEP_ID", "")
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        return _launch_info(environ, "Slurm", *names, job=job)
    if "PMI_RANK" in environ and "PMI_SIZE" in environ:
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return _launch_info(environ, "PMI", *names, job=environ.get("PMI_ID", "") or environ.get("PMI_PORT", ""))
    _check_alone(environ)
    return LaunchInfo(rank=0, world_size=1, source="nothing")


def _check_alone(environ: Mapping[str, str]) -> None:
    """Refuse an environment that asks for several workers, but does not say which one this process is."""
    for rank, size in RANK_AND_SIZE:
        if bool(environ.get(rank)) == bool(environ.get(size)) or environ.get(size, "").strip() == "1":
            continue
        there, missing = (rank, size) if environ.get(rank) else (size, rank)
        raise ValueError(
            f"{there}={environ[there]} is set, but {missing} is not: expected both, as a launcher sets them, or "
            f"neither. Without {missing} each process would train alone. Start the script with `gradsync run` or "
            f"torchrun; or set {missing}, MASTER_ADDR and MASTER_PORT too; or unset {there} to run one process alone."
        )
    nodes = environ.get("PET_NNODES") or "1"
    if nodes.strip().split(":")[-1] != "1":  # "1:4" is from one to four
        raise ValueError(
            f"PET_NNODES={nodes} asks for several nodes, but no launcher has started this process: each would train "
            "alone. Start the script with `gradsync run train.py` or `torchrun train.py`, which read PET_NNODES, "
            "instead of `python train.py`; or unset PET_NNODES to run one process alone."
        )


def launch_info_of_group(rank: int, world_size: int, environ: Mapping[str, str] = os.environ) -> LaunchInfo:
    """The launch info of a process whose script has initialised a process group itself."""
    address = environ.get("MASTER_ADDR", "")
    return LaunchInfo(
        rank=rank, world_size=world_size, master_addr=address, source="the script", attempt=_attempt(environ)
    )


def requested_transport(known: Collection[str], environ: Mapping[str, str] = os.environ) -> str:
    """The transport that ``GRADSYNC_TRANSPORT`` asks for, for scripts that leave it open; "auto" when it is not set.

    >>> from gradsync.comm.rendezvous import requested_transport
    >>> requested_transport(("auto", "mpi"), {"GRADSYNC_TRANSPORT": "mpi"}), requested_transport(("auto", "mpi"), {})
    ('mpi', 'auto')
    """
    name = environ.get("GRADSYNC_TRANSPORT") or "auto"
    if name not in known:
        raise ValueError(f"GRADSYNC_TRANSPORT must be one of {', '.join(known)}; got {name!r}.")
    return name


def collectives_file() -> TableFile:
    """The file with the measured all-reduce algorithms: see allreduce/table.py."""
    return table_file(os.environ)


def started_by_mpi(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks MPI has started, by the environment; None if it does not say.

    Raises ValueError for torchrun's workers: they are not MPI's ranks, even where torchrun was started by MPI.

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
    """The addresses at which other hosts may reach this one, IPv4 first."""
    found = [address for _, name in socket.if_nameindex() for address in interface_addresses(name)]
    reachable = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    return sorted(reachable, key=lambda address: ipaddress.ip_address(address).version)


def _launch_info(
    environ: Mapping[str, str], source: str, rank: str, size: str, local_rank: str, local_size: str, *, job: str
) -> LaunchInfo:
    numbers = {}
    for name in (rank, size):
        if not environ.get(name, "").strip().isdigit():
            raise ValueError(f"{name} must be a whole number, as {source} sets it; got {environ.get(name)!r}.")
        numbers[name] = int(environ[name])
    if not numbers[rank] < numbers[size]:
        raise ValueError(f"{rank} must be below {size}; got {numbers[rank]} and {numbers[size]}.")
    on_this_host = int(re.split(r"\D", environ.get(local_size, "1"))[0] or 1)  # Slurm writes "4(x2)"
    port = environ.get("MASTER_PORT", "")
    if numbers[size] > 1 and source == "torchrun" and not (port and environ.get("MASTER_ADDR")):
        missing = "MASTER_PORT" if environ.get("MASTER_ADDR") else "MASTER_ADDR"
        raise ValueError(
            f"{rank} and {size} are set, but {missing} is not: expected all of {rank}, {size}, MASTER_ADDR and "
            f"MASTER_PORT. Start the script with `gradsync run` or torchrun, or set {missing} on every rank."
        )
    if port and not (port.strip().isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT must be a number from 1 to 65535; got {port!r}.")
    master_addr = environ.get("MASTER_ADDR", "")
    if not master_addr and numbers[size] > 1:
        master_addr = _first_host(environ, source, alone_on_host=on_this_host == numbers[size], size=size)
    return LaunchInfo(
        rank=numbers[rank],
        world_size=numbers[size],
        local_rank=int(environ.get(local_rank, "0")),
        local_world_size=on_this_host,
        master_addr=master_addr,
        # Every rank derives the same port from the job's name, so that concurrent jobs use different ports.
        master_port=int(port) if port else 20000 + zlib.crc32(job.encode()) % 12000,
        source=source,
        attempt=_attempt(environ),
    )


def _attempt(environ: Mapping[str, str]) -> int:
    """How often torchrun (or ``gradsync run``) has restarted all workers."""
    text = environ.get("TORCHELASTIC_RESTART_COUNT", "0").strip()
    if not text.isdigit():
        raise ValueError(f"TORCHELASTIC_RESTART_COUNT must be a whole number, as torchrun sets it; got {text!r}.")
    return int(text)


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
    for at, character in enumerate(nodes):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            nodes = nodes[:at]
            break
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes)


def choose_gloo_interface(master_addr: str) -> None:
    """Have Gloo use the interface that leads to rank 0 (or to the store), unless the user named one.

    Gloo by itself takes the address that the host's own name resolves to: on many machines the loopback, which no
    other host can reach.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not hasattr(socket, "if_nameindex"):
        return
    for address in _own_addresses_towards(plain_address(master_addr)):
        for _, name in socket.if_nameindex():
            if address in interface_addresses(name):
                os.environ["GLOO_SOCKET_IFNAME"] = name
                return


def _own_addresses_towards(host: str) -> list[str]:
    """This host's address on the way to another, for each address that the other has. Sends nothing."""
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []  # Gloo's own choice then; if it can't connect either, its error names the address
    found = []
    for family, kind, _, _, where in targets:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(where)  # a datagram socket: this asks for the route and sends nothing
            found.append(str(probe.getsockname()[0]))
    return found


def gloo_addresses() -> list[str]:
    """Where peers may reach this process: the address of Gloo's interface; if none was chosen, all addresses."""
    name = interface_between_hosts()
    found = interface_addresses(name) if name else []
    return found[:1] or [*own_addresses(), "127.0.0.1"]


def interface_between_hosts() -> str:
    """The network interface over which this process reaches others, as chosen or as the user named it; "" if none is.

    >>> from gradsync.comm.rendezvous import interface_between_hosts
    >>> isinstance(interface_between_hosts(), str)
    True
    """
    return os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]


def interface_addresses(name: str) -> list[str]:
    """The addresses of a network interface, its IPv4 address first; without link-local ones."""
    ipv4 = interface_address(name)
    found = [] if ipv4 is None else [ipv4]
    if IPV6_ADDRESSES.exists():
        for line in IPV6_ADDRESSES.read_text().splitlines():
            digits, _, _, _, _, interface = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if interface == name and not address.is_link_local:
                found.append(str(address))
    return found


def interface_address(name: str) -> str | None:
    """The IPv4 address of a network interface, or None when it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
