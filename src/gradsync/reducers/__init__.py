"""How one bucket becomes its mean over the ranks: a file a way."""

from gradsync.reducers.adasum import Adasum
from gradsync.reducers.allreduce import Plain
from gradsync.reducers.base import Driver, Reducer
from gradsync.reducers.compressed import Compressed
from gradsync.reducers.powersgd import PowerSGD

__all__ = ["Adasum", "Compressed", "Driver", "Plain", "PowerSGD", "Reducer"]
