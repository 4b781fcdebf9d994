"""c10d's all-to-all on connections of our own: order, backlog, rows in part, and what goes wrong."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

import gradsync
from gradsync.comm import c10d, doors, parcels
from gradsync.comm.c10d import C10d
from gradsync.comm.watch import Call, Watch
from tests.ranks import run_processes

MIB = 1 << 20


def connected(timeout_s: float = 20) -> C10d:
    comm = gradsync.connect("c10d", timeout_s=timeout_s)
    group = comm.clone()
    assert isinstance(group, C10d)
    return group


def exchange_many(seed: int) -> None:
    """Several at once, of sizes that the kernel takes at once and of sizes that it does not."""
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
def test_exchanges_that_overlap_bring_every_byte_to_its_place(world_size: int) -> None:
    run_processes(world_size, exchange_many, 7 * world_size)


def send_parts() -> tuple[list[float], int]:
    comm = connected()
    rows = torch.arange(2 * 8 * MIB, dtype=torch.float32).view(2, -1) + comm.rank
    out = torch.full_like(rows, -1.0)
    comm.all_to_all(rows, out=out).wait()  # the connections stand
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
    assert comm._wires is not None
    info = dict(comm._wires._to)[peer].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int.from_bytes(info[128:136], "little")


def test_of_a_row_only_what_is_used_is_sent() -> None:
    first, second = run_processes(2, send_parts)
    size = 8 * MIB
    assert first[0] == [1.0, 2.0, 3.0, 4.0, -1.0, -1.0]  # 16 bytes of rank 1's row for rank 0
    assert second[0] == [size, size + 1.0, size + 2.0, -1.0, -1.0, -1.0]
    assert first[1] == 16 + parcels.HEAD.size
    assert second[1] == 12 + parcels.HEAD.size


def start_without_a_reader() -> float:
    """How long it takes to start what the other rank does not read yet, and what the kernel can't keep."""
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


def test_starting_never_waits_for_the_peer() -> None:
    first, _ = run_processes(2, start_without_a_reader)
    assert first < 0.8  # the other comes a second later


def take_no_notice(first_waits: bool) -> float:
    """How long rank 1 waits for an exchange that rank 0 has begun, and does not ask for until much later."""
    comm = connected()
    small = torch.zeros(2, 8)
    comm.all_to_all(small, out=torch.zeros(2, 8)).wait()
    rows, out = torch.ones(2, 32 * MIB), torch.zeros(2, 32 * MIB)  # far more than the kernel keeps
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
def test_what_nobody_asks_for_comes_in_all_the_same(first_waits: bool) -> None:
    _, second = run_processes(2, take_no_notice, first_waits)
    assert second < 3.5


def disagree() -> str:
    comm = connected()
    comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()
    length = 4 + comm.rank
    try:
        comm.all_to_all(torch.zeros(2, length), out=torch.zeros(2, length)).wait()
    except gradsync.GradSyncError as error:
        return str(error)
    return ""


def test_rows_of_different_lengths_are_an_error_that_says_so() -> None:
    said = run_processes(2, disagree)
    assert any(
        "rank 1 sends a row of 20 bytes in its exchange 2; here it is exchange 2, with rows of 16" in s for s in said
    )
    assert all(said)


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


def test_a_peer_that_dies_is_named() -> None:
    said = run_processes(2, lose_a_peer, expect_failure=True)
    assert said[0] == "1"


Share = Callable[[doors.Door], Sequence[doors.Door]]


def change_share(change: Callable[[int, Share], Share]) -> None:
    """Do something else in this process as the ranks tell each other where their doors are."""
    plain = doors.meet

    def meet(rank: int, share: Share, addresses: list[str], watch: Watch, call: Call) -> dict[int, socket.socket]:
        return plain(rank, change(rank, share), addresses, watch, call)

    c10d.meet = meet


def exchanged_ranks(comm: C10d) -> list[float]:
    out = torch.zeros(comm.world_size, 4)
    comm.all_to_all(torch.full((comm.world_size, 4), float(comm.rank)), out=out).wait()
    return out[:, 0].tolist()


def meet_among_strangers() -> list[str]:
    """Strangers knock at every rank's door while it waits for the others."""
    comm = connected()
    knocked: list[str] = []

    def knock(door: doors.Door, hello: bytes) -> None:
        with socket.create_connection(("127.0.0.1", door.port), timeout=5) as stranger:
            stranger.sendall(hello)
            if not hello:
                stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            try:
                knocked.append("let in" if stranger.recv(1) else "turned away")
            except ConnectionResetError:
                knocked.append("turned away")

    def disturbed(rank: int, share: Share) -> Share:
        def shared(door: doors.Door) -> Sequence[doors.Door]:
            all_doors = share(door)
            for hello in (b"GET / HTTP/1.1\r\n\r\n" + b" " * 40, doors.HELLO.pack(b"0" * 32, 1), b""):
                threading.Thread(target=knock, args=(door, hello), daemon=True).start()
            time.sleep(0.3 * rank)
            return all_doors

        return shared

    change_share(disturbed)
    assert exchanged_ranks(comm) == [float(rank) for rank in range(comm.world_size)]
    comm.barrier()
    return knocked


def test_strangers_are_turned_away() -> None:
    for knocked in run_processes(3, meet_among_strangers):
        assert "let in" not in knocked


def come_late_to_the_door() -> list[float]:
    """Rank 0 takes so long to open that the others give up and knock again."""
    comm = connected()
    doors.ANSWER_S = 0.3

    def late(rank: int, share: Share) -> Share:
        def shared(door: doors.Door) -> Sequence[doors.Door]:
            all_doors = share(door)
            time.sleep(0.8 if rank == 0 else 0.0)
            return all_doors

        return shared

    change_share(late)
    return exchanged_ranks(comm)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_knock_that_was_given_up_is_not_taken_for_a_rank(world_size: int) -> None:
    expected = [float(rank) for rank in range(world_size)]
    assert run_processes(world_size, come_late_to_the_door) == [expected] * world_size


def never_open() -> str:
    """Rank 0 is alive, but nobody can reach it."""
    comm = connected(timeout_s=3)
    if comm.rank == 0:
        change_share(lambda rank, share: lambda door: share(doors.Door(["127.0.0.1"], 9, door.token)))
    start_s = time.monotonic()
    with pytest.raises(gradsync.GradSyncError) as caught:
        comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()
    assert time.monotonic() - start_s < 10
    return type(caught.value).__name__


def test_ranks_that_can_not_reach_each_other_say_so_in_time() -> None:
    assert set(run_processes(2, never_open)) <= {"PeerLost", "CollectiveFailed"}


def leave_a_child() -> int:
    """How many of the parent's connections a forked child still has."""
    comm = connected()
    comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()
    assert comm._wires is not None
    connections = [connection for _, connection in comm._wires._to]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, bytes([sum(connection.fileno() >= 0 for connection in connections)]))
        os._exit(0)
    os.waitpid(child, 0)
    comm.all_to_all(torch.zeros(2, 4), out=torch.zeros(2, 4)).wait()  # the parent's are as they were
    return os.read(reader, 1)[0]


def test_a_forked_child_holds_no_connection() -> None:
    assert run_processes(2, leave_a_child) == [0, 0]
