"""A shard on disk: written beside and renamed, so that there is always a whole one to begin again from."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch

from gradsync.server.job import Job
from gradsync.server.keeper import Keeper

log = logging.getLogger(__name__)


class Snapshots:
    """Writes a shard every so many updates, in a thread of its own; reads what an earlier server left.

    Args:
        folder: where; made if it is not there.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._written: dict[int, int] = {}  # by shard: the version
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard}.pt"

    def look(self, keeper: Keeper, num_servers: int) -> None:
        """Write the shard if it is time for it, and the last one is written. Returns at once."""
        every, version = keeper.job.snapshot_every, keeper.shard.version
        if not every or not keeper.shard.filled or (self._thread is not None and self._thread.is_alive()):
            return
        last = self._written.get(keeper.index)
        if last is None or not last <= version < last + every:
            self._written[keeper.index] = version
            saved = content(keeper, num_servers)
            self._thread = threading.Thread(target=self._write, args=(keeper.index, saved), name="gradsync-snapshot")
            self._thread.start()

    def read(self) -> list[tuple[int, Job, int, dict[str, Any]]]:
        """What is there: of each shard its number, the job, the number of servers, and its content."""
        found = []
        for path in sorted(self.folder.glob("shard-*.pt")):
            try:
                saved = torch.load(path, weights_only=True)
                found.append((int(saved["shard"]), Job.from_json(saved["job"]), int(saved["num_servers"]), saved))
            except Exception as error:
                raise ValueError(f"{path} is no snapshot of a shard: {error}. Move it away to begin anew.") from error
        return found

    def close(self) -> None:
        """Wait for what is being written."""
        if self._thread is not None:
            self._thread.join(timeout=30.0)

    def _write(self, shard: int, saved: dict[str, Any]) -> None:
        path = self.path(shard)
        beside = path.with_suffix(".new")
        try:
            with beside.open("wb") as file:
                torch.save(saved, file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError as error:  # the run goes on; what a crash would lose grows
            self.error = error
            log.warning("shard %d: no snapshot could be written to %s: %s", shard, path, error)


def content(keeper: Keeper, num_servers: int) -> dict[str, Any]:
    """A copy of all that a shard is."""
    record = keeper.whole()
    return {
        "shard": keeper.index,
        "job": keeper.job.to_json(),
        "num_servers": num_servers,
        "groups": keeper.shard.hyperparameters(),
        "fields": record.fields,
        "tensors": record.tensors,
    }
