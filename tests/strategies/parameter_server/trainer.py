"""A small training job for tests of the parameter server, with threads as workers and servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.strategies.parameter_server.client import Client
from gradsync.strategies.parameter_server.job import Job, hyperparameters
from gradsync.strategies.parameter_server.server.server import Server

TIMEOUT_S = 60.0  # long enough for a busy machine; a test that waits for a dead worker fails after it

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


_seeding = threading.Lock()


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def make_model() -> nn.Module:
    with _seeding, torch.random.fork_rng():  # all threads share one generator
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(worker: int, step: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


class Trainer:
    """One worker: a model, its optimizer (which never steps) and its client of the servers."""

    def __init__(
        self, worker: int, addresses: list[str], make: Optimizers = sgd, *, num_workers: int, **options: Any
    ) -> None:
        self.worker = worker
        self.model = make_model().to(options.pop("dtype", torch.float32))
        self.params = dict(self.model.named_parameters())
        self.optimizer = make(list(self.params.values()))
        of_client = {
            key: options.pop(key) for key in ("keys", "timeout_s", "feedback", "reconnect_s") if key in options
        }
        of_client.setdefault("timeout_s", TIMEOUT_S)
        self.job = Job.describe(self.params, self.optimizer, num_workers=num_workers, **options)
        self.client = Client(worker, addresses, self.job, **of_client)

    def join(self) -> int:
        clock = self.client.join(self.params, hyperparameters(self.optimizer))
        self.client.pull(self.params)
        return clock

    def gradients(self, step: int, rows: int = 4) -> dict[str, Tensor | None]:
        x, y = (part.to(next(self.model.parameters()).dtype) for part in batch(self.worker, step, rows))
        self.model.zero_grad()
        nn.functional.mse_loss(self.model(x), y).backward()
        return {name: param.grad for name, param in self.params.items()}

    def step(self, step: int, rows: int = 4, *, pull: bool = True) -> None:
        grads = self.gradients(step, rows)
        self.client.push(grads, weight=float(rows), groups=hyperparameters(self.optimizer))
        if pull:
            self.client.pull(self.params)
        else:
            self.client.flush()

    def values(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.params.items()}


@contextlib.contextmanager
def servers(count: int, **options: Any) -> Iterator[list[Server]]:
    started = [Server(index, **options).start() for index in range(count)]
    try:
        yield started
    finally:
        for server in started:
            server.close()
        assert [server.error for server in started] == [None] * count


def addresses_of(started: list[Server]) -> list[str]:
    return [server.address for server in started]


def reference(
    num_workers: int,
    steps: int,
    make: Optimizers = sgd,
    *,
    rows: Callable[[int, int], int] = lambda worker, step: 4,
    clip_norm: float | None = None,
    before_step: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None,
) -> dict[str, Tensor]:
    """The result of one process that steps with the weighted mean over all workers' batches."""
    model = make_model()
    optimizer = make(list(model.parameters()))
    for step in range(steps):
        total = sum(rows(worker, step) for worker in range(num_workers))
        optimizer.zero_grad()
        for worker in range(num_workers):
            x, y = batch(worker, step, rows(worker, step))
            (nn.functional.mse_loss(model(x), y) * (rows(worker, step) / total)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        before_step(optimizer, step)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6)


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
