"""``Session``: this worker's part in an elastic run. It connects the members of each epoch, and counts what happened.

There is one in a process that `gradsync run --elastic` has started. ``gradsync.connect()`` asks it for the
communicator, which stays the same object while what it forwards to changes with every epoch.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsync.comm.background import attempt
from gradsync.comm.base import DEFAULT_TIMEOUT_S, Communicator, Worker
from gradsync.comm.connect import use_connector
from gradsync.comm.following import Following
from gradsync.comm.members import connect_members
from gradsync.elastic.leave import leave_requested
from gradsync.elastic.membership import Epoch, Membership, MembershipSettings
from gradsync.elastic.store import BoundedStore
from gradsync.errors import PeerLost, StoreUnreachable

log = logging.getLogger("gradsync")

END_POLL_S = 0.02  # how often a worker that connects asks whether the epoch has ended meanwhile
CLOSE_S = 5.0  # for a thread to end
WATCH_S = 0.1  # how often it asks whether somebody waits to join
CONNECT_LIMIT_S = 60.0  # of all members of an epoch; a smaller timeout_s limits it further


@dataclass(frozen=True)
class Change:
    """One change of the membership, for statistics and logs."""

    epoch: int
    cause: str
    num_members: int
    stalled_s: float
    discarded: bool  # a step was rolled back, and done again
    at_s: float  # since the epoch of the clock


class Session:
    """One worker's session. ``start`` makes it from what the launcher has put into the environment."""

    current: Session | None = None  # of this process

    def __init__(self, membership: Membership, store: BoundedStore) -> None:
        self.membership = membership
        self._store = store
        self._transport = "auto"
        self._timeout_s = DEFAULT_TIMEOUT_S
        self.comm = Following(worker=Worker())
        self.world: Communicator | None = None  # of the present epoch; None before the first, and between two
        self.changes: list[Change] = []
        self.lost_residuals: list[str] = []
        self.has_synchronizer = False
        self._listeners: list[Callable[[Change], None]] = []
        self._wanted: str | None = None
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gradsync-membership", daemon=True)

    @classmethod
    def start(cls, config: Mapping[str, Any]) -> Session:
        """The session that the launcher's ``GRADSYNC_ELASTIC`` describes; from now on ``connect()`` uses it."""
        host, _, port = str(config["store"]).rpartition(":")
        settings = MembershipSettings(
            min_members=int(config["min"]),
            max_members=int(config["max"]),
            partition_timeout_s=float(config.get("partition_timeout_s", 1800.0)),
        )
        store = BoundedStore(host, int(port))
        founders: Sequence[str] = config["founders"]
        membership = Membership(store, str(config["uid"]), int(config["slot"]), founders, settings)
        cls.current = cls(membership, store)
        use_connector(cls.current.open)
        return cls.current

    def open(self, transport: str, timeout_s: float) -> Communicator:
        """What ``connect()`` returns. Blocks until the founders are here; a newcomer joins later, in synchronize()."""
        self._transport, self._timeout_s = transport, timeout_s
        self.membership.settings = dataclasses.replace(self.membership.settings, timeout_s=timeout_s)
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
        self._store.close()

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
            self._store.new_client(self._timeout_s),
            generation=str(epoch.number),
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
        """Whether this worker knows of a reason for another epoch: it leaves, or somebody waits to join. Cheap."""
        return self._wanted is not None or leave_requested() is not None

    def why_change(self) -> str:
        """The reason, as far as this worker knows it."""
        if (reason := leave_requested()) is not None:
            return f"worker {self.membership.slot} leaves: {reason}"
        return self._wanted or "another worker asks for it"

    def _watch(self) -> None:
        """Ask the store from time to time: so that no step waits for an answer."""
        while not self._closing.wait(WATCH_S):
            if self.world is None:
                continue
            try:
                number = self.membership.epoch.number
                wanted = self.membership.change_wanted()
                if number == self.membership.epoch.number:
                    self._wanted = wanted
            except StoreUnreachable as unreachable:
                log.debug("%s", unreachable)

    # -- what happened --------------------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[Change], None]) -> None:
        """Call ``listener`` after every change, in the training thread."""
        self._listeners.append(listener)

    def record(self, cause: str, *, stalled_s: float, discarded: bool) -> None:
        """A change is over: note it, log it, and tell the listeners."""
        epoch = self.membership.epoch
        change = Change(epoch.number, epoch.cause, len(epoch.members), stalled_s, discarded, time.time())
        self.changes.append(change)
        log.warning(
            "epoch %d with %d workers, %s, after %.2f s: %s",
            change.epoch,
            change.num_members,
            "a step is done again" if discarded else "no step is lost",
            stalled_s,
            cause,
        )
        for listener in list(self._listeners):
            listener(change)

    def stats(self) -> dict[str, Any]:
        """For ``sync.stats()``."""
        return {
            "epoch": self.membership.epoch.number,
            "slot": self.membership.slot,
            "members": [member.slot for member in self.membership.epoch.members],
            "changes": [vars(change) for change in self.changes],
            "discarded_steps": sum(change.discarded for change in self.changes),
            "stalled_s": sum(change.stalled_s for change in self.changes),
            "lost_residuals": list(self.lost_residuals),
        }


def _import_ahead() -> None:
    """Load what a transport needs, before the others wait for this worker. (Numba takes a second to import.)"""
    import gradsync.comm.shm.communicator  # noqa: F401
