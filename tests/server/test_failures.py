"""Workers and servers that die, leave, and come: who goes on, and with what."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.comm.base import Communicator
from gradsync.comm.endpoints import Sent
from gradsync.comm.threads import run_ranks
from gradsync.server.lines import ServerLost
from gradsync.server.server import Server
from tests.ranks import run_processes
from tests.server.rig import (
    TIMEOUT_S,
    Trainee,
    addresses_of,
    assert_close,
    assert_same,
    batch,
    make_model,
    reference,
    servers,
    sgd,
)


def vanish(trainee: Trainee) -> None:
    """What the kernel does for a process that was killed: the connections are closed, and nothing is said."""
    trainee.client._lines.close()


def crash(server: Server) -> None:
    """A server that is gone, with all that it had."""
    server._stop.set()
    assert server._thread is not None
    server._thread.join(5.0)
    for mirror in server._mirrors.values():
        mirror.close()
    server._listener.close()


def fade(server: Server) -> None:
    """Crash in a moment; until then nothing that the server does reaches its shard's copy."""
    for mirror in server._mirrors.values():
        assert mirror.line is not None
        mirror.line.send = lambda message: Sent([])  # type: ignore[method-assign]
    threading.Timer(0.3, crash, [server]).start()


@pytest.mark.parametrize("staleness", [0, 1])
def test_nobody_waits_for_the_dead(staleness: int) -> None:
    with servers(2) as started:
        options: dict[str, Any] = {"num_workers": 3, "staleness": staleness}
        trainees = [Trainee(worker, addresses_of(started), **options) for worker in range(3)]
        for trainee in trainees:
            trainee.join()
        vanish(trainees[2])
        for step in range(3):
            for trainee in trainees[:2]:
                trainee.step(step, pull=False)
            for trainee in trainees[:2]:
                trainee.client.pull(trainee.params)
        assert trainees[0].client.stats()["clocks"] == {0: 3, 1: 3}
        if staleness == 0:
            assert_close(trainees[0].values(), reference(2, 3))
        for trainee in trainees[:2]:
            trainee.client.close()


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_newcomer_joins_at_the_minimum_and_contributes(staleness: int) -> None:
    with servers(2) as started:
        first = Trainee(0, addresses_of(started), num_workers=1, staleness=staleness)
        first.join()
        for step in range(4):
            first.step(step)
        newcomer = Trainee(5, addresses_of(started), num_workers=1, staleness=staleness)
        assert newcomer.join() == 4
        assert_same(newcomer.values(), first.values())
        for trainee in (first, newcomer):
            trainee.step(4, pull=False)
        for trainee in (first, newcomer):
            trainee.client.pull(trainee.params)
        assert_same(newcomer.values(), first.values())
        assert first.client.stats()["clocks"] == {0: 5, 5: 5}
        newcomer.client.close()
        first.step(5)  # it has left: nobody waits
        first.client.close()


def test_a_lost_server_without_copy_is_named() -> None:
    with servers(1) as started:
        lost = Server(1).start()
        trainee = Trainee(0, [*addresses_of(started), lost.address], num_workers=1)
        trainee.join()
        trainee.step(0)
        crash(lost)
        with pytest.raises(ServerLost, match=r"shard 1 .* was lost with its server at .*mirrors=1") as error:
            trainee.step(1)
        assert error.value.shard == 1
        assert set(error.value.names) == set(trainee.client.names[1])
        trainee.client.close()


@pytest.mark.parametrize(("staleness", "clip_norm"), [(0, None), (0, 0.3), (1, None), (None, 0.3)])
def test_a_mirrored_shard_loses_nothing(staleness: int | None, clip_norm: float | None) -> None:
    """A server dies in the middle of training; the result is that of a run in which it did not."""
    workers = 2 if staleness == 0 else 1  # then the result does not depend on who is faster
    steps = 12
    with servers(2) as started:
        dying = Server(2).start()
        everyone = [*started, dying]

        def work(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            trainee = Trainee(
                comm.rank,
                addresses_of(everyone),
                adagrad,
                num_workers=workers,
                staleness=staleness,
                mirrors=1,
                clip_norm=clip_norm,
            )
            trainee.join()
            for step in range(steps):
                if step == 5 and comm.rank == 0:
                    fade(dying)
                if step == 7 and dying._thread is not None:
                    dying._thread.join(TIMEOUT_S)  # whatever it did alone is gone
                trainee.step(step, pull=staleness == 0 or step % 2 == 1)
            comm.barrier()
            stats = trainee.client.stats()
            trainee.client.close()
            return trainee.values(), stats

        results = run_ranks(workers, work, timeout_s=TIMEOUT_S)
    assert dying.error is None
    for values, stats in results:
        if staleness == 0:
            assert_close(values, reference(workers, steps, adagrad, clip_norm=clip_norm))
        assert stats["versions"] == [steps] * 3
        assert stats["lost"] == []
        assert stats["dropped"] == 0
    if staleness != 0:
        undisturbed = unbroken(steps, staleness, clip_norm)
        assert_same(results[0][0], undisturbed)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.05)


