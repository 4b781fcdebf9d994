"""``gradsync info``: versions, devices and interfaces of this machine, and the transport that gradsync would use."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gradsync import spec
from gradsync.comm.base import DEFAULT_TIMEOUT_S, Solo
from gradsync.comm.connect import TRANSPORTS
from gradsync.comm.rendezvous import find_launch_info, interface_address, requested_transport
from gradsync.doctor.machine import link_mbit_per_s


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def info(as_json: bool) -> None:
    """Print versions, backends, devices, cores, network interfaces and the transport that would be used."""
    found = gather()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for topic, facts in found.items():
        for at, line in enumerate(_lines(facts)):
            table.add_row(topic if at == 0 else "", line)
    Console().print(table)


def gather() -> dict[str, Any]:
    """Everything that ``gradsync info`` prints, as plain data.

    >>> from gradsync.cli.info import gather
    >>> sorted(gather())
    ['backends', 'cores', 'devices', 'interfaces', 'place', 'strategies', 'transport', 'versions']
    """
    place = _find_place()
    return {
        "versions": _versions(),
        "backends": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
            "mpi": importlib.util.find_spec("mpi4py") is not None,
        },
        "devices": _devices(),
        "cores": _cores(),
        "interfaces": _interfaces(),
        "place": place,
        "transport": _transport(place),
        "strategies": list(spec.names("strategy")),
    }


def _versions() -> dict[str, str]:
    versions = {"gradsync": _version("gradsync"), "python": platform.python_version()}
    versions |= {name: _version(name) for name in ("torch", "numpy")}
    return versions | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    properties = [module.get_device_properties(at) for at in range(torch.accelerator.device_count())]
    return [f"{kind.type}:{at} {p.name}, {p.total_memory / 2**30:.1f} GiB" for at, p in enumerate(properties)]


def _cores() -> dict[str, Any]:
    return {
        "usable": len(os.sched_getaffinity(0)),  # as limited by taskset, Slurm or a container
        "total": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
    }


def _interfaces() -> list[dict[str, Any]]:
    ipv6 = _ipv6_addresses()
    found = []
    for _, name in socket.if_nameindex():
        ipv4 = interface_address(name)
        addresses = ([ipv4] if ipv4 is not None else []) + ipv6.get(name, [])
        found.append({"name": name, "addresses": addresses, "mbit_per_s": link_mbit_per_s(name)})
    return found


def _ipv6_addresses() -> dict[str, list[str]]:
    """Linux lists them in a file: the address in hexadecimal first, the interface's name last."""
    found: dict[str, list[str]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        address, *_, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found


def _find_place() -> dict[str, Any]:
    try:
        place = find_launch_info()
    except ValueError as error:  # incomplete environment variables: report it, and go on with the rest
        return {"problem": str(error)}
    return {
        "rank": place.rank,
        "world size": place.world_size,
        "on this host": place.local_world_size,
        "source": place.source,
    }


def _transport(place: dict[str, Any]) -> dict[str, Any]:
    """What ``connect(transport="auto")`` would choose here."""
    try:
        asked = requested_transport(TRANSPORTS)
    except ValueError as error:
        return {"auto": "none", "why": str(error)}
    if "problem" in place and asked != "mpi":  # MPI itself knows where the ranks are
        return {"auto": "none", "why": place["problem"]}
    if asked != "auto":
        return {"auto": asked, "why": f"GRADSYNC_TRANSPORT={asked}", "timeout_s": DEFAULT_TIMEOUT_S}
    if place["world size"] == 1:
        return {"auto": Solo.transport, "why": Solo.why, "timeout_s": DEFAULT_TIMEOUT_S}
    ranks = f"{place['world size']} ranks, as {place['source']} says"
    if torch.accelerator.is_available():
        return {"auto": "c10d", "why": f"{ranks}; torch.distributed for GPUs", "timeout_s": DEFAULT_TIMEOUT_S}
    if place["on this host"] == place["world size"]:
        return {"auto": "shm", "why": f"{ranks}; all on this host", "timeout_s": DEFAULT_TIMEOUT_S}
    return {"auto": "tcp", "why": f"{ranks}; on several hosts", "timeout_s": DEFAULT_TIMEOUT_S}


def _lines(facts: Any) -> list[str]:
    """A topic's facts as lines to read."""
    if isinstance(facts, dict):
        return [f"{name}: {_yes_or_no(fact)}" for name, fact in facts.items()]
    lines = []
    for fact in facts:
        if isinstance(fact, dict):
            rate = f", {fact['mbit_per_s']} Mbit/s" if fact["mbit_per_s"] else ""
            fact = f"{fact['name']}: {', '.join(fact['addresses']) or 'no address'}{rate}"
        lines.append(fact)
    return lines or ["none"]


def _yes_or_no(fact: object) -> str:
    return {True: "yes", False: "no"}[fact] if isinstance(fact, bool) else str(fact)
