"""Tools to test distributed training on one machine.

- :func:`run_ranks` runs a function on several ranks, each a thread of this process.
- :class:`Faulty` wraps a communicator and injects delays, dropped ranks and deaths, reproducibly from a seed.
- :class:`Lab` builds hosts out of network namespaces, joined by links of a chosen rate (Linux, root).
- :func:`run_commands` runs several commands at once and ends all of them when one fails.

>>> import torch
>>> from gradsync.testing import run_ranks
>>> def average(comm):
...     grad = torch.tensor([float(comm.rank)])
...     comm.all_reduce(grad).wait()
...     return grad.item() / comm.world_size
>>> run_ranks(3, average)
[1.0, 1.0, 1.0]
"""

from __future__ import annotations

from gradsync.testing.faults import Faulty
from gradsync.testing.network import Lab, lab_unavailable_reason
from gradsync.testing.processes import LabError, run_commands
from gradsync.testing.threads import run_ranks

__all__ = ["Faulty", "Lab", "LabError", "lab_unavailable_reason", "run_commands", "run_ranks"]