def unbroken(steps: int, staleness: int | None, clip_norm: float | None) -> dict[str, torch.Tensor]:
    with servers(3) as started:
        trainee = Trainee(0, addresses_of(started), adagrad, num_workers=1, staleness=staleness, clip_norm=clip_norm)
        trainee.join()
        for step in range(steps):
            trainee.step(step, pull=step % 2 == 1)
        trainee.client.close()
    return trainee.values()


def test_a_restarted_server_goes_on_from_its_snapshot_and_says_what_was_lost(tmp_path: Path) -> None:
    first = Server(0, snapshots=tmp_path, ipc=False).start()
    port = first._listener.port
    trainee = Trainee(0, [first.address], num_workers=1, snapshot_every=4, reconnect_s=10.0)
    trainee.join()
    for step in range(10):
        trainee.step(step)
        if step == 4:
            kept = (tmp_path / "shard-0.pt").read_bytes()
    crash(first)
    (tmp_path / "shard-0.pt").write_bytes(kept)  # as if the later ones had not been written
    again = Server(0, snapshots=tmp_path, port=port, ipc=False).start()
    trainee.step(10)
    stats = trainee.client.stats()
    assert len(stats["lost"]) == 1
    assert stats["lost"][0].startswith("shard 0: ")
    assert stats["clocks"] == {0: 11}
    trainee.step(11)
    trainee.client.close()
    again.close()


def test_bulk_synchronous_workers_go_on_together_with_a_restarted_server(tmp_path: Path) -> None:
    """It is killed when one worker has pushed, and waits, and the other has not."""
    serving = [Server(0, snapshots=tmp_path, ipc=False).start()]
    port = serving[0]._listener.port

    def restart() -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while serving[0]._keepers[0].clocks.of[1] < 7:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        crash(serving[0])
        serving.insert(0, Server(0, snapshots=tmp_path, port=port, ipc=False).start())

    def work(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        trainee = Trainee(comm.rank, [serving[-1].address], num_workers=2, snapshot_every=4, reconnect_s=TIMEOUT_S)
        trainee.join()
        for step in range(10):
            if step == 6 and comm.rank == 0:
                restart()
            trainee.step(step)
        comm.barrier()
        stats = trainee.client.stats()
        comm.barrier()
        trainee.client.close()
        return trainee.values(), stats

    (first, stats), (other, _) = run_ranks(2, work, timeout_s=TIMEOUT_S)
    assert_same(first, other)
    assert stats["clocks"] == {0: 10, 1: 10}
    assert stats["lost"][0].startswith("shard 0: ")
    serving[0].close()
    assert serving[0].error is None


def test_a_snapshot_is_the_shard_bit_for_bit(tmp_path: Path) -> None:
    with servers(1, snapshots=tmp_path) as started:
        trainee = Trainee(0, addresses_of(started), adagrad, num_workers=1, snapshot_every=1)
        trainee.join()
        for step in range(3):
            trainee.step(step)
        state = trainee.client.fetch_state()
        trainee.client.close()
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


def one_of_four(folder: str) -> Any:
    """Ranks 0 and 1 work, rank 2 works until it is killed, rank 3 serves until it is killed and has a mirror at 0."""
    rank, place = int(os.environ["RANK"]), Path(folder)
    server = Server({0: 0, 3: 1}[rank]).start() if rank in (0, 3) else None
    if server is not None:
        write(place / f"address-{rank}", server.address)
    if rank == 3:
        wait_for(place / "kill-3")
        os.kill(os.getpid(), signal.SIGKILL)
    addresses = [wait_for(place / f"address-{server}") for server in (0, 3)]
    trainee = Trainee(rank, addresses, num_workers=3, mirrors=1)
    trainee.join()
    for step in range(3):
        trainee.step(step)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    trainee.step(3)  # without rank 2
    write(place / f"there-{rank}", "")
    if rank == 0:
        wait_for(place / "there-1")
        write(place / "kill-3", "")
    for step in range(4, 8):
        trainee.step(step)
        time.sleep(0.05)
    write(place / f"done-{rank}", "")
    wait_for(place / f"done-{1 - rank}")
    trainee.client.close()
    if server is not None:
        server.close()
    return trainee.values()


def test_killed_processes_of_a_worker_and_of_a_server(tmp_path: Path) -> None:
    outcomes = run_processes(4, one_of_four, str(tmp_path), expect_failure=True, timeout_s=100.0)
    assert outcomes[2:] == [-9, -9]
    first, other = outcomes[:2]
    assert_same(first, other)
    # Three workers for three steps, two for the rest.
    model = Continued(3, 3)
    assert_close(first, model.then(2, range(3, 8)))


class Continued:
    """One process that does what some workers did, and then what others did."""

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
