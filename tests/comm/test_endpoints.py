"""Listeners and lines: loss is seen, keys are asked for, and every wait ends."""

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

from gradsync.comm.curve import ClientKeys, KeyPair, ServerKeys
from gradsync.comm.endpoints import ConnectionLost, Line, Listener, Unreachable, wait_any
from gradsync.comm.messages import CHUNK_BYTES, Message

KINDS = {"ask", "tell"}


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(KINDS)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["tcp", "ipc"])
def test_there_and_back(listener: Listener, way: str) -> None:
    address = next(entry for entry in listener.address.split() if entry.startswith(way))
    line = Line(address, KINDS)
    large = torch.arange(CHUNK_BYTES, dtype=torch.float32)
    sent = line.send(Message("ask", {"n": 1}, {"large": large, "small": torch.ones(3)}))
    got = listener.receive(5.0)
    assert got is not None
    peer, message = got
    assert torch.equal(message.tensors["large"], large)
    assert torch.equal(message.tensors["small"], torch.ones(3))
    assert sent.wait(5.0)
    assert sent.done()
    out = torch.empty_like(large)
    assert listener.send(peer, Message("tell", {}, {"large": large}))
    answer = line.receive(5.0, into={"large": out})
    assert answer is not None
    assert answer.tensors["large"] is out
    assert torch.equal(out, large)
    line.close()


def test_waits_end(listener: Listener) -> None:
    line = Line(listener.address, KINDS)
    assert listener.receive(0.05) is None
    assert line.receive(0.05) is None
    assert wait_any([line], 0.05) == []
    line.close()


def test_each_end_sees_that_the_other_is_gone(listener: Listener) -> None:
    line = Line(listener.address, KINDS)
    line.send(Message("ask"))
    got = listener.receive(5.0)
    assert got is not None
    peer = got[0]
    assert listener.is_there(peer)
    line.close()
    end_s = time.monotonic() + 5.0
    while listener.is_there(peer):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert not listener.send(peer, Message("tell"))

    other = Listener(KINDS)
    line = Line(other.address, KINDS)
    assert not line.lost
    other.close()
    with pytest.raises(ConnectionLost, match="gone"):
        line.receive(5.0)
    assert line.lost
    with pytest.raises(ConnectionLost):
        line.send(Message("ask"))
    line.close()


def test_what_came_before_the_loss_is_still_read() -> None:
    listener = Listener(KINDS)
    line = Line(listener.address, KINDS)
    line.send(Message("ask"))
    got = listener.receive(5.0)
    assert got is not None
    listener.send(got[0], Message("tell", {"last": "word"}))
    listener.close()
    end_s = time.monotonic() + 5.0
    while not line.lost and time.monotonic() < end_s:
        time.sleep(0.01)
    answer = line.receive(1.0)
    assert answer is not None
    assert answer.fields == {"last": "word"}
    with pytest.raises(ConnectionLost):
        line.receive(1.0)
    line.close()


def test_no_heartbeats_of_zeromq_which_abort_a_process_that_reads_too_late(listener: Listener) -> None:
    line = Line(listener.address, KINDS)
    for socket_of in (*listener.sockets(), line.sockets()[0]):
        assert socket_of.heartbeat_ivl == 0  # see [Note: no heartbeats] in comm/sockets.py
        assert socket_of.tcp_keepalive == 1
    line.close()


def test_nobody_there(listener: Listener) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(Unreachable, match="nobody answered"):
        Line(f"tcp://127.0.0.1:{port}", KINDS, timeout_s=0.3)
    with pytest.raises(Unreachable, match="an address is like"):
        Line("nonsense", KINDS, timeout_s=0.3)
    with pytest.raises(Unreachable, match="can't listen"):
        Listener(KINDS, port=listener.port)


def test_keys_let_in_those_who_have_them_and_nobody_else() -> None:
    server, client, stranger = KeyPair.make(), KeyPair.make(), KeyPair.make()
    listener = Listener(KINDS, keys=ServerKeys(server, frozenset({client.public})))
    try:
        for address in listener.address.split():
            line = Line(address, KINDS, keys=ClientKeys(client, server.public))
            line.send(Message("ask", {"secret": 1}))
            got = listener.receive(5.0)
            assert got is not None
            assert got[1].fields == {"secret": 1}
            line.close()
            for keys in (None, ClientKeys(stranger, server.public), ClientKeys(client, stranger.public)):
                with pytest.raises(Unreachable):
                    Line(address, KINDS, keys=keys, timeout_s=0.5)
        with pytest.raises(Unreachable, match="does not know this key"):
            Line(listener.address, KINDS, keys=ClientKeys(stranger, server.public), timeout_s=5.0)
    finally:
        listener.close()


def test_keys_on_disk_are_their_owners_alone(tmp_path: Path) -> None:
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


def test_garbage_is_counted_and_dropped(listener: Listener) -> None:
    rng = random.Random(1)
    line = Line(listener.address, KINDS)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(listener.address.split()[0])
    for number in range(50):
        dealer.send_multipart([rng.randbytes(rng.randint(0, 40)) for _ in range(rng.randint(1, 3))])
        with socket.create_connection(("127.0.0.1", listener.port), timeout=5.0) as raw:
            raw.sendall(rng.randbytes(rng.randint(1, 200)))
        line.send(Message("ask", {"number": number}))
    asked = []
    end_s = time.monotonic() + 20.0
    while (len(asked) < 50 or listener.malformed < 50) and time.monotonic() < end_s:
        got = listener.receive(0.2)
        if got is not None:
            asked.append(got[1].fields["number"])
    assert asked == list(range(50))
    assert listener.malformed >= 50  # now and then raw bytes are taken for a message of an old kind
    dealer.close()
    context.term()
    line.close()
