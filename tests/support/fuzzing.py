"""Malformed and adversarial messages for ZeroMQ ports: made from valid ones, with one thing wrong in each.

``malformed`` makes frames that no reader may accept as a message. ``raw_session`` makes bytes for a bare connection:
greetings, wrong passwords and handshakes, frames that claim to be huge. ``send_raw`` sends bytes to a port without
keys, and ``KeyedClient`` sends frames as a member that has the keys. ``record_session`` records the bytes of a
member's connection, for replays.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from gradsync.messaging import keys as curve
from gradsync.messaging.format import DTYPES, Message, pack
from gradsync.messaging.keys import ClientKeys
from gradsync.messaging.schema import NotRequired, Schema
from gradsync.messaging.sockets import IPC_PREFIX, make_socket, set_ip_family

DEEP = json.loads("[" * 40 + "1" + "]" * 40)
JUNK: list[Any] = [
    None,
    True,
    -1,
    1.5,
    1 << 63,
    -(1 << 70),
    10**300,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x" * 5000,
    "\ud800",
    "tcp://\0",
    [],
    {},
    [[1, 2, 3]],
    {"\ud800": 1},
    DEEP,
    {"params": [1]},
]
SIZES: list[Any] = [-1, 1.0, True, None, "2", 1 << 41, 1 << 63, [1]]


def malformed(rng: random.Random, good: Message, schema: Schema) -> list[bytes]:
    """A valid message with one thing wrong: the header, a field, a tensor's description, or the frames themselves."""
    frames = [bytes(frame) for frame in pack(good)]
    corrupt = rng.choice([_wrong_field, _wrong_field, _wrong_field, _wrong_head, _wrong_tensors, _wrong_frames])
    return corrupt(rng, frames, schema)


def _wrong_field(rng: random.Random, frames: list[bytes], schema: Schema) -> list[bytes]:
    head = json.loads(frames[0])
    name = rng.choice(list(schema))
    choice = rng.random()
    required = [field for field, check in schema.items() if not isinstance(check, NotRequired)]
    if choice < 0.1:
        head["fields"]["unknown"] = rng.choice(JUNK)
    elif choice < 0.2:
        del head["fields"][rng.choice(required)]
    else:
        wrong = [value for value in JUNK if not schema[name](value)]
        if not wrong:  # it may be anything that is bounded
            return _wrong_head(rng, frames, schema)
        head["fields"][name] = rng.choice(wrong)
    return [json.dumps(head).encode(), *frames[1:]]


def _wrong_head(rng: random.Random, frames: list[bytes], schema: Schema) -> list[bytes]:
    head = json.loads(frames[0])
    part = rng.choice(["kind", "fields", "tensors"])
    choice = rng.random()
    if choice < 0.2:
        del head[part]
    elif choice < 0.3:
        head["more"] = 1
    elif choice < 0.4:
        return [rng.choice([b"", b"null", b"[]", b"{", b"[" * 100_000, b'{"kind": ' + b"9" * 5000 + b"}", b"\xff{"])]
    else:
        head[part] = rng.choice([None, 1, True, "evil", ["push"], [1], math.nan, {"a": math.inf}])
    return [json.dumps(head).encode(), *frames[1:]]


def _wrong_tensors(rng: random.Random, frames: list[bytes], schema: Schema) -> list[bytes]:
    head = json.loads(frames[0])
    dtype = rng.choice(list(DTYPES))
    head["tensors"] += rng.choice(
        [
            [["fuzz", dtype, [1 << 40, 1 << 40, 0]]],
            [["fuzz", dtype, [0, 1 << 62, 1 << 62]]],
            [["fuzz", dtype, [rng.choice(SIZES), 0]]],
            [["fuzz", dtype, [1] * 100]],
            [["fuzz", dtype, [rng.randint(1, 1 << 39)]]],
            [["fuzz", dtype, rng.choice(SIZES)]],
            [["fuzz", rng.choice(["float8", "object", "", 1, None, [dtype]]), [0]]],
            [["fuzz", dtype, [0]], ["fuzz", dtype, [0]]],
            [[rng.choice([1, None, ["x"]]), dtype, [0]]],
            [["fuzz", dtype]],
            [1],
        ]
    )
    return [json.dumps(head).encode(), *frames[1:]]


def _wrong_frames(rng: random.Random, frames: list[bytes], schema: Schema) -> list[bytes]:
    choice = rng.random()
    if choice < 0.3:
        return [*frames, rng.randbytes(rng.randint(1, 50))]
    if choice < 0.5:
        return [frames[0][: rng.randrange(len(frames[0]))], *frames[1:]]
    if choice < 0.7 and len(frames) > 1:
        return [frames[0], *(frame[1:] for frame in frames[1:])]
    if choice < 0.8:
        return [b"", *frames]
    return [rng.randbytes(rng.randint(0, 60)) for _ in range(rng.randint(1, 5))]


# -- bare connections -------------------------------------------------------------------------------------------------


