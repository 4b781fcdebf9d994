"""How MPI's ranks meet: those of a world, before they have anything else, and those of a group that is to be made."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from typing import Any

from gradsync.comm.mpi_library import Library, wait_until
from gradsync.comm.watch import Call, Watch
from gradsync.errors import PeerLost

TAG = 29_973  # below the largest tag that every MPI allows; a script's own messages have smaller numbers
TEXT_BYTES = 1 << 16
VERDICT_S = 1.0  # what rank 0's word may take on its way

_GO, _MISSING = b"+", b"-"


class Meeting:
    """Every rank checks in with rank 0; then rank 0 tells all how its lifeline is reached. It takes no address.

    Stands where the lifeline has a torch store: rank 0 sets, the others get.
    """

    def __init__(self, library: Library, *, timeout_s: float) -> None:
        self._mpi = library.mpi
        self._world = library.mpi.COMM_WORLD
        self._timeout_s = timeout_s
        self._others = range(1, self._world.size)

    def check_in(self, word: str) -> list[str]:
        """Say that this rank is here. Rank 0 waits for all, and gets everybody's word in rank order; others get []."""
        if self._world.rank != 0:
            self._send([0], word.encode())
            return []
        texts = [bytearray(TEXT_BYTES) for _ in self._others]
        letters = [
            self._world.Irecv([text, self._mpi.BYTE], rank, TAG) for rank, text in zip(self._others, texts, strict=True)
        ]
        if not wait_until(lambda: self._mpi.Request.Testall(letters), timeout_s=self._timeout_s):
            missing = [rank for rank, letter in zip(self._others, letters, strict=True) if not letter.Test()]
            self._send([rank for rank in self._others if rank not in missing], _MISSING + json.dumps(missing).encode())
            raise self._lost(*missing)
        return [word, *(bytes(text).rstrip(b"\0").decode() for text in texts)]

    def set(self, key: str, value: str) -> None:
        """Tell all; on rank 0."""
        self._send(list(self._others), _GO + value.encode())

    def get(self, key: str) -> bytes:
        """What rank 0 has set; on the others."""
        text = bytearray(TEXT_BYTES)
        letter = self._world.Irecv([text, self._mpi.BYTE], 0, TAG)
        if not wait_until(letter.Test, timeout_s=self._timeout_s + VERDICT_S):
            raise self._lost(0)
        told = bytes(text).rstrip(b"\0")
        if told.startswith(_MISSING):
            raise self._lost(*json.loads(told.removeprefix(_MISSING)))
        return told.removeprefix(_GO)

    def _send(self, ranks: list[int], text: bytes) -> None:
        letters: list[Any] = [self._world.Isend([text, self._mpi.BYTE], rank, TAG) for rank in ranks]
        if not wait_until(lambda: self._mpi.Request.Testall(letters), timeout_s=self._timeout_s):
            raise self._lost(*(rank for rank, letter in zip(ranks, letters, strict=True) if not letter.Test()))

    def _lost(self, *ranks: int) -> PeerLost:
        reason = "it did not come to connect()"
        return PeerLost(rank=ranks, reason=reason, after_s=self._timeout_s, during="connect")


def make_comms(
    library: Library, parent: Any, chosen: Sequence[int], watch: Watch, call: Call, *, tag: int
) -> tuple[Any, Any]:
    """Two communicators of these ranks of ``parent``, all of whom are on their way here. Blocks.

    MPI does this in a call that blocks, which a lost peer would never let return. So a thread makes it.
    """
    made: list[Any] = []
    errors: list[Exception] = []

    def make() -> None:
        try:
            with contextlib.nullcontext() if library.any_thread_any_time else library.lock:
                whole = parent.Get_group()
                group = whole.Incl(list(chosen))
                for _ in range(2):
                    comm = parent.Create_group(group, tag)
                    comm.Set_errhandler(library.mpi.ERRORS_RETURN)
                    made.append(comm)
                group.Free()
                whole.Free()
        except Exception as error:  # raised below, in the thread that asked
            errors.append(error)

    maker = threading.Thread(target=make, name="gradsync-mpi-group", daemon=True)
    maker.start()
    while maker.is_alive():
        maker.join(0.02)
        if maker.is_alive():
            watch.check(call)
    if errors:
        watch.raise_cause(call, str(errors[0]))
    return made[0], made[1]
