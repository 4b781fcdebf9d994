"""``connect``: find this process's place in the run, choose a transport, and keep the communicator for the process."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist

from gradsync.comm.base import DEFAULT_TIMEOUT_S, Communicator, Solo
from gradsync.comm.c10d import C10d, connect_c10d
from gradsync.comm.chosen import choose
from gradsync.comm.hosts import describe_hosts, ranks_by_host, survey_hosts
from gradsync.comm.rendezvous import find_place, said_table_file, said_transport

log = logging.getLogger("gradsync")

TRANSPORTS = ("auto", "c10d", "shm", "hierarchical", "solo", "mpi")


class _Process:
    """What this process has connected: one communicator, shared by everyone who does not bring their own."""

    lock = threading.Lock()
    comm: Communicator | None = None
    timeout_s: float | None = None  # what the launcher said, if it did
    leave_in_order: Callable[[], None] | None = None  # what the transport does at an end where nobody was lost


def connect(transport: str = "auto", *, timeout_s: float | None = None) -> Communicator:
    """Connect this process with the other workers of its run; the same communicator at every call.

    The place in the run comes from what torchrun (or ``gradsync run``), Open MPI, PMI or Slurm left in the environment;
    with none of them it is a world of one, so that ``python train.py`` works unchanged. A process group that the script
    has already initialised is used as it is. Blocks until all workers are here, at most ``timeout_s`` (300 unless
    said): that is also how long any later collective may take before a silent peer is given up
    (:class:`gradsync.PeerLost`).

    ``transport``: ``"c10d"`` (torch.distributed: Gloo for CPU tensors, NCCL for CUDA ones), ``"shm"`` (shared memory,
    for CPU ranks on one host), ``"hierarchical"`` (for CPU ranks on several hosts: shared memory within, c10d across),
    ``"mpi"`` (for ranks that mpirun or srun started), ``"solo"``, or ``"auto"``: what the environment variable
    ``GRADSYNC_TRANSPORT`` says, and if it is not set, shared memory as far as it goes. ``comm.why`` says why it is what
    it is.

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
            "(Ranks as threads are made by gradsync.comm.run_ranks.)"
        )
    with _Process.lock:
        if _Process.comm is None:
            _Process.comm = _connect(transport, _Process.timeout_s or timeout_s or DEFAULT_TIMEOUT_S)
            log.info("%r: %s", _Process.comm, _Process.comm.why)
        comm = _Process.comm
    if transport not in ("auto", comm.transport):
        raise ValueError(f"this process is already connected over {comm.transport!r}; got {transport=}. Say it first.")
    if timeout_s is not None and timeout_s != comm.timeout_s and _Process.timeout_s is None:
        raise ValueError(
            f"this process is already connected with timeout_s={comm.timeout_s}; got {timeout_s=}. "
            "Say it at the first connect()."
        )
    return comm


def _connect(transport: str, timeout_s: float) -> Communicator:
    said = said_transport(TRANSPORTS) if transport == "auto" else transport
    comm = _connect_over(said, timeout_s)
    if said != transport:
        comm.why = f"{comm.why}; GRADSYNC_TRANSPORT={said}"
    return comm


def _connect_over(transport: str, timeout_s: float) -> Communicator:
    if transport == "mpi":
        from gradsync.comm.mpi import connect_mpi  # it loads the MPI library

        world = connect_mpi(timeout_s=timeout_s)
        _Process.leave_in_order = world.leave_in_order
        atexit.register(_leave)
        return world
    place = find_place()
    adopted = dist.is_initialized()
    world_size = dist.get_world_size() if adopted else place.world_size
    if world_size == 1 or transport == "solo":
        if transport not in ("auto", "solo"):
            raise ValueError(
                f"transport={transport!r} needs a launcher; no torchrun, MPI or Slurm is seen. Use `gradsync run`."
            )
        return Solo(timeout_s=timeout_s)
    why = "the script's own process group" if adopted else f"{world_size} ranks, as {place.source} says"
    group = connect_c10d(place, timeout_s=timeout_s, why=why)
    if not adopted:
        _Process.leave_in_order = _end_torch_distributed
    # At a normal exit the others must learn that this rank left in order, and did not die.
    atexit.register(_leave)
    # (A rank 0 that has nothing to do is not gone before the others have reached its lifeline: both calls meet.)
    comm = group if transport == "c10d" else _faster(group, transport)
    return choose(comm, said_table_file())


def _faster(group: C10d, transport: str) -> Communicator:
    """The group over shared memory, as far as its ranks share hosts; or the group, which says why not."""
    hosts, obstacle = survey_hosts(group)
    ranks = ranks_by_host(hosts)
    wanted = transport
    if transport == "auto":
        wanted = "shm" if len(ranks) == 1 else "hierarchical"
    if not obstacle and wanted == "shm" and len(ranks) > 1:
        obstacle = f"the ranks are on several hosts ({describe_hosts(ranks)})"
    if not obstacle and wanted == "hierarchical" and len(ranks) == 1:
        obstacle = "all ranks are on one host, where 'shm' does it alone"
    if not obstacle and wanted == "hierarchical" and len(ranks) == len(hosts):
        obstacle = "every rank is on a host of its own"
    if obstacle and transport != "auto":
        raise ValueError(f"transport={transport!r} is not possible here: {obstacle}.")
    if obstacle:
        group.why = f"{group.why}; {obstacle}"
        return group
    if wanted == "shm":
        from gradsync.comm.shm import Shm  # Numba takes a second to import

        return Shm(group, why=f"{group.why}; all on one host")
    from gradsync.comm.hierarchical import connect_hierarchical

    return connect_hierarchical(group, hosts)


def _leave() -> None:
    error = getattr(sys, "last_value", None)  # what the interpreter printed, if an exception ends it
    disconnect(failure="" if error is None else f"it failed with {type(error).__name__}: {error}")


def disconnect(*, failure: str = "") -> None:
    """Leave the run in order, telling the others (``failure``: why it is not in order). Safe to call twice.

    Happens by itself when the interpreter exits.
    """
    with _Process.lock:
        comm, _Process.comm = _Process.comm, None
        leave_in_order, _Process.leave_in_order = _Process.leave_in_order, None
    lifeline = comm.lifeline if comm is not None else None
    if lifeline is not None:
        broken = bool(lifeline.lost) or bool(failure)
        lifeline.close(failure)
        # With a peer lost there are collectives under way that will never end, and a transport would wait for them.
        if leave_in_order is not None and not broken:
            leave_in_order()


def _end_torch_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def override_timeout(timeout_s: float) -> None:
    """Set the timeout that ``connect`` uses, whatever the script says: for launchers (``gradsync run --timeout-s``)."""
    _Process.timeout_s = timeout_s


def current_timeout_s() -> float:
    """The timeout in force in this process."""
    comm = _Process.comm
    return comm.timeout_s if comm is not None else _Process.timeout_s or DEFAULT_TIMEOUT_S


def lost_ranks() -> dict[int, str]:
    """The peers that are known to be lost, each with the reason; empty while all is well."""
    lifeline = _Process.comm.lifeline if _Process.comm is not None else None
    return dict(lifeline.lost) if lifeline is not None else {}
