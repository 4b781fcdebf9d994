"""One member's side of the full mesh of gossip peers: connections, the receive thread, membership, failure detection.

The mesh has no server, uses no collective, and treats no rank specially. Every member has a connection to every other
one, on which it only sends; it receives on a listener of its own. When a process dies its connections break, and
whichever member notices tells the rest. The other modules of this folder register handlers for their message kinds.

[Note: receive before declaring dead] A member is declared dead only when its inbound connection (the one that it opened
to this member) is broken too, and everything that arrived on it has been handled. Its last messages (a mean; that it
leaves in order) are then known. Other members may have reported earlier that it is gone. Its connection then still
stands, and code that needs its last message waits until ``is_connected`` returns False.

[Note: membership reaches every member] Two changes may become known at two members at once: one member dies, while
another member, which does not know of the death yet, admits a newcomer. The report of the death then does not reach the
newcomer, which would try to connect to the dead member. So a member that learns of a newcomer sends it everything that
it knows; and a member that receives a membership view which lacks some newcomer forwards it to that newcomer.

[Note: stopped and late] A stopped process keeps its connections, so it is found by time. Each member sends a heartbeat
every ``HEARTBEAT_S``; a member that is silent for ``timeout_s`` is lost. The heartbeat also says whether the member is
waiting. A member that neither waits nor begins a step for ``timeout_s``, while another waits for it, is late, and is
lost too. A member that was stopped itself has received nothing in the meantime: it counts only the time during which
it was listening. The others keep their connections to it open, so that it learns from them that they gave it up.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable

from gradsync.errors import GradSyncError
from gradsync.messaging.endpoints import ClientConnection, ConnectionLost, Listener, PendingSend, Unreachable
from gradsync.messaging.format import Message
from gradsync.messaging.keys import ClientKeys, KeyPair, ServerKeys, shared_keys
from gradsync.messaging.sockets import RateLimitedLog
from gradsync.strategies.gossip.membership import MembershipView
from gradsync.strategies.gossip.messages import JOIN_KINDS, KINDS

log = logging.getLogger("gradsync")

POLL_S = 0.02  # how often the thread looks for broken connections
HEARTBEAT_S = 0.25
GRACE_S = 3.0  # if only this member's connection to a peer is broken: see [Note: receive before declaring dead]
CONNECT_S = 4.0  # limit for connecting to a newcomer: the thread receives nothing meanwhile
STOPPED_S = 2.0  # longer between two looks at the clock => this process was stopped: see [Note: stopped and late]
SLACK_S = 2.0  # added to timeout_s in waits, so that the thread can find the silent member first

Handler = Callable[[int, Message], None]

MAX_QUEUED_REPLIES = 16  # for a peer without a connection, and peers that have some


class PeerMesh:
    """One member's connections to all others, and what it knows of them.

    ``changed`` guards all received state; the thread notifies it after every message and every loss. The thread handles
    messages in the order in which one member sent them. A handler must not block: no other message is received
    meanwhile.
    """

    def __init__(
        self, member_id: int, *, host: str, port: int, keys: KeyPair | None, silent_s: float, timeout_s: float = 300.0
    ) -> None:
        self.member_id = member_id
        self.timeout_s = timeout_s
        self.run_id = ""  # the same on all members; messages with another one are dropped
        self.membership = MembershipView()
        self.changed = threading.Condition(threading.RLock())
        self.steps_begun = 0  # steps that this member has begun to mix; heartbeats carry it
        self.clocks: dict[int, int] = {}  # by member: the steps that it has begun, as last received
        self.num_bytes = 0  # of tensors, sent so far
        self._num_invalid = 0  # messages that matched their schema and were refused by their handler
        guards: ServerKeys | None = None
        self._keys: ClientKeys | None = None
        if keys is not None:
            guards, self._keys = shared_keys(keys)
        self._silent_s = silent_s
        self._listener = Listener(KINDS, host=host, port=port, keys=guards, silent_s=silent_s)
        self.address = self._listener.address
        self._drop_log = RateLimitedLog(f"rank {member_id}")
        self._connections: dict[int, _LockedConnection] = {}
        self._queued_replies: dict[int, list[Message]] = {}  # by peer: replies that wait for a connection to it
        self._broken_since_s: dict[int, float] = {}  # by peer: when the connection to it was found broken
        self._inbound_closed: set[int] = set()  # peers whose connection to this member is broken too
        self._inbound: dict[int, bytes] = {}  # by peer: the listener's identity of its connection to this member
        self._expelled: dict[int, _LockedConnection] = {}  # to members that were given up and are still connected
        self._num_waits = 0  # calls of wait() that block now, in any thread
        self._listened_s = 0.0  # for how long the thread has listened; see [Note: stopped and late]
        self._last_heard_s: dict[int, float] = {}  # by peer: when its last message came, as listened time
        self._progress: Counter[int] = Counter()  # by peer: how often it was seen to wait or to begin a step
        self._handlers: dict[str, Handler] = {"heartbeat": self._on_heartbeat, "membership": self._on_membership}
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._receive_loop, name="gradsync-gossip", daemon=True)
        self._pid = os.getpid()
        # A script that ends without close() leaves in order too; the exit of a forked child must not count as leaving.
        self._at_exit = functools.partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def malformed(self) -> int:
        """How many received messages were dropped."""
        return self._listener.malformed + self._num_invalid

    def start(self, run_id: str, members: dict[int, str], timeout_s: float) -> None:
        """Connect to all members and start the thread. Blocks until every connection is established."""
        self.run_id = run_id
        self.membership.joined.update(members)
        for member, address in members.items():
            if member != self.member_id:
                self.connect(member, address, timeout_s)
        if not self._thread.is_alive():
            self._thread.start()

    def on(self, kind: str, handler: Handler) -> None:
        """Have the thread call ``handler(sender, message)`` for messages of a kind."""
        self._handlers[kind] = handler

    # -- sending --------------------------------------------------------------------------------------------------

    def connect(self, member: int, address: str, timeout_s: float = CONNECT_S) -> None:
        """Connect to a member, unless this has been done. Sends the replies that were queued for it."""
        if member not in self._connections:
            connection = ClientConnection(
                address, {"none"}, keys=self._keys, timeout_s=timeout_s, silent_s=self._silent_s
            )
            with self.changed:
                if member in self._connections or self._closing:  # another thread was quicker, or this member leaves
                    connection.close()
                    return
                self._connections[member] = _LockedConnection(connection)
                for message in self._queued_replies.pop(member, []):
                    self.send(member, message)

    def is_connected(self, member: int) -> bool:
        """Whether there is a connection to a member, or messages of it may still be unread."""
        return member in self._connections

    def send(self, member: int, message: Message) -> PendingSend | None:
        """Send from any thread; returns None if the member is gone. The caller leaves the tensors alone until sent."""
        connection = self._connections.get(member)
        message.fields |= {"from": self.member_id, "run": self.run_id}
        sent = None if connection is None else connection.send(message)
        if sent is not None:
            self.num_bytes += message.num_bytes
        return sent

    def reply(self, member: int, message: Message) -> None:
        """Send, or queue until there is a connection.

        A newcomer may send a request before this member knows of it; and this member may receive one before it has
        connected to the others, if it is the newcomer.
        """
        with self.changed:
            if (
                member not in self._connections
                and member not in self.membership.dead
                and member not in self.membership.left
            ):
                waiting = self._queued_replies.setdefault(member, [])
                # Bounded: an unknown peer may keep sending requests and never join.
                if len(waiting) < MAX_QUEUED_REPLIES and len(self._queued_replies) <= MAX_QUEUED_REPLIES:
                    waiting.append(message)
                return
        self.send(member, message)

    def broadcast(self, kind: str, fields: dict[str, object], to: Iterable[int] | None = None) -> None:
        """Send a message without tensors to all active members, or to those in ``to``."""
        with self.changed:
            members = self.membership.active() if to is None else list(to)
        for member in members:
            if member != self.member_id:
                self.send(member, Message(kind, dict(fields)))

    def broadcast_membership(self) -> None:
        """Send this member's view to all. Must be called before anything is sent that belongs to a newer epoch."""
        with self.changed:
            view = self.membership.to_json()
        self.broadcast("membership", {"membership": view})

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Block until received messages make ``ready()`` true; returns False after ``timeout_s``."""
        left_s, before_s = timeout_s, time.monotonic()
        with self.changed:
            self._num_waits += 1
            try:
                while True:
                    self.check()
                    if ready():
                        return True
                    if left_s <= 0:
                        return False
                    self.changed.wait(min(left_s, 1.0))  # so a failure of the thread is noticed within a second
                    now_s = time.monotonic()
                    left_s -= min(now_s - before_s, STOPPED_S)
                    before_s = now_s
            finally:
                self._num_waits -= 1

    def progress(self) -> Counter[int]:
        """How often each member was seen to wait or to begin a step: to be passed to ``stalled`` later."""
        with self.changed:
            return Counter(self._progress)

    def stalled(self, members: Iterable[int], since: Counter[int]) -> list[int]:
        """Those of ``members`` that have neither waited nor begun a step since ``progress()`` returned ``since``."""
        with self.changed:
            return [member for member in members if self._progress[member] == since[member]]

    def note_clock(self, member: int, clock: int) -> None:
        """Record that a member has begun ``clock`` steps."""
        with self.changed:
            if clock > self.clocks.get(member, 0):
                self.clocks[member] = clock
                self._progress[member] += 1

    def check(self) -> None:
        """Raise if this member can't go on: its thread has failed, or the others have declared it dead."""
        if self._failure is not None:
            raise GradSyncError(f"the receive thread of gossip has failed: {self._failure}") from self._failure
        if self.member_id in self.membership.dead:
            raise GradSyncError(
                f"the others gave this rank up: {self.membership.dead[self.member_id]}. They go on without it. "
                "Start it again as a newcomer: gossip(join=ADDRESS)."
            )

    # -- the thread -----------------------------------------------------------------------------------------------

    def _receive_loop(self) -> None:
        next_heartbeat_s, before_s = 0.0, time.monotonic()
        try:
            while not self._closing:
                received = self._listener.receive(POLL_S)
                if received is not None:
                    self._handle(*received)
                self._check_connections(queue_is_empty=received is None)
                now_s = time.monotonic()
                self._listened_s += min(now_s - before_s, STOPPED_S)
                before_s = now_s
                if now_s >= next_heartbeat_s:
                    next_heartbeat_s = now_s + HEARTBEAT_S
                    self.send_heartbeat()
                    self._check_heartbeats()
        except BaseException as error:
            with self.changed:
                self._failure = error
                self.changed.notify_all()

    def _handle(self, connection: bytes, message: Message) -> None:
        sender = int(message.fields["from"])
        if message.kind not in JOIN_KINDS:
            if message.fields["run"] != self.run_id:
                return  # of another run; or the sender has given this run up
            if sender in self._expelled:  # the sender does not know yet that it was given up
                self._notify_expelled(sender)
                return
            if self._is_impostor(sender, connection):
                self._drop(f"a {message.kind!r} in the name of rank {sender}, which has a connection of its own")
                return
            self._inbound[sender] = connection
            self._last_heard_s[sender] = self._listened_s
        try:
            handler = self._handlers.get(message.kind)
            if handler is not None:
                handler(sender, message)
        except Exception as error:  # one member's bad message must not stop this thread
            self._drop(f"a {message.kind!r} of rank {sender} can't be handled: {error!r}")
        with self.changed:
            self.changed.notify_all()

    def _is_impostor(self, sender: int, connection: bytes) -> bool:
        """Whether a message names a sender that has another connection to this member, which still stands."""
        own = self._inbound.get(sender)
        return sender == self.member_id or (own not in (None, connection) and self._listener.is_connected(own or b""))

    def _drop(self, why: str) -> None:
        self._num_invalid += 1
        self._drop_log.record(why)

    def send_heartbeat(self, to: Iterable[int] | None = None) -> None:
        """Send how many steps this member has begun, and whether it waits."""
        self.broadcast("heartbeat", {"steps_begun": self.steps_begun, "waits": self._num_waits > 0}, to)

    def _on_heartbeat(self, sender: int, message: Message) -> None:
        self.note_clock(sender, message.fields["steps_begun"])
        if message.fields["waits"]:
            with self.changed:
                self._progress[sender] += 1

    def _on_membership(self, sender: int, message: Message) -> None:
        received = MembershipView.from_json(message.fields["membership"])
        known = set(received.joined)
        new = {member for member in received.active() if member not in self.membership.joined} - {self.member_id}
        # Connect before adding to the membership: other threads send to whatever the membership lists.
        for member in sorted(new):
            try:
                self.connect(member, received.joined[member])
            except Unreachable as error:
                received.dead[member] = f"it can't be reached: {error}"
        with self.changed:
            has_changed = self.membership.merge(received)
            active = set(self.membership.active())
            for member in self._queued_replies.keys() & (self.membership.joined.keys() - active):
                del self._queued_replies[member]  # it died before there was a connection
            # See [Note: membership reaches every member].
            unaware = active & new | (active - known if has_changed else set())
            view = self.membership.to_json()
        self.broadcast("membership", {"membership": view}, unaware)

    def _check_connections(self, *, queue_is_empty: bool) -> None:
        """Drop broken connections and declare their members dead: see [Note: receive before declaring dead]."""
        now_s = time.monotonic()
        for member, connection in list(self._connections.items()):
            if not connection.is_lost() and member not in self.membership.dead:
                continue
            since_s = self._broken_since_s.setdefault(member, now_s)
            all_received = member in self._inbound_closed and queue_is_empty
            inbound = self._inbound.get(member)
            if inbound is not None and not self._listener.is_connected(inbound):
                self._inbound_closed.add(member)
            has_left = member in self.membership.left and inbound is None
            if has_left or all_received or now_s - since_s >= GRACE_S:
                self._connections.pop(member)
                self._broken_since_s.pop(member)
                self._inbound.pop(member, None)
                self._inbound_closed.discard(member)
                if connection.is_lost():
                    connection.close()
                else:
                    self._expelled[member] = connection
                    self._notify_expelled(member)
                with self.changed:
                    self._queued_replies.pop(member, None)
                    self.changed.notify_all()
                if member not in self.membership.left:
                    self.mark_dead(member, "its process is gone, or its host does not answer")
        for member, connection in list(self._expelled.items()):
            if connection.is_lost():
                self._expelled.pop(member).close()

    def _check_heartbeats(self) -> None:
        with self.changed:
            members = self.membership.active()
        if self.member_id not in members:
            return  # this newcomer is not a member yet: nobody sends it heartbeats
        for member in members:
            silent_s = self._listened_s - self._last_heard_s.setdefault(member, self._listened_s)
            if member != self.member_id and silent_s > self.timeout_s:
                self.mark_dead(member, f"no sign of life for {self.timeout_s:.0f} s (stopped, or its host hangs)")

    def _notify_expelled(self, member: int) -> None:
        with self.changed:
            view = self.membership.to_json()
        fields = {"membership": view, "from": self.member_id, "run": self.run_id}
        self._expelled[member].send(Message("membership", fields))

    def mark_dead(self, member: int, reason: str) -> None:
        """Declare a member dead and tell all others, and the member itself. Any thread may call this."""
        with self.changed:
            if member not in self.membership.joined or member in self.membership.dead:
                return
            self.membership.dead[member] = reason
            self.changed.notify_all()
        log.warning("gossip: rank %s is lost (%s); the others go on", member, reason)
        self.broadcast_membership()
        self.broadcast("membership", {"membership": self.membership.to_json()}, [member])

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave in order: tell all which step is the first without this member. Waits for no peer."""
        if not self._closing and self._pid == os.getpid():
            with self.changed:
                self.membership.left.setdefault(self.member_id, self.steps_begun)
            self.broadcast_membership()
            self.kill()

    def kill(self) -> None:
        """Stop without telling the others, as a killed process does."""
        self._closing = True
        atexit.unregister(self._at_exit)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        for connection in [*self._connections.values(), *self._expelled.values()]:
            connection.close()
        self._connections, self._expelled = {}, {}
        self._listener.close()


def _leave(reference: weakref.ref[PeerMesh]) -> None:
    mesh = reference()
    if mesh is not None:
        mesh.close()


class _LockedConnection:
    """A connection on which several threads send, one at a time."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection: ClientConnection | None = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> PendingSend | None:
        with self._lock:
            try:
                return None if self._connection is None else self._connection.send(message)
            except ConnectionLost:
                return None

    def is_lost(self) -> bool:
        with self._lock:
            return self._connection is None or self._connection.lost

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()
