"""Cutting a bucket into a shard for each rank: what lies where in the payloads that travel."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.bucket import Bucket
from gradsync.codecs.base import Blocks, Codec, Payload
from gradsync.reducers.bundle import Bundle
from gradsync.slot import Slot

# Parameters are cut at multiples of this many values, counted from their beginning. Blocks of quantization divide it:
# they never cross parameters, and are the same whatever the number of ranks.
GRAIN = 1024
HEAD_BYTES = 8  # that a row begins with: see quiet.py


def worked_in(dtype: torch.dtype) -> torch.dtype:
    """What is left of a value of 16 bits may be too small for 16 bits: it is encoded, and kept, in 32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class Piece:
    """A part of one parameter, with its place in a shard's payload."""

    slot: Slot
    first: int  # values of the slot, as they lie in memory
    end: int
    flat: Tensor  # these values in the bucket
    codec: Codec
    at: int  # its first byte in the payload
    num_bytes: int
    key: int  # tells it from other pieces, in whatever bucket it lies
    blocks: Blocks | None = None  # of its payload, that need not be sent while they are zero

    def of(self, whole: Tensor) -> Tensor:
        """This piece's values of a tensor that holds the whole slot's, or what corresponds to them."""
        return whole if self.flat.numel() == whole.numel() else whole[self.first : self.end]

    def payload(self, row: Tensor) -> Payload:
        return Payload(row[self.at : self.at + self.num_bytes])


@dataclass(frozen=True)
class Shards:
    """For each rank the pieces that it sums, and how long the payload of any of them is.

    The bundle belongs to the last rank.
    """

    rows: tuple[tuple[Piece, ...], ...]
    bundle: Bundle
    row_bytes: int


def cut(bucket: Bucket, codecs: Mapping[str, Codec], num_shards: int, *, bundled_as: torch.dtype) -> Shards:
    """Cut so that all shards are about equally long on the wire.

    ``codecs``: of slots, by name. Those that are not named are bundled, in values of the dtype ``bundled_as``.
    """
    dtype = worked_in(bucket.buffer.dtype)
    slots = [slot for slot in bucket.slots if slot.name in codecs]
    costs = [codecs[slot.name].encoded_bytes(slot.flat.numel(), dtype) for slot in slots]
    bundle = Bundle(bucket, [slot for slot in bucket.slots if slot.name not in codecs], bundled_as)
    target = (sum(costs) + bundle.num_bytes) / num_shards
    rows: list[list[Piece]] = [[] for _ in range(num_shards)]
    ends = [HEAD_BYTES] * num_shards

    def place(owner: int, slot: Slot, first: int, end: int, codec: Codec) -> None:
        num_bytes = codec.encoded_bytes(end - first, dtype)
        key = zlib.crc32(f"{slot.name} {first}".encode())
        blocks = codec.blocks(end - first, dtype)
        rows[owner].append(Piece(slot, first, end, slot.flat[first:end], codec, ends[owner], num_bytes, key, blocks))
        ends[owner] += num_bytes

    owner, filled = 0, 0.0
    for slot, cost in zip(slots, costs, strict=True):
        codec, numel, first = codecs[slot.name], slot.flat.numel(), 0
        while first < numel:
            per_value = cost / numel
            fitting = round((target - filled) / per_value / GRAIN) * GRAIN
            take = numel - first if owner == num_shards - 1 else min(numel - first, fitting)
            if take <= 0:
                owner, filled = owner + 1, filled - target
                continue
            place(owner, slot, first, first + take, codec)
            first, filled = first + take, filled + take * per_value
    bundle.at = ends[-1]
    ends[-1] += bundle.num_bytes
    return Shards(tuple(tuple(row) for row in rows), bundle, max(ends))
