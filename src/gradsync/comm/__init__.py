"""Moving tensors between ranks: one interface (``base``), a package per transport, and ``connect``, which picks one."""

from typing import Any

from gradsync.comm.base import Communicator, Work
from gradsync.comm.connect import connect, current_timeout_s, disconnect, lost_ranks, override_timeout
from gradsync.deprecated import renamed

__all__ = [
    "Communicator",
    "Work",
    "connect",
    "current_timeout_s",
    "disconnect",
    "lost_ranks",
    "override_timeout",
]


def __getattr__(name: str) -> Any:
    return renamed(__name__, name)
