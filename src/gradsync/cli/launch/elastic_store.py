"""The store of an elastic run, as its launchers use it: hosted by one, and written to by all.

The store outlives any worker. Under ``gradsync/elastic`` the workers agree on who takes part (see
``gradsync.elastic.membership``). The launchers add:

- ``dead/<uid>``: why a worker's process has ended, and ``finished/<uid>`` if its script had ended without an error;
- ``launchers/...``: which nodes there are, that the run is ending, and which launchers have ended.

Where the sides of a partition may both go on, every other launcher hosts a standby store: see [Note: standby stores] in
``gradsync.elastic.authority``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import click
from torch._C._distributed_c10d import TCPStore

from gradsync.comm.tcp.handshake import plain_address, url_address
from gradsync.elastic.authority import STARTED, WANTED, standby_key
from gradsync.elastic.store import BoundedStore
from gradsync.errors import StoreUnreachable
from gradsync.profiling.record import Change

LOOPBACK = "127.0.0.1"
NODES_WAIT_S = 600.0  # for node 0 to be reached, and for the nodes with which the run begins
NODES_NOTICE_S = 5.0  # if it takes longer, a notice is printed
POLL_S = 0.5  # how often a launcher asks for news; one of several also shows that it is alive
STORE_LOST_S = 60.0  # while no worker waits for it, a store that can't be reached for longer is lost
RETRY_S = 0.2


@dataclass(frozen=True)
class Finished:
    """A worker's script has ended without an error."""

    uid: str


@dataclass(frozen=True)
class Left:
    """A worker has left the run in order."""

    uid: str
    reason: str


@dataclass(frozen=True)
class NextIncarnation:
    """The number of a slot's next worker."""

    slot: int
    incarnation: int


@dataclass(frozen=True)
class RunEnding:
    """A worker of any node has finished: no new workers are started."""


@dataclass(frozen=True)
class GivenUp:
    """The launcher of another node has given up the run."""

    reason: str


@dataclass(frozen=True)
class PeerAddresses:
    """The addresses of the other nodes."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class StoreLost:
    """The store can't be reached any more. No other event follows."""

    reason: str


@dataclass(frozen=True)
class MembersChanged:
    """The workers go on with other members."""

    text: str  # what has happened and what it cost, in one line


Event = Finished | Left | NextIncarnation | RunEnding | GivenUp | PeerAddresses | MembersChanged | StoreLost


class HostedStore:
    """torch's TCPStore in this process. It serves for as long as this object lives.

    Args:
        host: the address by which the workers reach it; on the loopback it listens there only.
        port: 0 for one that the system chooses.
    """

    def __init__(self, host: str, port: int) -> None:
        with _listen(host, port) as listener:
            self.port: int = listener.getsockname()[1]
            # torch itself would listen on all interfaces. It closes the descriptor that it is given.
            self._store = TCPStore(
                plain_address(host),
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_LOST_S),
                master_listen_fd=os.dup(listener.fileno()),
            )


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket: on the loopback if ``host`` is an address of it, else on all interfaces."""
    plain = plain_address(host)
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(LOOPBACK if plain == "localhost" else plain)
        if address.is_loopback:
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            return socket.create_server((str(address), port), family=family, backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def is_own_address(host: str) -> bool:
    """Whether an address or a name is this machine's."""
    try:
        found = socket.getaddrinfo(plain_address(host), 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)  # fails for an address of another machine
            return True
    return False


def wait_for_store(host: str, port: int) -> None:
    """Wait until something listens at the address; Ctrl-C ends it. Prints a notice if that takes long."""
    start_s, noticed = time.monotonic(), False
    while True:
        try:
            with socket.create_connection((plain_address(host), port), timeout=2.0):
                return
        except OSError as error:
            waited_s = time.monotonic() - start_s
            if waited_s > NODES_WAIT_S:
                raise click.ClickException(
                    f"the store of node 0 at {url_address(host)}:{port} was not reached in {waited_s:.0f} s: {error}. "
                    "Is the launcher of node 0 running, and may this node connect to that port?"
                ) from error
        if not noticed and time.monotonic() - start_s > NODES_NOTICE_S:
            noticed = True
            _print_notice(f"waiting for node 0 at {url_address(host)}:{port} (Ctrl-C ends it)")
        time.sleep(RETRY_S)


