"""Detects which of a server's workers have lost their connection."""

from __future__ import annotations

import time

from gradsync.messaging.endpoints import Listener

PROBE_BACKOFF = 0.02  # time until the next probe, as a fraction of the time that the worker has been silent


class Liveness:
    """Probes the connections of a listener's peers. The longer a peer is silent, the less often it is probed.

    Each probe is a message that the peer has to read and ignore, and a peer that computes for an hour reads none.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._last_message_s: dict[bytes, float] = {}
        self._last_probe_s: dict[bytes, float] = {}

    def record_message(self, peer: bytes) -> None:
        """A message came from this peer."""
        self._last_message_s[peer] = time.monotonic()

    def is_gone(self, peer: bytes) -> bool:
        """Whether the peer's connection is known to be lost."""
        now_s = time.monotonic()
        silent_s = now_s - self._last_message_s.setdefault(peer, now_s)
        if now_s < self._last_probe_s.get(peer, 0.0) + PROBE_BACKOFF * silent_s:
            return False
        self._last_probe_s[peer] = now_s
        if self._listener.is_connected(peer):
            return False
        del self._last_message_s[peer], self._last_probe_s[peer]
        return True
