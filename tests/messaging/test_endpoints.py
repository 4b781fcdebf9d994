"""Listeners and client connections: losses are detected, keys are required, and every wait ends."""

from __future__ import annotations

import random
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zmq

from gradsync.messaging.endpoints import ClientConnection, ConnectionLost, Listener, Unreachable, wait_any
from gradsync.messaging.format import CHUNK_BYTES, Message
from gradsync.messaging.keys import ClientKeys, KeyPair, ServerKeys

KINDS = {"ask", "tell"}


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(KINDS)
    yield made
    made.close()


@pytest.mark.parametrize("endpoint", ["tcp", "ipc"])
def test_endpoints_exchange_messages(listener: Listener, endpoint: str) -> None:
    address = next(entry for entry in listener.address.split() if entry.startswith(endpoint))
    connection = ClientConnection(address, KINDS)
    large = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    sent = connection.send(Message("ask", {"n": 1}, {"large": large, "small": torch.ones(3)}))
    got = listener.receive(5.0)
    assert got is not None
    peer, message = got
    assert torch.equal(message.tensors["large"], large)
    assert torch.equal(message.tensors["small"], torch.ones(3))
    assert sent.wait(5.0)
    assert sent.done()
    out = torch.empty_like(large)
    assert listener.send(peer, Message("tell", {}, {"large": large}))
    answer = connection.receive(5.0, into={"large": out})
    assert answer is not None
    assert answer.tensors["large"] is out
    assert torch.equal(out, large)
    connection.close()


def test_receive_returns_after_its_timeout(listener: Listener) -> None:
    connection = ClientConnection(listener.address, KINDS)
    assert listener.receive(0.05) is None
    assert connection.receive(0.05) is None
    assert wait_any([connection], 0.05) == []
    connection.close()


def test_endpoints_detect_that_the_other_is_gone(listener: Listener) -> None:
    connection = ClientConnection(listener.address, KINDS)
    connection.send(Message("ask"))
    got = listener.receive(5.0)
    assert got is not None
    peer = got[0]
    assert listener.is_connected(peer)
    connection.close()
    end_s = time.monotonic() + 5.0
    while listener.is_connected(peer):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert not listener.send(peer, Message("tell"))

    other = Listener(KINDS)
    connection = ClientConnection(other.address, KINDS)
    assert not connection.lost
    other.close()
    with pytest.raises(ConnectionLost, match="gone"):
        connection.receive(5.0)
    assert connection.lost
    with pytest.raises(ConnectionLost):
        connection.send(Message("ask"))
    connection.close()


def test_connection_reads_what_came_before_the_loss() -> None:
    listener = Listener(KINDS)
    connection = ClientConnection(listener.address, KINDS)
    connection.send(Message("ask"))
    got = listener.receive(5.0)
    assert got is not None
    listener.send(got[0], Message("tell", {"last": "word"}))
    listener.close()
    end_s = time.monotonic() + 5.0
    while not connection.lost and time.monotonic() < end_s:
        time.sleep(0.01)
    answer = connection.receive(1.0)
    assert answer is not None
    assert answer.fields == {"last": "word"}
    with pytest.raises(ConnectionLost):
        connection.receive(1.0)
    connection.close()


def test_sockets_use_keepalive_and_not_the_heartbeats_of_zeromq(listener: Listener) -> None:
    connection = ClientConnection(listener.address, KINDS)
    for socket_of in (*listener.sockets(), connection.sockets()[0]):
        assert socket_of.heartbeat_ivl == 0  # see [Note: no heartbeats] in messaging/sockets.py
        assert socket_of.tcp_keepalive == 1
    connection.close()


def test_unreachable_addresses_are_refused(listener: Listener) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(Unreachable, match="no answer in"):
        ClientConnection(f"tcp://127.0.0.1:{port}", KINDS, timeout_s=0.3)
    with pytest.raises(Unreachable, match="an address is like"):
        ClientConnection("nonsense", KINDS, timeout_s=0.3)
    with pytest.raises(Unreachable, match="can't listen"):
        Listener(KINDS, port=listener.port)


def test_listener_accepts_only_holders_of_its_keys() -> None:
    server, client, stranger = KeyPair.make(), KeyPair.make(), KeyPair.make()
    listener = Listener(KINDS, keys=ServerKeys(server, frozenset({client.public})))
    try:
        for address in listener.address.split():
            connection = ClientConnection(address, KINDS, keys=ClientKeys(client, server.public))
            connection.send(Message("ask", {"secret": 1}))
            got = listener.receive(5.0)
            assert got is not None
            assert got[1].fields == {"secret": 1}
            connection.close()
            for keys in (None, ClientKeys(stranger, server.public), ClientKeys(client, stranger.public)):
                with pytest.raises(Unreachable):
                    ClientConnection(address, KINDS, keys=keys, timeout_s=0.5)
        with pytest.raises(Unreachable, match="does not know this key"):
            ClientConnection(listener.address, KINDS, keys=ClientKeys(stranger, server.public), timeout_s=5.0)
    finally:
        listener.close()


def test_key_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    pair = KeyPair.make()
    pair.write(tmp_path / "own.key")
    assert KeyPair.read(tmp_path / "own.key") == pair
    assert stat.S_IMODE((tmp_path / "own.key").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        pair.write(tmp_path / "own.key")
    (tmp_path / "bad").write_text("public x\n")
    with pytest.raises(ValueError, match="must hold two lines"):
        KeyPair.read(tmp_path / "bad")
    with pytest.raises(ValueError, match="40 letters"):
        ClientKeys(pair, "short")
    with pytest.raises(ValueError, match="40 letters") as error:
        KeyPair(pair.public, "x" + pair.secret)
    assert pair.secret not in str(error.value)


def test_listener_counts_and_drops_malformed_messages(listener: Listener) -> None:
    rng = random.Random(1)
    connection = ClientConnection(listener.address, KINDS)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(listener.address.split()[0])
    for number in range(50):
        dealer.send_multipart([rng.randbytes(rng.randint(0, 40)) for _ in range(rng.randint(1, 3))])
        with socket.create_connection(("127.0.0.1", listener.port), timeout=5.0) as raw:
            raw.sendall(rng.randbytes(rng.randint(1, 200)))
        connection.send(Message("ask", {"number": number}))
    asked = []
    end_s = time.monotonic() + 20.0
    while (len(asked) < 50 or listener.malformed < 50) and time.monotonic() < end_s:
        got = listener.receive(0.2)
        if got is not None:
            asked.append(got[1].fields["number"])
    assert asked == list(range(50))
    assert listener.malformed >= 50  # sometimes ZeroMQ takes raw bytes for a message of an old protocol version
    dealer.close()
    context.term()
    connection.close()
