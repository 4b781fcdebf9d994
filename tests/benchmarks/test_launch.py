"""The benchmarks' launcher: every rank of a lab gets its place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.support.cluster import Cluster

REPORT = """
import os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
place = " ".join(os.environ[name] for name in names)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{place} {os.readlink('/proc/self/ns/net')}")
"""


@pytest.mark.netns
def test_cluster_runs_ranks_on_hosts(tmp_path: Path) -> None:
    cluster = Cluster(link="unlimited", world=4, ranks_per_host=2)
    cluster.run([sys.executable, "-S", "-c", REPORT, str(tmp_path)], timeout_s=60)
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert [" ".join(rank[:4]) for rank in found] == ["0 4 0 2", "1 4 1 2", "2 4 0 2", "3 4 1 2"]
    assert {tuple(rank[4:6]) for rank in found} == {("10.77.0.1", "eth0")}
    hosts = [rank[6] for rank in found]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]


def test_cluster_runs_ranks_on_this_host(tmp_path: Path) -> None:
    Cluster(link="same", world=3).run([sys.executable, "-S", "-c", REPORT, str(tmp_path)], timeout_s=60)
    found = [(tmp_path / str(rank)).read_text().split()[:6] for rank in range(3)]
    assert [" ".join(rank) for rank in found] == [f"{rank} 3 {rank} 3 127.0.0.1 lo" for rank in range(3)]
