"""Each worker its own part of every epoch, with weights and ``join`` that follow from it by themselves."""

from gradsync.data.loader import ShardedLoader
from gradsync.data.shard import shard

__all__ = ["ShardedLoader", "shard"]
