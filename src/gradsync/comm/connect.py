"""``connect``: find this process's place in the run, choose a transport, and keep the communicator for the process."""

from __future__ import annotations

import atexit
import logging
import sys
import threading

import torch.distributed as dist

from gradsync.comm.base import DEFAULT_TIMEOUT_S, Communicator, Solo
from gradsync.comm.c10d import C10d, connect_c10d
from gradsync.comm.rendezvous import find_place
from gradsync.comm.segment import can_share_memory

log = logging.getLogger("gradsync")

TRANSPORTS = ("auto", "c10d", "shm", "solo")


class _Process:
    """What this process has connected: one communicator, shared by everyone who does not bring their own."""

    lock = threading.Lock()
    comm: Communicator | None = None
    timeout_s: float | None = None  # what the launcher said, if it did
    initialised_torch = False  # torch.distributed is ours to end


def connect(transport: str = "auto", *, timeout_s: float | None = None) -> Communicator:
    """Connect this process with the other workers of its run; the same communicator at every call.

    The place in the run comes from what torchrun (or ``gradsync run``), Open MPI, PMI or Slurm left in the environment;
    with none of them it is a world of one, so that ``python train.py`` works unchanged. A process group that the script
    has already initialised is used as it is. Blocks until all workers are here, at most ``timeout_s`` (300 unless
    said): that is also how long any later collective may take before a silent peer is given up
    (:class:`gradsync.PeerLost`).

    ``transport``: ``"c10d"`` (torch.distributed: Gloo for CPU tensors, NCCL for CUDA ones), ``"shm"`` (shared memory,
    for CPU ranks on one host), ``"solo"``, or ``"auto"``: shared memory where it can be. ``comm.why`` says why it is
    what it is.

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
    place = find_place()
    adopted = dist.is_initialized()
    world_size = dist.get_world_size() if adopted else place.world_size
    if world_size == 1 or transport == "solo":
        if transport not in ("auto", "solo"):
            raise ValueError(
                f"transport={transport!r} needs a launcher; no torchrun, MPI or Slurm is seen. Use `gradsync run`."
            )
        return Solo(timeout_s=timeout_s)
    _Process.initialised_torch = not adopted
    why = "the script's own process group" if adopted else f"{world_size} ranks, as {place.source} says"
    group = connect_c10d(place, timeout_s=timeout_s, why=why)
    # At a normal exit the others must learn that this rank left in order, and did not die.
    atexit.register(_leave)
    return group if transport == "c10d" else _faster(group, transport)


def _faster(group: C10d, transport: str) -> Communicator:
    """The group over shared memory where its ranks can have it; else the group, which says why not."""
    obstacle = can_share_memory(group)
    if not obstacle:
        from gradsync.comm.shm import Shm  # Numba takes a second to import

        return Shm(group, why=f"{group.why}; all on one host")
    if transport == "shm":
        raise ValueError(f"transport='shm' is not possible here: {obstacle}.")
    group.why = f"{group.why}; {obstacle}"
    return group


def _leave() -> None:
    error = getattr(sys, "last_value", None)  # what the interpreter printed, if an exception ends it
    disconnect(failure="" if error is None else f"it failed with {type(error).__name__}: {error}")


def disconnect(*, failure: str = "") -> None:
    """Leave the run in order, telling the others (``failure``: why it is not in order). Safe to call twice.

    Happens by itself when the interpreter exits.
    """
    with _Process.lock:
        comm, _Process.comm = _Process.comm, None
        ours, _Process.initialised_torch = _Process.initialised_torch, False
    lifeline = comm.lifeline if comm is not None else None
    if lifeline is not None:
        broken = bool(lifeline.lost) or bool(failure)
        lifeline.close(failure)
        # With a peer lost there are collectives under way that will never end, and destroying would wait for them.
        if ours and dist.is_initialized() and not broken:
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
