"""What ``gradsync doctor`` knows: measuring machines and what lies between them, and judging what was measured."""

from __future__ import annotations

from gradsync.doctor.findings import Finding, judge
from gradsync.doctor.links import Links, clock_offsets, measure_links
from gradsync.doctor.machine import Machine, examine

__all__ = ["Finding", "Links", "Machine", "clock_offsets", "examine", "judge", "measure_links"]
