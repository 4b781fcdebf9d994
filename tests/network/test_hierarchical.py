"""Two ranks on each of two hosts: the network carries what one rank a host would send, counted by the interface."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradsync.comm.base import Communicator
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.connect import connect
from gradsync.comm.hierarchical.communicator import connect_hierarchical
from gradsync.comm.topology import survey_hosts
from gradsync.testing import Lab
from tests.network.on_hosts import bytes_sent, call_on_hosts

PER_HOST = 2
NUMEL = 4_000_000
NUM_BYTES = 4 * NUMEL
CPU = torch.device("cpu")


def run_each_collective() -> dict[str, int]:
    """Run each collective once; returns the bytes that this host's interface sent during each."""
    group = connect("tcp", timeout_s=30).unchecked()
    assert isinstance(group, C10d)
    survey = survey_hosts(group)
    assert survey.obstacle == ""
    comm = connect_hierarchical(group, survey.hosts)
    assert comm.why.endswith("2 hosts x 2 ranks: shared memory within, tcp across"), comm.why

    bucket = comm.allocate(NUMEL, torch.float32, CPU)
    private, rows = torch.empty(NUMEL), torch.empty(comm.world_size, NUMEL // 4)
    for tensor in (bucket, private):
        tensor.copy_(torch.arange(NUMEL) % 1000 + comm.rank)
    sent = {
        "bucket": bytes_sent_by(comm, lambda: comm.all_reduce(bucket).wait()),
        "all_reduce": bytes_sent_by(comm, lambda: comm.all_reduce(private).wait()),
        "all_gather": bytes_sent_by(comm, lambda: comm.all_gather(private[: NUMEL // 4], out=rows).wait()),
    }
    total = 4 * (torch.arange(NUMEL) % 1000) + 6
    assert torch.equal(bucket, total.float())
    assert torch.equal(private, bucket)
    assert torch.equal(rows, bucket[: NUMEL // 4].expand_as(rows))
    private.add_(comm.rank)
    sent["broadcast"] = bytes_sent_by(comm, lambda: comm.broadcast(private, 3).wait())
    assert torch.equal(private, bucket + 3)
    return sent


def bytes_sent_by(comm: Communicator, collective: Callable[[], None]) -> int:
    comm.barrier()
    before = bytes_sent()
    comm.barrier()
    collective()
    comm.barrier()
    return bytes_sent() - before


@pytest.mark.netns
def test_hierarchical_sends_what_one_rank_per_host_would_send() -> None:
    with Lab(hosts=2) as lab:
        results = call_on_hosts(lab, run_each_collective, per_host=PER_HOST, timeout_s=100)
    first, second = results[::PER_HOST]
    # For H hosts it is 2 (H - 1) / H of the data: all of it for two. Headers, acknowledgements and barriers come too.
    for host in (first, second):
        assert NUM_BYTES < host["bucket"] < 1.06 * NUM_BYTES
        assert NUM_BYTES < host["all_reduce"] < 1.06 * NUM_BYTES
        assert NUM_BYTES / 2 < host["all_gather"] < 1.06 * NUM_BYTES / 2  # two ranks' rows, each a quarter
    assert NUM_BYTES < second["broadcast"] < 1.06 * NUM_BYTES
    assert first["broadcast"] < 0.06 * NUM_BYTES
