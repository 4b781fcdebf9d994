"""How long a rank that waits for others of its host keeps its core."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Spinning:
    """How long a rank looks at a counter, again and again, before it does something else."""

    spins: int  # looks before the core is offered to somebody else
    eager_spins: int  # that the start of a collective takes: some microseconds, which most often save a second call
    small_spins: int  # the same for little data
    yields: int  # offers before this rank sleeps


# Every rank has a core. With little data they look for longer than the long way round takes: else one rank that goes
# it would make the others late for the next, and they it, for ever.
ALONE = Spinning(spins=2000, eager_spins=500, small_spins=4000, yields=50)
# Ranks share cores: who looks for long keeps the core from the one that it waits for.
CROWDED = Spinning(spins=20, eager_spins=20, small_spins=20, yields=5)


def spinning_of(num_ranks: int) -> Spinning:
    """That of one of so many ranks on this host.

    >>> from gradsync.comm.spinning import spinning_of
    >>> spinning_of(1).spins > spinning_of(100_000).spins
    True
    """
    return ALONE if num_ranks <= _num_cores() else CROWDED


def _num_cores() -> int:
    """The cores that the ranks of this host have. A rank that is pinned to one leaves the others theirs."""
    own = len(os.sched_getaffinity(0))
    return own if own > 1 else os.cpu_count() or 1
