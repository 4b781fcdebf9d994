"""One worker of compare_losses: trains a small model in every case with the gradsync that its PYTHONPATH leads to.

``CASES`` lists what is trained. A case is a strategy's spec and what else differs from plain SGD on ``SmallModel``. All
cases of a launch run in one process, one after the other. After each case every rank appends a line of JSON to its own
file: the loss of each step, and digests of what training has left behind.

The worker uses only what is public in every version, so that one script serves an old checkout and a new one.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gradsync

STEPS = 20
BATCH, TOKENS, WIDTH, CLASSES = 8, 4, 64, 10
ROWS, USED_ROWS = 256, 24  # of the embedding: a batch uses few rows, and most are never used
BUCKET_BYTES, FIRST_BUCKET_BYTES = 24 * 1024, 3 * 1024  # several buckets, and an embedding that is larger than one
TIMEOUT_S = 60.0
OVERFLOW_STEP = 7  # of the case with a GradScaler: rank 0's loss is inf there, and all ranks skip the step
CASES_FILE = "cases.json"  # what the launcher writes: the names of the cases to run
DIGESTS = ("parameters", "buffers", "optimizer state", "saved state", "settled parameters")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A strategy, and what else differs from SGD with momentum in float32."""

    spec: str
    optimizer: Literal["momentum", "sgd", "adamw"] = "momentum"
    accumulate: int = 1
    buffers: Literal["broadcast", "mean", "none"] = "broadcast"
    dtype: torch.dtype = torch.float32
    sparse: bool = False  # the embedding's gradient
    sync_batchnorm: bool = False
    sharded: bool = False  # data from gradsync.shard, whose last batches differ in size
    scaled: bool = False  # with a GradScaler, and a step that it skips
    max_workers: int | None = None  # with more of them two runs do not give the same bits; None: any number will do
    saves_times: bool = False  # the saved state holds measured times, and is not compared

    @property
    def name(self) -> str:
        """The spec, and the settings that are not the defaults."""
        notes = [
            self.optimizer if self.optimizer != "momentum" else "",
            f"accumulate={self.accumulate}" if self.accumulate != 1 else "",
            f"buffers={self.buffers}" if self.buffers != "broadcast" else "",
            str(self.dtype).removeprefix("torch.") if self.dtype != torch.float32 else "",
            "sparse" if self.sparse else "",
            "SyncBatchNorm" if self.sync_batchnorm else "",
            "shard" if self.sharded else "",
            "GradScaler" if self.scaled else "",
        ]
        return ", ".join([self.spec, *filter(None, notes)])


