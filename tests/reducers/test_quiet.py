"""Quiet blocks: packed and unpacked to the same bits, and an embedding whose unused rows are not sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.bucket import BucketPlan
from gradsync.codecs import Int4, Int8, Payload, Sign
from gradsync.codecs.base import Codec
from gradsync.comm import Communicator, run_ranks
from gradsync.comm.base import Solo
from gradsync.reducers import Compressed
from gradsync.reducers.quiet import Packing
from gradsync.reducers.shards import HEAD_BYTES, Piece
from tests.ranks import run_processes


def row_of(parts: list[tuple[Codec, Tensor]]) -> tuple[list[Piece], Tensor]:
    """A row as a reducer fills it: a head, each part's payload, and some bytes of a bundle."""
    pieces, at = [], HEAD_BYTES
    for codec, x in parts:
        size = codec.encoded_bytes(x.numel())
        slot: Any = None
        pieces.append(Piece(slot, 0, x.numel(), x, codec, at, size, 0, codec.blocks(x.numel())))
        at += size
    row = torch.randint(0, 255, (at + 24,), dtype=torch.uint8)
    for piece, (codec, x) in zip(pieces, parts, strict=True):
        codec.encode(x, Payload(row[piece.at : piece.at + piece.num_bytes]))
    return pieces, row


def values(numel: int, used: float, seed: int) -> Tensor:
    """Of which a part of all runs of 256 has a gradient."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=draw)
    x[(torch.rand(numel // 256 + 1, generator=draw) >= used).repeat_interleave(256)[:numel]] = 0
    return x


@pytest.mark.parametrize("used", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_comes_back_as_it_was(used: float, seed: int) -> None:
    parts: list[tuple[Codec, Tensor]] = [
        (Int8(), values(256 * 40 + 17, used, seed)),
        (Sign(), values(5000, used, seed + 1)),
        (Int4(), values(256 * 80, used, seed + 2)),
        (Int8(), values(100, used, seed + 3)),  # less than a block
        (Int8(), values(256 * 30, 1.0, seed + 4)),
    ]
    pieces, row = row_of(parts)
    packing, before = Packing(pieces, row.numel()), row.clone()
    length = packing.pack(row)
    assert length < row.numel()
    row[length:] = 77  # what the wire does not bring
    packing.unpack(row)
    assert torch.equal(row[HEAD_BYTES:], before[HEAD_BYTES:])


def test_what_saves_little_is_sent_as_it_lies() -> None:
    pieces, row = row_of([(Int8(), values(256 * 40, 0.9, 0))])
    before = row.clone()
    packing = Packing(pieces, row.numel())
    assert packing.pack(row) == row.numel()
    packing.unpack(row)
    assert torch.equal(row[HEAD_BYTES:], before[HEAD_BYTES:])


def test_a_block_that_is_not_a_number_is_not_quiet() -> None:
    x = values(256 * 40, 0.0, 0)
    x[256 * 7] = torch.nan
    pieces, row = row_of([(Int8(), x)])
    packing = Packing(pieces, row.numel())
    assert packing.pack(row) < row.numel()
    packing.unpack(row)
    out = torch.empty_like(x)
    assert not Int8().decode(Payload(row[pieces[0].at : pieces[0].at + pieces[0].num_bytes]), out)


def test_a_row_that_is_not_what_it_says_is_refused() -> None:
    pieces, row = row_of([(Int8(), values(256 * 40, 0.1, 0))])
    packing = Packing(pieces, row.numel())
    packing.pack(row)
    row[:HEAD_BYTES].view(torch.int64).sub_(256)
    with pytest.raises(ValueError, match="a packed row is not what"):
        packing.unpack(row)


def test_on_other_devices_nothing_is_packed() -> None:
    params = {"a": nn.Parameter(torch.zeros(64, 64, device="meta"))}
    plan, reducer = BucketPlan([["a"]], [], params, Solo()), Compressed("int8")
    reducer.attach(plan, Solo())
    wire = reducer._wire_of(plan.buckets[0], 2)
    wire.packings[0].unpack(wire.got[1])  # a row that is not in this process's memory can't be looked at
    assert wire.packings[0].pack(wire.given[1]) == wire.shards.row_bytes


WORDS, WIDTH, USED = 500, 512, 20


def train(comm: Communicator, codec: str) -> dict[str, Any]:
    """Some steps of a model with an embedding of which each step uses few rows."""
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
        residuals = sync.state_dict()["strategy_state"]["reducer"]["own"]["residuals"]
        return {"means": means, "bytes": bytes_sent, "residuals": residuals, "model": list(model.parameters())}


def train_over_wires(codec: str) -> dict[str, Any]:
    outcome = train(gradsync.connect("c10d", timeout_s=30), codec)
    return {**outcome, "model": [param.detach() for param in outcome["model"]]}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_rows_that_nobody_used_are_not_sent_and_change_nothing(codec: str, world_size: int) -> None:
    packed = run_processes(world_size, train_over_wires, codec)
    plain = run_ranks(world_size, lambda comm: train(comm, codec))  # threads send every byte
    for rank in range(world_size):
        for ours, theirs in zip(packed[rank]["means"], plain[0]["means"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(packed[rank]["model"], packed[0]["model"], strict=True))
        assert all(torch.equal(packed[rank]["residuals"][k], v) for k, v in plain[rank]["residuals"].items())
    saved = 1 - packed[0]["bytes"][-1] / plain[0]["bytes"][-1]
    assert saved > {2: 0.8, 3: 0.4}[world_size], "of two stages only the first leaves them out"


def test_with_sign_every_row_is_sent() -> None:
    packed, plain = run_processes(2, train_over_wires, "sign"), run_ranks(2, lambda comm: train(comm, "sign"))
    assert packed[0]["bytes"] == plain[0]["bytes"]
