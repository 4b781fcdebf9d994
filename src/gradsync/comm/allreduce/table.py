"""Which algorithm an all-reduce uses, by its size: tables that ``gradsync tune-comm`` has measured, and their file.

Without a table every all-reduce is ``native``: the transport's own. A table applies to one transport, one number of
ranks on one number of hosts, and the machine that it was measured on, identified by rank 0's host name and number of
cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.comm.allreduce.algorithms import ALGORITHMS

NATIVE = "native"
CHOICES = (NATIVE, *ALGORITHMS)
FORMAT = 1  # of the file

Rule = tuple[int | None, str]  # (largest size in bytes, None for any size; algorithm)


@dataclass(frozen=True)
class Machine:
    """What a table was measured on."""

    host: str
    num_cores: int

    def __str__(self) -> str:
        return f"{self.host} ({self.num_cores} cores)"


def this_machine() -> Machine:
    """Where this process runs. The cores are the machine's, not those that a launcher leaves to one rank."""
    return Machine(platform.node(), os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class Table:
    """The algorithms of one kind of group on one machine.

    >>> from gradsync.comm.allreduce.table import Machine, Table
    >>> rules = ((65536, "direct"), (None, "native"))
    >>> table = Table(transport="c10d", world_size=4, num_hosts=1, machine=Machine("a", 8), rules=rules)
    >>> table.algorithm_for(65536), table.algorithm_for(65537)
    ('direct', 'native')
    """

    transport: str
    world_size: int
    num_hosts: int
    machine: Machine
    rules: tuple[Rule, ...]  # in order of size; the last one is for all larger sizes

    def algorithm_for(self, num_bytes: int) -> str:
        """The algorithm for a tensor of this size."""
        return next(name for up_to, name in self.rules if up_to is None or num_bytes <= up_to)

    def replaces(self, other: Table) -> bool:
        """Whether both are for the same groups on the same machine."""
        return (self.group, self.machine) == (other.group, other.machine)

    @property
    def group(self) -> tuple[str, int, int]:
        """What kind of group it is for."""
        return self.transport, self.world_size, self.num_hosts

    def as_json(self) -> dict[str, Any]:
        """What the file holds of it."""
        return {
            "transport": self.transport,
            "world_size": self.world_size,
            "num_hosts": self.num_hosts,
            "host": self.machine.host,
            "num_cores": self.machine.num_cores,
            "rules": [list(rule) for rule in self.rules],
        }


@dataclass(frozen=True)
class TableFile:
    """Where tables are kept."""

    path: Path
    named: bool = False  # the user has named it: it must exist, and applies on any machine


def table_file(environ: Mapping[str, str]) -> TableFile:
    """The file that GRADSYNC_COLLECTIVES names, else the user's own in XDG_CONFIG_HOME or ~/.config.

    >>> from gradsync.comm.allreduce.table import table_file
    >>> str(table_file({"XDG_CONFIG_HOME": "/home/me/settings"}).path)
    '/home/me/settings/gradsync/collectives.json'
    """
    if named := environ.get("GRADSYNC_COLLECTIVES", ""):
        return TableFile(Path(named).absolute(), named=True)
    home = environ.get("XDG_CONFIG_HOME", "")
    return TableFile((Path(home) if home else Path.home() / ".config") / "gradsync" / "collectives.json")


def load_tables(path: Path) -> list[Table]:
    """The tables of a file. Raises FileNotFoundError, or ValueError that says what is wrong in it, and where."""
    try:
        return parse_tables(json.loads(path.read_text()))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        wrong = str(error).rstrip(".")
        raise ValueError(f"{path}: {wrong}. Mend the file, or delete it and run `gradsync tune-comm` again.") from error


def load_if_there(path: Path) -> list[Table]:
    """As ``load_tables``; none if there is no such file."""
    try:
        return load_tables(path)
    except FileNotFoundError:
        return []


def save_table(path: Path, table: Table) -> list[Table]:
    """Add a table to a file, replacing an earlier one of the same group and machine; returns all tables of the file."""
    tables = [other for other in load_if_there(path) if not table.replaces(other)] + [table]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written to another file and moved: a run that reads meanwhile sees the old file or the new one.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps({"format": FORMAT, "tables": [each.as_json() for each in tables]}, indent=1) + "\n")
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    return tables


def parse_tables(content: Any) -> list[Table]:
    """Tables from what the file holds. Raises ValueError that names the first thing that is wrong."""
    _check(isinstance(content, dict), "it", "an object with 'format' and 'tables'", content)
    _check(content.get("format") == FORMAT, "format", str(FORMAT), content.get("format"))
    _check(isinstance(content.get("tables"), list), "tables", "a list", content.get("tables"))
    tables = [_parse_table(table, f"tables[{at}]") for at, table in enumerate(content["tables"])]
    for at, table in enumerate(tables):
        twice = any(table.replaces(earlier) for earlier in tables[:at])
        _check(not twice, f"tables[{at}]", "for a group and machine that no other table is for", table.group)
    return tables


def _parse_table(given: Any, where: str) -> Table:
    kinds = {"transport": str, "world_size": int, "num_hosts": int, "host": str, "num_cores": int, "rules": list}
    _check(isinstance(given, dict), where, "an object", given)
    _check(set(given) == set(kinds), where, f"an object with {_listed(kinds)}", _listed(given))
    for name, kind in kinds.items():
        value = given[name]
        good = type(value) is kind and (not isinstance(value, int) or value >= 1)  # True is an int, and not one here
        expected = {str: "text", int: "a whole number of at least 1", list: "a list"}[kind]
        _check(good, f"{where}.{name}", expected, value)
    return Table(
        transport=given["transport"],
        world_size=given["world_size"],
        num_hosts=given["num_hosts"],
        machine=Machine(given["host"], given["num_cores"]),
        rules=_parse_rules(given["rules"], f"{where}.rules"),
    )


def _parse_rules(given: list[Any], where: str) -> tuple[Rule, ...]:
    _check(bool(given), where, "at least one rule", given)
    below = -1
    for at, rule in enumerate(given):
        here, is_last = f"{where}[{at}]", at == len(given) - 1
        _check(isinstance(rule, list) and len(rule) == 2, here, "[largest size in bytes, algorithm]", rule)
        up_to, algorithm = rule
        _check(algorithm in CHOICES, f"{here}[1]", f"one of {', '.join(CHOICES)}", algorithm)
        if is_last:
            _check(up_to is None, f"{here}[0]", "null, since it is the last: for all larger sizes", up_to)
            break
        grows = type(up_to) is int and up_to > below
        _check(grows, f"{here}[0]", f"a number of bytes above {below}, since sizes go up", up_to)
        below = up_to
    return tuple((up_to, algorithm) for up_to, algorithm in given)


def _check(good: bool, where: str, expected: str, got: object) -> None:
    if not good:
        raise ValueError(f"{where} must be {expected}; got {got!r}.")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
