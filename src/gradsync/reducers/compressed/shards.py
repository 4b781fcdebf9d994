"""Cutting a bucket into one shard for each rank, and the layout of the rows of bytes that are sent.

A row holds a header and the payloads of all pieces of one shard; a piece is a part of one parameter. ``shard_bucket``
makes the layout, which is the same on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.buckets.bucket import Bucket
from gradsync.buckets.slot import Slot
from gradsync.codecs.base import BlockLayout, Codec, Payload, compute_dtype
from gradsync.reducers.compressed.small_parameters import SmallParameters

# Parameters are cut at multiples of this many values, counted from their first. It is a multiple of the usual
# quantization blocks: they never cross parameters, and are the same for any number of ranks.
CUT_MULTIPLE = 1024
HEADER_BYTES = 8  # at the beginning of a row: see zero_blocks.py


@dataclass(frozen=True)
class Piece:
    """A part of one parameter, with the position of its payload in a row."""

    slot: Slot
    first: int  # the range of the slot's values, in memory order
    end: int
    flat: Tensor  # these values in the bucket
    codec: Codec
    offset: int  # of its payload in the row, in bytes
    num_bytes: int
    key: int  # identifies it among all pieces, independent of the bucket
    blocks: BlockLayout | None = None  # the blocks of its payload that need not be sent while they are zero

    def part_of(self, whole: Tensor) -> Tensor:
        """This piece's range of a tensor that has one element for each value of the slot."""
        return whole if self.flat.numel() == whole.numel() else whole[self.first : self.end]

    def payload(self, row: Tensor) -> Payload:
        return Payload(row[self.offset : self.offset + self.num_bytes])


@dataclass(frozen=True)
class Shards:
    """The pieces that each rank reduces, the small parameters, which belong to the last rank, and the row length."""

    pieces: tuple[tuple[Piece, ...], ...]
    small: SmallParameters
    row_bytes: int


def slice_bucket(bucket: Bucket, codecs: Mapping[str, Codec], num_shards: int) -> Shards:
    """Cut a bucket's storage into equal slices, wherever they end, and every slot into its parts of them."""
    dtype, share = compute_dtype(bucket.buffer.dtype), bucket.storage.numel() // num_shards
    pieces: list[tuple[Piece, ...]] = []
    row_bytes = 0
    for shard in range(num_shards):
        row, end_of_row = [], HEADER_BYTES
        for slot in bucket.slots:
            first = max(shard * share - slot.start, 0)
            end = min((shard + 1) * share - slot.start, slot.flat.numel())
            if first < end:
                row.append(_make_piece(slot, first, end, codecs[slot.name], end_of_row, dtype))
                end_of_row += row[-1].num_bytes
        pieces.append(tuple(row))
        row_bytes = max(row_bytes, end_of_row)
    return Shards(tuple(pieces), SmallParameters(bucket, [], bucket.buffer.dtype), row_bytes)


def _make_piece(slot: Slot, first: int, end: int, codec: Codec, offset: int, dtype: torch.dtype) -> Piece:
    num_bytes = codec.encoded_bytes(end - first, dtype)
    key = zlib.crc32(f"{slot.name} {first}".encode())
    blocks = codec.elidable_blocks(end - first, dtype)
    return Piece(slot, first, end, slot.flat[first:end], codec, offset, num_bytes, key, blocks)


def shard_bucket(bucket: Bucket, codecs: Mapping[str, Codec], num_shards: int, *, small_dtype: torch.dtype) -> Shards:
    """Cut a bucket so that all shards have about the same encoded size.

    ``codecs``: by slot name. Slots without one are small parameters, which are sent uncompressed in ``small_dtype``.
    """
    dtype = compute_dtype(bucket.buffer.dtype)
    slots = [slot for slot in bucket.slots if slot.name in codecs]
    costs = [codecs[slot.name].encoded_bytes(slot.flat.numel(), dtype) for slot in slots]
    small = SmallParameters(bucket, [slot for slot in bucket.slots if slot.name not in codecs], small_dtype)
    target = (sum(costs) + small.num_bytes) / num_shards
    pieces: list[list[Piece]] = [[] for _ in range(num_shards)]
    ends = [HEADER_BYTES] * num_shards

    def add_piece(owner: int, slot: Slot, first: int, end: int, codec: Codec) -> None:
        pieces[owner].append(_make_piece(slot, first, end, codec, ends[owner], dtype))
        ends[owner] += pieces[owner][-1].num_bytes

    owner, filled = 0, 0.0
    for slot, cost in zip(slots, costs, strict=True):
        codec, numel, first = codecs[slot.name], slot.flat.numel(), 0
        while first < numel:
            per_value = cost / numel
            fitting = round((target - filled) / per_value / CUT_MULTIPLE) * CUT_MULTIPLE
            take = numel - first if owner == num_shards - 1 else min(numel - first, fitting)
            if take <= 0:
                owner, filled = owner + 1, filled - target
                continue
            add_piece(owner, slot, first, first + take, codec)
            first, filled = first + take, filled + take * per_value
    small.offset = ends[-1]
    ends[-1] += small.num_bytes
    return Shards(tuple(tuple(row) for row in pieces), small, max(ends))
