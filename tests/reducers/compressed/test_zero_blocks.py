"""Zero-block elision: rows are restored to the same bits, and unused rows of an embedding are not sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.buckets.bucket import BucketPlan
from gradsync.codecs import Int4, Int8, Payload, Sign
from gradsync.codecs.base import Codec
from gradsync.comm import Communicator
from gradsync.comm.base import Solo
from gradsync.reducers import Compressed
from gradsync.reducers.compressed.shards import HEADER_BYTES, Piece
from gradsync.reducers.compressed.zero_blocks import ZeroBlockElision
from gradsync.testing import run_ranks
from tests.engine.saved import strategy_state
from tests.support.ranks import run_processes


def row_of(parts: list[tuple[Codec, Tensor]]) -> tuple[list[Piece], Tensor]:
    """A row as a reducer fills it: a header, each part's payload, and some bytes of small parameters."""
    pieces, at = [], HEADER_BYTES
    for codec, x in parts:
        size = codec.encoded_bytes(x.numel())
        slot: Any = None
        pieces.append(Piece(slot, 0, x.numel(), x, codec, at, size, 0, codec.elidable_blocks(x.numel())))
        at += size
    row = torch.randint(0, 255, (at + 24,), dtype=torch.uint8)
    for piece, (codec, x) in zip(pieces, parts, strict=True):
        codec.encode(x, Payload(row[piece.offset : piece.offset + piece.num_bytes]))
    return pieces, row


def values(numel: int, used: float, seed: int) -> Tensor:
    """Values of which a share ``used`` of all blocks of 256 is not zero."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=draw)
    x[(torch.rand(numel // 256 + 1, generator=draw) >= used).repeat_interleave(256)[:numel]] = 0
    return x


@pytest.mark.parametrize("used", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_restore_gives_back_the_row(used: float, seed: int) -> None:
    parts: list[tuple[Codec, Tensor]] = [
        (Int8(), values(256 * 40 + 17, used, seed)),
        (Sign(), values(5000, used, seed + 1)),
        (Int4(), values(256 * 80, used, seed + 2)),
        (Int8(), values(100, used, seed + 3)),  # less than a block
        (Int8(), values(256 * 30, 1.0, seed + 4)),
    ]
    pieces, row = row_of(parts)
    elision, before = ZeroBlockElision(pieces, row.numel()), row.clone()
    length = elision.elide(row)
    assert length < row.numel()
    row[length:] = 77  # not sent
    elision.restore(row)
    assert torch.equal(row[HEADER_BYTES:], before[HEADER_BYTES:])


def test_elide_leaves_a_row_unchanged_if_it_saves_little() -> None:
    pieces, row = row_of([(Int8(), values(256 * 40, 0.9, 0))])
    before = row.clone()
    elision = ZeroBlockElision(pieces, row.numel())
    assert elision.elide(row) == row.numel()
    elision.restore(row)
    assert torch.equal(row[HEADER_BYTES:], before[HEADER_BYTES:])


def test_elide_keeps_blocks_with_nan() -> None:
    x = values(256 * 40, 0.0, 0)
    x[256 * 7] = torch.nan
    pieces, row = row_of([(Int8(), x)])
    elision = ZeroBlockElision(pieces, row.numel())
    assert elision.elide(row) < row.numel()
    elision.restore(row)
    out = torch.empty_like(x)
    assert not Int8().decode(Payload(row[pieces[0].offset : pieces[0].offset + pieces[0].num_bytes]), out)


def test_restore_refuses_a_row_that_does_not_fit_its_header() -> None:
    pieces, row = row_of([(Int8(), values(256 * 40, 0.1, 0))])
    elision = ZeroBlockElision(pieces, row.numel())
    elision.elide(row)
    row[:HEADER_BYTES].view(torch.int64).sub_(256)
    with pytest.raises(ValueError, match="whose length fits its header"):
        elision.restore(row)


def test_elision_is_off_on_other_devices() -> None:
    params = {"a": nn.Parameter(torch.zeros(64, 64, device="meta"))}
    plan, reducer = BucketPlan([["a"]], [], params, Solo()), Compressed("int8")
    reducer.attach(plan, Solo())
    buffers = reducer._payload_rows_of(plan.buckets[0], 2)
    buffers.elisions[0].restore(buffers.recv[1])  # a row on another device can't be read
    assert buffers.elisions[0].elide(buffers.send[1]) == buffers.shards.row_bytes


WORDS, WIDTH, USED = 500, 512, 20


def train(comm: Communicator, codec: str) -> dict[str, Any]:
    """Some steps of a model with an embedding, of which each step uses few rows."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 8))
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(generator=torch.Generator().manual_seed(param.numel()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means, bytes_sent = [], []
    with gradsync.synchronize(model, optimizer, f"allreduce(codec={codec})", comm=comm) as sync:
        for step in range(4):
            draw = torch.Generator().manual_seed(10 * step + comm.rank)
            optimizer.zero_grad()
            model(torch.randint(WORDS, (USED,), generator=draw)).square().mean().backward()
            means.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
            bytes_sent.append(sync.stats()["bytes_per_step"])
            optimizer.step()
        residuals = strategy_state(sync.state_dict())["reducer"]["own"]["residuals"]
        return {"means": means, "bytes": bytes_sent, "residuals": residuals, "model": list(model.parameters())}


def train_in_processes(codec: str) -> dict[str, Any]:
    outcome = train(gradsync.connect("c10d", timeout_s=30), codec)
    return {**outcome, "model": [param.detach() for param in outcome["model"]]}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_unused_embedding_rows_are_not_sent_and_results_are_equal(codec: str, world_size: int) -> None:
    elided = run_processes(world_size, train_in_processes, codec)
    plain = run_ranks(world_size, lambda comm: train(comm, codec))  # threads send every byte
    for rank in range(world_size):
        for ours, theirs in zip(elided[rank]["means"], plain[0]["means"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(elided[rank]["model"], elided[0]["model"], strict=True))
        assert all(torch.equal(elided[rank]["residuals"][k], v) for k, v in plain[rank]["residuals"].items())
    saved = 1 - elided[0]["bytes"][-1] / plain[0]["bytes"][-1]
    assert saved > {2: 0.8, 3: 0.4}[world_size], "only the first of two stages elides them"


def test_sign_sends_every_row() -> None:
    elided, plain = run_processes(2, train_in_processes, "sign"), run_ranks(2, lambda comm: train(comm, "sign"))
    assert elided[0]["bytes"] == plain[0]["bytes"]
