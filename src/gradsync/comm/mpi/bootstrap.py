"""Bootstrap of the MPI transport: the rendezvous of all ranks in ``connect()``, and making a group's communicators."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from typing import Any

from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.mpi.library import Library, wait_until
from gradsync.errors import PeerLost

TAG = 29_973  # below the largest tag that every MPI allows; a script's own messages have smaller numbers
TEXT_BYTES = 1 << 16
REPLY_S = 1.0  # how long rank 0's reply may take

_OK, _MISSING = b"+", b"-"


class Bootstrap:
    """Every rank checks in with rank 0; then rank 0 sends all ranks the endpoint of its heartbeat. Needs no address.

    It has the interface of the torch store that the heartbeat uses elsewhere: rank 0 sets, the others get.
    """

    def __init__(self, library: Library, *, timeout_s: float) -> None:
        self._mpi = library.mpi
        self._world = library.mpi.COMM_WORLD
        self._timeout_s = timeout_s
        self._others = range(1, self._world.size)

    def check_in(self, identity: str) -> list[str]:
        """Report this rank to rank 0, which waits for all ranks and returns their identities; the others return []."""
        if self._world.rank != 0:
            self._send([0], identity.encode())
            return []
        texts = [bytearray(TEXT_BYTES) for _ in self._others]
        requests = [
            self._world.Irecv([text, self._mpi.BYTE], rank, TAG) for rank, text in zip(self._others, texts, strict=True)
        ]
        if not wait_until(lambda: self._mpi.Request.Testall(requests), timeout_s=self._timeout_s):
            missing = [rank for rank, request in zip(self._others, requests, strict=True) if not request.Test()]
            self._send([rank for rank in self._others if rank not in missing], _MISSING + json.dumps(missing).encode())
            raise self._lost(*missing)
        return [identity, *(bytes(text).rstrip(b"\0").decode() for text in texts)]

    def set(self, key: str, value: str) -> None:
        """Send a value to all other ranks; called on rank 0."""
        self._send(list(self._others), _OK + value.encode())

    def get(self, key: str) -> bytes:
        """Receive the value that rank 0 has set; called on the other ranks."""
        text = bytearray(TEXT_BYTES)
        request = self._world.Irecv([text, self._mpi.BYTE], 0, TAG)
        if not wait_until(request.Test, timeout_s=self._timeout_s + REPLY_S):
            raise self._lost(0)
        reply = bytes(text).rstrip(b"\0")
        if reply.startswith(_MISSING):
            raise self._lost(*json.loads(reply.removeprefix(_MISSING)))
        return reply.removeprefix(_OK)

    def _send(self, ranks: list[int], text: bytes) -> None:
        requests: list[Any] = [self._world.Isend([text, self._mpi.BYTE], rank, TAG) for rank in ranks]
        if not wait_until(lambda: self._mpi.Request.Testall(requests), timeout_s=self._timeout_s):
            raise self._lost(*(rank for rank, request in zip(ranks, requests, strict=True) if not request.Test()))

    def _lost(self, *ranks: int) -> PeerLost:
        reason = "it did not come to connect()"
        return PeerLost(rank=ranks, reason=reason, after_s=self._timeout_s, during="connect")


def make_comms(
    library: Library, parent: Any, chosen: Sequence[int], guard: CollectiveGuard, call: Call, *, tag: int
) -> tuple[Any, Any]:
    """Make two communicators of the ``chosen`` ranks of ``parent``, all of which call this. Blocks.

    MPI makes a communicator in a blocking call, which would never return if a peer is lost. So a thread makes it, and
    this one checks for lost peers meanwhile.
    """
    made: list[Any] = []
    errors: list[Exception] = []

    def make() -> None:
        try:
            with contextlib.nullcontext() if library.thread_multiple else library.lock:
                whole = parent.Get_group()
                group = whole.Incl(list(chosen))
                for _ in range(2):
                    comm = parent.Create_group(group, tag)
                    comm.Set_errhandler(library.mpi.ERRORS_RETURN)
                    made.append(comm)
                group.Free()
                whole.Free()
        except Exception as error:  # raised below, in the calling thread
            errors.append(error)

    maker = threading.Thread(target=make, name="gradsync-mpi-group", daemon=True)
    maker.start()
    while maker.is_alive():
        maker.join(0.02)
        if maker.is_alive():
            guard.check(call)
    if errors:
        guard.raise_cause(call, str(errors[0]))
    return made[0], made[1]
