"""The handshake at the TCP ports of a run, the heartbeat's and the mesh's: strangers are refused, and the run goes on.

``--exhaustive``: 100,000 adversarial connections at each port.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

import gradsync
from gradsync.comm.c10d import lazy_mesh
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.tcp import endpoint, handshake
from gradsync.comm.tcp.endpoint import Endpoint
from gradsync.comm.tcp.handshake import HELLO, NONCE_BYTES, Acceptor
from tests.support.ranks import run_processes

SHORT, EXHAUSTIVE = 400, 100_000
SECRET = "5ecret" * 8
OPEN_AT_ONCE = 40  # silent connections that an adversary keeps


class Adversary:
    """Connects to a port again and again, each time with something else that is not a rank's handshake."""

    def __init__(self, port: int, secret: str, world_size: int, seed: int) -> None:
        self.port = port
        self.draw = random.Random(seed)
        self.secret = secret.encode()
        self.world_size = world_size
        self.recorded = self.record()
        self.silent: list[socket.socket] = []
        self.got: Counter[str] = Counter()

    def attack(self, count: int) -> Counter[str]:
        """Connect so often; returns how many connections were refused and how many accepted."""
        kinds = [self.garbage, self.hello, self.text, self.truncated, self.replay, self.huge, self.silence, self.reset]
        for _ in range(count):
            self.draw.choice(kinds)()
        for connection in self.silent:
            connection.close()
        return self.got

    def connect(self) -> socket.socket:
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            connection = socket.socket(family)
            connection.settimeout(10)
            # Closed by a reset: 100,000 ports in TIME_WAIT would leave none for other tests.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                connection.connect((address, self.port))
                return connection
            except ConnectionRefusedError:
                connection.close()
        raise ConnectionRefusedError(f"no process listens at port {self.port} any more")

    def send(self, message: bytes) -> None:
        """Send it, and read the answer: a nonce, which every connection gets, and nothing else."""
        with self.connect() as connection:
            answer, outcome = b"", "refused"
            try:
                connection.sendall(message)
                connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1000):
                    answer += part
            except TimeoutError:
                outcome = "kept"
            except OSError:
                pass  # the connection is closed while it sends
            self.got["accepted" if len(answer) > NONCE_BYTES else outcome] += 1

    def record(self) -> bytes:
        """A valid hello of an earlier handshake, as an eavesdropper would have recorded it."""
        with self.connect() as connection:
            theirs, ours = connection.recv(NONCE_BYTES), bytes(NONCE_BYTES)
            return HELLO.pack(1, ours, handshake._proof(self.secret, b"caller", 1, theirs, ours))

    def garbage(self) -> None:
        self.send(self.draw.randbytes(self.draw.choice([0, 1, HELLO.size - 1, HELLO.size, HELLO.size + 1, 5000])))

    def hello(self) -> None:
        """Of the right form, with a wrong rank, nonce, secret or proof."""
        rank = self.draw.choice([0, 1, self.world_size - 1, self.world_size, 2**31, 2**32 - 1])
        nonce = self.draw.randbytes(NONCE_BYTES)
        proof = handshake._proof(self.draw.choice([b"", b"guess", self.secret[:-1]]), b"caller", rank, nonce, nonce)
        self.send(HELLO.pack(rank, nonce, self.draw.choice([proof, bytes(32), b"\xff" * 32])) + b"!")

    def text(self) -> None:
        texts = [
            '{"hello": 1, "token": "é"}\n'.encode(),
            b'{"hello": Infinity, "token": NaN}\n',
            b'{"hello": 1e999, "lost": {"0": "me"}}\n',
            b"[" * 100_000 + b"\n",
            b'{"a":' * 20_000 + b"\n",
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("<QQQ", 2**63, 2**63, 2**63),
        ]
        self.send(self.draw.choice(texts))

    def truncated(self) -> None:
        self.send(self.recorded[: self.draw.randrange(HELLO.size)])

    def replay(self) -> None:
        self.send(self.recorded + b"!")

    def huge(self) -> None:
        self.send(bytes(300_000))

    def silence(self) -> None:
        """Stay connected, and send nothing, or a byte now and then."""
        if len(self.silent) == OPEN_AT_ONCE:
            self.silent.pop(0).close()
        self.silent.append(self.connect())
        with contextlib.suppress(OSError):
            self.draw.choice(self.silent).send(b"x")

    def reset(self) -> None:
        """Disconnect before anything was sent."""
        self.connect().close()


