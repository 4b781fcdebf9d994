"""A folder of keys, as ``gradsync keys`` makes it: who may connect to a parameter server, and to whom.

=============  ==================================  ============================
file           what it holds                       who needs it
=============  ==================================  ============================
server.key     the servers' pair of keys: secret   each server
server.pub     its public half                     each worker, and each server
worker.key     the workers' pair of keys: secret   each worker
worker.pub     its public half                     each server
=============  ==================================  ============================

A rank that hosts a shard is both, and needs all four.
"""

from __future__ import annotations

import os
from pathlib import Path

from gradsync.comm.curve import ClientKeys, KeyPair, ServerKeys

ROLES = ("server", "worker")


def make_key_folder(folder: str | os.PathLike[str]) -> list[Path]:
    """Make new keys in a folder that only its owner may look into; refuses to overwrite any. Returns the files."""
    place = Path(folder)
    files = [place / f"{role}.{kind}" for role in ROLES for kind in ("key", "pub")]
    there = [file for file in files if file.exists()]
    if there:
        raise ValueError(
            f"{there[0]} is there already, and whoever uses it would be locked out. Choose another folder, or remove "
            "the old keys yourself."
        )
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role in ROLES:
        pair = KeyPair.make()
        pair.write(place / f"{role}.key")
        (place / f"{role}.pub").write_text(pair.public + "\n")
    return files


def server_keys(folder: str | os.PathLike[str]) -> ServerKeys:
    """What a server needs: its own pair, and who may come: the workers, and the other servers with copies of shards."""
    own = _pair(folder, "server")
    return ServerKeys(own, frozenset({own.public, _public(folder, "worker")}))


def peer_keys(folder: str | os.PathLike[str]) -> ClientKeys:
    """What a server needs to bring another one a copy of its shard."""
    own = _pair(folder, "server")
    return ClientKeys(own, own.public)


def worker_keys(folder: str | os.PathLike[str]) -> ClientKeys:
    """What a worker needs: its own pair, and what the servers must prove to be."""
    return ClientKeys(_pair(folder, "worker"), _public(folder, "server"))


def _pair(folder: str | os.PathLike[str], role: str) -> KeyPair:
    path = Path(folder) / f"{role}.key"
    _check_there(path)
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path} is a secret, and others may read it. Take their rights away: chmod 600 {path}")
    return KeyPair.read(path)


def _public(folder: str | os.PathLike[str], role: str) -> str:
    path = Path(folder) / f"{role}.pub"
    _check_there(path)
    return path.read_text().strip()


def _check_there(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"there is no key {path}. Make the keys once: gradsync keys {path.parent}")
