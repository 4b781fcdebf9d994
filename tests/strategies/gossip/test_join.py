"""Newcomers fetch the model and become full members; those with another model or without keys are refused."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.comm.base import Solo
from gradsync.messaging.key_folder import make_key_folder
from gradsync.strategies import Gossip
from gradsync.testing import run_ranks
from tests.strategies.gossip.trial import Trial


def test_newcomer_fetches_the_model_and_has_full_weight() -> None:
    address: list[str] = []

    def member(comm: Communicator) -> tuple[float, list[int], float]:
        trial = Trial(comm, "gossip(topology=test_lopsided, open=True)", torch.full((4,), 3.0).double())
        with trial.sync:
            if comm.rank == 0:
                address.append(trial.stats("address"))
            end_s = time.monotonic() + 20
            while len(trial.stats("living")) < 3:
                assert time.monotonic() < end_s, "no newcomer joined"
                trial.step()
            with trial.sync.join():
                trial.step(50)
            living = trial.stats("living")  # the others wait in settle() for this rank; after it they leave
            trial.sync.settle()
            return float(trial.values[0]), living, trial.stats("push_sum_weight")

    def newcomer() -> float:
        end_s = time.monotonic() + 20
        while not address:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        text = f"gossip(topology=test_lopsided, open=True, join={address[0]!r})"
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


def test_newcomer_with_another_model_is_refused() -> None:
    def run(comm: Communicator) -> None:
        trial = Trial(comm, "gossip(open=True)", torch.zeros(4).double())
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
                    Gossip(join=trial.stats("address"), open=True),
                    comm=Solo(timeout_s=10),
                )
        finally:
            stop.set()
            thread.join()
            trial.sync.close()

    run_ranks(1, run)


def try_to_join(address: str, **options: Any) -> str:
    """Try to fetch the model of a run; returns the error that this ends with."""
    other = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    strategy = Gossip(join=address, **options)
    with pytest.raises(gradsync.GradSyncError) as refused:
        gradsync.synchronize(other, optimizer, strategy, comm=Solo(timeout_s=1))
    return str(refused.value)


@pytest.mark.parametrize("way", ["tcp", "ipc"])
def test_join_without_keys_is_refused_by_default(way: str, tmp_path: Path) -> None:
    """The ranks make keys of their own, and neither the TCP port nor the Unix socket admits any other process."""
    make_key_folder(tmp_path / "other")

    def run(comm: Communicator) -> tuple[float, list[str]]:
        trial = Trial(comm, "gossip", torch.tensor([float(comm.rank)]).double())
        with trial.sync:
            trial.step()
            refused = []
            if comm.rank == 0:
                address = next(part for part in trial.stats("address").split() if part.startswith(way))
                refused = [try_to_join(address, open=True), try_to_join(address, keys=str(tmp_path / "other"))]
            trial.sync.settle()
            assert comm.rank or len(trial.stats("living")) == 2
            comm.barrier()
            return float(trial.values), refused

    outcomes = run_ranks(2, run)
    assert [value for value, _ in outcomes] == [0.5, 0.5]
    assert all("key" in text for text in outcomes[0][1])


def test_join_needs_the_keys_of_the_run(tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    make_key_folder(folder)
    make_key_folder(tmp_path / "other")
    address: list[str] = []

    def run(comm: Communicator) -> float:
        trial = Trial(comm, f"gossip(keys={folder!r})", torch.tensor([3.0]).double())
        with trial.sync:
            address.append(trial.stats("address"))
            end_s = time.monotonic() + 20
            while len(trial.stats("living")) < 2:
                assert time.monotonic() < end_s, "no newcomer joined"
                trial.step()
            trial.sync.settle()
            return float(trial.values)

    results: list[float] = []
    member = threading.Thread(target=lambda: results.extend(run_ranks(1, run)), daemon=True)
    member.start()
    end_s = time.monotonic() + 20
    while not address:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert "key" in try_to_join(address[0], keys=str(tmp_path / "other"))
    newcomer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(newcomer.parameters(), lr=0.0)
    strategy = Gossip(join=address[0], keys=folder)
    with gradsync.synchronize(newcomer, optimizer, strategy, comm=Solo(timeout_s=20)) as sync:
        assert newcomer.weight.item() == 3.0
        newcomer.weight.sum().backward()
        optimizer.step()
        sync.settle()
    member.join(20)
    assert results == [3.0]


def test_open_is_explicit_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_key_folder(tmp_path)
    with pytest.raises(ValueError, match="a newcomer needs the keys of the run"):
        Gossip(join="tcp://127.0.0.1:4000")
    with pytest.raises(ValueError, match="keys= restricts who may connect, and open=True does not"):
        Gossip(keys=str(tmp_path), open=True)
    for strategy, is_logged in (("gossip", False), ("gossip(open=True)", True)):
        caplog.clear()
        run_ranks(1, lambda comm, strategy=strategy: Trial(comm, strategy, torch.zeros(1)).sync.close())
        assert ("is open: whoever reaches it can read and change the model" in caplog.text) == is_logged


def test_keys_must_be_chosen_alike_on_all_ranks() -> None:
    def run(comm: Communicator) -> None:
        Trial(comm, "gossip(open=True)" if comm.rank else "gossip", torch.zeros(1))

    with pytest.raises(ValueError, match="rank 0 has neither keys nor open, rank 1 has open=True"):
        run_ranks(2, run)


def test_key_folder_refuses_a_file(tmp_path: Path) -> None:
    make_key_folder(tmp_path)
    strategy = f"gossip(keys={str(tmp_path / 'server.key')!r})"
    with pytest.raises(ValueError, match="keys is a folder that `gradsync keys FOLDER` has made; got the file"):
        run_ranks(1, lambda comm: Trial(comm, strategy, torch.zeros(1)))
    with pytest.raises(ValueError, match=r"there is no key .*server.key. Make the keys once: gradsync keys"):
        run_ranks(1, lambda comm: Trial(comm, f"gossip(keys={str(tmp_path / 'none')!r})", torch.zeros(1)))
