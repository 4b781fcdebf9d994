"""``Session``: this worker's part in an elastic run. It connects the members of each epoch, and counts what happened.

There is one in a process that `gradsync run --elastic` has started. ``gradsync.connect()`` asks it for the
communicator, which stays the same object while what it forwards to changes with every epoch.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradsync.comm.background import attempt
from gradsync.comm.base import DEFAULT_TIMEOUT_S, Communicator, Worker
from gradsync.comm.connect import use_connector
from gradsync.comm.following import Following
from gradsync.comm.members import connect_members
from gradsync.comm.rendezvous import interface_between_hosts
from gradsync.elastic.leave import leave_is_due, leave_requested
from gradsync.elastic.meetings import Meetings
from gradsync.elastic.membership import NO_STATE, Epoch, Membership, MembershipSettings, OnPartition, process_of
from gradsync.elastic.run_folder import RunFolder
from gradsync.elastic.store import CALL_TIMEOUT_S, BoundedStore
from gradsync.errors import PeerLost, StoreUnreachable
from gradsync.profiling.record import Change, Merge

__all__ = ["Change", "Cost", "Session"]

log = logging.getLogger("gradsync")

END_POLL_S = 0.02  # how often a worker that connects asks whether the epoch has ended meanwhile
CLOSE_S = 5.0  # for a thread to end
WATCH_S = 0.1  # how often it asks whether somebody waits to join
LOOK_S = 1.0  # how often it asks for standby stores; on a side of a partition, whether node 0's store answers again
STANDBYS_S = 15.0  # for all launchers to hold a standby store
UNREACHABLE_WATCH_S = 1.0  # the same, while the store can't be reached
CONNECT_LIMIT_S = 60.0  # of all members of an epoch; a smaller timeout_s limits it further


@dataclass
class Cost:
    """What a change of the members has cost until now, part by part. See :class:`gradsync.profiling.record.Change`."""

    began_s: float = field(default_factory=time.monotonic)
    agreeing_s: float = 0.0
    connecting_s: float = 0.0
    restoring_s: float = 0.0
    attaching_s: float = 0.0
    healed_bytes: int = 0
    merge: Merge | None = None  # of the sides of a partition

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time of the block to a part, also if it ends by an error."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            setattr(self, f"{part}_s", getattr(self, f"{part}_s") + time.monotonic() - start_s)


class Session:
    """One worker's session. ``start`` makes it from what the launcher has put into the environment."""

    current: Session | None = None  # of this process

    def __init__(self, membership: Membership, *, on_partition: OnPartition | None = None, num_nodes: int = 1) -> None:
        self.membership = membership
        self._on_partition = on_partition  # as the command line says; None: it says nothing
        self._num_nodes = num_nodes  # at most
        self._transport = "auto"
        self._timeout_s = DEFAULT_TIMEOUT_S
        self.comm = Following(worker=Worker())
        self.world: Communicator | None = None  # of the present epoch; None before the first, and between two
        self.changes: list[Change] = []
        self.lost_residuals: list[str] = []
        self.has_synchronizer = False
        self.folder: RunFolder | None = None  # of --resume
        self.save_every_s: float | None = None
        self.store_is_lost = False  # the last call of the watching thread did not reach it
        self._settled: Epoch | None = None  # the last epoch in which this worker has trained
        self._wanted: str | None = None
        self._over: int | None = None  # the number of an epoch that another member has ended
        self.save_is_due: Callable[[], bool] = lambda: False  # whether the run is to be saved between two steps
        self.meetings = Meetings(membership)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gradsync-membership", daemon=True)

    @classmethod
    def start(cls, config: Mapping[str, Any]) -> Session:
        """The session that the launcher's ``GRADSYNC_ELASTIC`` describes; from now on ``connect()`` uses it."""
        host, _, port = str(config["store"]).rpartition(":")
        settings = MembershipSettings(
            min_members=int(config["min"]),
            max_members=int(config["max"]),
            partition_timeout_s=float(config["partition_timeout_s"]),
        )
        store = BoundedStore(host, int(port))
        founders: Sequence[str] = config["founders"]
        membership = Membership(store, str(config["uid"]), int(config["slot"]), founders, settings)
        cls.current = cls(membership, on_partition=config["on_partition"], num_nodes=int(config["nodes"]))
        if folder := config.get("resume"):
            cls.current.folder = RunFolder(Path(folder))
            cls.current.save_every_s = config.get("save_every_s")
        use_connector(cls.current.open)
        return cls.current

    def open(self, transport: str, timeout_s: float) -> Communicator:
        """What ``connect()`` returns. Blocks until the founders are here; a newcomer joins later, in synchronize()."""
        self._transport, self._timeout_s = transport, timeout_s
        self.membership.settings = dataclasses.replace(self.membership.settings, timeout_s=timeout_s)
        self.membership.authority.home.timeout_s = min(CALL_TIMEOUT_S, timeout_s)
        if self.membership.is_founder:
            epoch = self.membership.agree(0, cause="the start")
            while self.world is None:
                try:
                    self.connect(epoch)
                except (PeerLost, StoreUnreachable, ConnectionError, RuntimeError) as error:
                    epoch = self.membership.agree(0, cause=str(error).partition("\n")[0])
        else:
            latest = self.membership.latest_epoch()
            slots = sorted([*(member.slot for member in latest.members), self.membership.slot])
            _import_ahead()
            self.comm.expect(rank=slots.index(self.membership.slot), world_size=len(slots), timeout_s=timeout_s)
        self._watcher.start()
        atexit.register(self.close)
        return self.comm

    def close(self) -> None:
        """End the session's threads: one that is in a call of the store when the interpreter ends would abort it."""
        self._closing.set()
        if self._watcher.is_alive():
            self._watcher.join(CLOSE_S)
        self.membership.authority.close()

    # -- what a partition does ------------------------------------------------------------------------------------

    def chosen_on_partition(self, script: OnPartition) -> OnPartition:
        """What happens when the network splits: what the command line says, else what the script says."""
        return self._on_partition or script

    def prepare_for_partition(self, on_partition: OnPartition) -> None:
        """From now on a partition does this. With "diverge" it blocks until all nodes hold standby stores."""
        self.membership.settings = dataclasses.replace(self.membership.settings, on_partition=on_partition)
        if on_partition == "pause" or self._num_nodes == 1:
            return
        authority, end_s = self.membership.authority, time.monotonic() + STANDBYS_S
        missing = 1
        while missing and time.monotonic() < end_s:
            try:
                authority.ask_for_standbys()
                missing = authority.read_standbys()
            except StoreUnreachable as unreachable:
                log.debug("%s", unreachable)
            time.sleep(END_POLL_S)
        if missing:
            log.warning("%d nodes hold no standby store yet: cut off now, their workers could only wait", missing)

    # -- one epoch ------------------------------------------------------------------------------------------------

    def connect(self, epoch: Epoch) -> Communicator:
        """Connect the members of an epoch. Blocks; raises ``PeerLost`` as soon as one of them is known to be gone."""
        rank = epoch.rank_of(self.membership.uid)
        assert rank is not None, "only members connect"
        limit_s = min(self._timeout_s, CONNECT_LIMIT_S)
        start_s = time.monotonic()

        def check() -> None:
            waited_s = time.monotonic() - start_s
            why = self._find_end(epoch)
            if why is None and waited_s > limit_s:
                why = f"the members of epoch {epoch.number} did not connect in {limit_s:.0f} s"
            if why is not None:
                raise PeerLost(rank=rank, reason=why, after_s=waited_s, during=f"connecting epoch {epoch.number}")

        self.world = attempt(
            lambda: self._connect_members(epoch, rank),
            check,
            discard=lambda world: world.abandon(),
            check_every_s=END_POLL_S,
        )
        self.comm.replace(self.world)
        self._wanted = None
        return self.world

    def _find_end(self, epoch: Epoch) -> str | None:
        try:
            return self.membership.find_end(epoch)
        except StoreUnreachable as unreachable:
            return str(unreachable)

    def _connect_members(self, epoch: Epoch, rank: int) -> Communicator:
        return connect_members(
            self.membership.authority.store.new_client(self._timeout_s),
            generation=self.membership.authority.generation(epoch.number),
            rank=rank,
            world_size=len(epoch.members),
            transport=self._transport,
            timeout_s=self._timeout_s,
            why=f"epoch {epoch.number} of an elastic run: {len(epoch.members)} workers",
            worker=self.comm.worker,
        )

    def abandon_world(self) -> None:
        """Leave the communicator of an epoch that has ended. Does not wait for anybody."""
        world, self.world = self.world, None
        if world is not None:
            world.abandon()

    # -- between two steps ----------------------------------------------------------------------------------------

    def wants_change(self) -> bool:
        """Whether something is to be done together between two steps: members change, or the run is saved. Cheap."""
        return self._wanted is not None or leave_is_due() or self.save_is_due()

    @property
    def is_over(self) -> bool:
        """Whether another member has ended the present epoch: for members that train apart. Cheap, a little late."""
        return self._over is not None and self._over == self.membership.epoch.number

    def why_change(self) -> str | None:
        """The reason, as far as this worker knows it; None if it knows of none."""
        if (reason := leave_requested()) is not None:
            return f"worker {self.membership.slot} leaves: {reason}"
        return self._wanted

    def _watch(self) -> None:
        """Ask the store from time to time: so that no step waits for an answer."""
        look_at_s = time.monotonic() + LOOK_S
        while not self._closing.wait(UNREACHABLE_WATCH_S if self.store_is_lost else WATCH_S):
            if self.store_is_lost and leave_requested() is not None:
                return  # the launcher has ended: a call now would only delay the end of this process
            if self.world is None:
                continue
            try:
                if time.monotonic() > look_at_s:
                    self._look_around()
                    look_at_s = time.monotonic() + LOOK_S
                number = self.membership.epoch.number
                wanted = self.membership.change_wanted()
                self.meetings.look()
                if self.membership.is_over():
                    self._over = number
                self.store_is_lost = False
                if number == self.membership.epoch.number:
                    self._wanted = wanted
            except StoreUnreachable as unreachable:
                self.store_is_lost = True
                log.debug("%s", unreachable)

    def _look_around(self) -> None:
        """Where sides may diverge: ask for the standby stores, or, on a side, for node 0's."""
        if self.membership.settings.on_partition == "pause" or self._num_nodes == 1:
            return
        if self.membership.authority.is_home:
            self.membership.authority.read_standbys()
        else:
            self.membership.look_home()

    # -- what is saved while the run goes on --------------------------------------------------------------------

    @property
    def timeout_s(self) -> float:
        return self._timeout_s

    def report_saved(self, rank: int, report: str) -> None:
        """Tell rank 0 what this rank has saved."""
        self.membership.authority.store.set(f"saved/{rank}", report)

    def read_saved(self, rank: int) -> str | None:
        """The last report of a rank."""
        return self.membership.authority.store.get(f"saved/{rank}")

    # -- what happened --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """All members of the epoch are in step: from now on it is the one that the next change begins from."""
        self._settled = self.membership.epoch

    def record(
        self, cost: Cost, *, cause: str, discarded: bool, before: Epoch | None, steps_at_risk: int = 0
    ) -> Change:
        """A change is over: note it, log it, and let the launchers know. Returns it.

        ``before``: the epoch that has ended; None on a newcomer. ``steps_at_risk``: the steps since the last exchange,
        which are lost with each member that is lost.
        """
        epoch, world = self.membership.epoch, self.world
        assert world is not None, "the members are connected"
        # Members that return from a side have new names.
        name_of: Callable[[str], str] = process_of if epoch.sides else str
        there = {name_of(member.uid): member.slot for member in epoch.members}
        gone = {} if before is None else {m.uid: m.slot for m in before.members if name_of(m.uid) not in there}
        if before is not None:
            known = {name_of(member.uid) for member in before.members}
        elif epoch.needs_healing:  # a newcomer does not know who was there, but who has a state
            known = {name_of(member.uid) for member in epoch.members if member.step != NO_STATE}
        else:  # every worker was lost, and these begin anew
            known = set()
        interface = "" if world.transport in ("shm", "solo", "threads") else interface_between_hosts()
        lost = tuple(slot for uid, slot in gone.items() if uid not in self.membership.left)
        change = Change(
            epoch=epoch.number,
            cause=cause,
            before=() if before is None else tuple(member.slot for member in before.members),
            members=tuple(there.values()),
            lost=lost,
            lost_steps=len(lost) * steps_at_risk,
            left=tuple(slot for uid, slot in gone.items() if uid in self.membership.left),
            joined=tuple(member.slot for member in epoch.members if name_of(member.uid) not in known),
            healed=tuple(member.slot for member in epoch.members if epoch.is_behind(member)),
            step=epoch.newest_step,
            discarded=discarded,
            stalled_s=time.monotonic() - cost.began_s,
            agreeing_s=cost.agreeing_s,
            connecting_s=cost.connecting_s,
            restoring_s=cost.restoring_s,
            attaching_s=cost.attaching_s,
            healed_bytes=cost.healed_bytes,
            over=world.transport + (f" over {interface}" if interface else ""),
            at_s=time.time(),
            history=self.membership.authority.history,
            merge=cost.merge,
        )
        self.changes.append(change)
        log.warning("%s", change.describe())
        if epoch.rank_of(self.membership.uid) == epoch.donor:
            with contextlib.suppress(StoreUnreachable):  # it is only for the launchers' logs
                self.membership.write_change(epoch.number, json.dumps(change.as_dict()))
        return change

    @property
    def settled(self) -> Epoch | None:
        """The last epoch in which this worker has trained; None before the first."""
        return self._settled

    def stats(self) -> dict[str, Any]:
        """For ``sync.stats()``."""
        return {
            "epoch": self.membership.epoch.number,
            "slot": self.membership.slot,
            "members": [member.slot for member in self.membership.epoch.members],
            "history": self.membership.authority.history,
            "changes": [change.as_dict() for change in self.changes],
            "discarded_steps": sum(change.discarded for change in self.changes),
            "lost_members": sum(len(change.lost) for change in self.changes),
            "heals": sum(len(change.healed) for change in self.changes),
            "stalled_s": sum(change.stalled_s for change in self.changes),
            "lost_residuals": list(self.lost_residuals),
        }


def _import_ahead() -> None:
    """Load what a transport needs, before the others wait for this worker. (Numba takes a second to import.)"""
    import gradsync.comm.shm.communicator  # noqa: F401
