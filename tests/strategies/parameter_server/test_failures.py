"""Workers and servers that die, leave and join: which of them continue, and with what state."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsync
from gradsync.comm.base import Communicator
from gradsync.messaging.endpoints import PendingSend
from gradsync.strategies.parameter_server.server.server import Server
from gradsync.testing.processes import wait_until
from gradsync.testing.threads import run_ranks
from tests.strategies.parameter_server.trainer import (
    TIMEOUT_S,
    Trainer,
    addresses_of,
    assert_close,
    assert_same,
    batch,
    make_model,
    reference,
    servers,
    sgd,
)
from tests.support.ranks import run_processes


def disconnect(trainer: Trainer) -> None:
    """Close the connections without leaving, as the kernel does for a killed process."""
    trainer.client._pool.close()


def crash(server: Server) -> None:
    """End a server without saving anything."""
    server._stop.set()
    assert server._thread is not None
    server._thread.join(5.0)
    for mirror in server._mirrors.values():
        mirror.close()
    server._listener.close()


def crash_soon(server: Server) -> None:
    """Crash in a moment; until then no change of the server reaches its shard's copy."""
    for mirror in server._mirrors.values():
        assert mirror.connection is not None
        mirror.connection.send = lambda message: PendingSend([])  # type: ignore[method-assign]
    threading.Timer(0.3, crash, [server]).start()


@pytest.mark.parametrize("staleness", [0, 1])
def test_clock_ignores_dead_workers(staleness: int) -> None:
    with servers(2) as started:
        options: dict[str, Any] = {"num_workers": 3, "staleness": staleness}
        trainers = [Trainer(worker, addresses_of(started), **options) for worker in range(3)]
        for trainer in trainers:
            trainer.join()
        disconnect(trainers[2])
        for step in range(3):
            for trainer in trainers[:2]:
                trainer.step(step, pull=False)
            for trainer in trainers[:2]:
                trainer.client.pull(trainer.params)
        assert trainers[0].client.stats()["clocks"] == {0: 3, 1: 3}
        if staleness == 0:
            assert_close(trainers[0].values(), reference(2, 3))
        for trainer in trainers[:2]:
            trainer.client.close()


@pytest.mark.parametrize("staleness", [0, 2])
def test_late_joiner_begins_at_the_smallest_clock_and_contributes(staleness: int) -> None:
    with servers(2) as started:
        first = Trainer(0, addresses_of(started), num_workers=1, staleness=staleness)
        first.join()
        for step in range(4):
            first.step(step)
        late_joiner = Trainer(5, addresses_of(started), num_workers=1, staleness=staleness)
        assert late_joiner.join() == 4
        assert_same(late_joiner.values(), first.values())
        for trainer in (first, late_joiner):
            trainer.step(4, pull=False)
        for trainer in (first, late_joiner):
            trainer.client.pull(trainer.params)
        assert_same(late_joiner.values(), first.values())
        assert first.client.stats()["clocks"] == {0: 5, 5: 5}
        late_joiner.client.close()
        first.step(5)  # it has left: it is not waited for
        first.client.close()


def test_server_lost_without_a_mirror_is_named() -> None:
    with servers(1) as started:
        lost = Server(1).start()
        trainer = Trainer(0, [*addresses_of(started), lost.address], num_workers=1)
        trainer.join()
        trainer.step(0)
        crash(lost)
        with pytest.raises(gradsync.ServerLost, match=r"shard 1 .* was lost with its server at .*mirrors=1") as error:
            trainer.step(1)
        assert error.value.shard == 1
        assert set(error.value.names) == set(trainer.client.names[1])
        trainer.client.close()


def test_server_that_was_never_reached_is_not_called_lost() -> None:
    with servers(1) as started:
        gone = Server(1)
        gone.close()
        addresses = [*addresses_of(started), gone.address]
        with pytest.raises(gradsync.Unreachable, match=r"shard 1 was never reached: tcp://.*`gradsync serve --shard 1"):
            Trainer(0, addresses, num_workers=1, timeout_s=1.0)


