"""One worker of bench_step: times training steps of every variant in turn, in one process and on one connection.

Started by bench_step.py, once for each rank; rank 0 writes the measurements to `--out`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import gradsync
from benchmarks.support.memory import PeakMemory
from benchmarks.workers import step_peers as peers
from benchmarks.workers.step_model import MODELS, Batch, Workload
from benchmarks.workers.step_optimizer import make_plain, make_zero, state_bytes
from benchmarks.workers.step_timing import order_of_round, step_of, time_block
from gradsync.cli.launch.elastic_store import LOOPBACK, HostedStore
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.hierarchical.communicator import connect_hierarchical
from gradsync.comm.objects import broadcast_object
from gradsync.comm.shm.communicator import Shm
from gradsync.comm.topology import survey_hosts
from gradsync.elastic.session import Session

Attach = Callable[[nn.Module, torch.optim.Optimizer, gradsync.Communicator], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter], str], torch.optim.Optimizer]
MakeStep = Callable[[nn.Module, torch.optim.Optimizer, Batch], Callable[[], None]]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A column of the table: a way to keep the replicas in step."""

    title: str
    attach: Attach  # returns the module that the loop calls
    one_host_only: bool = False
    hierarchical: bool = False  # needs several hosts, with several ranks on each
    adam: bool = False  # always trains with AdamW; else with the optimizer that --optimizer names
    sends_less: bool = False  # than exact float32 sums do: its bound takes the bytes that the interface counted
    needs: str = ""  # a package that gradsync does not install
    make_optimizer: MakeOptimizer = make_plain
    make_step: MakeStep = step_of


