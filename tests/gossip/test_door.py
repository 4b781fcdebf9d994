"""Newcomers: they fetch the model and count like any other; who has another model or no key stays outside."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator, run_ranks
from gradsync.comm.base import Solo
from gradsync.comm.curve import KeyPair
from gradsync.strategies import Gossip
from tests.gossip.trial import Trial


def test_a_newcomer_fetches_the_model_and_counts_like_any_other() -> None:
    address: list[str] = []

    def member(comm: Communicator) -> tuple[float, list[int], float]:
        trial = Trial(comm, "gossip(topology=test_lopsided)", torch.full((4,), 3.0).double())
        with trial.sync:
            if comm.rank == 0:
                address.append(trial.stats("address"))
            end_s = time.monotonic() + 20
            while len(trial.stats("living")) < 3:
                assert time.monotonic() < end_s, "nobody came"
                trial.step()
            with trial.sync.join():
                trial.step(50)
            living = trial.stats("living")  # all wait in settle() for this one; after it they leave
            trial.sync.settle()
            return float(trial.values[0]), living, trial.stats("push_sum_weight")

    def newcomer() -> float:
        end_s = time.monotonic() + 20
        while not address:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        text = f"gossip(topology=test_lopsided, join={address[0]!r})"
        model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with gradsync.synchronize(model, optimizer, text, comm=Solo(timeout_s=20)) as sync:
            assert float(model.weight.detach()[0, 0]) == 3.0, "it has the model of the run"
            with torch.no_grad():
                model.weight.fill_(6.0)  # what it has learnt
            with sync.join():
                for _ in range(50):
                    optimizer.zero_grad()
                    model.weight.sum().backward()
                    optimizer.step()
            sync.settle()
            return float(model.weight.detach()[0, 0])

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(newcomer()), daemon=True)
    thread.start()
    outcomes = run_ranks(2, member)
    thread.join(20)
    assert results == [pytest.approx(4.0, abs=1e-9)], "the mean of 3, 3 and 6"
    for value, living, weight in outcomes:
        assert value == pytest.approx(4.0, abs=1e-9)
        assert len(living) == 3
        assert weight == 1.0


def test_a_newcomer_with_another_model_is_refused() -> None:
    def run(comm: Communicator) -> None:
        trial = Trial(comm, "gossip", torch.zeros(4).double())
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                trial.step()
                time.sleep(0.01)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            other = nn.Linear(5, 1, bias=False, dtype=torch.float64)
            with pytest.raises(ValueError, match="trains another model: weight is"):
                gradsync.synchronize(
                    other,
                    torch.optim.SGD(other.parameters(), lr=0.1),
                    Gossip(join=trial.stats("address")),
                    comm=Solo(timeout_s=10),
                )
        finally:
            stop.set()
            thread.join()
            trial.sync.close()

    run_ranks(1, run)


def test_keys_keep_strangers_out(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    KeyPair.make().write(path)

    def run(comm: Communicator) -> tuple[float, str]:
        trial = Trial(comm, f"gossip(keys={str(path)!r})", torch.tensor([float(comm.rank)]).double())
        with trial.sync:
            trial.step()
            refused = ""
            if comm.rank == 0:
                other = nn.Linear(1, 1, bias=False, dtype=torch.float64)
                try:
                    gradsync.synchronize(
                        other,
                        torch.optim.SGD(other.parameters(), lr=0.1),
                        Gossip(join=trial.stats("address")),
                        comm=Solo(timeout_s=1),
                    )
                except gradsync.GradSyncError as error:
                    refused = str(error)
            with trial.sync.join():
                pass
            return float(trial.values), refused

    outcomes = run_ranks(2, run)
    assert [value for value, _ in outcomes] == [0.5, 0.5]
    assert "key" in outcomes[0][1]
