"""Shards in the ranks' own processes: each rank hosts one, and all learn each other's addresses."""

from __future__ import annotations

import logging
import os
import socket

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.comm.rendezvous import find_place, own_addresses
from gradsync.comm.segment import host_identity
from gradsync.server import keyfiles
from gradsync.server.server import Server
from gradsync.server.staleness import Policy

log = logging.getLogger("gradsync")

LOOPBACK = "127.0.0.1"


def host_shard(
    comm: Communicator, *, keys: str | os.PathLike[str] | None = None, policy: Policy | None = None
) -> tuple[Server, list[str]]:
    """Serve shard number ``comm.rank`` from a thread of this process; also every rank's address. Blocks: all call."""
    hosts = all_gather_object(comm, "/".join(host_identity()))
    alone = len(set(hosts)) == 1
    if not alone and keys is None:
        log.warning(
            "the parameter server listens on the network without keys: whoever reaches it may change the model. Make "
            "keys with `gradsync keys FOLDER`, and give keys='FOLDER'."
        )
    server = Server(
        comm.rank,
        host=LOOPBACK if alone else _reachable_address(),
        policy=policy,
        keys=None if keys is None else keyfiles.server_keys(keys),
        peer_keys=None if keys is None else keyfiles.peer_keys(keys),
    ).start()
    return server, [str(address) for address in all_gather_object(comm, server.address)]


def _reachable_address() -> str:
    """The address of the interface that leads to where the ranks have met."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((find_place().master_addr, 9))  # a datagram socket: this asks for the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return next(iter(own_addresses()), LOOPBACK)
