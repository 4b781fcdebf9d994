"""c10d's all-to-all over a ``TcpMesh``: order, backlog, partly used rows, connecting, and failures."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

import gradsync
from gradsync.comm.c10d import lazy_mesh
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.c10d.lazy_mesh import LazyMesh
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.tcp import endpoint, exchange, handshake
from gradsync.comm.tcp.endpoint import Endpoint
from tests.support.ranks import run_processes

MIB = 1 << 20


def connected(timeout_s: float = 20) -> C10d:
    comm = gradsync.connect("c10d", timeout_s=timeout_s).unchecked()
    group = comm.clone()
    assert isinstance(group, C10d)
    return group


def sockets_of(comm: C10d) -> list[tuple[int, socket.socket]]:
    """Each peer's connection; there is one from the first exchange on."""
    assert isinstance(comm._mesh, LazyMesh)
    assert comm._mesh.mesh is not None
    return comm._mesh.mesh.calls.sockets


def exchange_many(seed: int) -> None:
    """Several at once, of sizes that fit the kernel's send buffer and of sizes that do not."""
    comm = connected()
    n, rank = comm.world_size, comm.rank
    draw = torch.Generator().manual_seed(seed)
    for _ in range(6):
        sizes = [int(size) for size in 10 ** torch.empty(5).uniform_(0, 6.3, generator=draw)]
        tables = [torch.randint(0, 255, (n, n, size), dtype=torch.uint8, generator=draw) for size in sizes]
        outs = [torch.zeros(n, size, dtype=torch.uint8) for size in sizes]
        works = [comm.all_to_all(table[rank], out=out) for table, out in zip(tables, outs, strict=True)]
        order = torch.randperm(len(works), generator=draw).tolist()
        if rank % 2:
            time.sleep(0.02)
        for index in order:
            works[index].wait()
            assert works[index].done()
            assert torch.equal(outs[index], tables[index][:, rank])


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_overlapping_exchanges_deliver_every_row(world_size: int) -> None:
    run_processes(world_size, exchange_many, 7 * world_size)


def send_partly_used_rows() -> tuple[list[float], int]:
    comm = connected()
    rows = torch.arange(2 * 8 * MIB, dtype=torch.float32).view(2, -1) + comm.rank
    out = torch.full_like(rows, -1.0)
    comm.all_to_all(rows, out=out).wait()  # makes the connections
    out.fill_(-1.0)
    peer, used = 1 - comm.rank, 4 * (3 + comm.rank)
    before = _received_from(comm, peer)
    comm.barrier()  # both have counted
    comm.all_to_all(rows, out=out, own=False, used=[used, used]).wait()
    assert bool((out[comm.rank] == -1.0).all()), "the own row is left alone"
    comm.barrier()
    return out[peer][:6].tolist(), _received_from(comm, peer) - before


def _received_from(comm: C10d, peer: int) -> int:
    """By the kernel's own count."""
    info = dict(sockets_of(comm))[peer].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[128:136], "little")


def test_exchange_sends_only_the_used_bytes_of_a_row() -> None:
    first, second = run_processes(2, send_partly_used_rows)
    size = 8 * MIB
    assert first[0] == [1.0, 2.0, 3.0, 4.0, -1.0, -1.0]  # 16 bytes of rank 1's row for rank 0
    assert second[0] == [size, size + 1.0, size + 2.0, -1.0, -1.0, -1.0]
    assert first[1] == 16 + exchange.HEADER.size
    assert second[1] == 12 + exchange.HEADER.size


def start_without_a_reader() -> float:
    """How long it takes to start an exchange that the peer does not read yet and that no kernel buffer can hold."""
    comm = connected()
    small = torch.zeros(2, 8)
    comm.all_to_all(small, out=torch.zeros(2, 8)).wait()
    rows, out = torch.ones(2, 32 * MIB), torch.zeros(2, 32 * MIB)
    if comm.rank:
        time.sleep(1.0)
    start_s = time.monotonic()
    work = comm.all_to_all(rows, out=out)
    started_s = time.monotonic() - start_s
    work.wait()
    assert bool((out == 1.0).all())
    return started_s


def test_exchange_starts_without_waiting_for_the_peer() -> None:
    first, _ = run_processes(2, start_without_a_reader)
    assert first < 0.8  # the peer starts its part a second later


def wait_late(first_waits: bool) -> float:
    """How long rank 1 waits for an exchange that rank 0 has started, but waits for only much later."""
    comm = connected()
    small = torch.zeros(2, 8)
    comm.all_to_all(small, out=torch.zeros(2, 8)).wait()
    rows, out = torch.ones(2, 32 * MIB), torch.zeros(2, 32 * MIB)  # far more than the kernel buffers
    start_s = time.monotonic()
    little = comm.all_to_all(small, out=torch.zeros(2, 8))
    work = comm.all_to_all(rows, out=out)
    if first_waits:
        little.wait()
    if comm.rank == 0:
        time.sleep(4.0)
    work.wait()
    assert bool((out == 1.0).all())
    return time.monotonic() - start_s


@pytest.mark.parametrize("first_waits", [False, True])
def test_receiver_thread_reads_what_no_caller_waits_for(first_waits: bool) -> None:
    _, second = run_processes(2, wait_late, first_waits)
    assert second < 3.5


