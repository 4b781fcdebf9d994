"""gradsync keeps the replicas of a model in step while many workers train it."""

import gradsync.deprecated
from gradsync.comm import Communicator, Work, connect
from gradsync.data import shard
from gradsync.errors import (
    CollectiveFailed,
    GradSyncError,
    GradSyncWarning,
    NonFiniteGradient,
    OutOfStep,
    Partitioned,
    PeerLost,
    RefusedByServer,
    SameDataWarning,
    ServerLost,
    StoreUnreachable,
    Unreachable,
)
from gradsync.replicas.batchnorm import SyncBatchNorm
from gradsync.spec import SpecError
from gradsync.strategies import (
    AllReduce,
    Auto,
    DiLoCo,
    Gossip,
    Hogwild,
    LocalSGD,
    OneBitAdam,
    ParameterServer,
    Sharded,
    Strategy,
)
from gradsync.synchronize import Synchronizer, synchronize

__version__ = "0.1.0"
gradsync.deprecated.keep_old_names()

__all__ = [
    "AllReduce",
    "Auto",
    "CollectiveFailed",
    "Communicator",
    "DiLoCo",
    "Gossip",
    "GradSyncError",
    "GradSyncWarning",
    "Hogwild",
    "LocalSGD",
    "NonFiniteGradient",
    "OneBitAdam",
    "OutOfStep",
    "ParameterServer",
    "Partitioned",
    "PeerLost",
    "RefusedByServer",
    "SameDataWarning",
    "ServerLost",
    "Sharded",
    "SpecError",
    "StoreUnreachable",
    "Strategy",
    "SyncBatchNorm",
    "Synchronizer",
    "Unreachable",
    "Work",
    "connect",
    "shard",
    "synchronize",
]
