"""Every ZeroMQ port under malformed and adversarial messages while a job runs: the job is not affected.

Strangers connect without keys: bare bytes, handshakes with wrong passwords, replays of a member's own connection. A
faulty member with the right keys sends messages with one thing wrong in each. With --exhaustive each port gets 10^5.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.messaging.endpoints import ClientConnection, Listener, Unreachable
from gradsync.messaging.format import Message, pack
from gradsync.messaging.keys import ClientKeys, KeyPair, shared_keys
from gradsync.messaging.schema import Schema
from gradsync.strategies import Gossip
from gradsync.strategies.gossip.messages import KINDS
from gradsync.strategies.gossip.peer_mesh import PeerMesh
from gradsync.strategies.parameter_server.job import Job
from gradsync.strategies.parameter_server.messages import REQUESTS
from gradsync.strategies.parameter_server.server.server import Server
from gradsync.testing import run_ranks
from tests.strategies.parameter_server.trainer import Trainer, addresses_of, assert_close, reference, servers
from tests.support.fuzzing import KeyedClient, malformed, raw_session, record_session, send_raw

CI, EXHAUSTIVE = 400, 100_000
PATIENCE_S = 60.0
TRANSPORTS = ["tcp", "ipc"]


def endpoint_of(address: str, kind: str) -> str:
    return next(endpoint for endpoint in address.split() if endpoint.startswith(kind))


def wait_until(ready: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


def attack_as_stranger(endpoint: str, keys: ClientKeys, good: list[Message], count: int, seed: int) -> int:
    """Bare connections, replays, and connections with the wrong keys; returns how many messages were sent."""
    rng = random.Random(seed)
    payloads = [[bytes(frame) for frame in pack(message)] for message in good]
    session = record_session(
        endpoint, keys, payloads[0]
    )  # this one is authenticated, and sends a message that a member may send

    def attack() -> bytes:
        replay = session[: rng.randint(1, len(session))] if rng.random() < 0.5 else session
        return replay if endpoint.startswith("tcp") and rng.random() < 0.2 else raw_session(rng, payloads)

    num_sent = send_raw(endpoint, (attack() for _ in range(count)))
    other = KeyPair.make()
    for wrong in (None, shared_keys(other)[1], ClientKeys(other, keys.server, "wrong")):
        with pytest.raises(Unreachable):
            ClientConnection(endpoint, {"none"}, keys=wrong, timeout_s=0.3)
    return num_sent


def attack_as_member(
    endpoint: str, keys: ClientKeys, good: list[Message], schemas: Mapping[str, Schema], count: int, seed: int
) -> None:
    """A member with the keys that only sends malformed messages."""
    rng = random.Random(seed)
    with KeyedClient(endpoint, keys) as member:
        for _ in range(count):
            message = rng.choice(good)
            member.send(malformed(rng, message, schemas[message.kind]))


# -- the parameter server ---------------------------------------------------------------------------------------------


def good_requests(job: Job, groups: list[dict[str, object]]) -> list[Message]:
    """A valid message of each kind. From a peer that is no worker, the server refuses them all."""
    at = {"shard": 0}
    join = {"worker": 7, "job": job.to_json(), "servers": ["tcp://x:1"], "groups": groups, "clock": 0}
    record = {"sequence": 1, "kind": "clocks", "fields": {}, "job": None, "num_servers": 1, "groups": []}
    tensors = {"0.weight": torch.zeros(5, 6)}
    return [
        Message("join", {**at, **join, "read_version": 0, "observer": False, "run": "another", "resume": True}),
        Message("fill", dict(at), tensors),
        Message("push", {**at, "clock": 0, "weight": 1.0, "groups": groups, "squared_norm": None}, tensors),
        Message("pull", {**at, "clock": 0, "newest": False}),
        Message("clip", {**at, "step": 0, "squared_norm": 1.0}),
        Message("load", {**at, "metadata": {}, "clocks": {}}, tensors),
        Message("barrier", {**at, "tag": "settle", "value": [1]}, tensors),
        Message("replicate", {**at, **record}, tensors),
        *(Message(kind, dict(at)) for kind in ("get_state", "get_stats", "leave", "observe")),
    ]


@pytest.mark.timeout(1800)  # --exhaustive
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_parameter_server_survives_adversarial_messages(kind: str, exhaustive: bool) -> None:
    count = (EXHAUSTIVE if exhaustive else CI) // 2
    server_keys, keys = shared_keys(KeyPair.make())
    with servers(1, keys=server_keys) as started:
        server = started[0]
        trainer = Trainer(0, addresses_of(started), num_workers=1, keys=keys)
        trainer.join()
        endpoint = endpoint_of(server.address, kind)
        good = good_requests(trainer.job, [{"lr": 0.1}])
        assert {message.kind for message in good} == REQUESTS.keys()
        known = [message for message in good if message.kind != "join"]
        num_sent: list[int] = []

        def attack() -> None:
            num_sent.append(attack_as_stranger(endpoint, keys, known, count, 1))
            attack_as_member(endpoint, keys, good, REQUESTS, count, 2)
            other = {**good[0].fields, "job": {**good[0].fields["job"], "optimizer": "Adam"}}
            with KeyedClient(endpoint, keys) as member:  # well-formed, from a peer that is no worker here
                for message in (*known, Message("join", other)):
                    member.send([bytes(frame) for frame in pack(message)])

        attacker = threading.Thread(target=attack)
        attacker.start()
        steps = 0
        while attacker.is_alive() or steps < 20:
            trainer.step(steps)
            steps += 1
        attacker.join()
        wait_until(lambda: server.malformed >= count, "not all was read")
        wait_until(lambda: server.refused >= len(known) + 2, "not all was refused")
        assert num_sent[0] > 0.9 * count
        assert server.malformed == count, "each malformed message of the member, and none of a stranger"
        assert server.refused == len(known) + 2, "the recorded session was sent once by a member, too"
        trainer.step(steps)
        assert trainer.client.stats()["clocks"] == {0: steps + 1}, "no other worker has joined"
        if not exhaustive:  # the reference takes as many steps, one by one
            assert_close(trainer.values(), reference(1, steps + 1))
        trainer.client.close()


# -- gossip -----------------------------------------------------------------------------------------------------------


def valid_gossip_messages(mesh: PeerMesh) -> list[Message]:
    """A valid message of each kind, from a member number that no member has."""
    sender = {"from": 7, "run": mesh.run_id}
    membership = [[[7, "tcp://127.0.0.1:1"]], [], []]
    flat = {"0": torch.zeros(4, dtype=torch.float64)}
    return [
        Message("mix", {**sender, "step": 0, "epoch": [[0, 1], []], "weight": 1.0, "share": 0.5}, flat),
        Message("heartbeat", {**sender, "steps_begun": 3, "waits": False}),
        Message("membership", {**sender, "membership": membership}),
        Message("arrived", {**sender, "number": 0, "what": "settle", "clock": 0}),
        Message("contribution", {**sender, "number": 0, "weight": 1.0}, flat),
        *(Message(kind, {**sender, "number": 0}) for kind in ("mean", "request_mean", "have_mean")),
        Message("average_request", {**sender, "clock": 1}, flat),
        Message("average_reply", {**sender, "clock": 1, "fraction": 0.5}, flat),
        *(Message(kind, {**sender, "address": "tcp://127.0.0.1:1"}) for kind in ("fetch", "hello")),
        *(
            Message(kind, {**sender, "membership": membership, "clock": 1, "number": 0})
            for kind in ("state", "welcome")
        ),
    ]


def refused_gossip_messages(mesh: PeerMesh, rng: random.Random, count: int) -> list[Message]:
    """Well-formed, but refused: from a live member's number, for an epoch without the sender, or from an unknown."""
    made = []
    for _ in range(count):
        message = rng.choice(
            [
                each
                for each in valid_gossip_messages(mesh)
                if each.kind not in ("membership", "average_request", "average_reply")
            ]
        )
        if message.kind in ("arrived", "contribution", "have_mean"):
            message.fields |= {"number": rng.randint(0, 10**6)}
            message.fields |= {"clock": 10**9} if message.kind == "arrived" else {}
        message.fields["from"] = rng.choice([0, 1, 7]) if message.kind not in ("state", "welcome") else 7
        made.append(message)
    return made


