"""Where the ranks of a benchmark run: all on this host, or on the hosts of a lab, on links of a chosen rate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.support.launch import run_in_lab, run_on_this_host

SAME_HOST = "same"
UNLIMITED = "unlimited"
DEFAULT_WORLD = 2
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(bit|bps)", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """A rate as tc writes it, in bytes per second. Raises ValueError.

    >>> parse_rate("1gbit"), parse_rate("100mbit"), parse_rate("10mbps")
    (125000000.0, 12500000.0, 10000000.0)
    """
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"a link is {SAME_HOST!r}, {UNLIMITED!r} or a rate such as '1gbit' or '100mbit'; got {text!r}."
        )
    number, prefix, unit = match.groups()
    return float(number) * _PREFIXES[prefix.lower()] / (8 if unit.lower() == "bit" else 1)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Some ranks: on this host if the link is `same`, else on hosts of a lab.

    link: "same", "unlimited", or the rate of each host's link in each direction.

    >>> cluster = Cluster(link="1gbit", world=4, ranks_per_host=2)
    >>> cluster.name, cluster.hosts, cluster.bytes_per_s
    ('1gbit, 2 hosts x 2 ranks', 2, 125000000.0)
    >>> Cluster(link="same", world=4).name, Cluster(link="1gbit", world=2).name
    ('same, 4 ranks', '1gbit')
    """

    link: str
    world: int
    ranks_per_host: int = 1  # in a lab

    def __post_init__(self) -> None:
        if self.world < 2:
            raise ValueError(f"a world needs 2 ranks or more; got {self.world}.")
        if self.on_this_host:
            return
        if self.link != UNLIMITED:
            parse_rate(self.link)
        if self.ranks_per_host < 1 or self.world % self.ranks_per_host or self.world == self.ranks_per_host:
            raise ValueError(
                f"a lab needs 2 hosts or more with the same number of ranks; got {self.world} ranks, "
                f"{self.ranks_per_host} a host. Try --hosts 2 --ranks-per-host {max(1, self.ranks_per_host)}."
            )

    @property
    def on_this_host(self) -> bool:
        return self.link == SAME_HOST

    @property
    def hosts(self) -> int:
        return 1 if self.on_this_host else self.world // self.ranks_per_host

    @property
    def bytes_per_s(self) -> float:
        """The rate of a host's link in each direction; infinite where nothing limits it."""
        return float("inf") if self.link in (SAME_HOST, UNLIMITED) else parse_rate(self.link)

    @property
    def name(self) -> str:
        """The link, and the ranks unless they are two workers with the link between them."""
        if self.hosts < self.world and not self.on_this_host:
            return f"{self.link}, {self.hosts} hosts x {self.ranks_per_host} ranks"
        if self.world == DEFAULT_WORLD:
            return self.link
        return f"{self.link}, {self.world} {'ranks' if self.on_this_host else 'hosts'}"

    def run(self, command: Sequence[str], *, timeout_s: float) -> None:
        """Run a command for every rank; block until all have ended. Raises LabError."""
        if self.on_this_host:
            run_on_this_host(command, workers=self.world, timeout_s=timeout_s)
        else:
            rate = None if self.link == UNLIMITED else self.link
            run_in_lab(command, workers=self.world, timeout_s=timeout_s, rate=rate, ranks_per_host=self.ranks_per_host)
