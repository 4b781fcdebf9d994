"""Stale-synchronous and asynchronous training: which workers wait, and the staleness that policies and stats see."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import gradsync
from gradsync.comm.base import Communicator
from gradsync.errors import PeerLost
from gradsync.strategies.parameter_server.job import hyperparameters
from gradsync.strategies.parameter_server.server.staleness import StalePush
from gradsync.testing.threads import run_ranks
from tests.strategies.parameter_server.trainer import TIMEOUT_S, Trainer, addresses_of, assert_same, reference, servers


def test_pull_of_a_fast_worker_blocks_at_the_staleness_bound() -> None:
    with servers(2) as started:
        options: dict[str, Any] = {"num_workers": 2, "staleness": 2}
        fast = Trainer(0, addresses_of(started), **options)
        slow = Trainer(1, addresses_of(started), **options)
        fast.join()
        slow.join()
        for step in range(2):
            fast.step(step)
        fast.client.timeout_s = 0.5
        with pytest.raises(PeerLost, match=r"rank 1 was lost at step 3 in pull.*at clock 3") as lost:
            fast.step(2)
        fast.client.timeout_s = TIMEOUT_S
        assert lost.value.ranks == (1,)
        slow.step(0)
        fast.client.pull(fast.params)  # the slowest is at 1, and 3 - 2 = 1
        stats = fast.client.stats()
        assert stats["clocks"] == {0: 3, 1: 1}
        assert stats["straggler"]["worker"] == 1
        assert stats["straggler"]["behind"] == 2
        assert stats["straggler"]["awaited_s"] > 0.3
        fast.client.close()
        slow.client.close()


def test_pull_includes_all_updates_up_to_the_staleness_bound() -> None:
    """Each update adds 1 to the only parameter: so its value counts the updates."""
    workers, steps, staleness = 3, 40, 1
    reads: dict[int, list[tuple[int, int]]] = {}

    with servers(1) as started:

        def work(comm: Communicator) -> None:
            trainer = Trainer(comm.rank, addresses_of(started), num_workers=workers, staleness=staleness)
            for param in trainer.params.values():
                param.data.zero_()
            # Each push is one of `workers` shares of the learning rate, so it adds 1.
            trainer.optimizer.param_groups[0]["lr"] = float(workers)
            trainer.join()
            pause = threading.Event()
            for step in range(steps):
                grads = {name: -torch.ones_like(param) for name, param in trainer.params.items()}
                trainer.client.push(grads, weight=1.0, groups=hyperparameters(trainer.optimizer))
                trainer.client.pull(trainer.params)
                counted = round(trainer.params["0.bias"][0].item())
                reads.setdefault(comm.rank, []).append((step + 1, counted))
                pause.wait(0.003 * ((comm.rank * 7 + step) % 4))
            comm.barrier()
            trainer.client.close()

        run_ranks(workers, work, timeout_s=TIMEOUT_S)
    for found in reads.values():
        for clock, counted in found:
            assert counted >= clock + (workers - 1) * (clock - staleness)
            assert counted <= clock + (workers - 1) * (clock + staleness + 1)


def test_asynchronous_pull_never_waits_and_stats_show_the_staleness() -> None:
    with servers(1) as started:
        options: dict[str, Any] = {"num_workers": 2, "staleness": None}
        fast, slow = (Trainer(worker, addresses_of(started), **options) for worker in range(2))
        fast.join()
        slow.join()
        for step in range(5):
            fast.step(step)  # the other has not pushed once
        slow.step(0)
        stats = slow.client.stats()
        assert stats["staleness"] == {0: 5, 5: 1}
        assert stats["clocks"] == {0: 5, 1: 1}
        fast.client.close()
        slow.client.close()


def test_asynchronous_training_of_one_worker_equals_plain_training() -> None:
    with servers(2) as started:
        alone = Trainer(0, addresses_of(started), num_workers=1, staleness=None, clip_norm=0.2)
        alone.join()
        for step in range(10):
            alone.step(step)
        torch.testing.assert_close(
            list(alone.values().values()), list(reference(1, 10, clip_norm=0.2).values()), rtol=1e-4, atol=1e-6
        )
        alone.client.close()


class RecordingPolicy:
    """A policy that records each push, drops every third one and halves the learning rate of the others."""

    needs_backup = True

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def admit(self, push: StalePush) -> float | None:
        self.seen.append((push.worker, push.clock, push.tau))
        assert push.backup is not None
        moved = any(not torch.equal(push.backup[name], param) for name, param in push.params.items())
        assert moved == (push.tau > 0)
        push.state["count"] = push.state.get("count", torch.zeros(1)) + 1
        return None if len(self.seen) % 3 == 0 else 0.5


def test_policy_sees_each_push_and_decides() -> None:
    policy = RecordingPolicy()
    with servers(1, policy=policy) as started:
        options: dict[str, Any] = {"num_workers": 2, "staleness": None, "policy": "custom"}
        one, other = (Trainer(worker, addresses_of(started), **options) for worker in range(2))
        one.join()
        other.join()
        before = one.values()
        grads = {name: value.clone() for name, value in one.gradients(0).items() if value is not None}
        one.step(0)
        for name, value in one.values().items():
            torch.testing.assert_close(value, before[name] - 0.5 * 0.1 * grads[name])
        other.step(0)
        kept = other.values()
        one.step(1)  # dropped
        assert_same(one.values(), kept)
        assert policy.seen == [(0, 0, 0), (1, 0, 1), (0, 1, 1)]
        assert one.client.stats()["dropped"] == 1
        assert one.client.fetch_state()["policy"]["count"].item() == 3
        one.client.close()
        other.client.close()


def test_server_refuses_other_jobs_duplicate_numbers_and_unknown_peers() -> None:
    with servers(1) as started:
        first = Trainer(0, addresses_of(started), num_workers=2)
        first.join()
        other_job = Trainer(1, addresses_of(started), num_workers=2, staleness=3)
        with pytest.raises(gradsync.RefusedByServer, match="staleness is 3 and not 0"):
            other_job.join()
        same_number = Trainer(0, addresses_of(started), num_workers=2)
        with pytest.raises(gradsync.RefusedByServer, match="worker 0 is already connected"):
            same_number.join()
        stranger = Trainer(1, addresses_of(started), num_workers=2)
        with pytest.raises(gradsync.RefusedByServer, match="no worker of shard 0"):
            stranger.client.pull(stranger.params)
        for trainer in (first, other_job, same_number, stranger):
            trainer.client.close()