@pytest.mark.timeout(1800)  # --exhaustive
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_gossip_survives_adversarial_messages(kind: str, exhaustive: bool) -> None:
    count = (EXHAUSTIVE if exhaustive else CI) // 2
    rate = 2.0**-24
    stop_at: list[int] = []
    num_sent: list[int] = []

    def attack(mesh: PeerMesh) -> None:
        keys = mesh._keys
        assert keys is not None
        endpoint, good = endpoint_of(mesh.address, kind), valid_gossip_messages(mesh)
        assert {message.kind for message in good} == KINDS.keys()
        harmless = [message for message in good if message.kind == "mix"]  # of an epoch without its sender
        num_sent.append(attack_as_stranger(endpoint, keys, harmless, count, 3))
        attack_as_member(endpoint, keys, good, KINDS, count, 4)
        with KeyedClient(endpoint, keys) as member:
            for message in refused_gossip_messages(mesh, random.Random(5), CI // 2):
                member.send([bytes(frame) for frame in pack(message)])

    def run(comm: Communicator) -> tuple[float, int]:
        model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        strategy = Gossip()
        with gradsync.synchronize(model, optimizer, strategy, comm=comm) as sync, torch.no_grad():
            model.weight.fill_(2.0 * comm.rank)
            attacker = threading.Thread(target=attack, args=(strategy.mesh,))
            if comm.rank == 0:
                attacker.start()
            step = 0
            while not stop_at or step < stop_at[0]:
                optimizer.zero_grad()
                with torch.enable_grad():
                    model.weight.sum().backward()
                optimizer.step()
                step += 1
                if comm.rank == 0 and not stop_at and not attacker.is_alive() and strategy.mesh.malformed > count:
                    stop_at.append(step + 10)
            stats = sync.stats()
            assert stats["living"] == [0, 1]
            assert stats["lost"] == {}
            assert stats["late"] == 0
            if comm.rank == 0:
                assert strategy.mesh._listener.malformed == count, "no message of a stranger was read"
            sync.settle()
            comm.barrier()
            return float(model.weight[0, 0]), step

    outcomes = run_ranks(2, run, timeout_s=PATIENCE_S)
    steps = outcomes[0][1]
    assert outcomes == [(1.0 - rate * steps, steps)] * 2, "the same values as without the attack"
    assert num_sent[0] > 0.9 * count


# -- addresses --------------------------------------------------------------------------------------------------------


def test_security_md_names_every_file_that_opens_a_port() -> None:
    root = Path(gradsync.__file__).parent
    calls = r"\.bind\(|create_server\(|HTTPServer\(\(|init_process_group\(|memfd_create\("
    opens = re.compile(rf"^(?!.*(>>>|signature)).*({calls})", re.MULTILINE)  # no doctests
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if opens.search(path.read_text())}
    assert found >= {"messaging/endpoints.py", "comm/shm/segment.py"}
    text = (root.parents[1] / "SECURITY.md").read_text()
    assert [path for path in sorted(found) if f"`{path}`" not in text] == []


def has_ipv6() -> bool:
    try:
        Listener({"average_request"}, host="::1", ipc=False).close()
    except Unreachable:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_ipv6_addresses_work() -> None:
    server_keys, keys = shared_keys(KeyPair.make())
    server = Server(0, host="::1", keys=server_keys).start()
    try:
        tcp = server.address.split()[0]
        assert tcp.startswith("tcp://[::1]:")
        trainer = Trainer(0, [tcp], num_workers=1, keys=keys)
        trainer.join()
        trainer.step(0)
        assert_close(trainer.values(), reference(1, 1))
        trainer.client.close()
    finally:
        server.close()

    def gossip(comm: Communicator) -> str:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsync.synchronize(model, optimizer, "gossip(host='::1')", comm=comm) as sync:
            model.weight.sum().backward()
            optimizer.step()
            sync.settle()
            return str(sync.stats()["address"])

    assert all(address.startswith("tcp://[::1]:") for address in run_ranks(2, gossip))
