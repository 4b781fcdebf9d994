"""Integrations: gradsync's reducers as a DDP communication hook, and its step records in metrics tools."""

from gradsync.integrations.ddp import CommHook, comm_hook

__all__ = ["CommHook", "comm_hook"]
