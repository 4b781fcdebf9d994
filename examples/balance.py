"""Exact training on unequal machines: a slow worker gets less of every batch, and the result stays the same.

    gradsync run -n 4 examples/balance.py                # the last worker is four times slower
    gradsync run -n 4 examples/balance.py --even         # as it would be without balance=True

Slowness is simulated by sleeping for every sample, so that it shows on any machine.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import gradsync


def main() -> None:
    parser = argparse.ArgumentParser(description="Balanced parts for unequal workers.")
    parser.add_argument("--even", action="store_true", help="the same part for all, whatever their speed")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--nap-ms", type=float, default=2.0, help="for each sample; the last worker takes 4 times that")
    args = parser.parse_args()
    torch.set_num_threads(1)
    comm = gradsync.connect()
    sleep_s = args.nap_ms / 1000 * (4 if comm.rank == comm.world_size - 1 else 1)

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1040, 8, generator=generator)
    labels = inputs.square().sum(1, keepdim=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    sync = gradsync.synchronize(model, optimizer)
    loader = gradsync.shard((inputs, labels), global_batch_size=52, balance=not args.even)  # the one line
    for epoch in range(args.epochs):
        start_s = time.perf_counter()
        for x, y in loader:
            time.sleep(sleep_s * len(x))
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        if comm.rank == 0:
            rate = len(inputs) / (time.perf_counter() - start_s)
            with torch.no_grad():
                loss = float((model(inputs) - labels).square().mean())
            print(f"epoch {epoch}: {rate:.0f} samples/s, parts {loader.parts}, loss {loss:.5f}")
    sync.close()


if __name__ == "__main__":
    main()
