"""How tensors get from rank to rank: one seam (``base``), a file a transport, and ``connect`` that chooses."""

from gradsync.comm.base import Communicator, Work
from gradsync.comm.connect import connect, current_timeout_s, disconnect, lost_ranks, override_timeout
from gradsync.comm.feed import Feed
from gradsync.comm.threads import run_ranks

__all__ = [
    "Communicator",
    "Feed",
    "Work",
    "connect",
    "current_timeout_s",
    "disconnect",
    "lost_ranks",
    "override_timeout",
    "run_ranks",
]
