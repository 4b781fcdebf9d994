"""The fastest all-reduce algorithm for one size, measured in passing: what ``strategy="auto"`` asks for."""

from __future__ import annotations

from gradsync.comm.base import Communicator
from gradsync.comm.choice import NATIVE, Table, this_machine
from gradsync.comm.chosen import Chosen
from gradsync.comm.objects import all_gather_object
from gradsync.comm.segment import host_identity
from gradsync.comm.timing import measure, winner

ROUNDS = 3
SMALL_BYTES = 1 << 16  # headers and flags stay with the transport: the size that was measured says nothing of them


def fastest(comm: Communicator, num_bytes: int, *, rounds: int = ROUNDS) -> Table | None:
    """A table with the algorithm that beats the transport's own for this size, or None. Blocks; every rank calls it.

    None as well where there is nothing to gain: of two ranks, where tables are in use already, and where the transport
    reduces buckets in memory of its own.
    """
    places_buckets = type(comm).allocate is not Communicator.allocate
    if comm.world_size < 3 or isinstance(comm, Chosen) or places_buckets:
        return None
    hosts = hosts_of(comm)
    name = winner(measure(Chosen(comm, [], hosts), num_bytes, rounds=rounds, on_round=lambda: None))
    if name == NATIVE:
        return None
    return Table(
        transport=comm.transport,
        world_size=comm.world_size,
        num_hosts=len(set(hosts)),
        machine=this_machine(),
        rules=((SMALL_BYTES, NATIVE), (None, name)),
    )


def hosts_of(comm: Communicator) -> list[str]:
    """Something for each rank that is the same on ranks of one host. Blocks; every rank calls it."""
    return [str(host) for host in all_gather_object(comm, host_identity())]
