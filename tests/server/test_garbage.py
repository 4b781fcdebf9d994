"""Random bytes at a server's port: it stands, and whoever works there does not notice."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time

import pytest
import torch
import zmq

from gradsync.comm.messages import Message, pack
from gradsync.server.client import Client
from gradsync.server.job import hyperparameters
from gradsync.server.server import KINDS
from tests.server.rig import Trainee, addresses_of, assert_close, reference, servers

KINDS_LIST = sorted(KINDS)


def raw_bytes(rng: random.Random) -> bytes:
    """What no ZeroMQ socket would send; some begin as if one would."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" if rng.random() < 0.3 else b""
    return greeting + rng.randbytes(rng.randint(1, 300))


def framed(rng: random.Random) -> list[bytes]:
    """Frames of random bytes, or something that is nearly a message."""
    choice = rng.random()
    if choice < 0.4:
        return [rng.randbytes(rng.randint(0, 100)) for _ in range(rng.randint(1, 6))]
    junk = [None, -1, 0, 1.5, "x", [], {}, [[1]], True, 10**30]
    fields = {key: rng.choice(junk) for key in ("shard", "worker", "job", "clock", "step", "square", "number", "what")}
    fields |= {"shard": rng.choice([0, 0, 1, -1, "0"]), "servers": rng.choice([[], ["x"], None, "tcp://x"])}
    head = {"kind": rng.choice(KINDS_LIST), "fields": fields, "tensors": []}
    if choice < 0.8:
        return [json.dumps(head).encode()]
    message = Message(rng.choice(KINDS_LIST), fields, {"0.weight": torch.zeros(rng.randint(0, 40))})
    return [bytes(frame) for frame in pack(message)]


def bombard(address: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    port = int(address.split()[0].rsplit(":", 1)[1])
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.sndtimeo = 20_000
    dealer.connect(address.split()[0])
    for number in range(count):
        if number % 2:
            dealer.send_multipart(framed(rng))
            while dealer.poll(0):
                dealer.recv_multipart()
        else:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as raw:
                raw.sendall(raw_bytes(rng))
    dealer.send_multipart([b"the end"])
    dealer.poll(20)
    dealer.close(linger=5000)
    context.term()


@pytest.mark.timeout(900)  # --exhaustive sends a hundred thousand
def test_a_server_stands_under_random_bytes(exhaustive: bool) -> None:
    count = 100_000 if exhaustive else 2000
    with servers(1) as started:
        trainee = Trainee(0, addresses_of(started), num_workers=1)
        trainee.join()
        enemy = threading.Thread(target=bombard, args=(started[0].address, count, 11))
        enemy.start()
        steps = 0
        while enemy.is_alive() or steps < 20:
            trainee.step(steps)
            steps += 1
        enemy.join()
        trainee.step(steps)
        steps += 1
        assert_close(trainee.values(), reference(1, steps))
        stats = trainee.client.stats()
        assert stats["clocks"] == {0: steps}  # nobody else has got in
        assert stats["malformed"] + started[0].refused > count // 3
        trainee.client.close()


def test_a_workers_own_nonsense_is_refused_and_changes_nothing() -> None:
    with servers(1) as started:
        trainee = Trainee(0, addresses_of(started), num_workers=1)
        trainee.join()
        before = trainee.values()
        groups = hyperparameters(trainee.optimizer)
        client: Client = trainee.client
        good = {"shard": 0, "clock": 0, "weight": 1.0, "groups": groups, "square": None}
        bad = [
            Message("push", good, {"0.weight": torch.zeros(3)}),
            Message("push", good, {"unknown": torch.zeros(3)}),
            Message("push", {**good, "groups": []}),
            Message("push", {**good, "groups": [{"params": [1]}]}),
            Message("push", {**good, "weight": -1.0}),
            Message("push", {**good, "weight": "heavy"}),
            Message("push", {**good, "clock": None}),
            Message("load", {"shard": 0, "told": {}, "clocks": {}}, {"what": torch.zeros(1)}),
            Message("clip", {"shard": 0}),
            Message("fill", {"shard": 0}, {}),
        ]
        for message in bad:
            client._lines.tell(0, message)
        end_s = time.monotonic() + 10.0
        while started[0].refused + started[0].malformed < len(bad) - 1 and time.monotonic() < end_s:
            time.sleep(0.01)
        assert started[0].refused + started[0].malformed == len(bad) - 1  # a second fill is not needed, and no harm
        again = Trainee(1, addresses_of(started), num_workers=1)
        again.join()
        for name, value in again.values().items():
            assert torch.equal(value, before[name])
        client._lines.close()
        again.client.close()
