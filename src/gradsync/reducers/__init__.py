"""How one bucket becomes its mean over the ranks: a file a way."""

from gradsync.reducers.allreduce import Plain
from gradsync.reducers.base import Driver, Reducer

__all__ = ["Driver", "Plain", "Reducer"]
