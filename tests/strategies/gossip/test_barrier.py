"""The barrier: ranks without data go on mixing, and the exact mean survives the death of its leader."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.comm import Communicator
from gradsync.messaging.format import Message
from gradsync.strategies.gossip.barrier import Barrier
from gradsync.strategies.gossip.peer_mesh import PeerMesh
from gradsync.testing import run_ranks
from tests.strategies.gossip.trial import Trial


@pytest.mark.parametrize("buffers", ["mean", "broadcast", "none"])
def test_settle_gives_all_the_exact_mean(buffers: str) -> None:
    def run(comm: Communicator) -> tuple[float, float, float]:
        model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "gossip(topology=ring)", comm=comm, buffers=buffers) as sync:  # type: ignore[arg-type]
            with torch.no_grad():
                model[0].weight.fill_(comm.rank)
                model[1].running_mean.fill_(comm.rank)
            sync.settle()
            distance = sync.stats()["consensus"]["at_settle"]
            return float(model[0].weight.detach()[0]), float(model[1].running_mean[0]), distance

    outcomes = run_ranks(3, run)
    expected = {"mean": [1.0] * 3, "broadcast": [0.0] * 3, "none": [0.0, 1.0, 2.0]}
    assert [weight for weight, _, _ in outcomes] == [1.0] * 3
    assert [mean for _, mean, _ in outcomes] == expected[buffers]
    assert outcomes[0][2] > 0.0
    assert outcomes[1][2] == 0.0


@pytest.mark.parametrize("strategy", ["gossip", "gossip(topology=ring)", "gossip(asynchronous=True)"])
def test_join_mixes_with_ranks_that_have_more_batches(strategy: str) -> None:
    def run(comm: Communicator) -> tuple[float, int]:
        trial = Trial(comm, strategy, torch.tensor([float(comm.rank)]).double())
        with trial.sync:
            for _ in range(2):
                with trial.sync.join():
                    trial.step(3 + 4 * comm.rank)
            trial.sync.settle()
            return float(trial.values), trial.stats("clocks")[comm.rank]

    outcomes = run_ranks(3, run)
    assert [value for value, _ in outcomes] == [pytest.approx(1.0, abs=1e-12)] * 3
    if "asynchronous" not in strategy:
        assert [clock for _, clock in outcomes] == [22] * 3, "all have mixed as often as the rank with most batches"


def test_join_with_uneven_ranks_is_repeatable() -> None:
    def run(comm: Communicator) -> Tensor:
        trial = Trial(comm, "gossip", torch.randn(3, generator=torch.Generator().manual_seed(comm.rank)).double())
        trial.optimizer.param_groups[0]["lr"] = 0.1 * comm.rank
        with trial.sync, trial.sync.join():
            trial.step(4 + 3 * comm.rank)
        return trial.values

    for one, other in zip(run_ranks(3, run), run_ranks(3, run), strict=True):
        assert torch.equal(one, other)


def test_barrier_counts_the_clock_of_a_member_that_has_left() -> None:
    mesh = PeerMesh(0, host="127.0.0.1", port=0, keys=None, silent_s=2.0)
    try:
        barrier = Barrier(mesh, timeout_s=1)
        mesh.start("run", {0: mesh.address}, 1)
        for member, clock in ((1, 9), (2, 12)):
            mesh.membership.joined[member] = ""
            fields = {"number": 0, "what": "join", "clock": clock}
            mesh._handlers["arrived"](member, Message("arrived", fields))
        mesh.membership.left[1] = 9
        mesh.membership.dead[2] = "killed"
        steps: list[int] = []
        assert barrier.wait_for_all("join", clock=lambda: len(steps), step=lambda: steps.append(0)) == 0
        assert len(steps) == 9
    finally:
        mesh.close()


def test_barrier_mean_survives_its_leader() -> None:
    """The leader sends the mean to one member and dies. That member passes it on; a new mean would be different."""
    meshes = [PeerMesh(me, host="127.0.0.1", port=0, keys=None, silent_s=2.0) for me in range(3)]
    barriers = [Barrier(mesh, timeout_s=10) for mesh in meshes]
    for mesh in meshes:
        mesh.start("run", {other.member_id: other.address for other in meshes}, 10)
    send = meshes[0].send

    def die_after_first_mean(member: int, message: Message) -> Any:
        sent = send(member, message)
        if message.kind == "mean" and member == 1:
            meshes[0].kill()
            raise SystemExit
        return sent

    meshes[0].send = die_after_first_mean  # type: ignore[method-assign]
    found: dict[int, float] = {}

    def settle(me: int) -> None:
        number = barriers[me].wait_for_all("settle", clock=lambda: 0, step=None)
        with contextlib.suppress(SystemExit):
            found[me] = float(barriers[me].mean(number, 1.0, {"x0": torch.tensor([10.0**me])})["x0"])

    threads = [threading.Thread(target=settle, args=(me,), daemon=True) for me in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for mesh in meshes:
        mesh.close()
    assert found == {1: 37.0, 2: 37.0}, "of 1, 10 and 100"
