"""What ``gradsync compare`` stands on: runs of one script under several strategies, their curves, and the report."""

from __future__ import annotations

from gradsync.compare.curve import CurveWriter, Limits
from gradsync.compare.runs import Plan, RunFailed, run_one
from gradsync.compare.summary import Curve, Summary, load_curve, summarize

__all__ = ["Curve", "CurveWriter", "Limits", "Plan", "RunFailed", "Summary", "load_curve", "run_one", "summarize"]
