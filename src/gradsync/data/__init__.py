"""Sharded data: each rank gets its own part of every epoch. Weights and ``join`` are set automatically."""

from gradsync.data.loader import ShardedLoader
from gradsync.data.shard import shard

__all__ = ["ShardedLoader", "shard"]
