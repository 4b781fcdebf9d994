"""How long a rank that waits for others on its host spins before it yields its core, and yields before it sleeps."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class SpinPolicy:
    """How often a waiting rank polls a counter before it does something else."""

    spins: int  # polls before the core is yielded
    eager_spins: int  # polls at the start of a collective: some microseconds, which usually save a second call
    small_spins: int  # the same for small tensors
    yields: int  # yields before this rank sleeps


# Every rank has a core of its own. For small tensors ranks spin for longer than the slow path takes. Otherwise one rank
# on the slow path would make the others late for the next collective, those would make it late, and so on for ever.
DEDICATED_CORES = SpinPolicy(spins=2000, eager_spins=500, small_spins=4000, yields=50)
# Ranks share cores: a rank that spins for long keeps the core from the rank that it waits for.
OVERSUBSCRIBED = SpinPolicy(spins=20, eager_spins=20, small_spins=20, yields=5)


def spin_policy_for(num_ranks: int) -> SpinPolicy:
    """The policy for one of ``num_ranks`` ranks on this host.

    >>> from gradsync.comm.shm.spin import spin_policy_for
    >>> spin_policy_for(1).spins > spin_policy_for(100_000).spins
    True
    """
    return DEDICATED_CORES if num_ranks <= _num_cores() else OVERSUBSCRIBED


def _num_cores() -> int:
    """The cores that the ranks of this host have. If this rank is pinned to one core, the others have cores too."""
    own = len(os.sched_getaffinity(0))
    return own if own > 1 else os.cpu_count() or 1
