"""Asynchronous gossip, after AD-PSGD: after each step a member averages with one peer, and no member waits for another.

[Note: pairwise averaging keeps the sum] A member sends its values a in a request. The peer computes d = (a - x) / 2,
adds d to its own x, and replies with d; the first member subtracts d when the reply comes. Whatever happened to its
values in between, the sum over the two members stays the same. No lock is held while a message travels, so there is no
deadlock. If two members send requests to each other at the same time, both would move all the way, and only swap their
values. So a member that itself waits for a reply uses d = (a - x) / 4: two such quarters make the half.

The model's parameters are never touched while a backward may read them. Averaging happens in a copy, x. After each step
the optimizer's changes are added to x, and x is copied to the parameters.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gradsync.errors import PeerLost
from gradsync.messaging.format import Message
from gradsync.strategies.gossip.mixing import ConsensusDistance
from gradsync.strategies.gossip.peer_mesh import SLACK_S, PeerMesh
from gradsync.strategies.gossip.replica import Replica, mean_square
from gradsync.strategies.gossip.topology import Topology


class AsyncGossip:
    """One member's values. The mesh's receive thread averages them with one peer at a time."""

    def __init__(self, mesh: PeerMesh, topology: Topology, replica: Replica) -> None:
        self.mesh = mesh
        self.topology = topology
        self.replica = replica
        self.clock = 0
        self.distance = ConsensusDistance()
        self.staleness: Counter[int] = Counter()  # by number of averagings while a gradient was computed
        self.unanswered = 0  # steps that sent no request, because the last one had no reply yet
        self._lock = threading.Lock()  # guards the replica's x
        self._base: list[Tensor] = []  # the parameters as last written, to find what the optimizer has changed
        self._asked_peer: int | None = None  # the peer whose reply is outstanding
        self._since_step = 0  # averagings since the last step
        self._paused = False
        self.rebase()
        mesh.on("average_request", self._on_request)
        mesh.on("average_reply", self._on_reply)

    @torch.no_grad()
    def rebase(self) -> None:
        """Note that the parameters are equal to x now."""
        self._base = [part.x.to(part.dtype, copy=True) for part in self.replica.parts]

    @torch.no_grad()
    def refresh(self) -> None:
        """Add the optimizer's changes to x, and copy x to the parameters."""
        with self._lock:
            for part, base in zip(self.replica.parts, self._base, strict=True):
                now = part.read(torch.empty_like(base))
                part.x.add_(now.to(part.x.dtype).sub_(base))
            self.replica.write_model()
            self.rebase()
            self.staleness[self._since_step] += 1
            self._since_step = 0

    def mix(self) -> None:
        """Copy what was averaged since the last step to the model, and ask the next peer. Never blocks."""
        with self.mesh.changed:
            self.mesh.check()
        self.refresh()
        peer = self.peer()
        self.clock += 1
        with self.mesh.changed:
            self.mesh.steps_begun = self.clock
            active = self.mesh.membership.active()
            if self._asked_peer is not None and self._asked_peer not in active:
                self._asked_peer = None  # it died before it replied
            if self._asked_peer is not None:
                self.unanswered += 1
                return
            if peer is None:
                return
            self._asked_peer = peer
        # The next step replaces these tensors and does not write to them: they may still be on their way then.
        tensors = {str(at): base for at, base in enumerate(self._base)}
        if self.mesh.send(peer, Message("average_request", {"clock": self.clock}, tensors)) is None:
            self._asked_peer = None

    def peer(self) -> int | None:
        """The peer to average with at this step."""
        with self.mesh.changed:
            members = self.mesh.membership.active()
        if self.mesh.member_id not in members:
            return None
        place = members.index(self.mesh.member_id)
        found = self.topology.targets(place, len(members), self.clock)
        return members[found[self.clock % len(found)]] if found else None

    def restart(self) -> None:
        """Set x to the model's current parameters."""
        with self._lock:
            self.replica.reset()
            self.rebase()

    def set_replica(self, replica: Replica) -> None:
        """Go on with other parameters of the same model."""
        with self._lock:
            self.replica = replica
            self.rebase()

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"values": self.replica.values(), "weight": self.replica.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self.replica.load(state["values"], float(state["weight"]))
            self.rebase()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context no peer averages with this member: the reply to a request says fraction 0."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def wait_for_reply(self, what: str, timeout_s: float) -> None:
        """Block until this member has no outstanding request. ``what`` names the caller in errors."""
        asked = self._asked_peer
        if not self.mesh.wait(lambda: not self._awaits_reply(), timeout_s + SLACK_S):
            assert asked is not None
            reason = "it is alive, but has not answered this rank in time"
            raise PeerLost(rank=asked, reason=reason, after_s=timeout_s, during=what)

    def _awaits_reply(self) -> bool:
        return self._asked_peer is not None and self._asked_peer in self.mesh.membership.active()

    # -- the thread -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _on_request(self, sender: int, message: Message) -> None:
        fraction = 0.25 if self._asked_peer is not None else 0.5  # see [Note: pairwise averaging keeps the sum]
        reply: dict[str, Tensor] = {}
        measured = []
        with self._lock:
            if self._paused or not self._fits(message):  # parameters were frozen or unfrozen there, and not yet here
                self.mesh.reply(sender, Message("average_reply", {"clock": self.clock, "fraction": 0.0}))
                return
            for at, part in enumerate(self.replica.parts):
                theirs = message.tensors[str(at)].to(part.device)
                measured.append((*mean_square(part.x, theirs), part.x.numel()))
                difference = (theirs - part.x).mul_(fraction).to(part.dtype)
                part.x.add_(difference)
                reply[str(at)] = difference
            self._since_step += 1
        self.distance.update(measured)
        self._note_clock(sender, message)
        self.mesh.reply(sender, Message("average_reply", {"clock": self.clock, "fraction": fraction}, reply))

    @torch.no_grad()
    def _on_reply(self, sender: int, message: Message) -> None:
        measured = []
        fraction = float(message.fields["fraction"])
        with self._lock:
            fits = fraction > 0 and self._fits(message)
            for at, part in enumerate(self.replica.parts if fits else []):
                difference = message.tensors[str(at)].to(part.device)
                part.x.sub_(difference)
                whole = mean_square(difference, difference)[1] / fraction**2  # it is a fraction of the difference
                measured.append((whole, mean_square(part.x, part.x)[1], part.x.numel()))
            self._since_step += fits
        self.distance.update(measured)
        self._note_clock(sender, message)
        with self.mesh.changed:
            if self._asked_peer == sender:
                self._asked_peer = None

    def _fits(self, message: Message) -> bool:
        """Whether the message holds values of the same parameters. Checked before any of them is added."""
        expected = {str(at): (part.x.shape, part.dtype) for at, part in enumerate(self.replica.parts)}
        return expected == {name: (tensor.shape, tensor.dtype) for name, tensor in message.tensors.items()}

    def _note_clock(self, sender: int, message: Message) -> None:
        self.mesh.note_clock(sender, message.fields["clock"])

    def stats(self) -> dict[str, Any]:
        """How stale the gradients were: the number of averagings that happened while each was computed."""
        total = sum(self.staleness.values())
        mean = sum(late * count for late, count in self.staleness.items()) / total if total else math.nan
        return {"histogram": dict(sorted(self.staleness.items())), "mean": mean, "max": max(self.staleness, default=0)}
