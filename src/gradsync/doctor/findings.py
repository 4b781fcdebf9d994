"""Diagnosis: from measured machines and links to findings, each with a problem and its remedy. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from gradsync.doctor.links import LinkReport
from gradsync.doctor.machine import MachineReport

Severity = Literal["wrong", "advice"]

GPU_LINK_GBIT = 25.0  # below it, GPU nodes wait for the wire in most models
SLOW_LINK_GBIT = 2.0
MIN_RATE_SHARE = 0.6  # of a link's nominal rate: below it something else limits it
SLOW_RANK = 0.8  # of the median rank's speed: a slower rank makes all others wait
CLOCK_S = 0.05
LATENCY_S = 1e-3
BUSY = 0.5  # of the cores: a higher load means that other processes use the machine


@dataclass(frozen=True)
class Finding:
    """A problem that costs time (``what``), and its remedy (``do``)."""

    severity: Severity
    what: str
    do: str

    def as_dict(self) -> dict[str, str]:
        """Plain data, for JSON."""
        return asdict(self)


def diagnose(machines: Sequence[MachineReport], links: LinkReport | None = None) -> list[Finding]:
    """All findings, the "wrong" ones first. ``machines``: one for each rank, in rank order.

    >>> from gradsync.doctor import MachineReport, diagnose
    >>> [finding.what for finding in diagnose([MachineReport(host="a", cores=8, threads=8)] * 4)]
    ['4 ranks of 8 threads share 8 cores of a: 4 times more threads than cores']
    """
    found = [
        *_threads(machines),
        *_quota(machines),
        *_load(machines),
        *_version_mismatches(machines),
        *_slow_ranks(machines),
    ]
    if links is not None:
        found += [*_interfaces(machines, links), *_rate(machines, links), *_latency(links), *_clocks(machines, links)]
        found += _transport(links)
    return sorted(found, key=lambda finding: finding.severity != "wrong")


def _by_host(machines: Sequence[MachineReport]) -> dict[str, list[MachineReport]]:
    hosts: dict[str, list[MachineReport]] = {}
    for machine in machines:
        hosts.setdefault(machine.host, []).append(machine)
    return hosts


def _threads(machines: Sequence[MachineReport]) -> list[Finding]:
    found = []
    for host, ranks in _by_host(machines).items():
        cores, wanted = ranks[0].cores, sum(rank.threads for rank in ranks)
        fit = max(1, cores // len(ranks))
        who = f"{_count(len(ranks), 'rank')} of {_count(ranks[0].threads, 'thread')}"
        say = f"OMP_NUM_THREADS={fit}" + (f" (it is {ranks[0].omp} now)" if ranks[0].omp else "")
        verb = "share" if len(ranks) > 1 else "has"
        if wanted > cores and wanted > len(ranks):
            what = f"{who} {verb} {_count(cores, 'core')} of {host}: {wanted / cores:.3g} times more threads than cores"
            found.append(Finding("wrong", what, f"Set {say}, or let `gradsync run` set it: leave the variable out."))
        elif len(ranks) > cores:
            what = f"{_count(len(ranks), 'rank')} share {_count(cores, 'core')} of {host}"
            found.append(Finding("wrong", what, f"Start at most {cores} there: -n {cores}."))
        elif wanted <= cores // 2 and not ranks[0].gpus:
            what = f"{who} leave {cores - wanted} of {cores} cores of {host} idle"
            found.append(Finding("wrong" if ranks[0].omp else "advice", what, f"Set {say}, or start more ranks."))
    return found


def _quota(machines: Sequence[MachineReport]) -> list[Finding]:
    found = []
    for host, ranks in _by_host(machines).items():
        quota, threads = ranks[0].quota_cores, sum(rank.threads for rank in ranks)
        if quota is not None and quota < threads:
            what = f"the container on {host} may use {quota:.3g} cores a second, and {threads} threads want to run"
            found.append(Finding("wrong", what, "Raise its CPU limit, or start fewer ranks or threads."))
    return found


def _load(machines: Sequence[MachineReport]) -> list[Finding]:
    found = []
    for host, ranks in _by_host(machines).items():
        first = ranks[0]
        if first.load > BUSY * first.total_cores:
            what = f"{host} was busy before: a load of {first.load:.1f} on {_count(first.total_cores, 'core')}"
            found.append(Finding("advice", what, "See what else runs there (top); it slows these measurements."))
    return found


def _version_mismatches(machines: Sequence[MachineReport]) -> list[Finding]:
    found = []
    for package in sorted({name for machine in machines for name in machine.versions}):
        versions = Counter(machine.versions.get(package, "none") for machine in machines)
        if len(versions) > 1:
            odd = min(versions, key=lambda version: versions[version])
            rank = next(machine.rank for machine in machines if machine.versions.get(package, "none") == odd)
            what = f"the ranks have different versions of {package}: {', '.join(sorted(versions))}"
            found.append(Finding("wrong", what, f"Install the same everywhere; rank {rank} is the odd one."))
    return found


def _slow_ranks(machines: Sequence[MachineReport]) -> list[Finding]:
    if len(machines) < 2:
        return []
    usual = statistics.median(machine.gflops for machine in machines)
    slow = [machine for machine in machines if machine.gflops < SLOW_RANK * usual]
    return [
        Finding(
            "wrong",
            f"rank {machine.rank} on {machine.host} computes at {machine.gflops / usual:.0%} of the usual speed "
            f"({machine.gflops:.0f} of {usual:.0f} GFLOP/s): all wait for it",
            "See what else runs there, or give it less: gradsync.shard(..., balance=True).",
        )
        for machine in slow
    ]


def _interfaces(machines: Sequence[MachineReport], links: LinkReport) -> list[Finding]:
    if links.num_hosts == 1:
        return []
    found = []
    for machine in _first_of_hosts(machines):
        used = machine.used_link
        if used is not None and used.address.startswith("127."):
            what = f"{machine.host} connects to other hosts through {used.name}, a loopback interface"
            found.append(Finding("wrong", what, f"Set GLOO_SOCKET_IFNAME to one of {_names(machine)}."))
            continue
        fast = max(machine.interfaces, key=lambda link: link.mbit_per_s or 0, default=None)
        if used is None or fast is None or fast.mbit_per_s is None:
            continue
        if fast.mbit_per_s > 1.5 * (used.mbit_per_s or fast.mbit_per_s):
            what = (
                f"{machine.host} uses {used.name} of {used.mbit_per_s} Mbit/s, and has {fast.name} of "
                f"{fast.mbit_per_s} Mbit/s"
            )
            do = f"Set GLOO_SOCKET_IFNAME={fast.name} (and NCCL_SOCKET_IFNAME), and --master-addr {fast.address}."
            found.append(Finding("wrong", what, do))
    return found


def _rate(machines: Sequence[MachineReport], links: LinkReport) -> list[Finding]:
    if links.num_hosts == 1:
        return []
    found, gbit = [], links.network.gbit_per_s
    used = [link.mbit_per_s for m in _first_of_hosts(machines) if (link := m.used_link) is not None and link.mbit_per_s]
    if used and gbit * 1e3 < MIN_RATE_SHARE * min(used):
        what = f"all-reduces move {gbit:.2g} Gbit/s, and the link says {min(used) / 1e3:.3g}"
        do = "See whether others use it, or one core is too slow for its packets: more ranks a host, or jumbo frames."
        found.append(Finding("advice", what, do))
    if any(machine.gpus for machine in machines):
        if gbit < GPU_LINK_GBIT:
            what = f"{gbit:.2g} Gbit/s between GPU nodes: most models need {GPU_LINK_GBIT:.0f} or more"
            do = "Use the fast network (InfiniBand, RoCE) if there is one, else compress: see `gradsync profile`."
            found.append(Finding("wrong", what, do))
    elif gbit < SLOW_LINK_GBIT:
        what = f"{gbit:.2g} Gbit/s between hosts"
        found.append(Finding("advice", what, "Ask `gradsync profile` whether a codec or fewer exchanges would help."))
    return found


def _latency(links: LinkReport) -> list[Finding]:
    if links.num_hosts == 1 or links.network.latency_s < LATENCY_S:
        return []
    what = f"a message takes {links.network.latency_s * 1e3:.1f} ms from host to host"
    return [
        Finding("advice", what, "Larger buckets (bucket_bytes=) wait for it less often; local_sgd and diloco least.")
    ]


def _clocks(machines: Sequence[MachineReport], links: LinkReport) -> list[Finding]:
    late = [m for m in _first_of_hosts(machines) if abs(m.clock_offset_s) > CLOCK_S] if links.num_hosts > 1 else []
    return [
        Finding(
            "advice",
            f"the clock of {machine.host} is {machine.clock_offset_s:+.2f} s off rank 0's",
            "Let NTP or chrony set it. (Reports correct for it; logs of two hosts do not.)",
        )
        for machine in late
    ]


def _transport(links: LinkReport) -> list[Finding]:
    if links.num_hosts == 1 and links.world_size > 1 and links.transport in ("c10d", "tcp"):
        return [
            Finding(
                "advice", f"ranks of one host use {links.transport}: {links.why}", "Use --transport shm if you can."
            )
        ]
    return []


def _first_of_hosts(machines: Sequence[MachineReport]) -> list[MachineReport]:
    return [ranks[0] for ranks in _by_host(machines).values()]


def _names(machine: MachineReport) -> str:
    return ", ".join(link.name for link in machine.interfaces if not link.address.startswith("127.")) or "its others"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


__all__ = ["Finding", "diagnose"]
