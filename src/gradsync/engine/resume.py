"""``--resume DIR``: how a run's state is saved between two steps, and how a new run goes on from it.

What is saved is what a newcomer is given, and each rank's own part of the strategy's state (residuals). So a run that
is resumed with as many workers is bit for bit the one that never stopped. With another number the own parts are
redistributed, as by ``sync.load_state_dict``.

[Note: who writes what] Rank 0 writes what all ranks have in common, and every rank a file of its own. When the run ends
in order, all write and then meet in a collective: the launcher's store may be gone. While the run goes on, each rank
copies its part and writes it in a thread; the store tells rank 0's thread when all have done so.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object, broadcast_object, check_plain
from gradsync.elastic.run_folder import RunFolder, SavedFile, SavedState
from gradsync.elastic.session import Session
from gradsync.engine import saved_state
from gradsync.errors import GradSyncError, StoreUnreachable
from gradsync.replicas.agreement import copy_training_state, plain_name, sharable
from gradsync.replicas.training import Training

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine

log = logging.getLogger("gradsync")

SHARED_FILE = "shared.pt"
PROBE_S = 5.0  # how long a file on a shared file system may take to be seen on another node
POLL_S = 0.05
CLOSE_S = 5.0  # for the thread to end

Tree = dict[str, Any]


class Resume:
    """Saves the state of a run's ranks into a folder, and loads it."""

    def __init__(self, session: Session, training: Training, folder: RunFolder, save_every_s: float | None) -> None:
        self._session = session
        self._training = training
        self._folder = folder
        self._save_every_s = save_every_s
        self._last_s = time.monotonic()  # when the last save began
        self._writer: threading.Thread | None = None
        self._closing = threading.Event()
        atexit.register(self.close)  # runs before the session closes its store

    @property
    def path(self) -> str:
        return str(self._folder.path)

    # -- going on from a saved state ------------------------------------------------------------------------------

    def find(self, comm: Communicator, about: Mapping[str, str]) -> SavedState | None:
        """The state to go on from, the same on all ranks; None: the run begins anew. Blocks: all ranks call it.

        Raises on all ranks if the state is damaged or that of another run, or if a rank does not see the folder.
        """
        found: Tree = {}
        if comm.rank == 0:
            try:
                newest = self._folder.newest()
                found = {"probe": self._folder.leave_probe(), "state": None if newest is None else asdict(newest)}
            except (ValueError, OSError) as error:
                found = {"error": f"{error}"}
        found = broadcast_object(comm, found, 0)
        if "error" in found:
            raise ValueError(found["error"])
        self._check_reached_by_all(comm, found["probe"])
        if found["state"] is None:
            return None
        files = {name: SavedFile(**entry) for name, entry in found["state"].pop("files").items()}
        state = SavedState(files=files, **found["state"])
        self._check_same_run(state, about)
        damages = all_gather_object(comm, self._folder.find_damage(state, self._files_of(state, comm)))
        if damage := next(filter(None, damages), ""):
            raise ValueError(damage)
        return state

    def _check_reached_by_all(self, comm: Communicator, probe: str) -> None:
        end_s = time.monotonic() + PROBE_S
        while not (is_there := self._folder.has_probe(probe)) and time.monotonic() < end_s:
            time.sleep(POLL_S)
        missing = [rank for rank, sees_it in enumerate(all_gather_object(comm, is_there)) if not sees_it]
        if comm.rank == 0:
            self._folder.remove_probe(probe)
        if missing:
            raise ValueError(
                f"--resume needs a folder that all workers reach: {self.path} of rank 0 is not that of rank "
                f"{', '.join(map(str, missing))}. Give a folder on a file system that all nodes share."
            )

    def _check_same_run(self, state: SavedState, about: Mapping[str, str]) -> None:
        for name in dict.fromkeys([*state.about, *about]):
            saved, own = (lines.get(name, "not there") for lines in (state.about, about))
            if saved != own:
                raise ValueError(
                    f"the state in {self.path} is that of another run: its {name} is {saved}; this run's is {own}. "
                    "Start what was started there, or give another folder to --resume."
                )

    def load(self, comm: Communicator, state: SavedState) -> Tree:
        """Load the training state on all ranks; returns the progress to go on from. Blocks: all ranks call it."""
        files = self._files_of(state, comm)
        own = {owner: self._folder.read(state, _file_of(owner)) for owner in self._owners(state, comm)}
        shared: Tree = self._folder.read(state, SHARED_FILE) if SHARED_FILE in files else {}
        shared = broadcast_object(comm, {key: value for key, value in shared.items() if key != "training"}, 0) | shared
        first = next(iter(own.values()))
        if "training" in first:  # replicas that differ: each rank goes on from its own
            self._load_training(first["training"])
        else:
            if comm.rank == 0:
                self._load_training(shared["training"])
            training = self._training
            copy_training_state(comm, training.model, training.optimizer, training.copied_with_state, 0)
        labels = {label: part for each in own.values() for label, part in each["own"].items()}
        if comm.rank == 0:
            log.warning(
                "going on at step %d with %d workers, from %s, which %d have saved",
                shared["step"],
                comm.world_size,
                self.path,
                state.world_size,
            )
        is_alone = comm.rank < state.world_size  # nobody else goes on with the random numbers of this rank
        return {
            "step": shared["step"],
            "plan": shared["plan"],
            "place": shared["place"],
            "saved": {**shared["common"], "own": labels},
            "random": own[comm.rank]["random"] if is_alone and comm.rank in own else None,
        }

    def _owners(self, state: SavedState, comm: Communicator) -> list[int]:
        """The ranks whose own parts this rank reads, its own first."""
        own = comm.rank % state.world_size
        if state.world_size == comm.world_size:
            return [own]
        return [own, *(rank for rank in range(state.world_size) if rank != own)]

    def _files_of(self, state: SavedState, comm: Communicator) -> list[str]:
        own = [_file_of(owner) for owner in self._owners(state, comm)]
        return [SHARED_FILE, *own] if comm.rank == 0 else own

    def _load_training(self, saved: Tree) -> None:
        training = self._training
        with torch.no_grad():
            for name, tensor in _tensors_of(training).items():
                tensor.data.copy_(saved["tensors"][name])
        for one, state in zip([training.optimizer, *training.copied_with_state], saved["stateful"], strict=True):
            one.load_state_dict({**one.state_dict(), **state})

    # -- saving ---------------------------------------------------------------------------------------------------

    def is_due(self, rank: int) -> bool:
        """Whether it is time to save, by the clock of rank 0. Cheap."""
        return (
            self._save_every_s is not None
            and rank == 0
            and time.monotonic() - self._last_s > self._save_every_s
            and (self._writer is None or not self._writer.is_alive())
        )

    def new_name(self, engine: Engine) -> str:
        """A name for a state that is about to be saved: rank 0 gives it to the others."""
        return self._folder.new_name(engine.step)

    def save_now(
        self, engine: Engine, name: str, place: Tree | None, random: list[Tensor], about: Mapping[str, str]
    ) -> None:
        """Save the state on all ranks, as the last thing that they do. Blocks until it is on the disk."""
        started_s = time.monotonic()
        if self._writer is not None:
            self._writer.join(self._session.timeout_s)
        files: dict[str, SavedFile] = {}
        error = ""
        try:
            files = self._write(name, self._trees(engine, place, random))
        except OSError as failed:
            error = f"rank {engine.comm.rank}: {failed}"
        everyone = all_gather_object(engine.comm, {"files": {k: vars(v) for k, v in files.items()}, "error": error})
        error = next((each["error"] for each in everyone if each["error"]), "")
        if error:
            raise GradSyncError(f"step {engine.step} could not be saved to {self.path}: {error}. {_WHAT_STAYS}")
        if engine.comm.rank == 0:
            state = _state(name, engine.step, engine.comm.world_size, about, [each["files"] for each in everyone])
            try:
                self._folder.commit(state)
            except OSError as failed:
                raise GradSyncError(f"step {engine.step} could not be saved: {failed}. {_WHAT_STAYS}") from failed
            _log_saved(state, self.path, time.monotonic() - started_s)

    def save_in_background(
        self, engine: Engine, name: str, place: Tree | None, random: list[Tensor], about: Mapping[str, str]
    ) -> None:
        """Copy this rank's part, and have a thread save it. Blocks for the copy only."""
        self._last_s = started_s = time.monotonic()
        if self._writer is not None and self._writer.is_alive():
            log.warning("step %d is not saved: this rank still writes an earlier state", engine.step)
            return  # then rank 0 waits in vain, and says so
        trees = {file: _copied(tree) for file, tree in self._trees(engine, place, random).items()}
        step, rank, world_size = engine.step, engine.comm.rank, engine.comm.world_size

        def save() -> None:
            try:
                files = {file: vars(entry) for file, entry in self._write(name, trees).items()}
                self._session.report_saved(rank, json.dumps({"name": name, "files": files}))
                if rank == 0:
                    state = _state(name, step, world_size, about, self._wait_for_others(name, world_size))
                    self._folder.commit(state)
                    _log_saved(state, self.path, time.monotonic() - started_s)
            except (OSError, TimeoutError, StoreUnreachable) as failed:
                log.warning("step %d could not be saved to %s: %s. %s", step, self.path, failed, _WHAT_STAYS)

        self._writer = threading.Thread(target=save, name="gradsync-save", daemon=True)
        self._writer.start()

    def _wait_for_others(self, name: str, world_size: int) -> list[Mapping[str, Any]]:
        """What all ranks have written of a state. Runs in rank 0's thread."""
        end_s = time.monotonic() + self._session.timeout_s
        reports: dict[int, Mapping[str, Any]] = {}
        while len(reports) < world_size:
            for rank in range(world_size):
                text = None if rank in reports else self._session.read_saved(rank)
                if text is not None and (report := json.loads(text))["name"] == name:
                    reports[rank] = report["files"]
            if len(reports) < world_size and (self._closing.wait(POLL_S) or time.monotonic() > end_s):
                late = [rank for rank in range(world_size) if rank not in reports]
                raise TimeoutError(f"rank {', '.join(map(str, late))} has not written its part")
        return [reports[rank] for rank in range(world_size)]

    def _trees(self, engine: Engine, place: Tree | None, random: list[Tensor]) -> dict[str, Tree]:
        """What this rank writes, by file. The training state is not copied."""
        comm, strategy = engine.comm, engine.strategy
        tree = {**engine.state_dict(), "strategy_state": strategy.state_dict()}
        common = saved_state.pack(tree, strategy, rank=comm.rank, world_size=comm.world_size)
        own: Tree = {"own": common.pop("own"), "random": random}
        training = _training_state(self._training)
        if strategy.gradient_sync(engine.step) is None:  # replicas differ until they next exchange
            own["training"] = training
        trees = {_file_of(comm.rank): own}
        if comm.rank == 0:
            shared = {"step": engine.step, "plan": engine.plan_state(), "place": place, "common": common}
            trees[SHARED_FILE] = shared if "training" in own else {**shared, "training": training}
        check_plain(list(trees.values()))
        return trees

    def _write(self, name: str, trees: Mapping[str, Tree]) -> dict[str, SavedFile]:
        return {file: self._folder.write(name, file, tree) for file, tree in trees.items()}

    def close(self) -> None:
        """Wait a little for a state that is being written. What is not complete then does not count."""
        self._closing.set()
        atexit.unregister(self.close)
        if self._writer is not None:
            self._writer.join(CLOSE_S)


_WHAT_STAYS = "The state that was saved before it stays"


def _state(
    name: str, step: int, world_size: int, about: Mapping[str, str], files: list[Mapping[str, Any]]
) -> SavedState:
    entries = {file: SavedFile(**entry) for each in files for file, entry in each.items()}
    return SavedState(name=name, step=step, world_size=world_size, about=dict(about), files=entries)


def _log_saved(state: SavedState, path: str, seconds: float) -> None:
    num_bytes = sum(file.num_bytes for file in state.files.values())
    log.warning("step %d is saved in %s: %.1f MB in %.2f s", state.step, path, num_bytes / 1e6, seconds)


def _file_of(rank: int) -> str:
    return f"rank{rank}.pt"


def _tensors_of(training: Training) -> dict[str, Tensor]:
    model = training.model
    return {plain_name(name): tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _training_state(training: Training) -> Tree:
    stateful = [sharable(one.state_dict()) for one in (training.optimizer, *training.copied_with_state)]
    return {
        "tensors": {name: tensor.detach() for name, tensor in _tensors_of(training).items()},
        "stateful": stateful,
    }


def _copied(value: Any) -> Any:
    """A tree whose tensors training does not change any more."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(_copied(item) for item in value) if isinstance(value, list | tuple) else value
