"""What a codec sends, by the wire's own count: as much as ``stats()`` says, and as little as the codec promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradsync
from benchmarks.netlab import Lab
from tests.network.on_hosts import bytes_sent, call_on_hosts

STEPS = 3
LAYERS, WIDTH = 2, 2048  # enough that headers and acknowledgements are little beside it
PLAIN_BYTES = LAYERS * WIDTH * WIDTH * 4  # what each of two ranks sends in a plain all-reduce
# Each with the least ratio to a plain all-reduce that it promises over the tensors that it compresses.
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
    comm: gradsync.Communicator, model: nn.Module, text: str, draw: Callable[[], Tensor]
) -> dict[str, float]:
    """Train a few steps; returns what went out through this host's interface at a step, and what was said."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    said = 0.0
    with gradsync.synchronize(model, optimizer, text, comm=comm) as sync:
        for step in range(2 + STEPS):
            if step == 2:  # after the first the buckets are laid out anew
                comm.barrier()
                before = bytes_sent()
                comm.barrier()
            optimizer.zero_grad()
            model(draw()).square().mean().backward()
            said += sync.stats()["bytes_per_step"] / STEPS if step >= 2 else 0.0
        comm.barrier()
        return {"counted": (bytes_sent() - before) / STEPS, "said": said}


def be_rank() -> dict[str, dict[str, float]]:
    """Each strategy, on matrices."""
    comm = gradsync.connect("c10d", timeout_s=60)
    data = torch.Generator().manual_seed(comm.rank)
    seen = {}
    for text in PROMISED:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        seen[text] = count_bytes(comm, model, text, lambda: torch.randn(2, WIDTH, generator=data))
    return seen


def embed() -> dict[str, float]:
    """An embedding of which each step uses few rows."""
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


@pytest.mark.netns
@pytest.mark.timeout(100)
def test_the_wire_does_not_carry_rows_that_nobody_used() -> None:
    with Lab(hosts=2) as lab:
        told = call_on_hosts(lab, embed, timeout_s=80)
    for seen in told:
        assert seen["counted"] == pytest.approx(seen["said"], rel=0.05), seen
        assert seen["said"] < 0.3 * WIDTH * WIDTH


@pytest.mark.netns
@pytest.mark.timeout(200)
def test_the_wire_carries_what_stats_say_and_codecs_promise() -> None:
    with Lab(hosts=2) as lab:
        told = call_on_hosts(lab, be_rank, timeout_s=150)
    for seen in told:
        for text, row in seen.items():
            # Factors go in many small messages: of each the headers and acknowledgements are 6 %.
            tolerance = 0.08 if "powersgd" in text else 0.05
            assert row["counted"] == pytest.approx(row["said"], rel=tolerance), f"{text}: {row}"
            assert PLAIN_BYTES / row["said"] >= PROMISED[text] * 0.999, f"{text}: {row}"
