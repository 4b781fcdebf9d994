"""Train a byte-level GPT on the Python standard library's own source.

    python examples/char_lm.py                       # one process
    gradsync run -n 2 examples/char_lm.py            # two workers, the same training, the same losses

The three lines that make it distributed are marked with (1), (2) and (3). Everything else is plain PyTorch.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

import gradsync

DATA_BYTES = 4_000_000
HELD_OUT_BYTES = 32_768


class Block(nn.Module):
    """Causal attention, then a two-layer network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes in, logits of each next byte out. The embedding is also the head."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(hidden)), self.tokens.weight)


class Windows(Dataset[Tensor]):
    """Pieces of a text, each `context` bytes and the one that follows."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.bytes[start : start + self.context + 1].long()


def read_text(data: Path | None) -> bytes:
    files = [data] if data else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:DATA_BYTES]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def mean_over_ranks(comm: gradsync.Communicator, loss_sum: float, samples: int) -> float:
    totals = torch.tensor([loss_sum, samples], dtype=torch.float64)
    comm.all_reduce(totals).wait()
    return float(totals[0] / totals[1])


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Windows, comm: gradsync.Communicator, batch: int) -> float:
    """Each rank takes every world_size-th window; all get the mean over all windows."""
    mine = Subset(held_out, range(comm.rank, len(held_out), comm.world_size))
    loss_sum = sum(float(loss_of(model, tokens)) * len(tokens) for tokens in DataLoader(mine, batch_size=batch))
    return mean_over_ranks(comm, loss_sum, len(mine))


def endless(loader: Iterable[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader


def train(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    comm = gradsync.connect()  # (1) a world of one without a launcher

    text = read_text(args.data)
    dataset, held_out = Windows(text[:-HELD_OUT_BYTES], args.context), Windows(text[-HELD_OUT_BYTES:], args.context)
    model = GPT(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    sync = gradsync.synchronize(model, optimizer)  # (2) gradients are averaged while backward runs
    # (3) this rank's part of each global batch, the same samples at any number of workers
    loader = gradsync.shard(dataset, global_batch_size=args.batch, seed=args.seed, drop_last=True)

    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "sync": sync, "loader": loader}
    log: dict[str, Any] = {"world_size": comm.world_size, "batch": args.batch}
    log |= {"losses": [], "step_s": [], "sent_bytes": [], "evals": []}
    first_step = 0
    if args.resume:
        saved = torch.load(args.resume)
        first_step = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with sync, Progress(*columns, console=Console(quiet=comm.rank != 0)) as progress:
        bar = progress.add_task("training", total=args.steps, completed=first_step)
        start = time.perf_counter()
        for step, tokens in zip(range(first_step + 1, args.steps + 1), endless(loader), strict=False):
            optimizer.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the mean, as in one process
            optimizer.step()

            log["losses"].append(mean_over_ranks(comm, float(loss.detach()) * len(tokens), len(tokens)))
            log["step_s"].append(time.perf_counter() - start)
            log["sent_bytes"].append(sync.stats()["bytes_per_step"])
            progress.update(bar, advance=1, description=f"loss {log['losses'][-1]:.3f}")
            if args.eval_every and step % args.eval_every == 0:
                log["evals"].append((step, evaluate(model, held_out, comm, args.batch)))
                progress.print(f"step {step}: eval loss {log['evals'][-1][1]:.4f}")
            start = time.perf_counter()
        sync.settle()  # averages the replicas of strategies that exchange less often than every step
        log["eval_loss"] = evaluate(model, held_out, comm, args.batch)
        progress.print(f"step {args.steps}: eval loss {log['eval_loss']:.4f}")
        states = {name: part.state_dict() for name, part in parts.items()}
        states["sync"] = sync.gather_state_dict()  # with a codec each rank has residuals of its own
    if comm.rank == 0 and args.checkpoint:
        torch.save({"step": args.steps, **states}, args.checkpoint)
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description="A byte-level GPT, trained on the standard library's source.")
    parser.add_argument("--data", type=Path, help="a text to learn instead of the standard library")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="samples in a step, over all workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--eval-every", type=int, default=0, help="steps from one evaluation to the next (0: at the end)"
    )
    parser.add_argument("--checkpoint", type=Path, help="write the whole state here at the end")
    parser.add_argument("--resume", type=Path, help="continue from a checkpoint, at the next sample")
    parser.add_argument("--json", type=Path, help="write losses, and the seconds and bytes of each step, here")
    args = parser.parse_args()
    log = train(args)
    if args.json and gradsync.connect().rank == 0:
        args.json.write_text(json.dumps(log))


if __name__ == "__main__":
    main()
