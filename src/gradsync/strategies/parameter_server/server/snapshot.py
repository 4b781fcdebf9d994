"""Snapshots of a shard on disk. Each is written to a new file and renamed, so that there is always a complete one."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch

from gradsync.strategies.parameter_server.job import Job
from gradsync.strategies.parameter_server.server.shard_service import ShardService

log = logging.getLogger(__name__)


class SnapshotStore:
    """Writes a shard after every ``Job.snapshot_every`` updates, in a thread; reads what an earlier server has written.

    Args:
        folder: of the snapshots; made if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._written_version: dict[int, int] = {}  # by shard
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard}.pt"

    def write_if_due(self, service: ShardService, num_servers: int) -> None:
        """Start to write the shard if it is due and no write is under way. Returns at once."""
        every, version = service.job.snapshot_every, service.shard.version
        if not every or not service.shard.filled or (self._thread is not None and self._thread.is_alive()):
            return
        last = self._written_version.get(service.index)
        if last is None or not last <= version < last + every:
            self._written_version[service.index] = version
            saved = snapshot_content(service, num_servers)
            self._thread = threading.Thread(target=self._write, args=(service.index, saved), name="gradsync-snapshot")
            self._thread.start()

    def read(self) -> list[tuple[int, Job, int, dict[str, Any]]]:
        """The snapshots in the folder: of each shard its number, the job, the number of servers, and the content."""
        found = []
        for path in sorted(self.folder.glob("shard-*.pt")):
            try:
                saved = torch.load(path, weights_only=True)
                found.append((int(saved["shard"]), Job.from_json(saved["job"]), int(saved["num_servers"]), saved))
            except Exception as error:
                raise ValueError(f"{path} is no snapshot of a shard: {error}. Move it away to begin anew.") from error
        return found

    def close(self) -> None:
        """Wait for a write that is under way."""
        if self._thread is not None:
            self._thread.join(timeout=30.0)

    def _write(self, shard: int, saved: dict[str, Any]) -> None:
        path = self.path(shard)
        new = path.with_suffix(".new")
        try:
            with new.open("wb") as file:
                torch.save(saved, file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError as error:  # training goes on, but a crash would now lose more
            self.error = error
            log.warning("shard %d: no snapshot could be written to %s: %s", shard, path, error)


def snapshot_content(service: ShardService, num_servers: int) -> dict[str, Any]:
    """A copy of a shard's whole state, as it is written to disk."""
    record = service.snapshot()
    return {
        "shard": service.index,
        "job": service.job.to_json(),
        "num_servers": num_servers,
        "groups": service.shard.hyperparameters(),
        "fields": record.fields,
        "tensors": record.tensors,
    }
