"""The bytes that codecs send, counted by the network interface: what ``stats()`` reports and the codecs promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.testing import Lab
from tests.network.on_hosts import bytes_sent, call_on_hosts

STEPS = 3
LAYERS, WIDTH = 2, 2048  # enough to make headers and acknowledgements negligible
PLAIN_BYTES = LAYERS * WIDTH * WIDTH * 4  # what each of two ranks sends in a plain all-reduce
# The least compression ratio, against a plain all-reduce, that each promises for the tensors that it compresses.
PROMISED = {
    "allreduce": 1.0,
    "allreduce(codec=fp16)": 1.99,
    "allreduce(codec=int8)": 3.9,
    "allreduce(codec=int4)": 7.7,
    "allreduce(codec=sign)": 30.0,
    "allreduce(codec=topk(density=0.01))": 45.0,
    "allreduce(codec=chain(topk(density=0.01), int8))": 100.0,
    "allreduce(reducer=powersgd(rank=4))": 60.0,
}


def count_bytes(
    comm: gradsync.Communicator, model: nn.Module, spec: str, draw: Callable[[], Tensor]
) -> dict[str, float]:
    """Train a few steps; returns the bytes per step that this host's interface sent, and what stats() reported."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reported = 0.0
    with gradsync.synchronize(model, optimizer, spec, comm=comm) as sync:
        for step in range(2 + STEPS):
            if step == 2:  # the buckets are planned again after the first step
                comm.barrier()
                before = bytes_sent()
                comm.barrier()
            optimizer.zero_grad()
            model(draw()).square().mean().backward()
            reported += sync.stats()["bytes_per_step"] / STEPS if step >= 2 else 0.0
        comm.barrier()
        return {"counted": (bytes_sent() - before) / STEPS, "reported": reported}


def train_with_each_strategy() -> dict[str, dict[str, float]]:
    """Train a stack of matrices with each strategy."""
    comm = gradsync.connect("c10d", timeout_s=60)
    data = torch.Generator().manual_seed(comm.rank)
    seen = {}
    for spec in PROMISED:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        seen[spec] = count_bytes(comm, model, spec, lambda: torch.randn(2, WIDTH, generator=data))
    return seen


def train_embedding() -> dict[str, float]:
    """Train an embedding of which each step uses few rows."""
    comm = gradsync.connect("c10d", timeout_s=60)
    data = torch.Generator().manual_seed(comm.rank)
    torch.manual_seed(0)
    rows = WIDTH // 4
    return count_bytes(
        comm,
        nn.Embedding(WIDTH, WIDTH),
        "allreduce(codec=int8)",
        lambda: torch.randint(WIDTH, (rows,), generator=data),
    )


def train_on_hosts_of_several_ranks() -> dict[str, float]:
    comm = gradsync.connect(timeout_s=60)
    assert comm.transport == "hierarchical", comm.why
    data = torch.Generator().manual_seed(comm.rank)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    return count_bytes(comm, model, "allreduce(codec=int8)", lambda: torch.randn(2, WIDTH, generator=data))


@pytest.mark.netns
@pytest.mark.timeout(400)
@pytest.mark.parametrize("per_host", [2, 4])
def test_codes_cross_between_hosts_once_per_host(per_host: int) -> None:
    with Lab(hosts=2) as lab:
        results = call_on_hosts(lab, train_on_hosts_of_several_ranks, per_host=per_host, timeout_s=120)
    for host in range(2):
        ranks = results[host * per_host :][:per_host]
        # What one rank would send. Headers come too, for each rank: a few kilobytes.
        for sent in (ranks[0]["counted"], sum(rank["reported"] for rank in ranks)):
            assert PLAIN_BYTES / 4 < sent < 1.05 * PLAIN_BYTES / 3.9, results


@pytest.mark.netns
@pytest.mark.timeout(400)
def test_unused_embedding_rows_are_not_sent() -> None:
    with Lab(hosts=2) as lab:
        results = call_on_hosts(lab, train_embedding, timeout_s=80)
    for seen in results:
        assert seen["counted"] == pytest.approx(seen["reported"], rel=0.05), seen
        assert seen["reported"] < 0.3 * WIDTH * WIDTH


@pytest.mark.netns
@pytest.mark.timeout(400)
def test_codec_bytes_match_stats_and_promised_ratios() -> None:
    with Lab(hosts=2) as lab:
        results = call_on_hosts(lab, train_with_each_strategy, timeout_s=150)
    for seen in results:
        for spec, row in seen.items():
            # Factors go in many small messages, of which headers and acknowledgements are 6 %.
            tolerance = 0.08 if "powersgd" in spec else 0.05
            assert row["counted"] == pytest.approx(row["reported"], rel=tolerance), f"{spec}: {row}"
            assert PLAIN_BYTES / row["reported"] >= PROMISED[spec] * 0.999, f"{spec}: {row}"
