"""The peer mesh: races between messages, joins and deaths, one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.messaging.format import Message
from gradsync.strategies import Gossip
from gradsync.strategies.gossip import Ring
from gradsync.strategies.gossip.asynchronous import AsyncGossip
from gradsync.strategies.gossip.barrier import Barrier
from gradsync.strategies.gossip.peer_mesh import PeerMesh
from gradsync.strategies.gossip.replica import Replica
from gradsync.testing import run_ranks


def make_circles(members: int) -> list[PeerMesh]:
    """Meshes that have not started: the test decides what they know of each other."""
    return [PeerMesh(me, host="127.0.0.1", port=0, keys=None, silent_s=2.0) for me in range(members)]


def wait_until(ready: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 5
    while not ready():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("sender", [0, 1])
def test_newcomer_learns_of_a_death_during_its_join(sender: int) -> None:
    """Member 0 has reported a death before it knew the newcomer; member 1 admitted it before it knew of the death."""
    zero, one, newcomer = meshes = make_circles(3)
    dead = 7
    try:
        for mesh in meshes:
            mesh.membership.joined[dead] = ""
        for mesh in (zero, one):
            mesh.start("run", {other.member_id: other.address for other in (zero, one)}, 5)
        newcomer.start("run", {2: newcomer.address}, 5)
        zero.membership.dead[dead] = "killed"
        one.connect(2, newcomer.address)
        one.membership.joined[2] = newcomer.address
        meshes[sender].broadcast_membership()
        wait_until(lambda: dead in newcomer.membership.dead)
    finally:
        for mesh in meshes:
            mesh.close()


def test_reply_to_an_unknown_peer_is_queued() -> None:
    """A newcomer receives a request of its seed peer before it has a connection to that member id."""
    asker, asked = meshes = make_circles(2)
    try:
        values = [nn.Parameter(torch.full((3,), float(mesh.member_id))) for mesh in meshes]
        pairs = [AsyncGossip(meshes[me], Ring(), Replica({"w": values[me]})) for me in range(2)]
        asker.start("run", {0: asker.address, 1: asked.address}, 5)
        asked.start("run", {1: asked.address}, 5)
        pairs[0].mix()
        wait_until(lambda: float(pairs[1].replica.parts[0].x[0]) == 0.5)
        asked.connect(0, asker.address)
        pairs[0].wait_for_reply("settle", 5)
        assert float(pairs[0].replica.parts[0].x[0]) == 0.5
    finally:
        for mesh in meshes:
            mesh.close()


def test_mean_on_its_way_is_received_after_its_leader_left() -> None:
    leader, member = meshes = make_circles(2)
    found: list[float] = []
    followed = threading.Event()
    leader.on("contribution", lambda sender, message: followed.set())
    try:
        barrier = Barrier(member, timeout_s=10)
        for mesh in meshes:
            mesh.start("run", {other.member_id: other.address for other in meshes}, 5)
        thread = threading.Thread(
            target=lambda: found.append(float(barrier.mean(0, 1.0, {"x0": torch.tensor([5.0])})["x0"])), daemon=True
        )
        thread.start()
        assert followed.wait(5)
        with member.changed:
            member.membership.left[0] = 3
            member.changed.notify_all()
        thread.join(0.2)
        leader.send(1, Message("mean", {"number": 0}, {"x0": torch.tensor([7.0])}))
        thread.join(5)
        assert found == [7.0]
    finally:
        for mesh in meshes:
            mesh.close()


def test_training_starts_after_all_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a member that dies early would be gone before a slow one has connected to it."""
    connect = PeerMesh.connect

    def slow_connect(self: PeerMesh, member: int, address: str, timeout_s: float = 4.0) -> None:
        time.sleep(0.3 * (self.member_id == 0))
        connect(self, member, address, timeout_s)

    monkeypatch.setattr(PeerMesh, "connect", slow_connect)

    def run(comm: Communicator) -> list[int]:
        model, strategy = nn.Linear(2, 1), Gossip(asynchronous=True)
        sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, comm=comm)
        if comm.rank == 1:
            strategy.mesh.kill()
            return []
        with sync:
            wait_until(lambda: 1 in strategy.mesh.membership.dead)
            return strategy.mesh.membership.active()

    assert run_ranks(2, run, timeout_s=5) == [[0], []]
