"""``gradsync run --elastic`` on two hosts, of which one is cut off again and again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradsync.cli.launch.chaos import cut_unavailable_reason
from gradsync.testing import Lab, lab_unavailable_reason

SCRIPT = """
import json, os, signal, subprocess, time
from gradsync.elastic.store import BoundedStore
from gradsync.errors import StoreUnreachable

run = json.loads(os.environ["GRADSYNC_ELASTIC"])
host, _, port = run["store"].rpartition(":")
store = BoundedStore(host, int(port))

def wait_for(key):
    end = time.monotonic() + 90
    while True:
        assert time.monotonic() < end, key
        try:
            if store.has(key):
                return
        except StoreUnreachable:
            pass
        time.sleep(0.05)

if run["uid"] == "1.0":
    while "unreachable" not in subprocess.run(["ip", "route"], capture_output=True, text=True).stdout:
        time.sleep(0.02)  # until its host is cut off
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("dead/1.0")
if run["slot"] == 1:
    store.set("again", "yes")
wait_for("again")
"""


def test_elastic_launcher_of_a_node_that_is_cut_off_goes_on(tmp_path: Path) -> None:
    if lack := lab_unavailable_reason() or cut_unavailable_reason(2):
        pytest.skip(lack)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch = f"{sys.executable} -m gradsync.cli.main run --elastic --nnodes 2 -n 1"
    chaos = "--timeout-s 1 --chaos 'cut 1/5s' --chaos-seed 11"
    with Lab(hosts=2) as lab:
        where = f"--store {lab.address(0)}:29500"
        commands = [
            ["sh", "-c", f"{launch} {where} --node-rank {host} {more} {script} 2>&1 && ip route"]
            for host, more in enumerate(("", chaos))
        ]
        _, said = lab.run(commands, timeout_s=150, capture=True)
    assert f"chaos: this node sends nothing to {lab.address(0)} for" in said
    assert "worker 1 was killed by SIGKILL; a new one starts in 0.1 s (1 of 100)" in said
    assert "unreachable" not in said, "its routes are as they were"
