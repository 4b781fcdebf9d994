"""A lab on one machine: hosts that are network namespaces, on links of a chosen rate, and commands that run on them."""

from __future__ import annotations

from gradsync.lab.namespaces import INTERFACE, MASTER_PORT, Lab, why_unavailable
from gradsync.lab.together import LabError, run_together

__all__ = ["INTERFACE", "MASTER_PORT", "Lab", "LabError", "run_together", "why_unavailable"]