def _compute_only(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    return model


def _clone(comm: gradsync.Communicator) -> C10d:
    group = comm.unchecked().clone()
    assert isinstance(group, C10d)
    return group


SYNCHRONIZERS: dict[torch.optim.Optimizer, gradsync.Synchronizer] = {}


def _attach(
    model: nn.Module, optimizer: torch.optim.Optimizer, strategy: str, comm: gradsync.Communicator
) -> nn.Module:
    SYNCHRONIZERS[optimizer] = gradsync.synchronize(model, optimizer, strategy, comm=comm)
    return model


def _on_shm(strategy: str) -> Attach:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
        return _attach(model, optimizer, strategy, Shm(_c10d(comm), why="the benchmark asks for it"))

    return attach


def _gradsync_c10d(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    return _attach(model, optimizer, "allreduce", _c10d(comm))


def _c10d(comm: gradsync.Communicator) -> C10d:
    """The same ranks over torch.distributed alone."""
    split = _clone(comm).split_as(C10d, range(comm.world_size))
    assert split is not None, "every rank is in it"
    return split


def _strategy(text: str) -> Attach:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
        return _attach(model, optimizer, text, comm)

    return attach


def _hierarchical(text: str) -> Attach:
    def attach(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
        group = _clone(comm)
        survey = survey_hosts(group)
        assert not survey.obstacle, survey.obstacle
        return _attach(model, optimizer, text, connect_hierarchical(group, survey.hosts))

    return attach


def _elastic(model: nn.Module, optimizer: torch.optim.Optimizer, comm: gradsync.Communicator) -> nn.Module:
    """As a worker of `gradsync run --elastic` attaches: rank 0 holds the store that its launcher would hold."""
    global HELD_STORE
    if comm.rank == 0:
        HELD_STORE = HostedStore(LOOPBACK, 0)
    port = broadcast_object(comm, HELD_STORE.port if HELD_STORE is not None else None, 0)
    session = Session.start(
        {
            "store": f"{LOOPBACK}:{port}",
            "uid": f"{comm.rank}.0",
            "slot": comm.rank,
            "founders": [f"{rank}.0" for rank in range(comm.world_size)],
            "min": 1,
            "max": comm.world_size,
        }
    )
    return _attach(model, optimizer, "allreduce", session.open("shm", comm.timeout_s))


HELD_STORE: HostedStore | None = None

WARM_UP_STEPS = 3  # both DDP and gradsync rebuild their buckets after the first

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
    "ddp": Variant(title="DDP", attach=peers.ddp),
    "ddp_view": Variant(title="DDP, bucket views", attach=peers.ddp_view),
    "ddp_fp16": Variant(title="DDP, fp16 hook", attach=peers.ddp_fp16, sends_less=True),
    "ddp_powersgd": Variant(title="DDP, PowerSGD rank 4 hook", attach=peers.ddp_powersgd, sends_less=True),
    "ddp_zero": Variant(title="DDP, ZeroRedundancyOptimizer", attach=peers.ddp, make_optimizer=make_zero),
    "deepspeed_zero1": Variant(
        title="DeepSpeed, ZeRO-1", attach=peers.deepspeed_zero1, make_step=peers.deepspeed_step, needs="deepspeed"
    ),
    "gradsync": Variant(title="gradsync, tcp", attach=_strategy("allreduce")),
    "gradsync_c10d": Variant(title="gradsync, c10d", attach=_gradsync_c10d),
    "gradsync_shm": Variant(title="gradsync, shm", attach=_on_shm("allreduce"), one_host_only=True),
    "gradsync_elastic": Variant(title="gradsync, shm, elastic", attach=_elastic, one_host_only=True),
    "gradsync_adam": Variant(title="gradsync, shm, AdamW", attach=_on_shm("allreduce"), one_host_only=True, adam=True),
    "sharded": Variant(title="sharded, tcp", attach=_strategy("sharded")),
    "sharded_fp16": Variant(
        title="sharded(codec=fp16, weights=fp16), tcp",
        attach=_strategy("sharded(codec=fp16, weights=fp16)"),
        sends_less=True,
    ),
    "sharded_adam": Variant(title="sharded, shm, AdamW", attach=_on_shm("sharded"), one_host_only=True, adam=True),
    "gradsync_hierarchical": Variant(
        title="gradsync, hierarchical", attach=_hierarchical("allreduce"), hierarchical=True
    ),
    **{
        name: Variant(title=text, attach=_strategy(text), sends_less=True)
        for name, text in {**LOSSY, **PERIODIC}.items()
    },
    "int8_hierarchical": Variant(
        title="allreduce(codec=int8), hierarchical",
        attach=_hierarchical("allreduce(codec=int8)"),
        hierarchical=True,
        sends_less=True,
    ),
    "onebit_adam": Variant(
        title="onebit_adam, warmed up", attach=_strategy("onebit_adam(warmup_steps=2)"), adam=True, sends_less=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class Built:
    """A variant that is ready to be timed."""

    step: Callable[[], None]
    peak_bytes: int  # by how much building it, and its first steps, have made the process grow at most
    optimizer_state_bytes: int


def build(variant: Variant, workload: Workload, comm: gradsync.Communicator, *, optimizer: str, seed: int) -> Built:
    """Build a variant's own model from the seed, and take its first steps."""
    memory = PeakMemory()
    torch.manual_seed(seed)
    model = workload.build()
    used = variant.make_optimizer(model.parameters(), "adamw" if variant.adam else optimizer)
    module = variant.attach(model, used, comm)
    data = torch.Generator().manual_seed(seed + 1 + comm.rank)
    step = variant.make_step(module, used, workload.make_batch(data))
    for _ in range(WARM_UP_STEPS):
        step()
    state = state_bytes(used)
    if used in SYNCHRONIZERS:
        state = SYNCHRONIZERS[used].stats().get("optimizer_state_bytes", state)  # sharded() keeps it in slices
    found = torch.tensor([memory.num_bytes(), state])
    comm.all_reduce(found, op="max").wait()
    return Built(step=step, peak_bytes=int(found[0]), optimizer_state_bytes=int(found[1]))


def bytes_sent() -> int:
    """Read this host's counter of the interface that Gloo uses."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise ValueError(f"GLOO_SOCKET_IFNAME must name an interface of this host; got {interface!r}.")


def main() -> None:
    """Measure, and on rank 0 write the times and bytes of each variant, round by round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--variants", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    names = options.variants.split(",")

    torch.set_num_threads(1)
    comm = gradsync.connect("tcp")
    workload = MODELS[options.model]
    # torch allocates memory of its own in the first steps. It must not count for the variant that comes first.
    build(VARIANTS["compute"], workload, comm, optimizer=options.optimizer, seed=0)
    built = {name: build(VARIANTS[name], workload, comm, optimizer=options.optimizer, seed=0) for name in names}

    step_s: dict[str, list[list[float]]] = {name: [] for name in names}
    sent_bytes: dict[str, list[int]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in order_of_round(names, number):
            before = bytes_sent()
            step_s[name].append(time_block(built[name].step, comm, steps=options.steps))
            sent_bytes[name].append(bytes_sent() - before)
    if comm.rank == 0:
        params = [param.nbytes for param in workload.build().parameters()]
        measured = {
            "num_tensors": len(params),
            "gradient_bytes": sum(params),
            "step_s": step_s,
            "sent_bytes_per_step": {name: [sent / (options.steps + 1) for sent in sent_bytes[name]] for name in names},
            "peak_bytes": {name: built[name].peak_bytes for name in names},
            "optimizer_state_bytes": {name: built[name].optimizer_state_bytes for name in names},
        }
        options.out.write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
