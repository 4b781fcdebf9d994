"""Lock-free training of a bag of words: every worker updates the same parameters, and none waits for another.

    python examples/hogwild.py                       # one process
    gradsync run -n 4 examples/hogwild.py            # four, on one host

The task: a document is a few of 20,000 words, each word has a hidden value, and the label is the sign of their sum. A
gradient touches only the rows of its documents' words, so workers seldom conflict.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradsync

NUM_WORDS, WORDS_A_DOCUMENT = 20_000, 12


def documents(values: Tensor, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    words = torch.randint(NUM_WORDS, (number, WORDS_A_DOCUMENT), generator=generator)
    return words, (values[words].sum(1) > 0).float()


def main() -> None:
    parser = argparse.ArgumentParser(description="A bag of words, trained lock-free.")
    parser.add_argument("--steps", type=int, default=3000, help="of each worker")
    parser.add_argument("--batch", type=int, default=64, help="documents in a step of each worker")
    parser.add_argument("--lr", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    comm = gradsync.connect()
    values = torch.randn(NUM_WORDS, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(1 + comm.rank)  # each worker reads documents of its own

    model = nn.EmbeddingBag(NUM_WORDS, 1, mode="sum", sparse=True)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    with gradsync.synchronize(model, optimizer, "hogwild") as sync:
        for _ in range(args.steps):
            words, labels = documents(values, args.batch, own)
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(words).squeeze(1), labels).backward()
            optimizer.step()
        sync.settle()  # waits until all are done: from here on the parameters do not change
        if comm.rank == 0:
            words, labels = documents(values, 10_000, torch.Generator().manual_seed(99))
            right = ((model(words).squeeze(1) > 0) == labels.bool()).float().mean()
            stats = sync.stats()
            print(
                f"{float(right):.1%} right after updates {stats['updates']}; staleness {stats['staleness']['mean']:.1f}"
            )
        sync.settle()  # the others wait until rank 0 has evaluated


if __name__ == "__main__":
    main()
