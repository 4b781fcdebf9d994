"""Lab: its links transfer and count bytes, are limited to their rate, and are removed afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import netlab
from gradsync.testing import Lab, LabError
from gradsync.testing.network import INTERFACE
from tests.support.launching import Launched

NETLAB = Path(netlab.__file__)
PAYLOAD_BYTES = 4_000_000
RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000))
listener.settimeout(30)
peer, (sender, _) = listener.accept()
peer.settimeout(30)
got, first = len(peer.recv(1)), time.monotonic()
while chunk := peer.recv(1 << 16):
    got += len(chunk)
print(sender, got, time.monotonic() - first)
"""
SEND = """
import socket, sys, time
deadline = time.monotonic() + 30
while True:
    try:
        peer = socket.create_connection((sys.argv[1], 5000), timeout=30)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline, "the receiver never listened"
        time.sleep(0.02)
with peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""


def transfer(lab: Lab, *, sender: int, receiver: int) -> tuple[str, int, float]:
    """Send PAYLOAD_BYTES over TCP; returns the sender's address as the receiver saw it, bytes received, seconds."""
    idle = [sys.executable, "-c", ""]
    commands = [idle] * lab.hosts
    commands[receiver] = [sys.executable, "-c", RECEIVE, lab.address(receiver)]
    commands[sender] = [sys.executable, "-c", SEND, lab.address(receiver), str(PAYLOAD_BYTES)]
    seen_from, got, seconds = lab.run(commands, timeout_s=60, capture=True)[receiver].split()
    return seen_from, int(got), float(seconds)


def namespaces(prefix: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(prefix)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.netns
@pytest.mark.parametrize("hosts", [2, 3])
def test_lab_transfer_is_counted_and_limited_by_the_rate(hosts: int) -> None:
    with Lab(hosts=hosts, rate="100mbit") as lab:
        sender, receiver = hosts - 1, 0
        seen_from, got, seconds = transfer(lab, sender=sender, receiver=receiver)
        sent, received = lab.bytes_sent(sender), lab.bytes_received(receiver)
        acknowledged = lab.bytes_sent(receiver)

    assert seen_from == lab.address(sender)
    assert got == PAYLOAD_BYTES
    # Headers are at most 66 of each 1,514 bytes; the rest of the margin is for what TCP sends twice.
    assert PAYLOAD_BYTES < received < 1.15 * PAYLOAD_BYTES
    assert PAYLOAD_BYTES < sent < 1.15 * PAYLOAD_BYTES
    assert acknowledged < 0.05 * PAYLOAD_BYTES
    # A loaded machine can only make this slower, so the bound holds on any. Each hop passes its burst at full speed.
    hops = 1 if hosts == 2 else 2
    assert seconds >= (PAYLOAD_BYTES - hops * 256 * 1024) / 12_500_000


@pytest.mark.netns
def test_lab_limits_both_ends_of_a_link() -> None:
    for rate, expected in (("250mbit", ["tbf", 31_250_000]), (None, ["noqueue", None])):
        with Lab(hosts=2, rate=rate) as lab:
            for host in range(2):
                shown = subprocess.run(
                    ["tc", "-n", lab.namespace(host), "-j", "qdisc", "show", "dev", INTERFACE],
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=30,
                ).stdout
                (qdisc,) = json.loads(shown)
                assert [qdisc["kind"], qdisc.get("options", {}).get("rate")] == expected


@pytest.mark.netns
def test_lab_hosts_see_their_own_network_and_torchrun_variables() -> None:
    code = "import os, socket; print(sorted(n for _, n in socket.if_nameindex()), os.environ['RANK'], os.environ['X'])"
    with Lab(hosts=2) as lab:
        printed = lab.run([[sys.executable, "-c", code]] * 2, timeout_s=60, env={"X": "y"}, capture=True)
    assert printed == [f"['eth0', 'lo'] {rank} y\n" for rank in range(2)]


@pytest.mark.netns
def test_lab_is_isolated_from_another_lab() -> None:
    with Lab(hosts=2) as one, Lab(hosts=2) as other:
        transfer(one, sender=0, receiver=1)
        assert one.bytes_sent(0) > PAYLOAD_BYTES
        assert other.bytes_sent(0) == 0


@pytest.mark.netns
def test_lab_failing_command_is_named_and_ends_the_others(tmp_path: Path) -> None:
    waits = f"echo $$ > {tmp_path}/pid; exec sleep 99"
    fails = f"until [ -s {tmp_path}/pid ]; do sleep 0.02; done; exit 7"
    with Lab(hosts=2) as lab, pytest.raises(LabError, match="ended with code 7"):
        lab.run([["sh", "-c", waits], ["sh", "-c", fails]], timeout_s=60)
    assert not alive(int((tmp_path / "pid").read_text()))
    assert namespaces(lab.name) == []


@pytest.mark.netns
def test_lab_timeout_ends_children_outside_the_group(tmp_path: Path) -> None:
    stray = f"setsid sleep 99 & echo $! > {tmp_path}/pid; wait"
    with Lab(hosts=2) as lab, pytest.raises(LabError, match=r"commands \[0, 1\] of 2 .* timeout_s=1"):
        lab.run([["sh", "-c", stray], ["sleep", "99"]], timeout_s=1)
    assert not alive(int((tmp_path / "pid").read_text()))
    assert namespaces(lab.name) == []


@pytest.mark.netns
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_lab_signal_ends_processes_and_removes_namespaces(tmp_path: Path, number: signal.Signals, code: int) -> None:
    says_pid = f"echo $$ > {tmp_path}/pid{{rank}}; exec sleep 99"
    command = [sys.executable, str(NETLAB), "run", "--hosts", "3", "--", "sh", "-c", says_pid]
    process = Launched(command)
    try:
        deadline = time.monotonic() + 30
        files = [tmp_path / f"pid{rank}" for rank in range(3)]
        while not all(file.exists() and file.read_text().strip() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(namespaces(f"gradsync-lab-{process.pid}-")) == 4  # three hosts and the switch
        os.kill(process.pid, number)
        assert process.wait(30) == code
    finally:
        process.kill()
        process.wait(30)
    assert [alive(int(file.read_text())) for file in files] == [False] * 3
    assert namespaces(f"gradsync-lab-{process.pid}-") == []


@pytest.mark.netns
def test_lab_with_invalid_rate_removes_namespaces() -> None:
    lab = Lab(hosts=2, rate="quick")
    with pytest.raises(LabError, match=r"tc .* rate quick"), lab:
        pass
    assert namespaces(lab.name) == []


def test_lab_error_names_missing_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(LabError, match=r"'ip'.*not on PATH.*iproute2"), Lab(hosts=2):
        pass


def test_lab_error_outside_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="Linux"), Lab(hosts=2):
        pass


def test_lab_refuses_one_host() -> None:
    with pytest.raises(ValueError, match="hosts=1"):
        Lab(hosts=1)
