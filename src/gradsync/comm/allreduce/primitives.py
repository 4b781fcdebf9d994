"""What all-reduce algorithms are made of: a channel to send and receive through, slices and pieces, and exact sums.

[Note: sums of 16-bit floats] Messages keep the tensor's dtype: fewer bytes are what 16 bits were chosen for. Values
that meet at one rank are added in 32 bits and rounded once. So a sum over n ranks is rounded once by ``direct``, once a
level by ``tree``, once a round by ``halving`` and ``doubling`` (log2 n times), and n - 1 times by ``ring``, as in the
rings of Gloo and NCCL.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradsync.comm.base import ReduceOp, Work

PIECE_BYTES = 1 << 20  # summed at a time, while the next piece is on its way
AHEAD = 2  # pieces that are under way at once

Steps = Generator[Work, None, None]

_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Channel(Protocol):
    """Where one all-reduce sends and receives. Messages of two ranks match in the order in which they are started."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def send(self, tensor: Tensor, dst: int) -> Work: ...
    def recv(self, tensor: Tensor, src: int) -> Work: ...


def exchange(
    channel: Channel, give: Tensor, to: int, take: Tensor, source: int, op: ReduceOp, scratch: Sequence[Tensor]
) -> Steps:
    """Send ``give`` to one rank, and reduce what another one sends into ``take``: one piece while the next arrives.

    ``give`` and ``take`` may be the same values: a piece is sent before it is overwritten.
    """
    gives, takes = pieces(give), pieces(take)
    sends: deque[Work] = deque()
    recvs: deque[Work] = deque()

    def post(at: int) -> None:
        if at < len(takes):
            recvs.append(channel.recv(scratch[at % AHEAD][: takes[at].numel()], source))
        if at < len(gives):
            sends.append(channel.send(gives[at], to))

    for at in range(AHEAD):
        post(at)
    for at in range(max(len(gives), len(takes))):
        if at < len(takes):
            yield recvs.popleft()
        if at < len(gives):
            yield sends.popleft()
        if at < len(takes):
            mine, theirs = takes[at], scratch[at % AHEAD][: takes[at].numel()]
            reduce_rows([mine, theirs] if channel.rank < source else [theirs, mine], op, out=mine)
        post(at + AHEAD)


def swap(channel: Channel, give: Tensor, to: int, take: Tensor, source: int) -> Steps:
    """Send ``give`` to one rank, and overwrite ``take`` with what another one sends."""
    works = [channel.recv(take, source), channel.send(give, to)]
    yield from works


def until(works: deque[Work], left: int) -> Steps:
    """Wait for works, the oldest first, until only ``left`` of them are under way."""
    while len(works) > left:
        yield works.popleft()


def cut(values: Tensor, parts: int) -> list[Tensor]:
    """Slices of nearly equal length, some of them empty where there are fewer values than parts."""
    ends = [values.numel() * at // parts for at in range(parts + 1)]
    return [values[first:end] for first, end in itertools.pairwise(ends)]


def pieces(values: Tensor, parts: int = 1) -> Sequence[Tensor]:
    """``values`` cut so that a ``parts``-th of each piece is at most PIECE_BYTES; no pieces if there are no values."""
    return values.split(_width(values) * parts) if values.numel() else ()


def receive_buffers(values: Tensor, number: int = AHEAD) -> list[Tensor]:
    """Buffers for pieces of ``values`` that arrive, each as large as the largest piece."""
    width = min(values.numel(), _width(values))
    return [values.new_empty(width) for _ in range(number)]


def reduce_rows(rows: Sequence[Tensor], op: ReduceOp, *, out: Tensor) -> None:
    """Reduce the rows, in their order, into ``out``, which may be one of them. See [Note: sums of 16-bit floats]."""
    combine = _COMBINE[op]
    if len(rows) == 2:
        combine(rows[0], rows[1], out=out)  # torch itself adds two 16-bit floats in 32 bits
        return
    is_short = op == "sum" and out.dtype in (torch.float16, torch.bfloat16)
    total = combine(rows[0].float() if is_short else rows[0], rows[1])
    for row in rows[2:]:
        combine(total, row, out=total)
    out.copy_(total)


def _width(values: Tensor) -> int:
    return max(1, PIECE_BYTES // values.element_size())
