"""Who may connect: CURVE keys, made with ``gradsync keys``.

A server has a pair of keys and a list of the clients' public keys; a client has a pair and knows the server's public
key. Without them nobody gets in, and what travels is encrypted. Keys are text of 40 letters (Z85).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class KeyPair:
    """A public key, which everybody may know, and its secret one, which nobody else may.

    >>> from gradsync.comm.curve import KeyPair
    >>> pair = KeyPair.make()
    >>> len(pair.public), len(pair.secret)
    (40, 40)
    >>> pair.secret in repr(pair)                              # it does not get into a log by mistake
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

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write both keys, two lines, to a file that only its owner may read. Refuses to overwrite one."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"public {self.public}\nsecret {self.secret}\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> KeyPair:
        """Read what ``write`` wrote."""
        lines = [line.split() for line in Path(path).read_text().splitlines() if line.strip()]
        found = {line[0]: line[1] for line in lines if len(line) == 2}
        if found.keys() != {"public", "secret"}:
            raise ValueError(f"{path} must hold two lines, 'public KEY' and 'secret KEY'; make one by `gradsync keys`.")
        return cls(found["public"], found["secret"])


@dataclass(frozen=True)
class ServerKeys:
    """A server's own keys, and the public keys of the clients that may get in."""

    own: KeyPair
    allowed: frozenset[str]

    def __post_init__(self) -> None:
        for key in self.allowed:
            check_key(key, "allowed public")


@dataclass(frozen=True)
class ClientKeys:
    """A client's own keys, and the public key of the server, which it must prove to have the secret of."""

    own: KeyPair
    server: str

    def __post_init__(self) -> None:
        check_key(self.server, "server's public")


def check_key(key: str, what: str) -> None:
    """Refuse what is no key."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"the {what} key must be 40 letters of Z85, as `gradsync keys` writes them; got {key!r}.")


class _Allowed:
    """What the authenticator asks of each client that comes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = frozenset(key.encode() for key in keys)

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


def guard(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: ServerKeys) -> Callable[[], None]:
    """Let only the holders of allowed keys into a socket, before it is bound. Returns what ends the guard's thread."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_Allowed(keys.allowed))
    socket.curve_server = True
    socket.curve_secretkey = keys.own.secret.encode()
    socket.curve_publickey = keys.own.public.encode()
    return authenticator.stop


def show(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Have a client's socket, before it connects, prove who it is and ask the server for the same."""
    socket.curve_secretkey = keys.own.secret.encode()
    socket.curve_publickey = keys.own.public.encode()
    socket.curve_serverkey = keys.server.encode()
