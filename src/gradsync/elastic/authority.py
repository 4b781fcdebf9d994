"""``Authority``: the store that decides for this worker, and the name of its history in that store.

[Note: standby stores] The store of node 0's launcher decides. With ``on_partition="diverge"`` every other launcher
holds a *standby* store, and publishes its address in node 0's. Members that can't reach the store of their history turn
to the first one, in the order of the nodes, that they reach, and begin a *side history* there. Its name says after
which epoch, and in which node's store: ``7@node1``. Nobody else writes under that name, so a side has one history too.
The history in node 0's store is the main one, whatever it says: sides meet there, and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence

from gradsync.elastic.store import BoundedStore
from gradsync.errors import StoreUnreachable

log = logging.getLogger("gradsync")

MAIN = "0"  # the name of the history in node 0's store
HOME = 0  # the node that holds it
PROBE_S = 1.0  # how long a store may take to answer before the next one is tried

WANTED = "launchers/diverge"  # set as soon as a worker needs standby stores
STARTED = "launchers/started"


def standby_key(node: int) -> str:
    """Where a launcher publishes the address of its standby store."""
    return f"launchers/standby/{node}"


class Authority:
    """Reads and writes one worker's history. Every call may raise ``StoreUnreachable``."""

    def __init__(self, home: BoundedStore) -> None:
        self.home = home
        self.store = home
        self.history = MAIN
        self._standbys: dict[int, tuple[str, int]] = {}

    @property
    def is_home(self) -> bool:
        """Whether this worker is in the main history."""
        return self.history == MAIN

    # -- what belongs to the history ------------------------------------------------------------------------------

    def get(self, key: str) -> str | None:
        return self.store.get(self._key(key))

    def set(self, key: str, value: str) -> None:
        self.store.set(self._key(key), value)

    def set_once(self, key: str, value: str) -> str:
        return self.store.set_once(self._key(key), value)

    def has(self, key: str) -> bool:
        return self.store.has(self._key(key))

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys that are not there."""
        absent = set(self.store.missing([self._key(key) for key in keys]))
        return [key for key in keys if self._key(key) in absent]

    def generation(self, number: int) -> str:
        """The name of an epoch's world."""
        return str(number) if self.is_home else f"{self.history}/{number}"

    def _key(self, key: str) -> str:
        return key if self.is_home else f"side/{self.history}/{key}"

    # -- changing it ----------------------------------------------------------------------------------------------

    def ask_for_standbys(self) -> None:
        """Have every launcher hold a standby store."""
        self.home.set(WANTED, "yes")

    def read_standbys(self) -> int:
        """Learn the addresses of the standby stores; returns how many are still missing."""
        nodes = set()
        for launcher in range(self.home.add(STARTED, 0)):
            text = self.home.get(f"launchers/{launcher}/node")
            if text is not None and not self.home.has(f"launchers/{launcher}/ended"):
                nodes.add(int(json.loads(text)["number"]))
        found = {}
        for node in sorted(nodes - {HOME}):
            if (text := self.home.get(standby_key(node))) is not None:
                host, port = json.loads(text)
                found[node] = (str(host), int(port))
        self._standbys = found
        return len(nodes - {HOME}) - len(found)

    def can_reach_home(self) -> bool:
        """Whether node 0's store answers; takes seconds if it does not."""
        try:
            self.home.has(WANTED)
        except StoreUnreachable:
            return False
        return True

    def begin_side(self, history: str, number: int) -> bool:
        """Turn to the first standby store that answers, and begin a history there, after an epoch of another history.

        False if none answers.
        """
        for node, (host, port) in self._standbys.items():
            if (host, port) == (self.store.host, self.store.port):
                continue
            store = BoundedStore(host, port, timeout_s=PROBE_S)
            try:
                store.has(WANTED)
            except StoreUnreachable as unreachable:
                log.debug("%s", unreachable)
                store.close()
                continue
            store.timeout_s = self.home.timeout_s
            self._leave_store()
            parent = "" if history == MAIN else f"{history}+"
            self.store, self.history = store, f"{parent}{number}@node{node}"
            return True
        return False

    def return_home(self) -> None:
        """Turn to the main history again."""
        self._leave_store()
        self.store, self.history = self.home, MAIN

    def _leave_store(self) -> None:
        if self.store is not self.home:
            self.store.close()

    def write_everywhere(self, key: str, value: str) -> None:
        """Write into every store that answers: launchers on the other side of a cut read theirs."""
        places = [(store.host, store.port) for store in (self.home, self.store)]
        for host, port in dict.fromkeys([*places, *self._standbys.values()]):
            store = BoundedStore(host, port, timeout_s=PROBE_S)
            with contextlib.suppress(StoreUnreachable):
                store.set(key, value)
            store.close()

    def close(self) -> None:
        self._leave_store()
        self.home.close()
