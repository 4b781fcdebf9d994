"""The folder of ``gradsync run --elastic --resume DIR``: the newest complete state of a run, in files.

[Note: complete or not there] Each state has a folder of its own, in which every rank writes a file. ``state.json``
names the folder, and each file with its size and checksum. It is replaced last, in one step, when all files are on the
disk. So whatever is interrupted, ``state.json`` names a state that is complete: the new one, or the one before. What it
does not name is deleted by the next save.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

VERSION = 1
MANIFEST = "state.json"
LOCK = "lock"
_STATES = "step-"  # how the names of the states' folders begin
_PROBE = "probe-"
_CHECKSUM_CHUNK = 1 << 20


@dataclass(frozen=True)
class SavedFile:
    """One file of a state, as it was written."""

    num_bytes: int
    checksum: int


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What ``state.json`` says of a state."""

    name: str  # of its folder
    step: int
    world_size: int  # the ranks that have saved it
    about: Mapping[str, str]  # what a run must have in common with it, one line each
    files: Mapping[str, SavedFile]


class RunFolder:
    """The saved state of a run, in a folder that all its workers reach."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest(self) -> SavedState | None:
        """The newest complete state; None if there is none. Raises ValueError if ``state.json`` is damaged."""
        manifest = self.path / MANIFEST
        try:
            text = manifest.read_text()
        except FileNotFoundError:
            return None
        try:
            value = json.loads(text)
            version = value.pop("version")
            if version == VERSION:
                files = {name: SavedFile(**entry) for name, entry in value.pop("files").items()}
                return SavedState(files=files, **value)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{manifest} is damaged: {error}. {self._way_out()}") from error
        raise ValueError(
            f"expected a saved run of version {VERSION} in {self.path}; got {version!r}. Resume it with the gradsync "
            "that saved it, or give another folder."
        )

    def new_name(self, step: int) -> str:
        """A name for the folder of a new state, which no other save has had."""
        return f"{_STATES}{step}-{secrets.token_hex(4)}"

    def write(self, state: str, file: str, tree: Any) -> SavedFile:
        """Write one file of a state, down to the disk. Several ranks do so at the same time."""
        folder = self.path / state
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / file
        with open(path, "wb") as target:
            torch.save(tree, target)
            target.flush()
            os.fsync(target.fileno())
        _sync_folder(folder)
        return SavedFile(path.stat().st_size, _checksum_of(path))

    def commit(self, state: SavedState) -> None:
        """Make a state the newest, after all its files were written; delete all others."""
        for file, entry in state.files.items():  # another save may have taken this one for an interrupted one
            if (self.path / state.name / file).stat().st_size != entry.num_bytes:
                raise OSError(f"{self.path / state.name / file} has changed since it was written")
        manifest = self.path / MANIFEST
        new = self.path / f"{MANIFEST}.new"
        with open(new, "w") as target:
            json.dump({"version": VERSION, **asdict(state)}, target, indent=1)
            target.flush()
            os.fsync(target.fileno())
        os.replace(new, manifest)
        _sync_folder(self.path)
        self.delete_all_but({state.name})

    def delete_all_but(self, names: Collection[str]) -> None:
        """Delete the folders of other states, and what an interrupted start has left."""
        for path in self.path.iterdir():
            if path.name.startswith(_STATES) and path.name not in names:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_PROBE):
                path.unlink(missing_ok=True)

    def find_damage(self, state: SavedState, files: Collection[str]) -> str:
        """What is wrong with these files of a state; empty if they are as they were written."""
        for name in files:
            path, expected = self.path / state.name / name, state.files.get(name)
            if expected is None:
                return f"{self.path / MANIFEST} does not list {name}. {self._way_out()}"
            try:
                found = SavedFile(path.stat().st_size, _checksum_of(path))
            except OSError as error:
                return f"{path} can't be read: {error.strerror}. {self._way_out()}"
            if found != expected:
                return (
                    f"{path} is damaged: expected {expected.num_bytes} bytes with checksum {expected.checksum:08x}; "
                    f"got {found.num_bytes} bytes with {found.checksum:08x}. {self._way_out()}"
                )
        return ""

    def read(self, state: SavedState, file: str) -> Any:
        """The content of one file."""
        return torch.load(self.path / state.name / file, map_location="cpu", weights_only=True)

    def _way_out(self) -> str:
        return f"Restore {self.path} from a copy, or empty it to begin anew."

    # -- whether all workers reach the same folder ---------------------------------------------------------------

    def leave_probe(self) -> str:
        """Write an empty file, for workers of other nodes to look for; returns its name."""
        name = f"{_PROBE}{secrets.token_hex(8)}"
        (self.path / name).touch()
        return name

    def has_probe(self, name: str) -> bool:
        return (self.path / name).exists()

    def remove_probe(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


def _checksum_of(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as source:
        while chunk := source.read(_CHECKSUM_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk too, not only the files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
