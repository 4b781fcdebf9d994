"""``connect``: find this process's rank and world, pick a transport, and keep one communicator for the process."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

from gradsync.comm.allreduce.selector import select_all_reduce
from gradsync.comm.base import DEFAULT_TIMEOUT_S, Communicator, Solo
from gradsync.comm.c10d.communicator import C10d, connect_c10d
from gradsync.comm.checked import checked
from gradsync.comm.rendezvous import collectives_file, find_launch_info, launch_info_of_group, requested_transport
from gradsync.comm.tcp.communicator import Tcp
from gradsync.comm.topology import describe_hosts, ranks_by_host, survey_hosts

log = logging.getLogger("gradsync")

TRANSPORTS = ("auto", "tcp", "c10d", "shm", "hierarchical", "solo", "mpi")


Connector = Callable[[str, float], Communicator]  # given the transport and the timeout


class _Process:
    """This process's communicator, which all callers of ``connect`` share."""

    lock = threading.Lock()
    comm: Communicator | None = None
    timeout_s: float | None = None  # the launcher's, which overrides the script's
    finalize: Callable[[], None] | None = None  # called at exit, unless a peer was lost
    connector: Connector | None = None  # of an elastic run: it connects in place of `connect`


def connect(transport: str = "auto", *, timeout_s: float | None = None) -> Communicator:
    """Connect this process with the other workers of its run; the same communicator at every call.

    Rank and world size come from the environment that torchrun (or ``gradsync run``), Open MPI, PMI or Slurm set;
    without a launcher it is a world of one, so that ``python train.py`` works unchanged. A process group that the
    script has already initialised is used as it is. Blocks until all workers have connected, at most ``timeout_s``
    (default: 300). A later collective may take as long before a silent peer is given up (:class:`gradsync.PeerLost`).

    ``transport``: ``"tcp"`` (TCP connections of our own for CPU tensors, NCCL for CUDA ones), ``"c10d"``
    (torch.distributed alone: Gloo for CPU tensors, NCCL for CUDA ones), ``"shm"`` (shared memory, for CPU ranks on one
    host), ``"hierarchical"`` (for CPU ranks on several hosts: shared memory within, TCP across), ``"mpi"`` (for ranks
    that mpirun or srun started), ``"solo"``, or ``"auto"``: the value of the environment variable
    ``GRADSYNC_TRANSPORT``; if it is not set, shared memory between ranks of one host and TCP between hosts.
    ``comm.why`` gives the reason for the transport in use.

    >>> import gradsync
    >>> comm = gradsync.connect()
    >>> comm.world_size
    1
    >>> gradsync.connect() is comm
    True
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"transport must be one of {', '.join(TRANSPORTS)}; got {transport!r}. "
            "(Ranks as threads are made by gradsync.testing.run_ranks.)"
        )
    with _Process.lock:
        if _Process.comm is None:
            limit_s = _Process.timeout_s or timeout_s or DEFAULT_TIMEOUT_S
            if _Process.connector is not None:
                _Process.comm = _Process.connector(transport, limit_s)
                atexit.register(_leave)
            else:
                _Process.comm = _connect(transport, limit_s)
            log.info("%r: %s", _Process.comm, _Process.comm.why)
        comm = _Process.comm
    if transport not in ("auto", comm.transport):
        raise ValueError(
            f"this process is already connected over {comm.transport!r}; got {transport=}. "
            "Pass transport to the first connect()."
        )
    if timeout_s is not None and timeout_s != comm.timeout_s and _Process.timeout_s is None:
        raise ValueError(
            f"this process is already connected with timeout_s={comm.timeout_s}; got {timeout_s=}. "
            "Pass timeout_s to the first connect()."
        )
    return comm


def _connect(transport: str, timeout_s: float) -> Communicator:
    requested = requested_transport(TRANSPORTS) if transport == "auto" else transport
    comm = _connect_over(requested, timeout_s)
    if requested != transport:
        comm.why = f"{comm.why}; GRADSYNC_TRANSPORT={requested}"
    return checked(comm)


def _connect_over(transport: str, timeout_s: float) -> Communicator:
    if transport == "mpi":
        from gradsync.comm.mpi.communicator import connect_mpi  # it loads the MPI library

        world = connect_mpi(timeout_s=timeout_s)
        _Process.finalize = world.finalize
        atexit.register(_leave)
        return world
    if transport == "solo":
        return Solo(timeout_s=timeout_s)
    adopted = dist.is_initialized()
    info = launch_info_of_group(dist.get_rank(), dist.get_world_size()) if adopted else find_launch_info()
    world_size = info.world_size
    if world_size == 1:
        if transport != "auto":
            raise ValueError(
                f"transport={transport!r} needs a launcher; no torchrun, MPI or Slurm is seen. Use `gradsync run`."
            )
        return Solo(timeout_s=timeout_s)
    why = "the script's own process group" if adopted else f"{world_size} ranks, as {info.source} says"
    group = connect_c10d(info, timeout_s=timeout_s, why=why)
    if not adopted:
        _Process.finalize = _end_torch_distributed
    # At a normal exit the other ranks must learn that this rank left in order, and did not die.
    atexit.register(_leave)
    return over_transport(group, transport)


def over_transport(group: C10d, transport: str) -> Communicator:
    """The group of all ranks over this transport, or the best one for "auto". Blocks: every rank calls it."""
    # (Both calls are collective, so a rank 0 that exits soon does so after the others have connected to its heartbeat.)
    comm: Communicator = group
    if transport == "tcp":
        comm = group.as_kind(Tcp)
    elif transport != "c10d":
        comm = _use_shared_memory(group, transport)
    return select_all_reduce(comm, collectives_file())


def _use_shared_memory(group: C10d, transport: str) -> Communicator:
    """The group over shared memory, as far as its ranks share hosts; else over TCP, with the reason in ``why``."""
    survey = survey_hosts(group)
    hosts, obstacle = survey.hosts, survey.obstacle
    ranks = ranks_by_host(hosts)
    wanted = transport
    if transport == "auto":
        wanted = "shm" if len(ranks) == 1 else "hierarchical"
    if not obstacle and wanted == "shm" and len(ranks) > 1:
        obstacle = f"the ranks are on several hosts ({describe_hosts(ranks)})"
    if not obstacle and wanted == "hierarchical" and len(ranks) == 1:
        obstacle = "all ranks are on one host, where 'shm' is enough"
    if not obstacle and wanted == "hierarchical" and len(ranks) == len(hosts):
        obstacle = "every rank is on a host of its own"
    if obstacle and transport != "auto":
        raise ValueError(f"transport={transport!r} is not possible here: {obstacle}.")
    if obstacle:
        group.why = f"{group.why}; {obstacle}"
        return group if survey.has_gpu else group.as_kind(Tcp)
    if wanted == "shm":
        from gradsync.comm.shm.communicator import Shm  # Numba takes a second to import

        return Shm(group, why=f"{group.why}; all on one host")
    from gradsync.comm.hierarchical.communicator import connect_hierarchical

    return connect_hierarchical(group.as_kind(Tcp), hosts)


def _leave() -> None:
    error = getattr(sys, "last_value", None)  # what the interpreter printed, if an exception ends it
    disconnect(failure="" if error is None else f"it failed with {type(error).__name__}: {error}")


def disconnect(*, failure: str = "") -> None:
    """Leave the run in order, and tell the other ranks (``failure``: why it ends early). Safe to call twice.

    Called automatically when the interpreter exits.
    """
    with _Process.lock:
        comm, _Process.comm = _Process.comm, None
        finalize, _Process.finalize = _Process.finalize, None
    heartbeat = comm.heartbeat if comm is not None else None
    if heartbeat is not None:
        broken = bool(heartbeat.lost) or bool(failure)
        heartbeat.close(failure)
        # After a lost peer there are collectives under way that will never end, and finalizing would wait for them.
        if finalize is not None and not broken:
            finalize()


def _end_torch_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def use_connector(connector: Connector) -> None:
    """Have the first ``connect`` of this process call ``connector``: for the session of an elastic run."""
    _Process.connector = connector


def override_timeout(timeout_s: float) -> None:
    """Set the timeout that ``connect`` uses, whatever the script says: for launchers (``gradsync run --timeout-s``)."""
    _Process.timeout_s = timeout_s


def current_timeout_s() -> float:
    """The timeout in force in this process."""
    comm = _Process.comm
    return comm.timeout_s if comm is not None else _Process.timeout_s or DEFAULT_TIMEOUT_S


def lost_ranks() -> dict[int, str]:
    """The peers that are known to be lost, each with the reason; empty while all is well."""
    heartbeat = _Process.comm.heartbeat if _Process.comm is not None else None
    return dict(heartbeat.lost) if heartbeat is not None else {}
