"""For people who stay with another library's training loop: gradsync's parts in its places."""

from gradsync.compat.ddp import CommHook, comm_hook

__all__ = ["CommHook", "comm_hook"]
