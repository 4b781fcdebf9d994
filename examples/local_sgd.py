"""Local SGD with an exact beginning, and exchanges that become rarer as the learning rate falls.

    gradsync run -n 2 examples/local_sgd.py
    gradsync run -n 2 examples/local_sgd.py --strategy allreduce        # the same, exact

The task: classify points of four spirals. Each worker has points of its own.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsync

DEFAULT = "local_sgd(every=4, exact_steps=100, schedule='quadratic', optimizer_state='average')"


def points(seed: int, number: int = 128) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(4, (number,), generator=generator)
    far = torch.rand(number, generator=generator)
    angle = 2 * math.pi * (far + arm / 4) + 0.1 * torch.randn(number, generator=generator)
    return torch.stack([far * angle.cos(), far * angle.sin()], dim=1), arm


def main() -> None:
    parser = argparse.ArgumentParser(description="Four spirals, by local SGD.")
    parser.add_argument("--strategy", default=DEFAULT)
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    with gradsync.synchronize(model, optimizer, args.strategy, scheduler=schedule) as sync:
        sent = 0
        for step in range(args.steps):
            x, arm = points(seed=1000 * step + sync.rank)
            optimizer.zero_grad()
            F.cross_entropy(model(x), arm).backward()
            optimizer.step()
            schedule.step()
            sent += sync.stats()["bytes_per_step"]
            if sync.rank == 0 and (step + 1) % (args.steps // 4) == 0:
                shown = {name: sync.stats().get(name) for name in ("exchanges", "every")}
                print(f"step {step + 1}: learning rate {schedule.get_last_lr()[0]:.3f}, {shown}")
        sync.settle()  # from here on all ranks hold the same weights
        x, arm = points(seed=1, number=4000)
        right = (model(x).argmax(1) == arm).float().mean()
        if sync.rank == 0:
            print(f"{float(right):.1%} right; each worker sent {sent / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
