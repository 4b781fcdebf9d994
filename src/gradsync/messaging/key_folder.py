"""The folder of CURVE keys that ``gradsync keys`` makes, for parameter servers and gossip.

=============  ==================================  ============================
file           what it holds                       who needs it
=============  ==================================  ============================
server.key     the servers' key pair: secret       each server
server.pub     its public half                     each worker, and each server
worker.key     the workers' key pair: secret       each worker
worker.pub     its public half                     each server
=============  ==================================  ============================

A rank that hosts a shard is a server and a worker, and needs all four files. Ranks that gossip are servers to each
other.
"""

from __future__ import annotations

import os
from pathlib import Path

from gradsync.messaging.keys import ClientKeys, KeyPair, ServerKeys

ROLES = ("server", "worker")


def make_key_folder(folder: str | os.PathLike[str]) -> list[Path]:
    """Make new keys in a folder that only its owner may read; refuses to overwrite any. Returns the files."""
    place = Path(folder)
    files = [place / f"{role}.{kind}" for role in ROLES for kind in ("key", "pub")]
    there = [file for file in files if file.exists()]
    if there:
        raise ValueError(
            f"{there[0]} is there already, and its users would be locked out. Choose another folder, or remove "
            "the old keys yourself."
        )
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in ROLES:
        pair = KeyPair.make()
        pair.write(place / f"{role}.key")
        (place / f"{role}.pub").write_text(pair.public + "\n")
    return files


def server_keys(folder: str | os.PathLike[str]) -> ServerKeys:
    """What a server needs: its own pair, and its clients: workers, and servers that mirror their shards to it."""
    own = _pair(folder, "server")
    return ServerKeys(own, frozenset({own.public, _public(folder, "worker")}), own.password)


def peer_keys(folder: str | os.PathLike[str]) -> ClientKeys:
    """What a server needs to connect to another one, which mirrors its shard."""
    own = member_pair(folder)
    return ClientKeys(own, own.public, own.password)


def worker_keys(folder: str | os.PathLike[str]) -> ClientKeys:
    """What a worker needs: its own pair, and the public key that the servers must have."""
    own, server = _pair(folder, "worker"), _public(folder, "server")
    has_secret = (Path(folder) / "server.key").is_file()  # else it connects by TCP: see messaging/keys.py
    return ClientKeys(own, server, _pair(folder, "server").password if has_secret else "")


def member_pair(folder: str | os.PathLike[str]) -> KeyPair:
    """The key pair of members that are server and client to each other."""
    return _pair(folder, "server")


def _pair(folder: str | os.PathLike[str], role: str) -> KeyPair:
    path = Path(folder) / f"{role}.key"
    _check_exists(path)
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} is a secret, and others may read it. Take their rights away: chmod 600 {path}")
    return KeyPair.read(path)


def _public(folder: str | os.PathLike[str], role: str) -> str:
    path = Path(folder) / f"{role}.pub"
    _check_exists(path)
    return path.read_text().strip()


def _check_exists(path: Path) -> None:
    if path.parent.is_file():
        raise ValueError(
            f"keys is a folder that `gradsync keys FOLDER` has made; got the file {path.parent}. Give the folder: "
            f"keys={str(path.parent.parent)!r}"
        )
    if not path.is_file():
        raise ValueError(f"there is no key {path}. Make the keys once: gradsync keys {path.parent}")
