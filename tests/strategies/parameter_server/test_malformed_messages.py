"""Random bytes and invalid requests at a server's port: the server goes on, and its workers are not affected."""

from __future__ import annotations

import contextlib
import json
import math
import random
import socket
import threading
import time

import pytest
import torch
import zmq

from gradsync.messaging.format import Message, pack
from gradsync.strategies.parameter_server.client import Client
from gradsync.strategies.parameter_server.job import hyperparameters
from gradsync.strategies.parameter_server.messages import REQUESTS
from tests.strategies.parameter_server.trainer import Trainer, addresses_of, assert_close, reference, servers

KINDS_LIST = sorted(REQUESTS)


def raw_bytes(rng: random.Random) -> bytes:
    """Bytes that no ZeroMQ socket would send; some begin with a greeting."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" if rng.random() < 0.3 else b""
    return greeting + rng.randbytes(rng.randint(1, 300))


def random_frames(rng: random.Random) -> list[bytes]:
    """Frames of random bytes, or a message with random fields."""
    choice = rng.random()
    if choice < 0.4:
        return [rng.randbytes(rng.randint(0, 100)) for _ in range(rng.randint(1, 6))]
    junk = [None, -1, 0, 1.5, "x", [], {}, [[1]], True, 10**30]
    fields = {
        key: rng.choice(junk) for key in ("shard", "worker", "job", "clock", "step", "squared_norm", "sequence", "kind")
    }
    fields |= {"shard": rng.choice([0, 0, 1, -1, "0"]), "servers": rng.choice([[], ["x"], None, "tcp://x"])}
    head = {"kind": rng.choice(KINDS_LIST), "fields": fields, "tensors": []}
    if choice < 0.8:
        return [json.dumps(head).encode()]
    message = Message(rng.choice(KINDS_LIST), fields, {"0.weight": torch.zeros(rng.randint(0, 40))})
    return [bytes(frame) for frame in pack(message)]


def send_random(address: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    port = int(address.split()[0].rsplit(":", 1)[1])
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.sndtimeo = 20_000
    dealer.connect(address.split()[0])
    for number in range(count):
        if number % 2:
            dealer.send_multipart(random_frames(rng))
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
def test_server_survives_random_bytes(exhaustive: bool) -> None:
    count = 100_000 if exhaustive else 2000
    with servers(1) as started:
        trainer = Trainer(0, addresses_of(started), num_workers=1)
        trainer.join()
        attacker = threading.Thread(target=send_random, args=(started[0].address, count, 11))
        attacker.start()
        steps = 0
        while attacker.is_alive() or steps < 20:
            trainer.step(steps)
            steps += 1
        attacker.join()
        trainer.step(steps)
        steps += 1
        assert_close(trainer.values(), reference(1, steps))
        stats = trainer.client.stats()
        assert stats["clocks"] == {0: steps}  # no other worker has joined
        assert stats["malformed"] + started[0].refused > count // 3
        trainer.client.close()


def test_server_refuses_invalid_requests_of_a_worker_unchanged() -> None:
    with servers(1) as started:
        trainer = Trainer(0, addresses_of(started), num_workers=1)
        trainer.join()
        before = trainer.values()
        groups = hyperparameters(trainer.optimizer)
        client: Client = trainer.client
        join = client._join_request(0, None, None).fields
        good = {"shard": 0, "clock": 0, "weight": 1.0, "groups": groups, "squared_norm": None}
        bad = [
            Message("push", good, {"0.weight": torch.zeros(3)}),
            Message("push", good, {"unknown": torch.zeros(3)}),
            Message("push", {**good, "groups": []}),
            Message("push", {**good, "groups": [{"params": [1]}]}),
            Message("push", {**good, "weight": -1.0}),
            Message("push", {**good, "weight": "heavy"}),
            Message("push", {**good, "weight": math.inf}),
            Message("push", {**good, "clock": None}),
            Message("push", {**good, "clock": math.inf}),
            Message("push", {**good, "clock": 5}),
            Message("push", {**good, "groups": [{**groups[0], "lr": "fast"}]}),
            Message("push", {**good, "groups": [{**groups[0], "lr": math.nan}]}),
            Message("push", {**good, "groups": [{**groups[0], "momentum": "much"}]}),
            Message("barrier", {"shard": 0, "tag": "x" * 300, "value": None}),
            Message("join", {**join, "job": {**join["job"], "params": [["0.weight", [1 << 50], "float32", 0]]}}),
            Message("join", {**join, "worker": 1 << 40}),
            Message("load", {"shard": 0, "metadata": {}, "clocks": {}}, {"what": torch.zeros(1)}),
            Message("clip", {"shard": 0}),
            Message("fill", {"shard": 0}, {}),
        ]
        for message in bad:
            client._pool.send_if_connected(0, message)
        end_s = time.monotonic() + 10.0
        while started[0].refused + started[0].malformed < len(bad) - 1 and time.monotonic() < end_s:
            time.sleep(0.01)
        assert started[0].refused + started[0].malformed == len(bad) - 1  # a second fill is ignored
        again = Trainer(1, addresses_of(started), num_workers=1)
        again.join()
        for name, value in again.values().items():
            assert torch.equal(value, before[name])
        client._pool.close()
        again.client.close()
