"""Hosting shards in the ranks' own processes: each rank starts a server, and all ranks exchange their addresses."""

from __future__ import annotations

import os
import socket

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.comm.rendezvous import find_launch_info, launch_info_of_group, own_addresses
from gradsync.comm.shm.segment import host_identity
from gradsync.comm.tcp.handshake import plain_address
from gradsync.messaging import key_folder
from gradsync.messaging.keys import ClientKeys, check_same_key_choice, make_run_keys, shared_keys
from gradsync.strategies.parameter_server.server.server import Server
from gradsync.strategies.parameter_server.server.staleness import Policy

LOOPBACK = "127.0.0.1"


def host_shard(
    comm: Communicator,
    *,
    keys: str | os.PathLike[str] | None = None,
    open: bool = False,
    policy: Policy | None = None,
) -> tuple[Server, list[str], ClientKeys | None]:
    """Serve shard number ``comm.rank`` from a thread of this process. Blocks: every rank must call it.

    Also returns every rank's address, and a worker's keys: from the folder ``keys``, or made for this run; None with
    ``open``.
    """
    check_same_key_choice(comm, keys=str(keys or ""), open=open)
    hosts = all_gather_object(comm, "/".join(host_identity()))
    on_one_host = len(set(hosts)) == 1
    worker_keys: ClientKeys | None = None
    if open:
        server_keys, peer_keys = None, None
    elif keys is None:
        server_keys, peer_keys = shared_keys(make_run_keys(comm))
        worker_keys = peer_keys
    else:
        server_keys, peer_keys = key_folder.server_keys(keys), key_folder.peer_keys(keys)
        worker_keys = key_folder.worker_keys(keys)
    server = Server(
        comm.rank,
        host=LOOPBACK if on_one_host else _reachable_address(comm),
        policy=policy,
        keys=server_keys,
        peer_keys=peer_keys,
    ).start()
    return server, [str(address) for address in all_gather_object(comm, server.address)], worker_keys


def _reachable_address(comm: Communicator) -> str:
    """The address of this host's interface towards the rendezvous host."""
    try:
        master = find_launch_info().master_addr
    except ValueError:  # no environment of a launcher: the script has made the process group itself
        master = ""
    master = plain_address(master or launch_info_of_group(comm.rank, comm.world_size).master_addr)
    if not master:
        return next(iter(own_addresses()), LOOPBACK)
    try:
        family, kind, _, _, place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # a datagram socket: this looks up the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return next(iter(own_addresses()), LOOPBACK)
