"""The heartbeat by itself: which connections it accepts, which ranks it finds lost, and which verdict stands."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import gradsync
from gradsync.comm.failure.heartbeat import Heartbeat
from tests.support.ranks import run_processes


class Store:
    """The rendezvous store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


@pytest.fixture
def heartbeats() -> Iterator[list[Heartbeat]]:
    store = Store()
    made = [Heartbeat(rank, 3, store, addresses=["127.0.0.1"], timeout_s=2.0) for rank in range(3)]
    made[0].store = store  # type: ignore[attr-defined]
    assert eventually(lambda: len(made[0]._peers) == 2)
    yield made
    for heartbeat in made:
        heartbeat.close()


def test_broken_connection_is_reported_to_all_ranks(heartbeats: list[Heartbeat]) -> None:
    heartbeats[2]._peers[0].connection.shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: 2 in heartbeats[0].lost and 2 in heartbeats[1].lost)
    assert heartbeats[1].lost == {2: "its process is gone"}


def test_close_is_not_reported_as_a_loss(heartbeats: list[Heartbeat]) -> None:
    heartbeats[1].progress.position_in("group")[:] = 5, "all_reduce(sum)"
    heartbeats[1].close()
    assert eventually(lambda: 1 in heartbeats[0].left and 1 in heartbeats[2].left)
    assert heartbeats[2].left[1].groups == {"group": [5, "all_reduce(sum)"]}
    time.sleep(0.2)
    assert not heartbeats[0].lost
    assert not heartbeats[2].lost


def test_close_with_a_failure_reports_the_reason(heartbeats: list[Heartbeat]) -> None:
    heartbeats[2].close("it failed with ZeroDivisionError: division by zero")
    assert eventually(lambda: "ZeroDivisionError" in heartbeats[1].lost.get(2, ""))


def test_first_verdict_stands(heartbeats: list[Heartbeat]) -> None:
    heartbeats[1].declare_lost([2], "it is late")
    assert eventually(lambda: 2 in heartbeats[0].lost)
    heartbeats[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)  # and now its own process ends too
    assert eventually(lambda: 1 in heartbeats[0].lost)
    assert next(iter(heartbeats[0].lost.items())) == (2, "it is late")


def test_ask_progress_gathers_every_ranks_answer(heartbeats: list[Heartbeat]) -> None:
    for number, heartbeat in enumerate(heartbeats):
        heartbeat.progress.position_in("group")[:] = number, "all_reduce(sum)"
        heartbeat.progress.note = f"step {number}"
    for heartbeat in heartbeats:
        answers = heartbeat.ask_progress()
        assert {rank: answer.note for rank, answer in answers.items()} == {0: "step 0", 1: "step 1", 2: "step 2"}


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"hello": 1, "token": "guess"}\n',
        b'{"hello": 1, "token": "\xc3\xa9"}\n',
        b'{"hello": Infinity, "token": NaN}\n',
        b'{"hello": true}\n',
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        b"\xff\x00" * 99,
        b" " * (3 << 20),
    ],
    ids=lambda greeting: repr(greeting[:40]),
)
def test_hub_drops_strangers_and_goes_on(heartbeats: list[Heartbeat], greeting: bytes) -> None:
    endpoint = json.loads(heartbeats[0].store.get("heartbeat"))  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", endpoint["port"])) as stranger:
        stranger.settimeout(5)
        with contextlib.suppress(OSError):  # the connection is closed while it sends
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(100):
                pass
    assert len(heartbeats[0].ask_progress()) == 3
    assert not heartbeats[0].lost
    assert heartbeats[0]._thread.is_alive()


def test_hub_drops_a_silent_stranger_in_time(heartbeats: list[Heartbeat]) -> None:
    endpoint = json.loads(heartbeats[0].store.get("heartbeat"))  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", endpoint["port"])) as stranger:
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(100):
                pass
    assert len(heartbeats[0].ask_progress()) == 3


def test_malformed_message_makes_its_sender_lost(heartbeats: list[Heartbeat]) -> None:
    heartbeats[2]._peers[0].send({"bye": 1})
    assert eventually(lambda: "a malformed message" in heartbeats[1].lost.get(2, ""))
    assert len(heartbeats[0].ask_progress(timeout_s=0.5)) == 2
    assert heartbeats[0]._thread.is_alive()


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_heartbeat_works_over_ipv6(address: str) -> None:
    store = Store()
    heartbeats = [Heartbeat(rank, 2, store, addresses=[address], timeout_s=5.0) for rank in range(2)]
    assert eventually(lambda: len(heartbeats[0]._peers) == 1)
    assert len(heartbeats[1].ask_progress()) == 2
    for heartbeat in heartbeats[::-1]:
        heartbeat.close()


def killed_with_a_loader_worker_alive() -> str:
    """The loader's worker was forked from the rank, and outlives it for a while, with the descriptors it inherited."""
    comm = gradsync.connect(timeout_s=60)
    loader = DataLoader(
        TensorDataset(torch.zeros(1000)), num_workers=1, prefetch_factor=1, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    try:
        comm.barrier()
    except gradsync.PeerLost as lost:
        assert time.monotonic() - start_s < 3, "the forked worker must not keep the dead rank's connection open"
        return str(lost.ranks)
    return "nothing"


def test_forked_child_does_not_keep_a_dead_ranks_connection_open() -> None:
    outcomes = run_processes(3, killed_with_a_loader_worker_alive, expect_failure=True, timeout_s=30)
    assert outcomes[0] == outcomes[2] == "(1,)"


def test_heartbeat_finds_its_hub_through_torchs_store() -> None:
    store = dist.HashStore()
    hub = Heartbeat(0, 2, store, addresses=[], timeout_s=5.0)
    other = Heartbeat(1, 2, store, addresses=[], timeout_s=5.0)
    assert eventually(lambda: len(hub._peers) == 1)
    other.close()
    hub.close()
