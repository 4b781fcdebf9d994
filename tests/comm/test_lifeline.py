"""The lifeline by itself: who is let in, who is missed, and whose word counts."""

from __future__ import annotations

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
from gradsync.comm.lifeline import Lifeline
from tests.ranks import run_processes


class Store:
    """What the ranks share while they meet."""

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
def lines() -> Iterator[list[Lifeline]]:
    store = Store()
    made = [Lifeline(rank, 3, store, addresses=["127.0.0.1"], timeout_s=2.0) for rank in range(3)]
    made[0].store = store  # type: ignore[attr-defined]
    assert eventually(lambda: len(made[0]._peers) == 2)
    yield made
    for line in made:
        line.close()


def test_a_connection_that_breaks_is_a_death_that_all_hear_of(lines: list[Lifeline]) -> None:
    lines[2]._peers[0].connection.shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: 2 in lines[0].lost and 2 in lines[1].lost)
    assert lines[1].lost == {2: "its process is gone"}


def test_leaving_in_order_is_no_death(lines: list[Lifeline]) -> None:
    lines[1].here.enter("group")[:] = 5, "all_reduce(sum)"
    lines[1].close()
    assert eventually(lambda: 1 in lines[0].left and 1 in lines[2].left)
    assert lines[2].left[1].groups == {"group": [5, "all_reduce(sum)"]}
    time.sleep(0.2)
    assert not lines[0].lost
    assert not lines[2].lost


def test_leaving_with_a_failure_is_told_with_its_reason(lines: list[Lifeline]) -> None:
    lines[2].close("it failed with ZeroDivisionError: division by zero")
    assert eventually(lambda: "ZeroDivisionError" in lines[1].lost.get(2, ""))


def test_the_first_verdict_stands(lines: list[Lifeline]) -> None:
    lines[1].declare_lost([2], "it is late")
    assert eventually(lambda: 2 in lines[0].lost)
    lines[1]._peers[0].connection.shutdown(socket.SHUT_RDWR)  # and now its own process ends too
    assert eventually(lambda: 1 in lines[0].lost)
    assert next(iter(lines[0].lost.items())) == (2, "it is late")


def test_whereabouts_come_from_all_who_answer(lines: list[Lifeline]) -> None:
    for number, line in enumerate(lines):
        line.here.enter("group")[:] = number, "all_reduce(sum)"
        line.here.note = f"step {number}"
    for line in lines:
        answers = line.ask_whereabouts()
        assert {rank: answer.note for rank, answer in answers.items()} == {0: "step 0", 1: "step 1", 2: "step 2"}


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"hello": 1, "token": "guess"}\n',
        b'{"hello": true}\n',
        b"[1]\n",
        b"\xff\x00" * 99,
    ],
)
def test_strangers_are_shown_out_and_nobody_is_hurt(lines: list[Lifeline], greeting: bytes) -> None:
    meet = json.loads(lines[0].store.get("lifeline"))  # type: ignore[attr-defined]
    with socket.create_connection(("127.0.0.1", meet["port"])) as stranger:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        assert stranger.recv(100) == b""
    assert len(lines[0].ask_whereabouts()) == 3
    assert not lines[0].lost


def killed_with_a_loader_worker_alive() -> str:
    """The worker was forked from the rank, and outlives it for a while, with all that it had open."""
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
        assert time.monotonic() - start_s < 3, "the forked worker must not keep the dead rank's line open"
        return str(lost.ranks)
    return "nothing"


def test_a_forked_child_does_not_keep_a_dead_ranks_line_open() -> None:
    outcomes = run_processes(3, killed_with_a_loader_worker_alive, expect_failure=True, timeout_s=30)
    assert outcomes[0] == outcomes[2] == "(1,)"


def test_it_rides_on_torchs_store() -> None:
    store = dist.HashStore()
    hub = Lifeline(0, 2, store, addresses=[], timeout_s=5.0)
    other = Lifeline(1, 2, store, addresses=[], timeout_s=5.0)
    assert eventually(lambda: len(hub._peers) == 1)
    other.close()
    hub.close()
