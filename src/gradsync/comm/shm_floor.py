"""Where the ranks of one host meet: the control segment, its counters, and sleeping until a peer rings."""

from __future__ import annotations

import numpy as np

from gradsync.comm import futex
from gradsync.comm.base import Communicator
from gradsync.comm.segment import share
from gradsync.comm.shm_kernels import (
    DOORBELL,
    FLOOR_WORDS,
    MAILBOX_BYTES,
    MAILBOXES,
    RING,
    SLEEPING,
    SLOT_BYTES,
    SLOTS,
    TURNS,
    load,
    store,
)


class Floor:
    """One group's control segment, as one rank sees it. What the kernels need of it is the array at ``address``."""

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size
        self._segment = share(comm, MAILBOXES + comm.world_size * MAILBOX_BYTES)
        self._parts = [self._segment.address_of(rank) for rank in range(comm.world_size)]
        self._here = self._parts[comm.rank]
        slots = [part + SLOTS + turn * SLOT_BYTES for turn in range(RING) for part in self._parts]
        # As the kernels read it: see FLOOR_WORDS. The last words, as many as ranks, are room for a kernel to write to.
        place = [comm.rank, comm.world_size, self._parts[0], self._segment.bytes_per_rank, 0]
        self._words = np.array([*place, *slots, *self._parts], np.int64)
        assert len(place) == FLOOR_WORDS
        self.address: int = self._words.ctypes.data

    def reserve(self, num_turns: int) -> int:
        """The number of the first of some turns, which every rank reserves in the same order."""
        first = self.turns + 1
        self._words[TURNS] += num_turns
        return first

    @property
    def turns(self) -> int:
        """How many were reserved so far."""
        return int(self._words[TURNS])

    def mailbox(self, src: int, dst: int) -> int:
        """The address of what ``src`` sends to ``dst``."""
        return self._parts[src] + MAILBOXES + dst * MAILBOX_BYTES

    # -- sleeping. Whoever raises a counter rings those who sleep: see `publish` in shm_kernels.py ------------------

    def fall_asleep(self) -> int:
        """Say that this rank sleeps. Look once more before ``sleep``: who published just before did not ring."""
        bell: int = load(self._here + DOORBELL)
        store(self._here + SLEEPING, 1)
        return bell

    def sleep(self, bell: int, limit_s: float) -> None:
        futex.wait(self._here + DOORBELL, bell & 0xFFFFFFFF, limit_s)

    def wake_up(self) -> None:
        store(self._here + SLEEPING, 0)
