"""gradsync keeps the replicas of a model in step while many workers train it."""

from gradsync.batchnorm import SyncBatchNorm
from gradsync.comm import Communicator, Work, connect
from gradsync.data import shard
from gradsync.errors import (
    CollectiveFailed,
    GradSyncError,
    GradSyncWarning,
    NonFiniteGradient,
    OutOfStep,
    PeerLost,
    SameDataWarning,
)
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
    Strategy,
)
from gradsync.synchronize import Synchronizer, synchronize

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
    "PeerLost",
    "SameDataWarning",
    "SpecError",
    "Strategy",
    "SyncBatchNorm",
    "Synchronizer",
    "Work",
    "connect",
    "shard",
    "synchronize",
]