def train_among_strangers(count: int) -> tuple[Counter[str], int]:
    """Rank 1 plays the adversary at rank 0's heartbeat port, in a thread, while all ranks run all-reduces."""
    comm = gradsync.connect(timeout_s=300)
    endpoint_of_hub: list[str] = []
    heartbeat = comm.heartbeat
    assert heartbeat is not None
    if comm.rank == 0:
        assert heartbeat._acceptor is not None
        acceptor = heartbeat._acceptor
        endpoint_of_hub = [json.dumps([acceptor._listener.getsockname()[1], acceptor._secret.decode()])]
    (text,) = gradsync.comm.objects.broadcast_object(comm, endpoint_of_hub, src=0)
    port, secret = json.loads(text)
    got: Counter[str] = Counter()

    def play() -> None:
        try:
            got.update(Adversary(port, secret, comm.world_size, 5).attack(count))
        except BaseException as error:
            got[f"failed with {error!r}"] += 1

    attack = threading.Thread(target=play)
    if comm.rank == 1:
        attack.start()
    steps, going = 0, torch.ones(1)
    while going.item():
        going.fill_(float(attack.is_alive() or steps < 3))
        comm.all_reduce(going).wait()
        steps += 1
        time.sleep(0.02)  # a step's computation, which leaves the cores to the adversary
    assert not heartbeat.lost
    assert heartbeat._thread.is_alive()
    assert len(heartbeat.ask_progress()) == comm.world_size
    comm.barrier()
    return got, steps


@pytest.mark.timeout(1300)  # of the exhaustive form
def test_heartbeat_refuses_strangers_and_ranks_go_on(exhaustive: bool) -> None:
    count = EXHAUSTIVE if exhaustive else SHORT
    results = run_processes(3, train_among_strangers, count, timeout_s=1200 if exhaustive else 60)
    got, steps = results[1]
    assert list(got) == ["refused"], got
    assert got["refused"] > count / 2
    assert steps > 3


def connect_among_strangers(count: int, timeout_s: float) -> tuple[Counter[str], list[float]]:
    """Rank 1 plays the adversary at rank 0's mesh port before it connects itself."""
    comm = gradsync.connect("c10d", timeout_s=timeout_s)
    got: Counter[str] = Counter()
    plain = endpoint.connect_all

    def connect_all(
        rank: int,
        share: Callable[[Endpoint], Sequence[Endpoint]],
        addresses: list[str],
        guard: CollectiveGuard,
        call: Call,
    ) -> dict[int, socket.socket]:
        def shared(own: Endpoint) -> Sequence[Endpoint]:
            endpoints = share(own)
            if rank == 1:
                got.update(Adversary(endpoints[0].port, endpoints[0].secret, len(endpoints), 6).attack(count))
            return endpoints

        return plain(rank, shared, ["127.0.0.1"], guard, call)

    lazy_mesh.connect_all = connect_all
    out = torch.zeros(comm.world_size, 4)
    comm.all_to_all(torch.full((comm.world_size, 4), float(comm.rank)), out=out).wait()
    comm.barrier()
    return got, out[:, 0].tolist()


@pytest.mark.timeout(1300)  # of the exhaustive form
def test_mesh_refuses_strangers_and_connects_ranks(exhaustive: bool) -> None:
    count = EXHAUSTIVE if exhaustive else SHORT
    timeout_s = 1200.0 if exhaustive else 40.0
    results = run_processes(3, connect_among_strangers, count, timeout_s, timeout_s=timeout_s + 20)
    assert [rows for _, rows in results] == [[0.0, 1.0, 2.0]] * 3
    got = results[1][0]
    assert list(got) == ["refused"], got
    assert got["refused"] > count / 2


