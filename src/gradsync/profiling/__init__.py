"""Where a step's time goes: records of steps, made while training, and what is made of them."""

from gradsync.profiling.record import Breakdown, BucketRecord, Span, StepRecord
from gradsync.profiling.recorder import Recorder, typical
from gradsync.profiling.run import Run, load
from gradsync.profiling.start import set_recording

__all__ = ["Breakdown", "BucketRecord", "Recorder", "Run", "Span", "StepRecord", "load", "set_recording", "typical"]
