"""Faults in the user's own run: ``gradsync run --elastic --chaos "kill 1/30s; stop 1/60s"``.

A schedule of faults is drawn from a seed (:class:`Schedule`), the same one whenever the seed and the rates are the
same. The launcher does what it says to the workers of its node.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("kill", "stop", "cut")
UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
PROBED_ADDRESS = "198.51.100.1"  # reserved for documentation
PROBED_TABLE = "29500"  # a routing table that no rule names: what is in it changes nothing
COMMAND_S = 10.0

_RATE = re.compile(r"(?P<kind>\w+)\s+(?P<count>\d+(\.\d+)?)\s*/\s*(?P<time>\d+(\.\d+)?)\s*(?P<unit>[a-z]*)")


@dataclass(frozen=True)
class Rate:
    """How often a kind of fault comes, on average."""

    kind: str
    mean_s: float


def parse_chaos(text: str) -> tuple[Rate, ...]:
    """Read the rates of faults; raises ValueError for what is not one.

    >>> from gradsync.cli.launch.chaos import parse_chaos
    >>> parse_chaos("kill 1/30s; stop 2/1min")
    (Rate(kind='kill', mean_s=30.0), Rate(kind='stop', mean_s=30.0))
    """
    rates: list[Rate] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        found = _RATE.fullmatch(part)
        if found is None:
            raise ValueError(f"expected faults as in 'kill 1/30s; stop 1/60s'; got {part!r}.")
        if found["kind"] not in KINDS:
            raise ValueError(f"expected one of the faults {', '.join(KINDS)}; got {found['kind']!r}.")
        if found["unit"] not in UNITS_S:
            raise ValueError(f"expected a time in {', '.join(UNITS_S)}, as in '{found['kind']} 1/30s'; got {part!r}.")
        if found["kind"] in (rate.kind for rate in rates):
            raise ValueError(f"expected each fault once; got {found['kind']!r} twice. Add their rates up.")
        count, time_s = float(found["count"]), float(found["time"]) * UNITS_S[found["unit"]]
        if count == 0 or time_s == 0:
            raise ValueError(f"expected a rate above 0 and a time above 0; got {part!r}.")
        rates.append(Rate(found["kind"], time_s / count))
    if not rates:
        raise ValueError(f"expected at least one fault, as in 'kill 1/30s'; got {text!r}.")
    return tuple(rates)


@dataclass(frozen=True, order=True)
class Fault:
    """One fault of a schedule."""

    at_s: float  # since the start of the run
    kind: str
    draw: float  # chooses the victim; in [0, 1)
    duration_s: float  # of a stop or a cut

    def victim_among(self, living: Sequence[int]) -> int:
        """The slot that the fault hits, of those with a living worker."""
        return sorted(living)[int(self.draw * len(living))]


class Schedule:
    """The faults of one node, in the order of their times, without an end.

    The gaps between faults of a kind are exponentially distributed: a fault is as likely in any moment as in any other.

    Args:
        rates: how often each kind comes.
        seed: the same seed gives the same schedule.
        node: the number of the node; each has a schedule of its own.
        longest_s: no stop or cut lasts longer.
    """

    def __init__(self, rates: Sequence[Rate], *, seed: int, node: int = 0, longest_s: float) -> None:
        self._longest_s = longest_s
        self._rates = {rate.kind: rate for rate in rates}
        # A generator for each kind: another kind in the schedule does not move the faults of this one.
        self._draws = {rate.kind: random.Random(f"{seed}:{node}:{rate.kind}") for rate in rates}
        self._next = [self._draw(kind, 0.0) for kind in self._rates]
        heapq.heapify(self._next)

    def _draw(self, kind: str, after_s: float) -> Fault:
        draw = self._draws[kind]
        at_s = after_s + draw.expovariate(1 / self._rates[kind].mean_s)
        return Fault(at_s, kind, draw.random(), draw.uniform(0, self._longest_s))

    @property
    def next_at_s(self) -> float:
        """When the next fault is due, in seconds since the start of the run."""
        return self._next[0].at_s

    def pop(self) -> Fault:
        """Take the next fault from the schedule."""
        fault = self._next[0]
        heapq.heapreplace(self._next, self._draw(fault.kind, fault.at_s))
        return fault


# -- cutting a node off ------------------------------------------------------------------------------------------------


def cut_unavailable_reason(num_nodes: int) -> str | None:
    """Why this node can't be cut off from the others; None if it can.

    It adds and removes a route in a table that is not used, because a container may run as root and still forbid that.
    """
    if num_nodes == 1:
        return "it cuts a node off from the other nodes, and this run has one node. Give --nnodes, or leave it out."
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "it needs Linux and the command `ip` (Debian's package iproute2)."
    if os.geteuid() != 0:
        return f"it needs root, to add routes; got user id {os.geteuid()}. Run it with sudo, or leave it out."
    for act in ("add", "del"):
        command = [*_route(act, PROBED_ADDRESS), "table", PROBED_TABLE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode != 0:
            return f"it needs CAP_NET_ADMIN, to add routes; got: {done.stderr.strip()}."
    return None


class Cut:
    """This node sends nothing to the other nodes for a time: the kernel finds no route to them.

    A process of its own puts the routes back, when the time is over or when it is told to: also if the launcher has
    been killed meanwhile.
    """

    def __init__(self, addresses: Sequence[str], duration_s: float) -> None:
        own = tuple(dict.fromkeys(_ip_addresses(addresses)))
        heal = "; ".join(" ".join(_route("del", address)) for address in own)
        cut = "; ".join(" ".join(_route("add", address)) for address in own)
        script = f"trap '{heal}; kill $!' EXIT; trap 'exit 0' TERM INT HUP; {cut}; sleep {duration_s:.3f} & wait $!"
        self._process = subprocess.Popen(
            ["sh", "-c", script], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def heal(self) -> None:
        """End the cut now. Blocks until the routes are back."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(COMMAND_S)


def _ip_addresses(names: Sequence[str]) -> list[str]:
    return [
        str(address[0])
        for name in names
        for _, _, _, _, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    ]


def _route(act: str, address: str) -> list[str]:
    """The command that adds or removes the lack of a route: senders get EHOSTUNREACH, open connections only wait."""
    length, family = ("128", "-6") if ":" in address else ("32", "-4")
    return ["ip", family, "route", act, "unreachable", f"{address}/{length}"]
