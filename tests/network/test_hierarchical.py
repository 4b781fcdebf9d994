"""Two ranks on each of two hosts: what crosses the wire is what one rank a host would send, by the wire's own count.

Run as a script this file is one host, or with ``--rank`` one rank of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.netlab import INTERFACE, Lab
from gradsync.comm.base import Communicator
from gradsync.comm.c10d import C10d
from gradsync.comm.connect import connect
from gradsync.comm.hierarchical import connect_hierarchical
from gradsync.comm.hosts import survey_hosts

PER_HOST = 2
NUMEL = 4_000_000
NUM_BYTES = 4 * NUMEL
CPU = torch.device("cpu")


def be_host() -> None:
    """Start this host's ranks and wait for them."""
    host, num_hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = []
    for local in range(PER_HOST):
        place = {"RANK": host * PER_HOST + local, "WORLD_SIZE": num_hosts * PER_HOST, "OMP_NUM_THREADS": 1}
        env = {**os.environ, **{name: str(value) for name, value in place.items()}}
        ranks.append(subprocess.Popen([sys.executable, __file__, "--rank"], env=env))
    sys.exit(max(rank.wait(60) for rank in ranks))


def be_rank() -> None:
    """Run each collective once; the first rank of a host tells what went out through its interface meanwhile."""
    group = connect("c10d", timeout_s=30)
    assert isinstance(group, C10d)
    hosts, obstacle = survey_hosts(group)
    assert obstacle == ""
    comm = connect_hierarchical(group, hosts)
    assert comm.why.endswith("2 hosts x 2 ranks: shared memory within, c10d across"), comm.why

    bucket = comm.allocate(NUMEL, torch.float32, CPU)
    elsewhere, rows = torch.empty(NUMEL), torch.empty(comm.world_size, NUMEL // 4)
    for tensor in (bucket, elsewhere):
        tensor.copy_(torch.arange(NUMEL) % 1000 + comm.rank)
    sent = {
        "bucket": sent_by(comm, lambda: comm.all_reduce(bucket).wait()),
        "all_reduce": sent_by(comm, lambda: comm.all_reduce(elsewhere).wait()),
        "all_gather": sent_by(comm, lambda: comm.all_gather(elsewhere[: NUMEL // 4], out=rows).wait()),
    }
    total = 4 * (torch.arange(NUMEL) % 1000) + 6
    assert torch.equal(bucket, total.float())
    assert torch.equal(elsewhere, bucket)
    assert torch.equal(rows, bucket[: NUMEL // 4].expand_as(rows))
    elsewhere.add_(comm.rank)
    sent["broadcast"] = sent_by(comm, lambda: comm.broadcast(elsewhere, 3).wait())
    assert torch.equal(elsewhere, bucket + 3)
    if comm.rank % PER_HOST == 0:
        print(json.dumps(sent))


def sent_by(comm: Communicator, collective: Callable[[], None]) -> int:
    counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
    comm.barrier()
    before = int(counter.read_text())
    comm.barrier()
    collective()
    comm.barrier()
    return int(counter.read_text()) - before


@pytest.mark.netns
def test_the_wire_carries_what_one_rank_a_host_would_send() -> None:
    root = Path(__file__).parents[2]
    with Lab(hosts=2) as lab:
        commands = [[sys.executable, __file__]] * 2
        told = lab.run(commands, timeout_s=100, env={"PYTHONPATH": str(root)}, capture=True)
    first, second = (json.loads(text) for text in told)
    # 2 (H - 1) / H of the data for H hosts is all of it for two. Beside it go headers, acknowledgements and barriers.
    for host in (first, second):
        assert NUM_BYTES < host["bucket"] < 1.06 * NUM_BYTES
        assert NUM_BYTES < host["all_reduce"] < 1.06 * NUM_BYTES
        assert NUM_BYTES / 2 < host["all_gather"] < 1.06 * NUM_BYTES / 2  # two ranks' rows, each a quarter
    assert NUM_BYTES < second["broadcast"] < 1.06 * NUM_BYTES
    assert first["broadcast"] < 0.06 * NUM_BYTES


if __name__ == "__main__":
    be_rank() if "--rank" in sys.argv else be_host()
