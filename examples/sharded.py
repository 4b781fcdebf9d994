"""A sharded optimizer: each worker keeps its share of AdamW's state and does its share of the step.

    gradsync run -n 2 examples/sharded.py
    gradsync run -n 2 examples/sharded.py --strategy allreduce        # the same losses, the whole state on each worker

The task: a small network learns to sort the digits of a number. Each worker has numbers of its own.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsync

DIGITS = 4


def numbers(seed: int, count: int = 256) -> tuple[Tensor, Tensor]:
    digits = torch.randint(10, (count, DIGITS), generator=torch.Generator().manual_seed(seed))
    return F.one_hot(digits, 10).float().flatten(1), digits.sort(dim=1).values


def main() -> None:
    parser = argparse.ArgumentParser(description="Sorting digits, with a sharded AdamW.")
    parser.add_argument("--strategy", default="sharded")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10 * DIGITS, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10 * DIGITS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with gradsync.synchronize(model, optimizer, args.strategy) as sync:
        for step in range(args.steps):
            x, ordered = numbers(seed=1000 * step + sync.rank)
            optimizer.zero_grad()
            F.cross_entropy(model(x).view(-1, 10), ordered.flatten()).backward()
            sync.clip_grad_norm_(1.0)
            optimizer.step()
        x, ordered = numbers(seed=1, count=2000)
        right = (model(x).view(-1, DIGITS, 10).argmax(2) == ordered).float().mean()
        saved = sync.optimizer_state_dict()  # all ranks call it
        if sync.rank == 0:
            whole = sum(value.nbytes for state in saved["state"].values() for value in state.values())
            own = sync.stats().get("optimizer_state_bytes", whole)
            print(f"{float(right):.1%} of the digits right; optimizer state: {own / 1e6:.1f} of {whole / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
