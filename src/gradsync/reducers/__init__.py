"""Reducers: how one bucket becomes its mean over the ranks. One module or package for each way."""

from gradsync.reducers.adasum import Adasum
from gradsync.reducers.base import Driver, Reducer
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.reducers.plain import Plain
from gradsync.reducers.powersgd.reducer import PowerSGD

__all__ = ["Adasum", "Compressed", "Driver", "Plain", "PowerSGD", "Reducer"]
