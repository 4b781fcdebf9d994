"""A network as collectives see it: rate, latency, and the cost to the cores that compute; and how it is measured."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gradsync.comm.allreduce.autotune import hosts_of
from gradsync.comm.base import Communicator, Work
from gradsync.comm.objects import broadcast_object
from gradsync.comm.topology import ranks_by_host

BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
GOODPUT = 0.952  # of a link's rate: the rest are headers. As iperf3 measured it.
LATENCY_S = 50e-6  # of a link of which only the rate is given
CALL_S = 200e-6  # to start a collective and learn of its end, for a transport that was not measured
CPU_S_PER_BYTE = 0.4e-9  # for a TCP transport that was not measured
SMALL_BYTES = 4096
STREAM_CALLS = 4  # collectives in flight at once, as a backward starts them
MIN_STREAM_BYTES, MAX_STREAM_BYTES = 1 << 16, 1 << 23  # of each of them
LARGE_CALL = 3  # a large collective is this many times as large as those of a stream
LARGE_BYTES = 8 << 20  # a collective in which a rank sends more is a large one
BUSY_ROUNDS = 4
MIN_SHARE = 0.2  # a lower measured share means that something else interfered
MATRIX = 160  # the size of the matrix product that is disturbed: some 0.2 ms on one core


@dataclass(frozen=True, kw_only=True)
class Network:
    """A link between ranks, as collectives see it. Rates are what one rank sends while the others send as much.

    Args:
        name: for reports.
        bytes_per_s: while no rank computes.
        busy_bytes_per_s: while the ranks compute. Lower where the transport needs cores that are taken.
        latency_s: from one rank to another. Counts once a round: a ring of n ranks takes 2 (n - 1) of them.
        call_s: to start a collective and learn of its end, beyond the latency.
        busy_call_s: the same while the ranks compute.
        cpu_s_per_byte: seconds of computing lost for each byte sent: what the transport takes from the cores.
        burst_bytes: passed without delay after a pause, as the token buckets of clouds (and of ``tc``) do.
        exchange_share: the share of these rates that an all-to-all reaches; codes that can't be summed use it.
        half_s_per_byte: the extra time of a byte where the transport sums 16-bit floats, which CPUs do slowly.
        large_share: the share of these rates that large buckets reach: they fill the queue of a slow link, which drops.
        transport, world_size: with which it was measured.

    >>> from gradsync.advisor import Network
    >>> link = Network.named("1gbit")
    >>> round(link.bytes_per_s / 1e6), link.transport
    (119, 'not measured')
    """

    name: str
    bytes_per_s: float
    busy_bytes_per_s: float
    latency_s: float = LATENCY_S
    call_s: float = CALL_S
    busy_call_s: float = CALL_S
    cpu_s_per_byte: float = CPU_S_PER_BYTE
    burst_bytes: float = 0.0
    exchange_share: float = 1.0
    large_share: float = 1.0
    half_s_per_byte: float = 0.0
    transport: str = "not measured"
    world_size: int = 2
    num_hosts: int = 2

    def __post_init__(self) -> None:
        if min(self.bytes_per_s, self.busy_bytes_per_s) <= 0.0:
            raise ValueError(f"a network moves more than 0 bytes a second; got {self.bytes_per_s=}.")

    @classmethod
    def named(cls, rate: str) -> Network:
        """A link of a nominal rate: "100mbit", "1gbit", "25gbit"."""
        per_s = rate_of(rate) / 8 * GOODPUT
        return cls(name=rate, bytes_per_s=per_s, busy_bytes_per_s=per_s)

    def at(self, rate: str) -> Network:
        """The measured transport on a link of another rate. It gets no faster than it was measured."""
        per_s = rate_of(rate) / 8 * GOODPUT
        return replace(
            self,
            name=rate,
            bytes_per_s=min(self.bytes_per_s, per_s),
            busy_bytes_per_s=min(self.busy_bytes_per_s, per_s),
            burst_bytes=0.0,
        )

    @property
    def gbit_per_s(self) -> float:
        return self.bytes_per_s * 8 / 1e9

    def rounds_s(self, rounds: int, *, busy: bool) -> float:
        """The time of a collective of this many rounds, beyond moving its bytes."""
        return (self.busy_call_s if busy else self.call_s) + max(0, rounds - 2) * self.latency_s

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Network:
        """Restore a network from ``as_dict``, directly or from JSON."""
        return cls(**data)


def rate_of(text: str) -> float:
    """Bits a second, from a rate in the notation of ``tc``.

    >>> from gradsync.advisor.network import rate_of
    >>> rate_of("1gbit"), rate_of("2.5 Gbit/s")
    (1000000000.0, 2500000000.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt])(?:bit|bps|b)(?:/s)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0.0:
        raise ValueError(f"expected a rate such as 100mbit, 1gbit or 25gbit; got {text!r}.")
    return float(match[1]) * BITS[match[2].lower()]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_network(comm: Communicator, *, seconds: float = 2.0, name: str = "") -> Network:
    """Measure the network by a few collectives. Blocks for about ``seconds``; every rank calls it and gets the same.

    The load is that of training: several all-reduces in flight at once, first while the ranks wait for them, then while
    they compute, which shows how much computing they cost.
    """
    if comm.world_size < 2:
        raise ValueError("a world of one has no network to measure. Start it by `gradsync run -n 2`.")
    if seconds <= 0:
        raise ValueError(f"seconds must be above 0; got {seconds=}.")
    part_s = seconds / 12
    call_s = _agreed(comm, _small_call_s(comm, part_s))
    busy_call_s = max(call_s, _agreed(comm, _small_call_s(comm, part_s, computing=True)))
    latency_s = _agreed(comm, _latency_s(comm))
    num_bytes = _bytes_of_stream(comm, 2 * part_s)
    per_byte = 2 * (comm.world_size - 1) / comm.world_size  # what a rank sends for each byte that is reduced
    sent = STREAM_CALLS * num_bytes * per_byte
    idle_s = _agreed(comm, statistics.median(_stream_s(comm, num_bytes) for _ in range(2)))
    half_s = _agreed(comm, statistics.median(_stream_s(comm, num_bytes, dtype=torch.float16) for _ in range(2)))
    large_s = _agreed(comm, _stream_s(comm, LARGE_CALL * num_bytes, calls=2))
    exchanged_s = _agreed(comm, statistics.median(_exchange_s(comm, num_bytes) for _ in range(2)))
    busy_s, lost_s = [], []
    for _ in range(BUSY_ROUNDS):
        moved_s, lost = _stream_while_computing(comm, num_bytes)
        busy_s.append(_agreed(comm, moved_s))
        lost_s.append(_agreed(comm, lost))
    bytes_per_s = sent / max(idle_s - call_s, idle_s / 10)
    return Network(
        name=name or f"{comm.transport} as measured",
        bytes_per_s=bytes_per_s,
        # The best of several: other users of the machine slow a transport that waits for a core more than anything.
        busy_bytes_per_s=min(bytes_per_s, sent / min(busy_s)),
        latency_s=latency_s,
        call_s=call_s,
        busy_call_s=busy_call_s,
        cpu_s_per_byte=max(0.0, statistics.median(lost_s)) / sent,
        burst_bytes=_agreed(comm, _burst_bytes(comm, bytes_per_s, call_s)),
        exchange_share=min(1.0, max(MIN_SHARE, idle_s / exchanged_s)),
        half_s_per_byte=max(0.0, half_s - idle_s) / sent,
        large_share=min(1.0, max(MIN_SHARE, 2 * LARGE_CALL * idle_s / STREAM_CALLS / large_s)),
        transport=comm.transport,
        world_size=comm.world_size,
        num_hosts=len(_ranks_of_hosts(comm)),
    )


