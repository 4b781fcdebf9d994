"""The ranks that gossip, as one of them sees it: a line to each, a thread that listens, and a book of who is there.

Nobody is needed by all: there is no server, no collective and no first rank. Each has a line to each; when a process
dies its lines break, and whoever sees it tells the rest.

[Note: the last word first] A member is taken for dead when its own line to this one is broken too, and all that came
by it has been heard: what it said last (a mean; that it leaves in order) is then known. Others may have told before
that it is gone: then its line still stands, and who waits for its last word waits until ``has_line`` says no.

[Note: all hear of all] Two things may become known at two ends at once: one member dies, and another is let in by
somebody who does not know that yet. Whoever tells of the death then leaves the newcomer out, and the newcomer would
try to reach the dead. So a member that hears of a newcomer tells it all that it knows; and one that hears news from
somebody who does not know of a newcomer passes them on to that one.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable

from gradsync.comm.curve import ClientKeys, KeyPair, ServerKeys
from gradsync.comm.endpoints import ConnectionLost, Line, Listener, Sent, Unreachable
from gradsync.comm.messages import Message
from gradsync.errors import GradSyncError
from gradsync.gossip.book import Book

log = logging.getLogger("gradsync")

POLL_S = 0.02  # how often broken lines are looked for
BEAT_S = 0.25  # how often each says how far it is
GRACE_S = 3.0  # if only the line to a member is broken, and its own is not: see [Note: the last word first]
CONNECT_S = 4.0  # what a newcomer's line may take: nothing else is heard meanwhile

Handler = Callable[[int, Message], None]

KINDS = {
    *("mail", "beat", "news", "idle"),  # of all
    *("part", "mean", "call", "settled"),  # of those who settle
    *("ask", "answer"),  # of those who average in pairs
    *("fetch", "state", "hello", "welcome"),  # of newcomers
}


class Circle:
    """One member's view. ``changed`` guards what is heard; the thread notifies it after every message and loss.

    Messages are handled by the thread, in the order in which one member sent them; a handler that has to wait for
    anything would stop all hearing.
    """

    def __init__(self, me: int, *, host: str, port: int, keys: KeyPair | None, silent_s: float) -> None:
        self.me = me
        self.run = ""  # a word that all members share: whoever says another one belongs to another run
        self.book = Book()
        self.changed = threading.Condition(threading.RLock())
        self.begun = 0  # steps that this member has begun to mix; what it tells the others
        self.clocks: dict[int, int] = {}  # and what each of them has told
        self.num_bytes = 0  # of values, sent
        self.malformed = 0
        self._keys = None if keys is None else ClientKeys(keys, keys.public)
        guards = None if keys is None else ServerKeys(keys, frozenset({keys.public}))
        self._silent_s = silent_s
        self._listener = Listener(KINDS, host=host, port=port, keys=guards, silent_s=silent_s)
        self.address = self._listener.address
        self._lines: dict[int, _Guarded] = {}
        self._early: dict[int, list[Message]] = {}  # answers to those whom no line leads to yet
        self._broken: dict[int, float] = {}  # since when
        self._silent: set[int] = set()  # whose own line is broken too
        self._heard_by: dict[int, bytes] = {}  # the line that each has to this one
        self._handlers: dict[str, Handler] = {"beat": self._hear_beat, "news": self._hear_news}
        self._failure: BaseException | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="gradsync-gossip", daemon=True)
        self._pid = os.getpid()
        # A script that ends without close() has left in order all the same; a forked child of it has not.
        self._at_exit = functools.partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)

    def start(self, run: str, members: dict[int, str], timeout_s: float) -> None:
        """Connect to all members and begin to listen. Blocks until every line stands."""
        self.run = run
        self.book.joined.update(members)
        for member, address in members.items():
            if member != self.me:
                self.connect(member, address, timeout_s)
        if not self._thread.is_alive():
            self._thread.start()

    def on(self, kind: str, handler: Handler) -> None:
        """Have the thread call ``handler(sender, message)`` for messages of a kind."""
        self._handlers[kind] = handler

    # -- saying ---------------------------------------------------------------------------------------------------

    def connect(self, member: int, address: str, timeout_s: float = CONNECT_S) -> None:
        """Make a line to a member, unless there is one."""
        if member not in self._lines:
            line = Line(address, {"none"}, keys=self._keys, timeout_s=timeout_s, silent_s=self._silent_s)
            with self.changed:
                self._lines[member] = _Guarded(line)
                for message in self._early.pop(member, []):
                    self.send(member, message)

    def has_line(self, member: int) -> bool:
        """Whether a line to a member stands, or it may at least have said something that is not heard yet."""
        return member in self._lines

    def send(self, member: int, message: Message) -> Sent | None:
        """Hand a message over, from any thread; None if the member is gone. Its tensors stay as they are until sent."""
        line = self._lines.get(member)
        message.fields |= {"from": self.me, "run": self.run}
        sent = None if line is None else line.send(message)
        if sent is not None:
            self.num_bytes += message.num_bytes
        return sent

    def answer(self, member: int, message: Message) -> None:
        """Send, or keep until there is a line. Who is new may ask before this member knows of it; and if this one is
        new itself, before it has got to know the others.
        """
        with self.changed:
            if member not in self._lines and member not in self.book.dead and member not in self.book.left:
                self._early.setdefault(member, []).append(message)
                return
        self.send(member, message)

    def tell(self, kind: str, fields: dict[str, object], to: Iterable[int] | None = None) -> None:
        """Send a few words to all who are there, or to some."""
        with self.changed:
            members = self.book.present() if to is None else list(to)
        for member in members:
            if member != self.me:
                self.send(member, Message(kind, dict(fields)))

    def spread_news(self) -> None:
        """Tell all what the book says: before anything that belongs to a newer epoch."""
        with self.changed:
            news = self.book.to_json()
        self.tell("news", {"book": news})

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until something that is heard makes ``ready()`` true; False if that takes longer."""
        end_s = time.monotonic() + timeout_s
        with self.changed:
            while True:
                self.check()
                if ready():
                    return True
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return False
                self.changed.wait(min(left_s, 1.0))  # a failure of the thread is seen within a second

    def check(self) -> None:
        """Raise if this member can't go on: its thread has failed, or the others believe it dead."""
        if self._failure is not None:
            raise GradSyncError(f"the thread that listens to peers has failed: {self._failure}") from self._failure
        if self.me in self.book.dead:
            raise GradSyncError(
                f"the others gave this rank up: {self.book.dead[self.me]}. They go on without it. "
                "Start it again as a newcomer: gossip(join=ADDRESS)."
            )

    # -- the thread -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        next_beat_s = 0.0
        try:
            while not self._closing:
                came = self._listener.receive(POLL_S)
                if came is not None:
                    self._hear(*came)
                self._look_for_broken_lines(heard_all=came is None)
                now_s = time.monotonic()
                if now_s >= next_beat_s:
                    next_beat_s = now_s + BEAT_S
                    self.beat()
        except BaseException as error:
            with self.changed:
                self._failure = error
                self.changed.notify_all()

    def _hear(self, line: bytes, message: Message) -> None:
        try:
            sender, stranger = int(message.fields["from"]), message.fields["run"] != self.run
            self._heard_by[sender] = line
            if stranger and message.kind not in ("fetch", "hello", "state", "welcome"):
                return  # of another run, or one that was given up there
            handler = self._handlers.get(message.kind)
            if handler is not None:
                handler(sender, message)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.malformed += 1
        with self.changed:
            self.changed.notify_all()

    def beat(self, to: Iterable[int] | None = None) -> None:
        """Say how far this member is."""
        self.tell("beat", {"begun": self.begun}, to)

    def _hear_beat(self, sender: int, message: Message) -> None:
        with self.changed:
            self.clocks[sender] = max(self.clocks.get(sender, 0), int(message.fields["begun"]))

    def _hear_news(self, sender: int, message: Message) -> None:
        news = Book.from_json(message.fields["book"])
        known = set(news.joined)
        fresh = {member for member in news.present() if member not in self.book.joined and member != self.me}
        # First the line, then the book: whoever is in the book is written to.
        for member in sorted(fresh):
            try:
                self.connect(member, news.joined[member])
            except Unreachable as error:
                news.dead[member] = f"it can't be reached: {error}"
        with self.changed:
            learnt = self.book.add(news)
            present = set(self.book.present())
            for member in self._early.keys() & (self.book.joined.keys() - present):
                del self._early[member]  # it died before there was a line
            unaware = present & fresh | (present - known if learnt else set())  # see [Note: all hear of all]
            book = self.book.to_json()
        self.tell("news", {"book": book}, unaware)

    def _look_for_broken_lines(self, *, heard_all: bool) -> None:
        now_s = time.monotonic()
        for member, line in list(self._lines.items()):
            if not line.is_lost() and member not in self.book.dead:
                continue
            since_s = self._broken.setdefault(member, now_s)
            silent = member in self._silent and heard_all  # nothing can come any more, and nothing is left
            own = self._heard_by.get(member)
            if own is not None and not self._listener.is_there(own):
                self._silent.add(member)
            if (member in self.book.left and own is None) or silent or now_s - since_s >= GRACE_S:
                self._lines.pop(member)
                self._broken.pop(member)
                self._heard_by.pop(member, None)
                self._silent.discard(member)
                line.close()
                with self.changed:
                    self._early.pop(member, None)
                    self.changed.notify_all()
                if member not in self.book.left:
                    self._bury(member, "its process is gone, or its host does not answer")

    def _bury(self, member: int, reason: str) -> None:
        with self.changed:
            if member not in self.book.joined or member in self.book.dead:
                return
            self.book.dead[member] = reason
            self.changed.notify_all()
        log.warning("gossip: rank %s is lost (%s); the others go on", member, reason)
        self.spread_news()

    # -- the end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave in order: tell all which step is the first without this member. Does not wait for anybody."""
        if not self._closing and self._pid == os.getpid():
            with self.changed:
                self.book.left.setdefault(self.me, self.begun)
            self.spread_news()
            self.die()

    def die(self) -> None:
        """End without a word, as a killed process does."""
        self._closing = True
        atexit.unregister(self._at_exit)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        for line in self._lines.values():
            line.close()
        self._lines = {}
        self._listener.close()


def _leave(reference: weakref.ref[Circle]) -> None:
    circle = reference()
    if circle is not None:
        circle.close()


class _Guarded:
    """A line that several threads send by, one at a time."""

    def __init__(self, line: Line) -> None:
        self._line: Line | None = line
        self._lock = threading.Lock()

    def send(self, message: Message) -> Sent | None:
        with self._lock:
            try:
                return None if self._line is None else self._line.send(message)
            except ConnectionLost:
                return None

    def is_lost(self) -> bool:
        with self._lock:
            return self._line is None or self._line.lost

    def close(self) -> None:
        with self._lock:
            line, self._line = self._line, None
            if line is not None:
                line.close()
