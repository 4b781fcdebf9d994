"""A parameter server in one script: workers of unequal speed train one model, and fast ones wait little.

    gradsync run -n 4 examples/parameter_server.py
    gradsync run -n 4 examples/parameter_server.py --strategy "parameter_server(staleness=3)"
    gradsync run -n 4 --servers 2 examples/parameter_server.py      # shards as processes of their own: workers may die

Every worker pushes its gradients when it steps; the servers (by default a thread in each worker) run the optimizer.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import gradsync


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="parameter_server(staleness=None, staleness_policy=scale)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--slow-ms", type=float, default=5.0, help="the time that the last rank sleeps in every step")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    target = torch.randn(8, 1)
    with gradsync.synchronize(model, optimizer, options.strategy) as sync:
        data = torch.Generator().manual_seed(sync.rank)
        for _ in range(options.steps):
            x = torch.randn(32, 8, generator=data)
            optimizer.zero_grad()
            loss = (model(x) - torch.tanh(x @ target)).square().mean()
            loss.backward()
            optimizer.step()  # pushes the gradients, and pulls the servers' current parameters
            if sync.rank == sync.world_size - 1:
                time.sleep(options.slow_ms / 1000)
        sync.settle()  # all pushes are in; every rank has the newest parameters
        if sync.rank == 0:
            stats = sync.stats()
            print(f"loss {loss.item():.4f}")
            print(f"pushes of each worker: {stats['clocks']}")
            print(f"staleness, in updates: {dict(sorted(stats['staleness'].items()))}")
            print(f"straggler: {stats['straggler']}")


if __name__ == "__main__":
    main()
