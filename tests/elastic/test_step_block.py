"""``with sync.step():``: workers of a model with SyncBatchNorm are killed in forward, in backward and between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm.base import Communicator, Solo
from gradsync.elastic.commit import RestorePoint
from gradsync.replicas.buffers import BufferSync
from gradsync.replicas.training import Training
from gradsync.testing import run_ranks
from tests.elastic.test_survive import BATCH, Run, alone, run

__all__ = ["alone", "run"]  # fixtures

CNN: dict[str, Any] = {"model": "cnn", "block": True, "step_s": 0.02}


def test_step_block_changes_nothing_in_a_run_that_is_not_elastic() -> None:
    first = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    samples = torch.randn(3, 8, 4)

    def train(comm: Communicator, *, blocks: bool) -> torch.Tensor:
        model = copy.deepcopy(first)
        gradsync.SyncBatchNorm.convert(model, comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, comm=comm) as sync:
            for batch in samples[:, comm.rank :: comm.world_size]:
                if blocks:
                    with sync.step():
                        model(batch).square().mean().backward()
                        optimizer.step()
                else:
                    model(batch).square().mean().backward()
                    optimizer.step()
                optimizer.zero_grad()
            assert not sync.discarded
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    plain = run_ranks(2, lambda comm: train(comm, blocks=False))
    blocked = run_ranks(2, lambda comm: train(comm, blocks=True))
    assert torch.equal(plain[0], blocked[0])
    assert torch.equal(blocked[0], blocked[1])


def test_step_block_refuses_to_be_nested_and_passes_errors_on() -> None:
    model = nn.Linear(2, 1)
    with gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1)) as sync:
        with pytest.raises(ValueError, match="entered within another one"), sync.step(), sync.step():
            pass
        block = sync.step()
        with pytest.raises(ValueError, match="entered within another one"), block, block:
            pass
        with pytest.raises(ZeroDivisionError), sync.step():
            raise ZeroDivisionError
        with pytest.raises(gradsync.PeerLost), sync.step():  # nobody could go on
            raise gradsync.PeerLost(rank=1, reason="a test", after_s=0.0)
        with sync.step():  # those before have ended
            model(torch.ones(1, 2)).sum().backward()
        assert sync.synchronized


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_batch_norm_goes_on_exactly_when_workers_die_in_forward_and_backward(
    run: Run, alone: Callable[..., dict[str, Any]], transport: str
) -> None:
    kills = [["1.0", 6, "in_forward"], ["0.0", 9, "in_forward"], ["2.0", 13, "hook"]]  # 6: while rank 2 has no data
    kills += [[f"2.{number}", 3, phase] for number, phase in enumerate(["backward", "step", "forward"], start=1)]
    options = {**CNN, "epochs": 16, "samples": 62}  # the last batch has 2 samples for 3 workers
    outcome = run(*([] if transport == "auto" else ["--transport", transport]), kills=kills, **options)
    assert outcome.code == 0, outcome.log
    assert outcome.log.count("was killed by SIGKILL") == len(kills), outcome.log
    outcome.check_exact(alone(**options), finished=3)


@pytest.mark.parametrize("windows", [False, True])
def test_accumulation_across_blocks_and_within_one_is_rolled_back_as_a_whole(
    run: Run, alone: Callable[..., dict[str, Any]], windows: bool
) -> None:
    options = {**CNN, "epochs": 16, "samples": 6 * BATCH, "accumulate": 2, "windows": windows}
    kills = [["1.0", 6, "in_forward"], ["0.0", 11, "hook"], ["2.0", 16, "in_forward"]]
    outcome = run(kills=kills, **options)
    assert outcome.code == 0, outcome.log
    assert outcome.log.count("was killed by SIGKILL") == len(kills), outcome.log
    outcome.check_exact(alone(**options), finished=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": False}, "Expected both in such a block; got one outside"),
        ({"twice": True}, "Expected the block to end after it; got a second one"),
    ],
)
def test_what_could_not_be_rolled_back_is_refused_in_an_elastic_run(
    run: Run, options: dict[str, bool], message: str
) -> None:
    outcome = run(**{**CNN, **options, "epochs": 1})
    assert outcome.code != 0
    assert message in outcome.log


def test_restore_point_knows_buffers_that_another_rank_has_overwritten() -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = dict(model.named_parameters())
    buffers = BufferSync(model, "broadcast", Solo())
    training = Training(model=model, optimizer=optimizer, params=params, buffers=buffers, scaler=None, schedules=[])
    point = RestorePoint(training)
    assert model.running_mean is not None
    model.running_mean.data.fill_(5.0)  # as from another rank: torch's version counters do not see it
    buffers.num_overwritten += 1
    point.take(None)
    model(torch.randn(4, 2))  # nor do they see what torch's own BatchNorm writes here
    assert model.running_mean.tolist() != [5.0, 5.0]
    point.restore()
    assert model.running_mean.tolist() == [5.0, 5.0]
    assert model.num_batches_tracked is not None
    assert int(model.num_batches_tracked) == 0