@dataclass(frozen=True, kw_only=True)
class Node:
    """This launcher's place among the launchers of a run."""

    number: int
    launcher: int  # counts the launchers in the order of their coming
    is_host: bool
    run_id: str


def enter_run(
    store: BoundedStore, *, is_host: bool, node_rank: int | None, settings: dict[str, Any], run_id: str
) -> Node:
    """Take this launcher's place in the run. All nodes must agree on the settings, which are those of node 0.

    ``node_rank``: None to be given the next number.
    """
    if is_host:
        store.set("launchers/run", json.dumps({"id": run_id, "settings": settings}))
    else:
        run = json.loads(_wait_for_key(store, "launchers/run"))
        run_id = run["id"]
        if run["settings"] != settings:
            differing = ", ".join(
                f"{name} {value} there and {settings.get(name)} here"
                for name, value in run["settings"].items()
                if value != settings.get(name)
            )
            raise click.ClickException(f"expected the same options as on node 0; got {differing}. Give the same ones.")
    if is_host:
        node_rank = 0
    elif node_rank is None:
        node_rank = store.add("launchers/nodes", 1)
        while store.has(f"launchers/node/{node_rank}"):  # of a node whose rank was given
            node_rank = store.add("launchers/nodes", 1)
    else:
        _claim(store, node_rank)
    launcher = store.add(STARTED, 1) - 1
    node = Node(number=node_rank, launcher=launcher, is_host=is_host, run_id=run_id)
    address = _address_towards(store.host, store.port) or store.host
    store.set(f"launchers/{node.launcher}/node", json.dumps({"number": node.number, "address": address}))
    store.set(f"launchers/node/{node.number}", str(node.launcher))
    return node


def _claim(store: BoundedStore, number: int) -> None:
    """Refuse a node's number that a living launcher has: their workers would have the same slots."""
    if store.add(f"launchers/claims/{number}", 1) == 1:
        return
    launcher = _wait_for_key(store, f"launchers/node/{number}")
    if store.has(f"launchers/{launcher}/ended"):
        return
    before = store.add(f"launchers/{launcher}/beats", 0)
    time.sleep(3 * POLL_S)
    if store.add(f"launchers/{launcher}/beats", 0) != before:
        raise click.ClickException(
            f"--node-rank {number} is in the run already. Give each node a rank of its own, or none of them any."
        )


def wait_for_nodes(store: BoundedStore, node: Node, count: int) -> None:
    """Wait until nodes 0 to ``count - 1`` are here. Prints a notice if that takes long."""
    keys = [f"launchers/node/{number}" for number in range(count)]
    start_s, noticed = time.monotonic(), False
    while missing := store.missing(keys):
        store.add(f"launchers/{node.launcher}/beats", 1)
        waited_s = time.monotonic() - start_s
        names = ", ".join(key.rpartition("/")[2] for key in missing)
        if waited_s > NODES_WAIT_S:
            raise click.ClickException(f"expected {count} nodes; node {names} did not come in {waited_s:.0f} s.")
        if not noticed and waited_s > NODES_NOTICE_S:
            noticed = True
            where = f"{url_address(store.host)}:{store.port}"
            _print_notice(
                f"waiting for the other nodes at {where}: node {names} has not come yet, {count} must (Ctrl-C ends it)"
            )
        time.sleep(RETRY_S / 2)


def _wait_for_key(store: BoundedStore, key: str) -> str:
    end_s = time.monotonic() + STORE_LOST_S
    while (value := store.get(key)) is None:  # node 0 writes it a moment after its store listens
        if time.monotonic() > end_s:
            raise click.ClickException(
                f"the store at {url_address(store.host)}:{store.port} is not that of an elastic run: {key} is missing."
            )
        time.sleep(RETRY_S / 2)
    return value


