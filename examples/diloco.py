"""DiLoCo over a slow network: many local steps, and a small exchange now and then.

    gradsync run -n 2 examples/diloco.py
    gradsync run -n 2 examples/diloco.py --strategy "diloco(every=20, fragments=2, codec=int4)"
    gradsync run -n 2 examples/diloco.py --checkpoint run     # writes run.rank0.pt, run.rank1.pt; continues from them

The task: a student network learns the outputs of a fixed random teacher. Each worker has inputs of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradsync


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


def ask(teacher: nn.Module, seed: int, number: int = 64) -> tuple[Tensor, Tensor]:
    questions = torch.randn(number, 16, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return questions, teacher(3 * questions)


def main() -> None:
    parser = argparse.ArgumentParser(description="A student of a random teacher, trained by DiLoCo.")
    parser.add_argument("--strategy", default="diloco(every=50, fragments=4, codec=int4)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--checkpoint", help="each rank saves its own at the end, and continues from it at the start")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher, student = network(32), network(128)
    optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)

    with gradsync.synchronize(student, optimizer, args.strategy) as sync:
        parts: dict[str, Any] = {"model": student, "optimizer": optimizer, "sync": sync}
        # Under DiLoCo every rank has weights and momenta of its own, so each saves its own.
        own = Path(f"{args.checkpoint}.rank{sync.rank}.pt") if args.checkpoint else None
        first = 0
        if own is not None and own.exists():
            saved = torch.load(own)
            first = saved["step"]
            for name, part in parts.items():
                part.load_state_dict(saved[name])
        for step in range(first, first + args.steps):
            x, y = ask(teacher, seed=1000 * step + sync.rank)
            optimizer.zero_grad()
            nn.functional.mse_loss(student(x), y).backward()
            optimizer.step()
        if own is not None:
            torch.save({"step": first + args.steps, **{name: part.state_dict() for name, part in parts.items()}}, own)
        sync.settle()  # from here on all ranks hold the same weights
        x, y = ask(teacher, seed=1, number=2000)
        loss, stats = nn.functional.mse_loss(student(x), y), sync.stats()
        if sync.rank == 0:
            whole = sum(param.numel() * 4 for param in student.parameters())
            print(f"step {first + args.steps}: loss {loss:.4f} on new inputs, after {stats['exchanges']} exchanges")
            print(f"{stats['bytes_per_step']} bytes a step; the gradients are {whole}")
            print(f"distance of a replica from the mean: {stats['consensus_distance']:.3f}")


if __name__ == "__main__":
    main()
