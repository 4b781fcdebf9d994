"""Whether a number of workers fits on this machine: checked before they are started, when a warning still helps."""

from __future__ import annotations

import contextlib
from pathlib import Path

GIB = 1 << 30
WORKER_BYTES = 270 << 20  # the least memory of a worker: measured with torch loaded and a tiny model trained


def capacity_warnings(workers: int, *, cores: int, free_bytes: int | None) -> list[str]:
    """Warnings about this number of workers on one machine; empty if they fit.

    >>> from gradsync.cli.launch.capacity import capacity_warnings
    >>> capacity_warnings(2, cores=2, free_bytes=8 << 30)
    []
    >>> capacity_warnings(100, cores=2, free_bytes=22 << 30)[0]
    '100 workers share 2 cores: they take turns, and a step takes about 50 times as long as on a core each'
    """
    warnings = []
    if workers > cores:
        shared = f"{workers} workers share {cores} core{'s' if cores > 1 else ''}"
        warnings.append(
            f"{shared}: they take turns, and a step takes about {workers / cores:.2g} times as long as on a core each"
        )
    needed_bytes = workers * WORKER_BYTES
    if free_bytes is not None and needed_bytes > free_bytes:
        warnings.append(
            f"{workers} workers need at least {needed_bytes / GIB:.2g} GiB of memory (each {WORKER_BYTES >> 20} MiB, "
            f"without the model and its data), and {free_bytes / GIB:.2g} GiB are free: the kernel may kill any process"
        )
    return warnings


def free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory that new processes can use: the machine's, or what is left of a container's limit.

    None where neither can be read.
    """
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(min(limit, limit - used + _reclaimable_bytes(cgroup / "memory.stat")))
    return min(found, default=None)


def _reclaimable_bytes(stat: Path) -> int:
    """The file cache that the kernel drops when a process needs memory; ``memory.current`` counts it as used."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return int(dict(line.split() for line in stat.read_text().splitlines())["inactive_file"])
    return 0