def _address_towards(host: str, port: int) -> str | None:
    """The address of this machine from which packets to ``host`` go; sends none."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(plain_address(host), port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def _print_notice(text: str) -> None:
    click.secho(text, err=True, dim=True)


class StoreReports:
    """Writes to the store and asks it, in a thread: the launcher goes on supervising while the store is out of reach.

    Calls are made in the order in which they are asked for. What they find comes as an :data:`Event` from
    :meth:`take_events`; ``notify`` is called, in the thread, when there is one.
    """

    def __init__(self, store: BoundedStore, node: Node, *, alone: bool, notify: Callable[[], None]) -> None:
        self.patience_s = STORE_LOST_S  # for how long the store may be out of reach before it is lost
        self._standby: tuple[HostedStore, BoundedStore] | None = None  # and a connection to it
        self._store = store
        self._node = node
        self._alone = alone
        self._notify = notify
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._last_change = 0  # up to this epoch they were passed on
        self._told: set[type] = set()  # news of the other launchers that were passed on already
        self._thread = threading.Thread(target=self._serve, name="gradsync-reports", daemon=True)
        self._thread.start()

    # -- called by the launcher's main thread ---------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """The events since the last call; does not block."""
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._events.get_nowait())
        return taken

    def report_death(self, uid: str, reason: str) -> None:
        """A worker's process has ended with an error, or was killed."""
        if self._standby is not None:  # workers on this side of a cut need not wait for a timeout
            with contextlib.suppress(StoreUnreachable):
                self._standby[1].set(f"dead/{uid}", reason)
        self._calls.put(lambda: self._store.set(f"dead/{uid}", reason))

    def report_exit(self, uid: str) -> None:
        """A worker's process has ended with code 0. :class:`Left` or :class:`Finished` follows."""
        self._calls.put(lambda: self._report_exit(uid))

    def ask_incarnation(self, slot: int) -> None:
        """Ask for the number of a slot's next worker. :class:`NextIncarnation` follows."""
        self._calls.put(lambda: self._put(NextIncarnation(slot, next_incarnation(self._store, slot))))

    def ask_addresses(self) -> None:
        """Ask where the other nodes are. :class:`PeerAddresses` follows."""
        self._calls.put(self._ask_addresses)

    def report_given_up(self, reason: str) -> None:
        """Tell the launchers of the other nodes that the run can't succeed."""
        self._calls.put(lambda: self._store.set("launchers/given_up", reason))

    def close(self, within_s: float) -> None:
        """Say that this launcher has ended, after everything that was asked for before, and the last news."""
        self._calls.put(self._ask_for_changes)
        self._calls.put(lambda: self._store.set(f"launchers/{self._node.launcher}/ended", "yes"))
        self._calls.put(None)
        self._thread.join(within_s)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            call: Callable[[], None] | None
            try:
                call = self._calls.get(timeout=POLL_S)
            except queue.Empty:
                call = self._ask_for_changes if self._alone else self._ask_for_news
            if call is None:
                return
            try:
                self._retry(call)
            except StoreUnreachable:
                where = f"{url_address(self._store.host)}:{self._store.port}"
                self._put(StoreLost(f"{where} does not answer"))
                return

    def _retry(self, call: Callable[[], None]) -> None:
        """Make a call, again and again while the store can't be reached: every call may be made twice."""
        start_s = time.monotonic()
        while True:
            try:
                return call()
            except StoreUnreachable:
                if time.monotonic() - start_s > self.patience_s or self._is_refused():
                    raise
            time.sleep(RETRY_S)

    def _is_refused(self) -> bool:
        """Whether the host's kernel says, twice, that nothing listens: its launcher has ended."""
        for _ in range(2):
            try:
                with socket.create_connection((plain_address(self._store.host), self._store.port), timeout=2.0):
                    return False
            except ConnectionRefusedError:
                time.sleep(RETRY_S)
            except OSError:
                return False
        return True

    def _put(self, event: Event) -> None:
        self._events.put(event)
        self._notify()

    def _report_exit(self, uid: str) -> None:
        reason = self._store.get(f"left/{uid}")
        if reason is None and self._standby is not None:  # it has left while the cable was cut
            reason = self._standby[1].get(f"left/{uid}")
        if reason is None:
            self._store.set(f"finished/{uid}", "yes")
            self._store.set("launchers/ending", "yes")
        self._store.set(f"dead/{uid}", "finished" if reason is None else f"left: {reason}")
        self._put(Finished(uid) if reason is None else Left(uid, reason))

    def _ask_addresses(self) -> None:
        self._put(PeerAddresses(tuple(found["address"] for found in self._other_launchers().values())))

    def _ask_for_news(self) -> None:
        """Ask for what the launchers of the other nodes have said, and show that this one is alive."""
        self._store.add(f"launchers/{self._node.launcher}/beats", 1)
        self._ask_for_changes()
        if self._standby is None and not self._node.is_host and self._store.has(WANTED):
            self._host_standby()
        if RunEnding not in self._told and self._store.has("launchers/ending"):
            self._told.add(RunEnding)
            self._put(RunEnding())
        if GivenUp not in self._told and (reason := self._store.get("launchers/given_up")) is not None:
            self._told.add(GivenUp)
            self._put(GivenUp(reason))

    def _ask_for_changes(self) -> None:
        """Ask what the changes of the members have cost, as a member of each new epoch has written."""
        last = int(self._store.get("changed") or 0)
        for number in range(self._last_change + 1, last + 1):
            if (text := self._store.get(f"changed/{number}")) is not None:
                self._put(MembersChanged(Change.from_dict(json.loads(text)).describe()))
        self._last_change = max(self._last_change, last)

    def _host_standby(self) -> None:
        """Hold a store of this node's own, for workers that a cut keeps from that of node 0."""
        address = _address_towards(self._store.host, self._store.port) or LOOPBACK
        hosted = HostedStore(address, 0)
        self._standby = hosted, BoundedStore(address, hosted.port)
        self._store.set(standby_key(self._node.number), json.dumps([address, hosted.port]))

    def _other_launchers(self) -> dict[int, dict[str, str]]:
        """The launchers of other nodes that have not ended, by their number."""
        found = {}
        for launcher in range(self._store.add(STARTED, 0)):
            node = self._store.get(f"launchers/{launcher}/node")
            if launcher == self._node.launcher or node is None or self._store.has(f"launchers/{launcher}/ended"):
                continue
            found[launcher] = json.loads(node)
        return found


def next_incarnation(store: BoundedStore, slot: int) -> int:
    """The number of a slot's next worker: no two of the run's workers have the same, whichever launcher starts them."""
    return store.add(f"launchers/incarnations/{slot}", 1) - 1


class OtherLaunchers:
    """The launchers of the other nodes, as the one that hosts the store sees them: they need it until they end."""

    def __init__(self, store: BoundedStore, node: Node) -> None:
        self._store = store
        self._node = node
        self._beats: dict[int, tuple[int, float]] = {}  # launcher -> its count of beats, and when that changed last

    def alive(self, silent_s: float) -> list[int]:
        """The numbers of those that have not ended, and were not silent for ``silent_s``. Blocks for milliseconds."""
        now_s, found = time.monotonic(), []
        for launcher in range(self._store.add(STARTED, 0)):
            if launcher == self._node.launcher or self._store.has(f"launchers/{launcher}/ended"):
                continue
            beats = self._store.add(f"launchers/{launcher}/beats", 0)
            before, since_s = self._beats.get(launcher, (-1, now_s))
            if beats != before:
                since_s = now_s
                self._beats[launcher] = beats, now_s
            if now_s - since_s < silent_s:
                found.append(launcher)
        return found