class CountingListener(socket.socket):
    """Counts the calls of ``accept``."""

    num_accepts = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_accepts += 1
        return super().accept()


@pytest.fixture
def listener() -> CountingListener:
    return CountingListener(fileno=handshake.listen(["127.0.0.1"], backlog=256).detach())


def test_acceptor_keeps_a_bounded_number_of_strangers_and_accepts_a_rank(listener: CountingListener) -> None:
    acceptor = Acceptor(listener, SECRET.encode(), range(1, 3))
    limit = handshake.MAX_STRANGERS + 2
    strangers = []
    for _ in range(limit + 30):
        strangers.append(socket.create_connection(listener.getsockname()))
        acceptor.accept()
    assert len(acceptor._strangers) == limit
    came = _accept_rank(acceptor, listener.getsockname()[1], rank=2)
    assert [rank for rank, _ in came] == [2]
    for connection in (*strangers, came[0][1]):
        connection.close()
    acceptor.close()


def test_acceptor_flooded_by_strangers_keeps_a_rank_that_has_proved_itself(listener: CountingListener) -> None:
    acceptor = Acceptor(listener, SECRET.encode(), range(1, 3))
    with contextlib.ExitStack() as connections:
        rank = connections.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
        acceptor.accept(10)
        theirs, ours = rank.recv(NONCE_BYTES), bytes(NONCE_BYTES)
        rank.sendall(HELLO.pack(1, ours, handshake._proof(SECRET.encode(), b"caller", 1, theirs, ours)))
        acceptor.accept(10)
        assert len(rank.recv(handshake.PROOF_BYTES)) == handshake.PROOF_BYTES
        for _ in range(handshake.MAX_STRANGERS + 10):
            connections.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
            acceptor.accept(10)
        rank.sendall(handshake.CONFIRMED)
        came = acceptor.accept(10)
        assert [number for number, _ in came] == [1]
        came[0][1].close()
    acceptor.close()


def _accept_rank(acceptor: Acceptor, port: int, rank: int) -> list[tuple[int, socket.socket]]:
    caller = threading.Thread(
        target=lambda: handshake.connect_to("127.0.0.1", port, SECRET.encode(), rank).close(), daemon=True
    )
    caller.start()
    end_s = time.monotonic() + 10
    came: list[tuple[int, socket.socket]] = []
    while not came and time.monotonic() < end_s:
        came = acceptor.accept(0.1)
    caller.join()
    return came


def out_of_descriptors() -> tuple[int, list[int]]:
    """How often accept is called in half a second without free descriptors, and which ranks are accepted afterwards."""
    port_socket = handshake.listen(["127.0.0.1"], backlog=256)
    listener = CountingListener(fileno=port_socket.detach())
    acceptor = Acceptor(listener, SECRET.encode(), range(1, 3))
    stranger = socket.create_connection(listener.getsockname())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    end_s = time.monotonic() + 0.5
    while time.monotonic() < end_s:
        acceptor.accept(0.05)
    num_accepts = listener.num_accepts
    for descriptor in taken:
        os.close(descriptor)
    came = _accept_rank(acceptor, listener.getsockname()[1], rank=1)
    stranger.close()
    acceptor.close()
    return num_accepts, [rank for rank, _ in came]


def test_acceptor_out_of_descriptors_pauses_and_goes_on() -> None:
    num_accepts, came = run_processes(1, out_of_descriptors)[0]
    assert 1 <= num_accepts <= 5
    assert came == [1]


def test_connect_to_refuses_a_listener_that_does_not_know_the_secret(listener: CountingListener) -> None:
    acceptor = Acceptor(listener, b"another", range(1, 3))
    stopped = threading.Event()

    def serve() -> None:
        while not stopped.is_set():
            acceptor.accept(0.05)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(ConnectionError):
        handshake.connect_to("127.0.0.1", listener.getsockname()[1], SECRET.encode(), 1)
    stopped.set()
    thread.join()
    acceptor.close()
