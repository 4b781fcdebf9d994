"""One worker of bench_step: times training steps of every variant in turn, in one process and on one connection.

Started by bench_step.py, once for each rank; rank 0 writes the measurements to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradsync
from benchmarks.workers.step_model import BATCH, TOKENS, VOCABULARY, Transformer, order_of_round, step_of, time_block
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.shm.communicator import Shm

Attach = Callable[[nn.Module, torch.optim.Optimizer, gradsync.Communicator], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A column of the table: a way to keep the replicas in step."""

    title: str
    attach: Attach  # returns the module that the loop calls
    one_host_only: bool = False
    adam: bool = False  # trains with AdamW; else with SGD


def _compute_only(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    return model


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    return DistributedDataParallel(model)


def _ddp_view(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _ddp_fp16(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    module = DistributedDataParallel(model)
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return module


def _ddp_powersgd(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    # One bucket: the hook starts collectives from completion callbacks, so with several buckets two Gloo ranks can
    # start them in different orders. Tried: some runs abort.
    module = DistributedDataParallel(model, bucket_cap_mb=100)
    # It starts after two steps, the least that its authors allow; there are more untimed steps.
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module


def _on_shm(strategy: str) -> Attach:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
        group = comm.unchecked().clone()
        assert isinstance(group, C10d)
        gradsync.synchronize(model, optimizer, strategy, comm=Shm(group, why="the benchmark asks for it"))
        return model

    return attach


def _gradsync(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    gradsync.synchronize(model, optimizer, comm=comm)
    return model


def _strategy(text: str) -> Attach:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
        gradsync.synchronize(model, optimizer, text, comm=comm)
        return model

    return attach


# Lossy compression. The 16-bit codec is what the others must beat.
LOSSY = {
    "fp16": "allreduce(codec=fp16)",
    "int8": "allreduce(codec=int8)",
    "int4": "allreduce(codec=int4)",
    "sign": "allreduce(codec=sign)",
    "topk": "allreduce(codec=topk(density=0.01))",
    "topk_int8": "allreduce(codec=chain(topk(density=0.01), int8))",
    "powersgd": "allreduce(reducer=powersgd(rank=4))",
    "powersgd_alternating": "allreduce(reducer=powersgd(rank=4, alternating=True))",
}

# Periodic exchanges of weights: most steps cost nothing, a few cost much, so compare means.
PERIODIC = {
    "local_sgd": "local_sgd(every=50)",
    "diloco": "diloco(every=50, fragments=4, codec=int4)",
    "diloco_whole": "diloco(every=50, codec=int4)",
}

# A new transport, strategy or codec to compare is one entry here.
VARIANTS: dict[str, Variant] = {
    "compute": Variant(title="compute only", attach=_compute_only),
    "compute_adam": Variant(title="compute only, AdamW", attach=_compute_only, adam=True),
    "gradsync_adam": Variant(title="gradsync, shm, AdamW", attach=_on_shm("allreduce"), one_host_only=True, adam=True),
    "sharded_adam": Variant(title="sharded, shm, AdamW", attach=_on_shm("sharded"), one_host_only=True, adam=True),
    "sharded_adam_c10d": Variant(title="sharded, c10d, AdamW", attach=_strategy("sharded"), adam=True),
    "ddp": Variant(title="DDP", attach=_ddp),
    "ddp_view": Variant(title="DDP, bucket views", attach=_ddp_view),
    "ddp_fp16": Variant(title="DDP, fp16 hook", attach=_ddp_fp16),
    "ddp_powersgd": Variant(title="DDP, PowerSGD rank 4 hook", attach=_ddp_powersgd),
    "gradsync": Variant(title="gradsync, c10d", attach=_gradsync),
    "gradsync_shm": Variant(title="gradsync, shm", attach=_on_shm("allreduce"), one_host_only=True),
    **{name: Variant(title=text, attach=_strategy(text)) for name, text in {**LOSSY, **PERIODIC}.items()},
    "onebit_adam": Variant(title="onebit_adam, warmed up", attach=_strategy("onebit_adam(warmup_steps=2)"), adam=True),
}


def make_step(variant: Variant, comm: gradsync.Communicator, *, seed: int) -> Callable[[], None]:
    """Build a variant's own model from the seed; returns one whole training step of it."""
    torch.manual_seed(seed)
    model = Transformer()
    params = model.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-4) if variant.adam else torch.optim.SGD(params, lr=0.01)
    module = variant.attach(model, optimizer, comm)
    data = torch.Generator().manual_seed(seed + 1 + comm.rank)
    return step_of(module, optimizer, torch.randint(VOCABULARY, (BATCH, TOKENS + 1), generator=data))


def bytes_sent() -> int:
    """Read this host's counter of the interface that Gloo uses."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def main() -> None:
    """Measure, and on rank 0 write the times and bytes of each variant, round by round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    names = options.variants.split(",")

    torch.set_num_threads(1)
    comm = gradsync.connect("c10d")
    steps = {name: make_step(VARIANTS[name], comm, seed=0) for name in names}
    for step in steps.values():
        for _ in range(3):  # both DDP and gradsync rebuild their buckets after the first
            step()

    step_s: dict[str, list[list[float]]] = {name: [] for name in names}
    sent_bytes: dict[str, list[int]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in order_of_round(names, number):
            before = bytes_sent()
            step_s[name].append(time_block(steps[name], comm, steps=options.steps))
            sent_bytes[name].append(bytes_sent() - before)
    if comm.rank == 0:
        per_step = {name: [sent / (options.steps + 1) for sent in sent_bytes[name]] for name in names}
        options.out.write_text(json.dumps({"step_s": step_s, "sent_bytes_per_step": per_step}))


if __name__ == "__main__":
    main()
