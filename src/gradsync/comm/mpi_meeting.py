"""Where the ranks of an MPI world meet before they have anything else: it takes no address and no port."""

from __future__ import annotations

import json
from typing import Any

from gradsync.comm.mpi_library import Library, wait_until
from gradsync.errors import PeerLost

TAG = 29_973  # below the largest tag that every MPI allows; a script's own messages have smaller numbers
TEXT_BYTES = 1 << 16
VERDICT_S = 1.0  # what rank 0's word may take on its way

_GO, _MISSING = b"+", b"-"


class Meeting:
    """Every rank checks in with rank 0; then rank 0 tells all how its lifeline is reached.

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
