"""Measuring all-reduce algorithms: ``autotune`` for one size (``strategy="auto"``), and the parts of ``tune-comm``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from gradsync.comm.allreduce.selector import SelectedAllReduce
from gradsync.comm.allreduce.table import CHOICES, NATIVE, Rule, Table, this_machine
from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.comm.shm.segment import host_identity

ROUNDS = 3
SMALL_BYTES = 1 << 16  # headers and flags use the transport's all-reduce: their size was not measured


def autotune(comm: Communicator, num_bytes: int, *, rounds: int = ROUNDS) -> Table | None:
    """A table with the algorithm that beats the transport's own for this size, or None. Blocks; every rank calls it.

    None as well where there is nothing to gain: with two ranks, where tables are in use already, and where the
    transport reduces buckets in memory of its own.
    """
    places_buckets = type(comm).allocate is not Communicator.allocate
    if comm.world_size < 3 or isinstance(comm, SelectedAllReduce) or places_buckets:
        return None
    hosts = hosts_of(comm)
    name = winner(measure(SelectedAllReduce(comm, [], hosts), num_bytes, rounds=rounds, on_round=lambda: None))
    if name == NATIVE:
        return None
    return Table(
        transport=comm.transport,
        world_size=comm.world_size,
        num_hosts=len(set(hosts)),
        machine=this_machine(),
        rules=((SMALL_BYTES, NATIVE), (None, name)),
    )


def hosts_of(comm: Communicator) -> list[str]:
    """An identifier of each rank's host. Blocks; every rank calls it."""
    return [str(host) for host in all_gather_object(comm, host_identity())]


SMALLEST_BYTES = 4096
GROWTH = 4  # from one size to the next
REPEAT_BYTES = 1 << 18  # smaller tensors are reduced several times per measurement, for the clock's resolution
MOST_REPEATS = 8
MARGIN = 1.1  # an algorithm of ours is used where it is faster than native by this factor


def sizes_up_to(max_bytes: int) -> list[int]:
    """The sizes that are measured.

    >>> from gradsync.comm.allreduce.autotune import sizes_up_to
    >>> sizes_up_to(70_000)
    [4096, 16384, 65536]
    """
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * GROWTH <= max_bytes:
        sizes.append(sizes[-1] * GROWTH)
    return sizes


def measure(comm: SelectedAllReduce, num_bytes: int, *, rounds: int, on_round: Callable[[], None]) -> dict[str, float]:
    """The median seconds that an all-reduce of ``num_bytes`` takes by each algorithm. Blocks: every rank must call it.

    Each round runs all algorithms, in another order than the round before, so that other load on the machine affects
    all of them alike. The slowest rank's time counts.
    """
    comm.open_p2p_group()
    tensor = torch.zeros(num_bytes // 4)
    repeats = max(1, min(MOST_REPEATS, REPEAT_BYTES // num_bytes))
    seconds = torch.zeros(rounds, len(CHOICES), dtype=torch.float64)
    for number in range(-1, rounds):  # the first time, connections are made and pages are touched
        for offset in range(len(CHOICES)):
            at = (offset + number) % len(CHOICES)
            comm.barrier()
            start_s = time.perf_counter()
            for _ in range(repeats):
                comm.all_reduce_by(CHOICES[at], tensor).wait()
            seconds[max(number, 0), at] = (time.perf_counter() - start_s) / repeats
        on_round()
    comm.inner.all_reduce(seconds, op="max").wait()
    return dict(zip(CHOICES, seconds.median(0).values.tolist(), strict=True))


def winner(seconds: Mapping[str, float]) -> str:
    """The algorithm to use: the fastest, or native if no other is faster by ``MARGIN``.

    >>> from gradsync.comm.allreduce.autotune import winner
    >>> winner({"native": 1.0, "ring": 0.95, "tree": 1.2}), winner({"native": 1.0, "ring": 0.8, "tree": 0.7})
    ('native', 'tree')
    """
    fastest = min(seconds, key=lambda name: seconds[name])
    return fastest if seconds[fastest] * MARGIN <= seconds[NATIVE] else NATIVE


def rules_from(measured: Mapping[int, Mapping[str, float]]) -> tuple[Rule, ...]:
    """The rules of a table, from the seconds of each algorithm at each size. Between two sizes the nearer one counts.

    >>> from gradsync.comm.allreduce.autotune import rules_from
    >>> rules_from({4096: {"native": 2.0, "tree": 1.0}, 16384: {"native": 3.0, "tree": 4.0}})
    ((8192, 'tree'), (None, 'native'))
    """
    rules: list[Rule] = []
    for size in sorted(measured):
        name = winner(measured[size])
        if rules and rules[-1][1] == name:
            rules.pop()
        rules.append((round(size * GROWTH**0.5), name))
    return (*rules[:-1], (None, rules[-1][1]))
