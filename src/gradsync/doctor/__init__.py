"""``gradsync doctor`` without its terminal: measure machines and the links between them, and diagnose problems."""

from __future__ import annotations

from gradsync.doctor.findings import Finding, diagnose
from gradsync.doctor.links import LinkReport, clock_offsets, measure_links
from gradsync.doctor.machine import MachineReport, examine

__all__ = ["Finding", "LinkReport", "MachineReport", "clock_offsets", "diagnose", "examine", "measure_links"]