CASES = (
    Case(spec="allreduce"),
    Case(spec="allreduce", accumulate=3),
    Case(spec="allreduce", optimizer="adamw", buffers="mean"),
    Case(spec="allreduce", dtype=torch.bfloat16, buffers="none"),
    Case(spec="allreduce", sparse=True, optimizer="sgd"),
    Case(spec="allreduce", sync_batchnorm=True),
    Case(spec="allreduce", sharded=True),
    Case(spec="allreduce(codec=fp16)"),
    Case(spec="allreduce(codec=bf16)"),
    Case(spec="allreduce(codec=int8)"),
    Case(spec="allreduce(codec=int8)", accumulate=3),
    Case(spec="allreduce(codec=int8)", dtype=torch.bfloat16),
    Case(spec="allreduce(codec=int8)", scaled=True),
    Case(spec="allreduce(codec=int8(rounding='stochastic'))"),
    Case(spec="allreduce(codec=int4)"),
    Case(spec="allreduce(codec=int4(rounding='stochastic'))"),
    Case(spec="allreduce(codec=sign)"),
    Case(spec="allreduce(codec=ternary)"),
    Case(spec="allreduce(codec=topk(density=0.05))"),
    Case(spec="allreduce(codec=randomk(density=0.05))"),
    Case(spec="allreduce(codec=dgc(density=0.02, warmup_steps=8, clip_norm=1.0))", optimizer="sgd"),
    Case(spec="allreduce(codec=chain(topk(density=0.05), int8))"),
    Case(spec="allreduce(codec={'embedding.*': 'int4', '*.bias': 'int8', '*': 'topk(density=0.05)'})"),
    Case(spec="allreduce(reducer=compressed(codec=int8, feedback='ef21'))"),
    Case(spec="allreduce(reducer=compressed(codec=int4, feedback='none'))"),
    Case(spec="allreduce(reducer=powersgd(rank=2))"),
    Case(spec="allreduce(reducer=powersgd(rank=2, alternating=True, start_step=3))", accumulate=2),
    Case(spec="allreduce(reducer=adasum)"),
    Case(spec="sharded", optimizer="adamw"),
    Case(spec="sharded(codec=int8)", accumulate=3),
    Case(spec="onebit_adam(warmup_steps=6)", optimizer="adamw"),
    Case(spec="onebit_adam(warmup_steps=6, codec=topk(density=0.05))", optimizer="adamw"),
    Case(spec="local_sgd(every=4, exact_steps=3)"),
    Case(spec="local_sgd(every=3, codec=int8, optimizer_state='average')"),
    Case(spec="local_sgd(every=1, codec=topk(density=0.05), rate='sqrt')", optimizer="adamw"),
    Case(spec="local_sgd(every=2, reducer=powersgd(rank=2))", sharded=True),
    Case(spec="diloco(every=5)", optimizer="adamw"),
    Case(spec="diloco(every=6, fragments=2, codec=int4, overlap=2)", optimizer="adamw"),
    Case(spec="auto(steps=6, seconds=0.05)", max_workers=2, saves_times=True),
    Case(spec="parameter_server(staleness=0)"),
    Case(spec="parameter_server(staleness=0, codec=int8, clip_norm=1.0)", optimizer="adamw"),
    Case(spec="gossip(topology=ring)"),
    Case(spec="gossip(topology=exponential)", buffers="mean"),
    Case(spec="gossip(topology=random(seed=1))", optimizer="adamw"),
    Case(spec="gossip(topology=ring, codec=int8)"),
    Case(spec="gossip(topology=ring, codec=topk(density=0.05))"),
    Case(spec="gossip(asynchronous=True)", max_workers=1),
    Case(spec="hogwild", max_workers=1),
    Case(spec="hogwild", sparse=True, optimizer="sgd", max_workers=1),
    Case(spec="parameter_server(staleness=2)", max_workers=1),
    Case(spec="parameter_server(staleness=None, staleness_policy=compensate, codec=int8)", max_workers=1),
    Case(spec="parameter_server(staleness=None, push_every=2, pull_every=3)", optimizer="sgd", max_workers=1),
)


class SmallModel(nn.Module):
    """A classifier with a BatchNorm, tied weights, and an embedding that is larger than all the rest."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each row of tokens."""
        hidden = self.norm(self.embedding(tokens).mean(dim=1))
        for layer in (self.first, self.second):
            hidden = layer(hidden).tanh()
        logits: Tensor = self.head(hidden)
        return logits


def make_model(case: Case) -> SmallModel:
    """A model with the same weights on every rank and in every run."""
    model = SmallModel(sparse=case.sparse).to(case.dtype)
    seeded = torch.Generator().manual_seed(0)  # not torch's own, which ranks that are threads share
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(0.2 * torch.randn(param.shape, generator=seeded))
    return model


