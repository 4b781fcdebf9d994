"""The peers of bench_step: torch's DistributedDataParallel with and without hooks, and DeepSpeed's ZeRO stage 1."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradsync
from benchmarks.workers.step_model import Batch


def ddp(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    """DDP with its defaults."""
    return DistributedDataParallel(model)


def ddp_view(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    """DDP whose gradients are views of its buckets: it saves a copy."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def ddp_fp16(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    """DDP with the hook that sends 16 bits a value."""
    module = DistributedDataParallel(model)
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return module


def ddp_powersgd(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    """DDP with the PowerSGD hook, rank 4."""
    # One bucket: the hook starts collectives from completion callbacks, so with several buckets two Gloo ranks can
    # start them in different orders. Tried: some runs abort.
    module = DistributedDataParallel(model, bucket_cap_mb=100)
    # It starts after two steps, the least that its authors allow; there are more untimed steps.
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module


def deepspeed_zero1(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    """DeepSpeed's engine with ZeRO stage 1 around the plain optimizer, in float32."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # an optional package; its first import compiles an extension

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # It calls functions of torch.distributed by names that torch 2.13 replaces.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    config = {
        "train_micro_batch_size_per_gpu": 1,  # only its own throughput figures use it
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,  # SGD is one
        "zero_force_ds_cpu_optimizer": False,  # step with torch's optimizer, as all others do
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    module: nn.Module = engine
    return module


def deepspeed_step(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], None]:
    """One training step of a DeepSpeed engine, which owns its optimizer and clears the gradients itself."""
    engine: Any = module

    def step() -> None:
        engine.backward(batch.loss(engine))
        engine.step()

    return step
