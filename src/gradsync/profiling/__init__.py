"""Where a step's time goes: step records, taken while training, and the summaries, reports and traces made from them.

``interface`` is what engine and strategies call, ``recorder`` keeps raw marks (``raw``), ``parts`` turns these into
records (``record``), ``run`` saves and loads them, ``summary``, ``report`` and ``trace`` present them.
"""

from gradsync.profiling.record import Breakdown, BucketRecord, Change, Span, StepRecord
from gradsync.profiling.recorder import Recorder, typical
from gradsync.profiling.run import Run, load
from gradsync.profiling.start import set_recording

__all__ = [
    "Breakdown",
    "BucketRecord",
    "Change",
    "Recorder",
    "Run",
    "Span",
    "StepRecord",
    "load",
    "set_recording",
    "typical",
]