def _agreed(comm: Communicator, value: float) -> float:
    """The maximum over the ranks: a collective has ended when it has ended everywhere."""
    wire = torch.tensor([value], dtype=torch.float64)
    comm.all_reduce(wire, op="max").wait()
    return float(wire[0])


def _repeats(comm: Communicator, once_s: float, seconds: float, *, most: int) -> int:
    """How often something that takes ``once_s`` fits into ``seconds``; rank 0 decides."""
    return int(broadcast_object(comm, max(3, min(most, int(seconds / max(once_s, 1e-6)))), src=0))


def _small_call_s(comm: Communicator, seconds: float, *, computing: bool = False) -> float:
    tensor, matrix = torch.zeros(SMALL_BYTES // 4), torch.ones(MATRIX, MATRIX)
    comm.barrier()
    start_s = time.perf_counter()
    comm.all_reduce(tensor).wait()
    taken: list[float] = []
    for _ in range(_repeats(comm, time.perf_counter() - start_s, seconds, most=100)):
        start_s = time.perf_counter()
        work = comm.all_reduce(tensor)
        while computing and not work.done():
            matrix @ matrix
        work.wait()
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)


def _latency_s(comm: Communicator) -> float:
    """Half the round trip of a small message, between the first two hosts, or between ranks 0 and 1."""
    peers = _two_far_ranks(comm)
    tensor = torch.zeros(1)
    taken = [0.0]
    if comm.rank in peers:
        other = peers[1 - peers.index(comm.rank)]
        for at in range(20):
            start_s = time.perf_counter()
            for turn in (0, 1):
                if peers.index(comm.rank) == turn:
                    comm.send(tensor, other).wait()
                else:
                    comm.recv(tensor, other).wait()
            if at > 2:
                taken.append((time.perf_counter() - start_s) / 2)
    comm.barrier()
    return statistics.median(taken)


