"""One worker of bench_kills: trains a model whose gradients take longer to exchange than to compute, until a peer dies.

Started by bench_kills.py, which forks it from a process that has imported this file already: importing torch anew for
each worker would take most of the benchmark's time.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # the optimizers import it at their first step
from torch import Tensor, nn

import gradsync
import gradsync.comm.hierarchical.communicator
import gradsync.comm.shm.communicator

PHASES = ("starting", "forward", "backward", "optimizer.step()")
WIDTH = 1024  # a layer has 4 MiB of weights


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the workers of one world train, and over which transport."""

    transport: str
    strategy: str
    layers: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a survivor's training ended. Times are of the monotonic clock, which all processes of a host share."""

    error: str  # the exception's type; empty: it has none
    text: str
    ranks: tuple[int, ...]  # that PeerLost names
    during: str  # the collective that PeerLost names
    raised_s: float


def work(job: Job, environment: Mapping[str, str], phases: Any, steps: Any, results: Connection) -> None:
    """Train until an exception ends it; send a :class:`Report`, and leave as an interpreter that exits does.

    ``phases`` and ``steps`` are shared with the benchmark: what each rank is doing, and how many steps it has done.
    """
    os.setsid()  # what this worker starts is in its process group: the benchmark looks there for what is left
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        train(job, phases, steps)
    except gradsync.PeerLost as lost:
        ended = Report(
            error="PeerLost", text=str(lost), ranks=lost.ranks, during=lost.during or "", raised_s=time.monotonic()
        )
    except Exception as error:
        ended = Report(error=type(error).__name__, text=str(error), ranks=(), during="", raised_s=time.monotonic())
    results.send(ended)
    results.close()
    atexit._run_exitfuncs()  # a forked process of multiprocessing runs none


def train(job: Job, phases: Any, steps: Any) -> None:
    """Train without an end."""
    comm = gradsync.connect(job.transport, timeout_s=job.timeout_s)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(job.layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    gradsync.synchronize(model, optimizer, job.strategy)
    batch: Tensor = torch.randn(2, WIDTH) + comm.rank
    while True:
        phases[comm.rank] = PHASES.index("forward")
        loss = model(batch).square().mean()
        phases[comm.rank] = PHASES.index("backward")
        loss.backward()
        phases[comm.rank] = PHASES.index("optimizer.step()")
        optimizer.step()
        optimizer.zero_grad()
        steps[comm.rank] += 1