@pytest.mark.parametrize(("staleness", "clip_norm"), [(0, None), (0, 0.3), (1, None), (None, 0.3)])
def test_mirrored_shard_loses_nothing_with_its_server(staleness: int | None, clip_norm: float | None) -> None:
    """A server dies in the middle of training; the result is that of a run in which it did not."""
    workers = 2 if staleness == 0 else 1  # then the result does not depend on which worker is faster
    steps = 12
    with servers(2) as started:
        dying = Server(2).start()
        everyone = [*started, dying]

        def work(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            trainer = Trainer(
                comm.rank,
                addresses_of(everyone),
                adagrad,
                num_workers=workers,
                staleness=staleness,
                mirrors=1,
                clip_norm=clip_norm,
            )
            trainer.join()
            for step in range(steps):
                if step == 5 and comm.rank == 0:
                    crash_soon(dying)
                if step == 7 and dying._thread is not None:
                    dying._thread.join(TIMEOUT_S)  # its unreplicated changes are lost
                trainer.step(step, pull=staleness == 0 or step % 2 == 1)
            comm.barrier()
            stats = trainer.client.stats()
            trainer.client.close()
            return trainer.values(), stats

        results = run_ranks(workers, work, timeout_s=TIMEOUT_S)
    assert dying.error is None
    for values, stats in results:
        if staleness == 0:
            assert_close(values, reference(workers, steps, adagrad, clip_norm=clip_norm))
        assert stats["versions"] == [steps] * 3
        assert stats["lost"] == []
        assert stats["dropped"] == 0
    if staleness != 0:
        undisturbed = train_without_failure(steps, staleness, clip_norm)
        assert_same(results[0][0], undisturbed)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.05)


def train_without_failure(steps: int, staleness: int | None, clip_norm: float | None) -> dict[str, torch.Tensor]:
    with servers(3) as started:
        trainer = Trainer(0, addresses_of(started), adagrad, num_workers=1, staleness=staleness, clip_norm=clip_norm)
        trainer.join()
        for step in range(steps):
            trainer.step(step, pull=step % 2 == 1)
        trainer.client.close()
    return trainer.values()


def test_restarted_server_resumes_from_its_snapshot_and_reports_lost_updates(tmp_path: Path) -> None:
    first = Server(0, snapshots=tmp_path, ipc=False).start()
    port = first._listener.port
    trainer = Trainer(0, [first.address], num_workers=1, snapshot_every=4, reconnect_s=10.0)
    trainer.join()
    for step in range(10):
        trainer.step(step)
        if step == 4:
            wait_until((tmp_path / "shard-0.pt").exists, timeout_s=30.0)  # it is written beside the training
            kept = (tmp_path / "shard-0.pt").read_bytes()
    crash(first)
    (tmp_path / "shard-0.pt").write_bytes(kept)  # as if the later ones had not been written
    again = Server(0, snapshots=tmp_path, port=port, ipc=False).start()
    trainer.step(10)
    stats = trainer.client.stats()
    assert len(stats["lost"]) == 1
    assert stats["lost"][0].startswith("shard 0: ")
    assert stats["clocks"] == {0: 11}
    trainer.step(11)
    trainer.client.close()
    again.close()


