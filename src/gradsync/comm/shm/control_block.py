"""The control block of a group of ranks on one host: counters, slots and channels in shared memory, and sleeping.

How the kernels use its parts is described in ``kernels/shm/collectives.py``.
"""

from __future__ import annotations

import ctypes

import numpy as np

from gradsync.comm.base import Communicator
from gradsync.comm.shm.segment import create_segment
from gradsync.kernels.shm import futex
from gradsync.kernels.shm.collectives import (
    CALL_TEXT,
    CALL_TEXT_BYTES,
    CHANNEL_BYTES,
    CHANNELS,
    CONTROL_WORDS,
    FUTEX_WORD,
    LAST_SEQUENCE,
    NUM_SLOTS,
    SLEEPING,
    SLOT_BYTES,
    SLOTS,
    load,
    store,
)


class ControlBlock:
    """One group's control segment, as one rank sees it. The kernels take the ``address`` of its control words."""

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size
        self._segment = create_segment(comm, CHANNELS + comm.world_size * CHANNEL_BYTES)
        self._parts = [self._segment.address_of(rank) for rank in range(comm.world_size)]
        self._own_part = self._parts[comm.rank]
        slots = [part + SLOTS + slot * SLOT_BYTES for slot in range(NUM_SLOTS) for part in self._parts]
        # The layout is that of CONTROL_WORDS. The last words, one for each rank, are scratch space of the kernels.
        head = [comm.rank, comm.world_size, self._parts[0], self._segment.bytes_per_rank, 0]
        self._words = np.array([*head, *slots, *self._parts], np.int64)
        assert len(head) == CONTROL_WORDS
        self.address: int = self._words.ctypes.data

    def reserve(self, num_chunks: int) -> int:
        """Reserve sequence numbers and return the first. Every rank must reserve them in the same order."""
        first = self.last_sequence + 1
        self._words[LAST_SEQUENCE] += num_chunks
        return first

    @property
    def last_sequence(self) -> int:
        """The last sequence number that was reserved; 0 at first."""
        return int(self._words[LAST_SEQUENCE])

    def channel(self, src: int, dst: int) -> int:
        """The address of the channel from ``src`` to ``dst``."""
        return self._parts[src] + CHANNELS + dst * CHANNEL_BYTES

    # -- when the ranks' calls differ: see [Note: fingerprints] -----------------------------------------------------

    def publish_call(self, sequence: int, description: str) -> None:
        """Publish what this rank asked for in the call whose first sequence number is ``sequence``."""
        text = description.encode()[: CALL_TEXT_BYTES - 16]
        ctypes.memmove(self._own_part + CALL_TEXT + 16, text, len(text))
        store(self._own_part + CALL_TEXT + 8, len(text))
        store(self._own_part + CALL_TEXT, sequence)

    def read_calls(self, sequence: int) -> list[str] | None:
        """What each rank asked for in that call; None as long as not all ranks have published it."""
        parts = [part + CALL_TEXT for part in self._parts]
        if any(load(part) != sequence for part in parts):
            return None
        return [ctypes.string_at(part + 16, load(part + 8)).decode(errors="replace") for part in parts]

    # -- sleeping. A rank that raises a counter wakes the ranks that sleep: see `publish` in collectives.py ---------

    def prepare_sleep(self) -> int:
        """Announce that this rank sleeps. Check the counters once more before ``sleep``.

        A rank that published just before the announcement did not see it, and sent no wake-up.
        """
        expected: int = load(self._own_part + FUTEX_WORD)
        store(self._own_part + SLEEPING, 1)
        return expected

    def sleep(self, expected: int, limit_s: float) -> None:
        """Sleep until woken, at most ``limit_s``. ``expected``: what ``prepare_sleep`` returned."""
        futex.wait(self._own_part + FUTEX_WORD, expected & 0xFFFFFFFF, limit_s)

    def end_sleep(self) -> None:
        """Announce that this rank is awake."""
        store(self._own_part + SLEEPING, 0)
