"""Cutting a bucket into a shard for each rank: what lies where in the payloads that travel."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.bucket import Bucket
from gradsync.codecs.base import Codec, Payload
from gradsync.slot import Slot

# Parameters are cut at multiples of this many values, counted from their beginning. Blocks of quantization divide it:
# they never cross parameters, and are the same whatever the number of ranks.
GRAIN = 1024


@dataclass(frozen=True)
class Piece:
    """A part of one parameter, or a bucket's flags, with its place in a shard's payload."""

    slot: Slot | None  # None: the flags
    first: int  # values of the slot, as they lie in memory
    end: int
    codec: Codec
    at: int  # its first byte in the payload
    num_bytes: int
    key: int  # tells it from other pieces, in whatever bucket it lies

    def payload(self, row: Tensor) -> Payload:
        return Payload(row[self.at : self.at + self.num_bytes])


@dataclass(frozen=True)
class Shards:
    """For each rank the pieces that it sums, and how long the payload of any of them is."""

    rows: tuple[tuple[Piece, ...], ...]
    row_bytes: int


def cut(bucket: Bucket, codecs: Sequence[Codec], num_shards: int, *, flags: Codec) -> Shards:
    """Cut so that all shards are about equally long on the wire. ``codecs``: one a slot; ``flags``: for the flags."""
    dtype = torch.float32 if bucket.buffer.dtype.itemsize < 4 else bucket.buffer.dtype  # what the codecs see
    costs = [codec.encoded_bytes(slot.flat.numel(), dtype) for slot, codec in zip(bucket.slots, codecs, strict=True)]
    target = sum(costs) / num_shards
    rows: list[list[Piece]] = [[] for _ in range(num_shards)]
    ends = [0] * num_shards

    def place(owner: int, slot: Slot | None, first: int, end: int, codec: Codec) -> None:
        num_bytes = codec.encoded_bytes(end - first, dtype)
        key = 0 if slot is None else zlib.crc32(f"{slot.name} {first}".encode())
        rows[owner].append(Piece(slot, first, end, codec, ends[owner], num_bytes, key))
        ends[owner] += num_bytes

    owner, filled = 0, 0.0
    for slot, codec, cost in zip(bucket.slots, codecs, costs, strict=True):
        numel, first = slot.flat.numel(), 0
        while first < numel:
            per_value = cost / numel
            fitting = round((target - filled) / per_value / GRAIN) * GRAIN
            take = numel - first if owner == num_shards - 1 else min(numel - first, fitting)
            if take <= 0:
                owner, filled = owner + 1, filled - target
                continue
            place(owner, slot, first, first + take, codec)
            first, filled = first + take, filled + take * per_value
    place(num_shards - 1, None, 0, bucket.flags.numel(), flags)
    return Shards(tuple(tuple(row) for row in rows), max(ends))
