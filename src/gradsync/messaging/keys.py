"""Authentication of ZeroMQ connections: CURVE keys, made with ``gradsync keys`` or by rank 0 for one run.

A server has a key pair and a list of its clients' public keys; a client has a key pair and knows the server's public
key. Both ends authenticate, and the traffic is encrypted. A key is a text of 40 characters (Z85). The key types come
first in this file, then the functions that configure sockets with them, then the keys that ranks make for one run.

[Note: no encryption within a host] Traffic of a Unix socket can't be sniffed, and encryption makes an exchange two to
three times slower (100 MB there and back: 650 ms, and 260 ms without). So a client that holds the server's secret key
authenticates to the Unix socket with a password derived from that key (ZeroMQ's PLAIN), and to the TCP port with CURVE.
A client that only holds the server's public key uses TCP.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object, broadcast_object

PLAIN_USER = "gradsync"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class KeyPair:
    """A public key, and the secret key that belongs to it and must not leave its owner.

    >>> from gradsync.messaging.keys import KeyPair
    >>> pair = KeyPair.make()
    >>> len(pair.public), len(pair.secret)
    (40, 40)
    >>> pair.secret in repr(pair)                              # so that it is not logged by mistake
    False
    """

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        check_key(self.public, "public")
        if not _KEY.fullmatch(self.secret):
            raise ValueError("a secret key is 40 letters of Z85, as `gradsync keys` writes it; this one is not.")

    @classmethod
    def make(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @property
    def password(self) -> str:
        """For Unix sockets, derived from the secret key. See [Note: no encryption within a host]."""
        return hashlib.sha256(f"gradsync unix socket {self.secret}".encode()).hexdigest()

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write both keys, two lines, to a file that only its owner may read. Refuses to overwrite one."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"public {self.public}\nsecret {self.secret}\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> KeyPair:
        """Read what ``write`` wrote."""
        if Path(path).is_dir():
            raise ValueError(f"expected a file with a pair of keys; got the folder {path}. Name the file in it.")
        lines = [line.split() for line in Path(path).read_text().splitlines() if line.strip()]
        found = {line[0]: line[1] for line in lines if len(line) == 2}
        if found.keys() != {"public", "secret"}:
            raise ValueError(f"{path} must hold two lines, 'public KEY' and 'secret KEY'; make one by `gradsync keys`.")
        return cls(found["public"], found["secret"])


@dataclass(frozen=True)
class ServerKeys:
    """A server's own keys, the public keys of its allowed clients, and the password of its Unix socket.

    Without a password the server has no Unix socket.
    """

    own: KeyPair
    allowed: frozenset[str]
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for key in self.allowed:
            check_key(key, "allowed public")


@dataclass(frozen=True)
class ClientKeys:
    """A client's own keys, and the public key of the server, which must prove that it has the secret key.

    Without the password of the server's Unix socket, the client connects by TCP.
    """

    own: KeyPair
    server: str
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_key(self.server, "server's public")


def check_key(key: str, what: str) -> None:
    """Refuse text that is not a key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"the {what} key must be 40 letters of Z85, as `gradsync keys` writes them; got {key!r}.")


class _AllowedKeys:
    """Tells the authenticator whether a client's key is allowed."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = frozenset(key.encode() for key in keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def shared_keys(pair: KeyPair) -> tuple[ServerKeys, ClientKeys]:
    """Keys for members that are server and client to each other and all hold one key pair."""
    server = ServerKeys(pair, frozenset({pair.public}), pair.password)
    return server, ClientKeys(pair, pair.public, pair.password)


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> Callable[[], None]:
    """Start the thread that authenticates clients of a context's server sockets. Returns the function that stops it."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_AllowedKeys(keys.allowed))
    if keys.password:
        authenticator.configure_plain(domain="*", passwords={PLAIN_USER: keys.password})
    return authenticator.stop


def configure_curve_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Require CURVE with an allowed key of the clients of a TCP socket. Call before it is bound."""
    socket.curve_server = True
    socket.curve_secretkey = keys.own.secret.encode()
    socket.curve_publickey = keys.own.public.encode()


def configure_plain_server(socket: zmq.Socket[bytes]) -> None:
    """Require the password of the clients of a Unix socket. Call before it is bound."""
    socket.plain_server = True


def configure_client(socket: zmq.Socket[bytes], keys: ClientKeys, *, local: bool) -> None:
    """Give a client's socket its password (``local``: a Unix socket) or its keys (TCP). Call before it connects."""
    if local:
        socket.plain_username = PLAIN_USER.encode()
        socket.plain_password = keys.password.encode()
        return
    socket.curve_secretkey = keys.own.secret.encode()
    socket.curve_publickey = keys.own.public.encode()
    socket.curve_serverkey = keys.server.encode()


def make_run_keys(comm: Communicator) -> KeyPair:
    """A new key pair that only the ranks of this run have. Blocks: every rank must call it.

    >>> from gradsync.comm.base import Solo
    >>> from gradsync.messaging.keys import make_run_keys
    >>> make_run_keys(Solo()).public == make_run_keys(Solo()).public
    False
    """
    pair = KeyPair.make() if comm.rank == 0 else None
    public, secret = broadcast_object(comm, None if pair is None else [pair.public, pair.secret], src=0)
    return KeyPair(str(public), str(secret))


def check_same_key_choice(comm: Communicator, *, keys: str, open: bool) -> None:
    """Refuse ranks that differ in whether they use keys: they could not connect. Blocks: every rank must call it."""
    own = "open=True" if open else "keys=FOLDER" if keys else "neither keys nor open"
    choices = [str(choice) for choice in all_gather_object(comm, own)]
    if len(set(choices)) > 1:
        other = next(rank for rank, choice in enumerate(choices) if choice != choices[0])
        raise ValueError(
            f"keys and open must be the same on all ranks: rank 0 has {choices[0]}, rank {other} has {choices[other]}."
        )
