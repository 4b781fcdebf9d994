"""Two ranks on each of two hosts: what crosses the wire is what one rank a host would send, by the wire's own count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.netlab import Lab
from gradsync.comm.base import Communicator
from gradsync.comm.c10d import C10d
from gradsync.comm.connect import connect
from gradsync.comm.hierarchical import connect_hierarchical
from gradsync.comm.hosts import survey_hosts
from tests.network.on_hosts import bytes_sent, call_on_hosts

PER_HOST = 2
NUMEL = 4_000_000
NUM_BYTES = 4 * NUMEL
CPU = torch.device("cpu")


def be_rank() -> dict[str, int]:
    """Run each collective once; returns what went out through this host's interface meanwhile."""
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
    return sent


def sent_by(comm: Communicator, collective: Callable[[], None]) -> int:
    comm.barrier()
    before = bytes_sent()
    comm.barrier()
    collective()
    comm.barrier()
    return bytes_sent() - before


@pytest.mark.netns
def test_the_wire_carries_what_one_rank_a_host_would_send() -> None:
    with Lab(hosts=2) as lab:
        told = call_on_hosts(lab, be_rank, per_host=PER_HOST, timeout_s=100)
    first, second = told[::PER_HOST]
    # 2 (H - 1) / H of the data for H hosts is all of it for two. Beside it go headers, acknowledgements and barriers.
    for host in (first, second):
        assert NUM_BYTES < host["bucket"] < 1.06 * NUM_BYTES
        assert NUM_BYTES < host["all_reduce"] < 1.06 * NUM_BYTES
        assert NUM_BYTES / 2 < host["all_gather"] < 1.06 * NUM_BYTES / 2  # two ranks' rows, each a quarter
    assert NUM_BYTES < second["broadcast"] < 1.06 * NUM_BYTES
    assert first["broadcast"] < 0.06 * NUM_BYTES
