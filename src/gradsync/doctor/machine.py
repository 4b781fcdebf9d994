"""Examining one rank's machine: its cores, how fast they compute and copy, its threads, its network interfaces."""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gradsync.comm.rendezvous import interface_address

MATRIX = 384  # the size of the timed product: it stays in the cache, so that cores are measured and not memory
COPY_BYTES = 64 << 20  # far beyond any cache
ROUNDS = 7


@dataclass(frozen=True)
class Interface:
    """A network interface that has an address."""

    name: str
    address: str
    mbit_per_s: int | None = None  # the link's nominal rate; None where it has none, as most virtual interfaces


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """The machine of one rank, as that rank sees it. Can be sent as JSON."""

    host: str
    rank: int = 0
    cores: int = 1  # that this process may use, as limited by taskset, Slurm or a container
    total_cores: int = 1
    quota_cores: float | None = None  # core-seconds a second that a container's quota allows; None: no limit
    threads: int = 1  # of torch, in one operation
    omp: str | None = None  # OMP_NUM_THREADS, if it is set
    gflops: float = 0.0  # of float32, with all its threads
    copy_gb_per_s: float = 0.0  # read and written
    load: float = 0.0  # the load average of the last minute, before anything was measured here
    gpus: tuple[str, ...] = ()
    nccl: bool = False
    interfaces: tuple[Interface, ...] = ()
    used_interface: str | None = None  # the one that GLOO_SOCKET_IFNAME names, or that leads to rank 0
    versions: Mapping[str, str] = field(default_factory=dict)
    clock_offset_s: float = 0.0  # this machine's wall clock minus rank 0's

    @property
    def used_link(self) -> Interface | None:
        """The entry of ``interfaces`` that is used."""
        return next((link for link in self.interfaces if link.name == self.used_interface), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MachineReport:
        """Restore a report from ``as_dict``, directly or from JSON."""
        links = tuple(Interface(**link) for link in data["interfaces"])
        return cls(**{**data, "interfaces": links, "gpus": tuple(data["gpus"])})


def examine(*, rank: int = 0, environ: Mapping[str, str] = os.environ) -> MachineReport:
    """Examine this machine and time it: about half a second.

    >>> from gradsync.doctor import examine
    >>> machine = examine()
    >>> machine.cores >= 1, machine.gflops > 0
    (True, True)
    """
    load = os.getloadavg()[0]
    interfaces = _interfaces()
    kind = torch.accelerator.current_accelerator(check_available=True)
    module = None if kind is None else torch.get_device_module(kind)
    gpus = [] if module is None else [module.get_device_properties(at).name for at in range(module.device_count())]
    return MachineReport(
        host=platform.node(),
        rank=rank,
        cores=len(os.sched_getaffinity(0)),
        total_cores=os.cpu_count() or 1,
        quota_cores=_quota_cores(Path("/sys/fs/cgroup")),
        threads=torch.get_num_threads(),
        omp=environ.get("OMP_NUM_THREADS"),
        gflops=_gflops(),
        copy_gb_per_s=_copy_gb_per_s(),
        load=load,
        gpus=tuple(gpus),
        nccl=torch.distributed.is_available() and torch.distributed.is_nccl_available(),
        interfaces=interfaces,
        used_interface=_used_interface(interfaces, environ),
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
    )


def _gflops() -> float:
    matrix = torch.ones(MATRIX, MATRIX)
    matrix @ matrix
    taken = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        taken.append((time.perf_counter() - start_s) / 4)
    return 2 * MATRIX**3 / statistics.median(taken) / 1e9


def _copy_gb_per_s() -> float:
    source, target = torch.zeros(COPY_BYTES, dtype=torch.uint8), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    taken = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - start_s)
    return 2 * COPY_BYTES / statistics.median(taken) / 1e9


def _quota_cores(folder: Path) -> float | None:
    """The CPU quota of a container: ``cpu.max`` of cgroup version 2, or the two files of version 1."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _interfaces() -> tuple[Interface, ...]:
    found = []
    for _, name in socket.if_nameindex():
        address = interface_address(name)
        if address is not None:
            found.append(Interface(name, address, link_mbit_per_s(name)))
    return tuple(found)


def link_mbit_per_s(name: str) -> int | None:
    """The nominal rate of an interface's link; None where it has none (the loopback, most virtual ones)."""
    try:
        rate = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        return None
    return rate if rate > 0 else None


def _used_interface(interfaces: tuple[Interface, ...], environ: Mapping[str, str]) -> str | None:
    """The interface that GLOO_SOCKET_IFNAME names; else the one that leads to rank 0."""
    if names := environ.get("GLOO_SOCKET_IFNAME"):
        return names.split(",")[0]
    master = environ.get("MASTER_ADDR")
    if not master:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing: it only asks the kernel for the route
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((each.name for each in interfaces if each.address == own), None)