def exchange_rows_of_different_lengths() -> str:
    comm = connected()
    comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()
    length = 4 + comm.rank
    try:
        comm.all_to_all(torch.zeros(2, length), out=torch.zeros(2, length)).wait()
    except gradsync.GradSyncError as error:
        return str(error)
    return ""


def test_exchange_of_rows_of_different_lengths_raises() -> None:
    errors = run_processes(2, exchange_rows_of_different_lengths)
    expected = "rank 1 sends a message of 20 bytes in its exchange 2; here it is exchange 2, with messages of 16"
    assert any(expected in error for error in errors)
    assert all(errors)


def lose_a_peer() -> str:
    comm = connected()
    comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()
    if comm.rank:
        comm.all_to_all(torch.zeros(2, 4 * MIB), out=torch.zeros(2, 4 * MIB))
        os._exit(3)

    def go_on() -> None:
        for _ in range(4):
            comm.all_to_all(torch.zeros(2, 4 * MIB), out=torch.zeros(2, 4 * MIB)).wait()

    start_s = time.monotonic()
    with pytest.raises(gradsync.PeerLost) as caught:
        go_on()
    assert time.monotonic() - start_s < 10
    return f"{caught.value.rank}"


def test_exchange_names_a_peer_that_dies() -> None:
    lost = run_processes(2, lose_a_peer, expect_failure=True)
    assert lost[0] == "1"


Share = Callable[[Endpoint], Sequence[Endpoint]]


def change_share(change: Callable[[int, Share], Share]) -> None:
    """Replace, in this process, how the ranks share their endpoints."""
    plain = endpoint.connect_all

    def connect_all(
        rank: int, share: Share, addresses: list[str], guard: CollectiveGuard, call: Call
    ) -> dict[int, socket.socket]:
        return plain(rank, change(rank, share), addresses, guard, call)

    lazy_mesh.connect_all = connect_all


def exchanged_ranks(comm: C10d) -> list[float]:
    out = torch.zeros(comm.world_size, 4)
    comm.all_to_all(torch.full((comm.world_size, 4), float(comm.rank)), out=out).wait()
    return out[:, 0].tolist()


def connect_among_strangers() -> list[str]:
    """Strangers connect to every rank's endpoint while it accepts its peers."""
    comm = connected()
    outcomes: list[str] = []

    def connect_as_stranger(own: Endpoint, hello: bytes) -> None:
        with socket.create_connection(("127.0.0.1", own.port), timeout=5) as stranger:
            stranger.sendall(hello)
            if not hello:
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            try:
                stranger.recv(handshake.NONCE_BYTES)  # every connection gets it
                outcomes.append("accepted" if stranger.recv(1) else "refused")
            except ConnectionError:
                outcomes.append("refused")

    def disturbed(rank: int, share: Share) -> Share:
        def shared(own: Endpoint) -> Sequence[Endpoint]:
            endpoints = share(own)
            for hello in (b"GET / HTTP/1.1\r\n\r\n" + b" " * 40, handshake.HELLO.pack(1, b"0" * 16, b"0" * 32), b""):
                threading.Thread(target=connect_as_stranger, args=(own, hello), daemon=True).start()
            time.sleep(0.3 * rank)
            return endpoints

        return shared

    change_share(disturbed)
    assert exchanged_ranks(comm) == [float(rank) for rank in range(comm.world_size)]
    comm.barrier()
    return outcomes


def test_connect_all_refuses_strangers() -> None:
    for outcomes in run_processes(3, connect_among_strangers):
        assert "accepted" not in outcomes


def accept_late() -> list[float]:
    """Rank 0 accepts so late that the others give up their first attempt and connect again."""
    comm = connected()
    endpoint.HANDSHAKE_S = 0.3

    def late(rank: int, share: Share) -> Share:
        def shared(own: Endpoint) -> Sequence[Endpoint]:
            endpoints = share(own)
            time.sleep(0.8 if rank == 0 else 0.0)
            return endpoints

        return shared

    change_share(late)
    return exchanged_ranks(comm)


@pytest.mark.parametrize("world_size", [2, 3])
def test_connect_all_ignores_abandoned_attempts(world_size: int) -> None:
    expected = [float(rank) for rank in range(world_size)]
    assert run_processes(world_size, accept_late) == [expected] * world_size


def be_unreachable() -> str:
    """Rank 0 is alive, but shares an endpoint that no rank can reach."""
    comm = connected(timeout_s=3)
    if comm.rank == 0:
        change_share(lambda rank, share: lambda own: share(Endpoint(["127.0.0.1"], 9, own.secret)))
    start_s = time.monotonic()
    with pytest.raises(gradsync.GradSyncError) as caught:
        comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()
    assert time.monotonic() - start_s < 10
    return type(caught.value).__name__


def test_connect_all_fails_in_time_if_a_rank_is_unreachable() -> None:
    assert set(run_processes(2, be_unreachable)) <= {"PeerLost", "CollectiveFailed"}


def fork_a_child() -> int:
    """How many of the parent's connections a forked child still has."""
    comm = connected()
    comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()
    connections = [connection for _, connection in sockets_of(comm)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, bytes([sum(connection.fileno() >= 0 for connection in connections)]))
        os._exit(0)
    os.waitpid(child, 0)
    comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()  # the parent's are as they were
    return os.read(reader, 1)[0]


def test_mesh_closes_its_connections_in_a_forked_child() -> None:
    assert run_processes(2, fork_a_child) == [0, 0]