def whole_state(sync: gradsync.Synchronizer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's whole state, on every rank. An earlier version has no strategy that shards it."""
    gather = getattr(sync, "optimizer_state_dict", None)
    return optimizer.state_dict() if gather is None else gather(dst=None)


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the case asks for."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9 if case.optimizer == "momentum" else 0.0)


def draw(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets. The tokens are every tenth, so that used and unused rows alternate in a codec's blocks."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 10 * torch.randint(USED_ROWS, (samples, TOKENS), generator=generator)
    return tokens, torch.randint(CLASSES, (samples,), generator=generator)


def batches(case: Case, comm: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The data of this rank: drawn by step and rank, or a part of one dataset that all ranks share."""
    if not case.sharded:
        yield from (draw(1000 * step + comm.rank, BATCH) for step in range(STEPS))
        return
    # Two epochs of the same number of batches; each ends with samples that do not go into equal parts.
    data = draw(0, STEPS // 2 * BATCH * comm.world_size - 3)
    loader = gradsync.shard(data, batch_size=BATCH, seed=1, comm=comm)
    for _ in range(2):
        yield from loader


def train(case: Case, comm: Any) -> dict[str, Any]:
    """Train one case; returns this rank's losses, bit for bit, and the digests."""
    model = make_model(case)
    if case.sync_batchnorm:
        gradsync.SyncBatchNorm.convert(model, comm)
    optimizer = make_optimizer(case, model)
    scaler = torch.amp.GradScaler("cpu", enabled=case.scaled)
    losses: list[str] = []
    with gradsync.synchronize(
        model,
        optimizer,
        case.spec,
        comm=comm,
        accumulate=case.accumulate,
        buffers=case.buffers,
        bucket_bytes=BUCKET_BYTES,
        first_bucket_bytes=FIRST_BUCKET_BYTES,
        scaler=scaler if case.scaled else None,
    ) as sync:
        for step, (tokens, targets) in enumerate(batches(case, comm)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), targets)
            if case.scaled and (step, comm.rank) == (OVERFLOW_STEP, 0):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()).hex())
        digests = [
            digest([param.detach() for param in model.parameters()]),
            digest(list(model.buffers())),
            digest(whole_state(sync, optimizer)),
            "" if case.saves_times else digest(sync.state_dict()),
        ]
        sync.settle()
        digests.append(digest([param.detach() for param in model.parameters()]))
    return {"case": case.name, "losses": losses, "digests": dict(zip(DIGESTS, digests, strict=True))}


def digest(value: Any) -> str:
    """The SHA-256 of a tensor's bytes, or of all that a nested state holds."""
    sha = hashlib.sha256()
    for part in _parts(value):
        sha.update(part)
    return sha.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        dense = (value.to_dense() if value.is_sparse else value).contiguous()
        yield f"{dense.dtype} {tuple(dense.shape)} ".encode()
        yield dense.flatten().view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield f"{key!r}: ".encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"{len(value)} of ".encode()
        for item in value:
            yield from _parts(item)
    else:
        yield repr(value).encode()


def run_cases(comm: Any, folder: Path) -> None:
    """Run the cases that the launcher has written down; append a line to this rank's file after each."""
    wanted = json.loads((folder / CASES_FILE).read_text())
    cases = {case.name: case for case in CASES}
    with (folder / f"{comm.rank}.jsonl").open("w", buffering=1) as file:
        for name in wanted:
            # What is imported stays. synchronize() searches all objects that are not frozen, which takes half a second.
            gc.collect()
            gc.freeze()
            file.write(json.dumps(train(cases[name], comm)) + "\n")
            comm.barrier()  # so that a rank that fails is known to have failed in this case


def find_run_ranks() -> Callable[..., list[None]]:
    """The function that runs ranks as threads: ``gradsync.testing`` has it, in older versions ``gradsync.comm``."""
    try:
        module = importlib.import_module("gradsync.testing")
    except ModuleNotFoundError:
        module = importlib.import_module("gradsync.comm")
    found: Callable[..., list[None]] = module.run_ranks
    return found


def main() -> None:
    """Connect, and run all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    imported = Path(gradsync.__file__).resolve()
    assert imported.is_relative_to(options.checkout.resolve()), f"expected {options.checkout}; imported {imported}"
    torch.set_num_threads(1)
    if options.transport == "threads":
        find_run_ranks()(options.workers, lambda comm: run_cases(comm, options.folder), timeout_s=TIMEOUT_S)
        return
    comm = gradsync.connect(options.transport, timeout_s=TIMEOUT_S)
    assert (comm.transport, comm.world_size) == (options.transport, options.workers), comm.why
    run_cases(comm, options.folder)


if __name__ == "__main__":
    main()