def raw_session(rng: random.Random, payloads: Sequence[Sequence[bytes]]) -> bytes:
    """The bytes of one bare connection: a greeting of some mechanism, a wrong handshake, and frames after it."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randint(1, 300))
    mechanism = rng.choice([b"NULL", b"PLAIN", b"CURVE", b"GSSAPI", rng.randbytes(20)])
    major, minor = rng.choice([(3, 0), (3, 1), (3, 1), (1, 0), (rng.randrange(256), rng.randrange(256))])
    greeting = b"\xff" + bytes(8) + b"\x7f" + bytes([major, minor]) + mechanism.ljust(20, b"\0") + bytes(32)
    greeting = greeting if rng.random() < 0.9 else greeting[: rng.randrange(64)]
    parts = [rng.choice(_HANDSHAKES)(rng) for _ in range(rng.randint(0, 3))]
    for frames in rng.sample(payloads, min(2, len(payloads))):
        parts += [_frame(frame, more=True) for frame in frames[:-1]] + [_frame(frames[-1])]
    if rng.random() < 0.2:
        parts.append(bytes([rng.choice([2, 3, 6])]) + struct.pack(">Q", rng.choice([1 << 62, (1 << 64) - 1, 1 << 40])))
    return greeting + b"".join(parts)


def _frame(data: bytes, *, more: bool = False) -> bytes:
    if len(data) > 255:
        return bytes([2 | more]) + struct.pack(">Q", len(data)) + data
    return bytes([int(more), len(data)]) + data


def _command(name: bytes, body: bytes) -> bytes:
    data = bytes([len(name)]) + name + body
    return bytes([6]) + struct.pack(">Q", len(data)) + data if len(data) > 255 else bytes([4, len(data)]) + data


def _plain(rng: random.Random) -> bytes:
    user, password = rng.choice([b"gradsync", b"", rng.randbytes(5)]), rng.randbytes(rng.choice([0, 32, 64, 255]))
    return _command(b"HELLO", bytes([len(user)]) + user + bytes([len(password)]) + password)


_HANDSHAKES: list[Callable[[random.Random], bytes]] = [
    _plain,
    lambda rng: _command(b"HELLO", b"\x01\x00" + bytes(72) + rng.randbytes(120)),  # of CURVE
    lambda rng: _command(b"INITIATE", rng.randbytes(rng.choice([0, 10, 248, 400]))),
    lambda rng: _command(b"READY", rng.choice([b"", b"\x0bSocket-Type\x00\x00\x00\x06DEALER", rng.randbytes(30)])),
    lambda rng: _command(b"ERROR", bytes([rng.randrange(256)]) + rng.randbytes(5)),
    lambda rng: _command(rng.randbytes(rng.randint(0, 20)), rng.randbytes(rng.randint(0, 40))),
    lambda rng: _command(b"PING", rng.randbytes(rng.randint(0, 30))),
]


def connect_bare(endpoint: str, number: int = 0) -> socket.socket:
    """A bare connection to one endpoint of a listener. ``number`` selects the source address, so that ports suffice."""
    if endpoint.startswith(IPC_PREFIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(5.0)
        connection.connect("\0" + endpoint.removeprefix(IPC_PREFIX))
        return connection
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    source = (f"127.0.{number // 20_000 % 250}.{1 + number % 2}", 0) if host.startswith("127.") else None
    return socket.create_connection((host.strip("[]"), int(port)), timeout=5.0, source_address=source)


def send_raw(endpoint: str, payloads: Iterable[bytes]) -> int:
    """Send each payload on a bare connection of its own; returns on how many connections it was sent."""
    num_sent = 0
    for number, payload in enumerate(payloads):
        with contextlib.suppress(OSError), connect_bare(endpoint, number) as connection:
            connection.sendall(payload)
            connection.settimeout(0.002)
            num_sent += 1
            connection.recv(256)  # the answer so far: closing a connection with unread bytes would reset it
    return num_sent


def record_session(endpoint: str, keys: ClientKeys, frames: Sequence[bytes]) -> bytes:
    """All bytes of a member's connection that sends one message, handshake included, as a wire-tap would see them."""
    recorded = bytearray()
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as relay:
        dealer = make_socket(context, zmq.DEALER, 5.0)
        curve.configure_client(dealer, keys, local=endpoint.startswith(IPC_PREFIX))
        dealer.connect(f"tcp://127.0.0.1:{relay.getsockname()[1]}")
        dealer.send_multipart(frames)
        relay.settimeout(10.0)
        client, _ = relay.accept()
        with client, connect_bare(endpoint) as server:
            back = threading.Thread(target=_relay, args=(server, client, bytearray()), daemon=True)
            back.start()
            client.settimeout(1.0)
            _relay(client, server, recorded)
        dealer.close(linger=0)
        back.join(5.0)
    context.term()
    return bytes(recorded)


def _relay(source: socket.socket, sink: socket.socket, recorded: bytearray) -> None:
    with contextlib.suppress(OSError):
        while got := source.recv(1 << 16):
            recorded += got
            sink.sendall(got)


# -- members ----------------------------------------------------------------------------------------------------------


class KeyedClient:
    """A client that has the keys, and may send any frames."""

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        self._context = zmq.Context()
        self._dealer = make_socket(self._context, zmq.DEALER, 10.0)
        self._dealer.sndtimeo = 20_000
        curve.configure_client(self._dealer, keys, local=endpoint.startswith(IPC_PREFIX))
        set_ip_family(self._dealer, endpoint)
        self._dealer.connect(endpoint)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send, and discard the answers."""
        self._dealer.send_multipart(frames)
        while self._dealer.poll(0):
            self._dealer.recv_multipart()

    def __enter__(self) -> KeyedClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close once everything is sent; after an error at once, or the error would never be seen."""
        self._dealer.close(linger=20_000 if kind is None else 0)
        self._context.term()
