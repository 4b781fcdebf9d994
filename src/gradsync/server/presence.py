"""Which of a server's workers are still connected."""

from __future__ import annotations

import time

from gradsync.comm.endpoints import Listener

PATIENCE = 0.02  # of the time that a worker has been silent: how long until it is asked again


class Presence:
    """Asks a listener about its peers: the less often the longer one is silent.

    Each question is a message that the peer will have to read over, and one that computes for an hour reads none.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._heard_s: dict[bytes, float] = {}
        self._asked_s: dict[bytes, float] = {}

    def heard(self, peer: bytes) -> None:
        """A message came from it."""
        self._heard_s[peer] = time.monotonic()

    def is_gone(self, peer: bytes) -> bool:
        """Whether its connection is known to be gone."""
        now_s = time.monotonic()
        silent_s = now_s - self._heard_s.setdefault(peer, now_s)
        if now_s < self._asked_s.get(peer, 0.0) + PATIENCE * silent_s:
            return False
        self._asked_s[peer] = now_s
        if self._listener.is_there(peer):
            return False
        del self._heard_s[peer], self._asked_s[peer]
        return True