def test_restarted_server_keeps_bulk_synchronous_workers_equal(tmp_path: Path) -> None:
    """The server is killed when one worker has pushed and waits, and the other has not."""
    serving = [Server(0, snapshots=tmp_path, ipc=False).start()]
    port = serving[0]._listener.port

    def restart() -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while serving[0]._services[0].clocks.by_worker[1] < 7:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        crash(serving[0])
        serving.insert(0, Server(0, snapshots=tmp_path, port=port, ipc=False).start())

    def work(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        trainer = Trainer(comm.rank, [serving[-1].address], num_workers=2, snapshot_every=4, reconnect_s=TIMEOUT_S)
        trainer.join()
        for step in range(10):
            if step == 6 and comm.rank == 0:
                restart()
            trainer.step(step)
        comm.barrier()
        stats = trainer.client.stats()
        comm.barrier()
        trainer.client.close()
        return trainer.values(), stats

    (first, stats), (other, _) = run_ranks(2, work, timeout_s=TIMEOUT_S)
    assert_same(first, other)
    assert stats["clocks"] == {0: 10, 1: 10}
    assert stats["lost"][0].startswith("shard 0: ")
    serving[0].close()
    assert serving[0].error is None


def test_snapshot_equals_the_shard_bit_for_bit(tmp_path: Path) -> None:
    with servers(1, snapshots=tmp_path) as started:
        trainer = Trainer(0, addresses_of(started), adagrad, num_workers=1, snapshot_every=1)
        trainer.join()
        for step in range(3):
            trainer.step(step)
        state = trainer.client.fetch_state()
        trainer.client.close()
    saved = torch.load(tmp_path / "shard-0.pt", weights_only=True)
    if saved["fields"]["told"]["version"] == 3:  # the last may have been skipped while another was being written
        for name, value in state["params"].items():
            assert torch.equal(saved["tensors"][f"param\0{name}"], value)
    (tmp_path / "shard-1.pt").write_bytes(b"broken")
    with pytest.raises(ValueError, match="is no snapshot"):
        Server(0, snapshots=tmp_path)


# -- real processes ---------------------------------------------------------------------------------------------------


def wait_for(path: Path, timeout_s: float = 30.0) -> str:
    end_s = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} did not come"
        time.sleep(0.01)
    return path.read_text()


def write(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def run_one_of_four(folder: str) -> Any:
    """Ranks 0 and 1 work, rank 2 works until it is killed, rank 3 serves until it is killed and has a mirror at 0."""
    rank, place = int(os.environ["RANK"]), Path(folder)
    server = Server({0: 0, 3: 1}[rank]).start() if rank in (0, 3) else None
    if server is not None:
        write(place / f"address-{rank}", server.address)
    if rank == 3:
        wait_for(place / "kill-3")
        os.kill(os.getpid(), signal.SIGKILL)
    addresses = [wait_for(place / f"address-{server}") for server in (0, 3)]
    trainer = Trainer(rank, addresses, num_workers=3, mirrors=1)
    trainer.join()
    for step in range(3):
        trainer.step(step)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.step(3)  # without rank 2
    write(place / f"there-{rank}", "")
    if rank == 0:
        wait_for(place / "there-1")
        write(place / "kill-3", "")
    for step in range(4, 8):
        trainer.step(step)
        time.sleep(0.05)
    write(place / f"done-{rank}", "")
    wait_for(place / f"done-{1 - rank}")
    trainer.client.close()
    if server is not None:
        server.close()
    return trainer.values()


def test_workers_survive_killed_worker_and_server_processes(tmp_path: Path) -> None:
    outcomes = run_processes(4, run_one_of_four, str(tmp_path), expect_failure=True, timeout_s=100.0)
    assert outcomes[2:] == [-9, -9]
    first, other = outcomes[:2]
    assert_same(first, other)
    # Three workers for three steps, two for the rest.
    model = Continued(3, 3)
    assert_close(first, model.then(2, range(3, 8)))


class Continued:
    """One process that trains on the batches of some workers, and then on those of others."""

    def __init__(self, workers: int, steps: int) -> None:
        self.values = reference(workers, steps)

    def then(self, workers: int, steps: range) -> dict[str, torch.Tensor]:
        model = make_model()
        model.load_state_dict(self.values)
        optimizer = sgd(list(model.parameters()))
        for step in steps:
            optimizer.zero_grad()
            for worker in range(workers):
                x, y = batch(worker, step)
                (torch.nn.functional.mse_loss(model(x), y) / workers).backward()
            optimizer.step()
        return {name: param.detach() for name, param in model.named_parameters()}