def _two_far_ranks(comm: Communicator) -> list[int]:
    hosts = _ranks_of_hosts(comm)
    return [hosts[0][0], hosts[1][0]] if len(hosts) > 1 else [0, 1]


def _ranks_of_hosts(comm: Communicator) -> list[list[int]]:
    return ranks_by_host(hosts_of(comm))


def _stream_s(
    comm: Communicator, num_bytes: int, *, calls: int = STREAM_CALLS, dtype: torch.dtype = torch.float32
) -> float:
    tensors = [torch.zeros(num_bytes // dtype.itemsize, dtype=dtype) for _ in range(calls)]
    comm.barrier()
    start_s = time.perf_counter()
    works = [comm.all_reduce(tensor) for tensor in tensors]
    for work in works:
        work.wait()
    return time.perf_counter() - start_s


def _exchange_s(comm: Communicator, num_bytes: int) -> float:
    """Seconds for all-to-alls in which a rank sends as much as in ``_stream_s``."""
    sent = 2 * (comm.world_size - 1) * num_bytes // comm.world_size
    rows = [torch.zeros(comm.world_size, sent // (comm.world_size - 1), dtype=torch.uint8) for _ in range(STREAM_CALLS)]
    outs = [torch.zeros_like(each) for each in rows]
    comm.barrier()
    start_s = time.perf_counter()
    works = [comm.all_to_all(each, out=out) for each, out in zip(rows, outs, strict=True)]
    for work in works:
        work.wait()
    return time.perf_counter() - start_s


def _bytes_of_stream(comm: Communicator, seconds: float) -> int:
    """The size of each collective that fills the given time, so that slow links are measured in bounded time."""
    _stream_s(comm, MIN_STREAM_BYTES)  # makes connections, and uses up a burst that the link allows
    num_bytes = 4 * MIN_STREAM_BYTES
    taken_s = _stream_s(comm, num_bytes)
    wanted = num_bytes * seconds / max(taken_s, 1e-6)
    return int(broadcast_object(comm, int(min(MAX_STREAM_BYTES, max(MIN_STREAM_BYTES, wanted))) // 64 * 64, src=0))


def _stream_while_computing(comm: Communicator, num_bytes: int) -> tuple[float, float]:
    """The seconds that a stream takes while this rank computes, and the seconds of computing that it costs."""
    tensors = [torch.zeros(num_bytes // 4) for _ in range(STREAM_CALLS)]
    matrix = torch.ones(MATRIX, MATRIX)
    comm.barrier()
    alone_s = _seconds_per_product(matrix)
    comm.barrier()
    start_s = time.perf_counter()
    works: list[Work] = [comm.all_reduce(tensor) for tensor in tensors]
    products = 0
    while not all(work.done() for work in works):
        matrix @ matrix
        products += 1
    for work in works:
        work.wait()
    taken_s = time.perf_counter() - start_s
    return taken_s, taken_s - products * alone_s


def _seconds_per_product(matrix: torch.Tensor, num: int = 60) -> float:
    for _ in range(5):
        matrix @ matrix
    start_s = time.perf_counter()
    for _ in range(num):
        matrix @ matrix
    return (time.perf_counter() - start_s) / num


def _burst_bytes(comm: Communicator, bytes_per_s: float, call_s: float) -> float:
    """The bytes that pass without delay after a pause: from how much a 1 MiB all-reduce is faster than the stream."""
    tensor = torch.zeros(1 << 18)
    per_byte = 2 * (comm.world_size - 1) / comm.world_size
    sent = tensor.nbytes * per_byte
    pause_s = min(0.3, 2 * sent / bytes_per_s)
    if sent / bytes_per_s < 4 * call_s:  # the link is too fast to measure it
        return 0.0
    found = []
    for _ in range(3):
        time.sleep(pause_s)
        comm.barrier()
        start_s = time.perf_counter()
        comm.all_reduce(tensor).wait()
        found.append(sent - (time.perf_counter() - start_s - call_s) * bytes_per_s)
    return min(sent, max(0.0, statistics.median(found)))
