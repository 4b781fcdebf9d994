"""Decentralised training: each rank averages its model with a neighbour after every step, and any rank may fail.

gradsync run -n 4 --keep-going examples/gossip.py
gradsync run -n 4 --keep-going examples/gossip.py --topology ring --asynchronous --kill 0

A newcomer needs the run's keys. Make them once, and start the run with them, and with a port:

gradsync keys keys
gradsync run -n 4 --keep-going examples/gossip.py --keys keys --port 4000
python examples/gossip.py --keys keys --join "tcp://127.0.0.1:4000"
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
from torch import nn

import gradsync
from gradsync.strategies import Gossip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="exponential", choices=["ring", "exponential", "random"])
    parser.add_argument("--asynchronous", action="store_true", help="do not wait for slower ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--port", type=int, default=0, help="rank r listens at port + r")
    parser.add_argument("--join", default="", help="join a running training: the address of any of its ranks")
    parser.add_argument(
        "--keys", default="", help="a folder that `gradsync keys` has made, for all ranks and newcomers"
    )
    parser.add_argument("--kill", type=int, help="kill this rank half-way, to see the others go on")
    options = parser.parse_args()

    torch.manual_seed(0)
    teacher, model = nn.Linear(20, 1), nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    strategy = Gossip(
        topology=options.topology,
        asynchronous=options.asynchronous,
        port=options.port,
        join=options.join,
        keys=options.keys,
    )
    with gradsync.synchronize(model, optimizer, strategy) as sync:
        torch.manual_seed(sync.rank if not options.join else os.getpid())  # each has data of its own
        with sync.join():
            for step in range(options.steps):
                if options.kill == sync.rank and step == options.steps // 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                x = torch.randn(32, 20)
                loss = (model(x) - teacher(x).detach()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        living, apart = sync.stats()["living"], sync.stats()["consensus"]["relative"]
        sync.settle()  # the exact mean of the active ranks, on all of them
        x = torch.randn(1000, 20, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            loss = (model(x) - teacher(x)).square().mean()
        print(f"rank {sync.rank}: loss {loss:.4f}, living {living}, models were {apart:.1%} apart", flush=True)


if __name__ == "__main__":
    main()
