"""Models that differ on one rank, and models wrapped by DDP or FSDP: on real processes and transports."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync
from tests.support.models import build
from tests.support.ranks import run_processes


def freeze_one_layer(transport: str) -> str:
    comm = gradsync.connect(transport=transport, timeout_s=20.0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsync.synchronize(model, optimizer, comm=comm):
        for number in range(3):
            if number == 2 and comm.rank == 1:
                model[2].requires_grad_(False)
            try:
                model(torch.ones(2, 4)).sum().backward()
            except gradsync.OutOfStep as error:
                return str(error)
            optimizer.step()
            optimizer.zero_grad()
    return "nothing"


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_layer_frozen_on_one_rank_is_named_at_once(transport: str) -> None:
    texts = run_processes(2, freeze_one_layer, transport, timeout_s=15.0)  # less than the communicator's timeout
    assert texts[0] == texts[1]
    assert "parameter 2.weight: rank 1 has frozen" in texts[0]


def freeze_everywhere() -> list[list[float]]:
    comm = gradsync.connect(transport="shm", timeout_s=20.0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsync.synchronize(model, optimizer, comm=comm):
        for number in range(6):
            model[2].requires_grad_(number % 2 == 0)
            model(torch.full((2, 4), comm.rank + 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [param.flatten().tolist() for param in model.parameters()]


def test_layers_frozen_and_unfrozen_on_all_ranks_stay_in_step() -> None:
    first, second = run_processes(2, freeze_everywhere)
    assert first == second


def wrap_both_ways() -> list[str]:
    texts = []
    dist.init_process_group("gloo")
    for attempt in ("ddp.module", "ddp", "inside", "ddp after"):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapper = DistributedDataParallel(model) if attempt in ("ddp.module", "ddp") else None
        whole: nn.Module = model
        if attempt == "ddp":
            assert wrapper is not None
            whole = wrapper
        if attempt == "inside":
            whole = nn.Sequential(DistributedDataParallel(model))
        sync = None
        try:
            sync = gradsync.synchronize(whole, optimizer)
            DistributedDataParallel(model)
        except ValueError as error:
            texts.append(str(error))
        if sync is not None:
            sync.close()
            DistributedDataParallel(model)  # allowed after close()
    model = build()
    wrapper = DistributedDataParallel(model)
    del wrapper  # a deleted wrapper averages nothing
    gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1)).close()
    return texts


def test_ddp_and_gradsync_on_one_model_are_refused_both_ways() -> None:
    for texts in run_processes(2, wrap_both_ways):
        assert len(texts) == 4
        for text in texts:
            assert "Drop DistributedDataParallel everywhere" in text


def shard_parameters() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    texts = []
    mesh = init_device_mesh("cpu", (2,))
    sharded, distributed = build(), build()
    fully_shard(sharded, mesh=mesh)
    distribute_module(distributed, mesh)
    for model in (sharded, distributed):
        try:
            gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_sharded_models_are_refused_at_attach() -> None:
    for texts in run_processes(2, shard_parameters):
        assert "the model is sharded by FSDP" in texts[0]
        assert "parameter 0.weight is a DTensor" in texts[1]
