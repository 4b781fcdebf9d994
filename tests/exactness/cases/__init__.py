"""The exactness suite's named cases: each trains a small model the same way in one process and on N ranks.

A case gets a Context, runs its loop, and returns its model(s). What a rank sees is its part of the joined batch.
"""

from tests.exactness.cases import accumulation, data, parameters, plain, ways_of_torch
from tests.exactness.cases.common import CASES

__all__ = ["CASES", "accumulation", "data", "parameters", "plain", "ways_of_torch"]
