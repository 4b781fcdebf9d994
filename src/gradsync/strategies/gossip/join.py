"""How a newcomer joins a run: it fetches the model from any member, trains a first step, and then sends ``hello``.

No member waits for a newcomer that starts up. It becomes a member only with its ``hello``, at the current step of the
member that receives it. ``JoinServer`` is the members' side, ``JoinClient`` the newcomer's.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradsync.errors import GradSyncError
from gradsync.messaging.endpoints import Unreachable
from gradsync.messaging.format import Message
from gradsync.strategies.gossip.barrier import Barrier
from gradsync.strategies.gossip.membership import MembershipView
from gradsync.strategies.gossip.peer_mesh import PeerMesh

SEED_PEER = -1  # stands for the id of the member at the address that a newcomer was given, which it does not know yet
FIRST_NEWCOMER_ID = 1_000_000  # beyond any rank
MAX_CONNECTING = 8  # newcomers that a member connects to at a time
MAX_PENDING_JOINS = 64  # requests that wait for the end of a step


def new_member_id() -> int:
    """A newcomer's id. It is random, because two newcomers may join at two members at the same time."""
    return FIRST_NEWCOMER_ID + secrets.randbelow(1 << 30)


def copy_model(own: Mapping[str, Tensor], values: Mapping[str, Tensor], where: str) -> None:
    """Copy a run's ``values`` into this model's ``own`` tensors; ValueError if the two models differ."""
    for name in sorted(own.keys() | values.keys()):
        mine, theirs = own.get(name), values.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            kinds = [None if t is None else (tuple(t.shape), t.dtype) for t in (mine, theirs)]
            raise ValueError(
                f"the run at {where} trains another model: {name[2:]} is {kinds[1]} there, {kinds[0]} here."
            )
    with torch.no_grad():
        for name, mine in own.items():
            mine.copy_(values[name])


class JoinServer:
    """A member's side. Its main thread serves join requests between two steps.

    A thread of its own connects to each newcomer first, so that an address where nobody answers delays no step.
    """

    def __init__(self, mesh: PeerMesh, barrier: Barrier, read_model: Callable[[], dict[str, Tensor]]) -> None:
        self.mesh = mesh
        self._barrier = barrier
        self._read_model = read_model
        self._pending: list[tuple[str, int, str]] = []  # (kind, newcomer, address)
        self._num_connecting = 0
        for kind in ("fetch", "hello"):
            mesh.on(kind, self._on_request)

    def _on_request(self, sender: int, message: Message) -> None:
        if sender < FIRST_NEWCOMER_ID:
            raise ValueError(f"a newcomer's id is at least {FIRST_NEWCOMER_ID}; got {sender}")
        with self.mesh.changed:
            if self._num_connecting >= MAX_CONNECTING or len(self._pending) >= MAX_PENDING_JOINS:
                raise ValueError("too many join requests are pending")
            self._num_connecting += 1
        request = (message.kind, sender, message.fields["address"])
        threading.Thread(target=self._connect, args=request, name="gradsync-newcomer", daemon=True).start()

    def _connect(self, kind: str, newcomer: int, address: str) -> None:
        connected = False
        try:
            known = self.mesh.membership.joined.get(newcomer, address)
            if known == address:  # else another member has this id
                self.mesh.connect(newcomer, address)
                connected = True
        except Unreachable:
            pass  # it has gone away
        finally:
            with self.mesh.changed:
                self._num_connecting -= 1
                if connected:
                    self._pending.append((kind, newcomer, address))

    def serve_pending(self, clock: int) -> None:
        """Serve pending join requests. Called where the model is complete and no step is under way."""
        with self.mesh.changed:
            pending, self._pending = self._pending, []
        for kind, newcomer, address in pending:
            with self.mesh.changed:
                if kind == "hello":
                    self.mesh.membership.joined[newcomer] = address
                view = self.mesh.membership.to_json()
            fields = {"membership": view, "clock": clock, "number": self._barrier.next_number}
            if kind == "hello":
                self.mesh.send(newcomer, Message("welcome", fields))
                self.mesh.broadcast_membership()
            else:
                self.mesh.send(newcomer, Message("state", fields, self._read_model()))


class JoinClient:
    """A newcomer's side: ``fetch`` the model, and ``join`` after the first step."""

    def __init__(self, mesh: PeerMesh, *, timeout_s: float) -> None:
        self.mesh = mesh
        self.timeout_s = timeout_s
        self._replies: dict[str, Message] = {}  # by kind
        for kind in ("state", "welcome"):
            mesh.on(kind, self._on_reply)

    def _on_reply(self, sender: int, message: Message) -> None:
        with self.mesh.changed:
            self._replies[message.kind] = message

    def fetch(self, address: str) -> dict[str, Tensor]:
        """The model of the member at ``address``. Blocks until that member is between two steps."""
        self.mesh.start("", {}, self.timeout_s)
        self.mesh.connect(SEED_PEER, address, self.timeout_s)
        state = self._request(SEED_PEER, "fetch", "state")
        if state is None:
            raise GradSyncError(
                f"{address} did not send its model in {self.timeout_s:.0f} s. Does that rank still train?"
            )
        self.mesh.run_id = str(state.fields["run"])
        with self.mesh.changed:
            self.mesh.membership.merge(MembershipView.from_json(state.fields["membership"]))
        return state.tensors

    def join(self) -> tuple[int, int]:
        """Become a member; returns the step to begin with and the number of the next barrier. Blocks.

        Asks the member that it fetched the model from; if that one is gone, the others in turn.
        """
        for seed_peer in [SEED_PEER, *self.mesh.membership.active()]:
            if seed_peer != SEED_PEER:
                with contextlib.suppress(Unreachable):
                    self.mesh.connect(seed_peer, self.mesh.membership.joined[seed_peer])
            welcome = self._request(seed_peer, "hello", "welcome")
            if welcome is not None:
                self._connect_to_all(welcome)
                return int(welcome.fields["clock"]), int(welcome.fields["number"])
        raise GradSyncError("no member of the run that this newcomer has fetched its model from is there any more.")

    def _request(self, member: int, kind: str, reply_kind: str) -> Message | None:
        if self.mesh.send(member, Message(kind, {"address": self.mesh.address})) is None:
            return None
        self.mesh.wait(lambda: reply_kind in self._replies or not self.mesh.is_connected(member), self.timeout_s)
        return self._replies.get(reply_kind)

    def _connect_to_all(self, welcome: Message) -> None:
        self.mesh.run_id = str(welcome.fields["run"])
        with self.mesh.changed:
            self.mesh.membership.merge(MembershipView.from_json(welcome.fields["membership"]))
            active = {member: self.mesh.membership.joined[member] for member in self.mesh.membership.active()}
        for member, address in active.items():
            if member != self.mesh.member_id:
                self._connect(member, address)

    def _connect(self, member: int, address: str) -> None:
        """Connect to a member; returns without a connection if the membership says that it is gone."""
        end_s = time.monotonic() + self.timeout_s
        while not self.mesh.is_connected(member):
            try:
                self.mesh.connect(member, address, 1.0)
            except Unreachable:
                if member not in self.mesh.membership.active():
                    return
                if time.monotonic() > end_s:
                    raise
