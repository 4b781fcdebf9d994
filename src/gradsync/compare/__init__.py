"""``gradsync compare`` without its terminal: runs of one script under several strategies, their curves, the report.

``runs`` starts the script under a strategy, ``curve`` writes its losses in the workers, ``summary`` reads and compares
them, ``page`` renders the report.
"""

from __future__ import annotations

from gradsync.compare.curve import CurveWriter, Limits
from gradsync.compare.runs import ComparisonPlan, RunFailed, run_one
from gradsync.compare.summary import ComparisonSummary, Curve, load_curve, summarize

__all__ = [
    "ComparisonPlan",
    "ComparisonSummary",
    "Curve",
    "CurveWriter",
    "Limits",
    "RunFailed",
    "load_curve",
    "run_one",
    "summarize",
]
