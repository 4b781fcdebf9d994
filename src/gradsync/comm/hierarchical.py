"""Several CPU ranks on each of several hosts: shared memory within a host, torch.distributed across.

An all-reduce goes up (the host's ranks sum in shared memory), across (the *lanes* sum over the hosts: lane i is the
i-th rank of every host, with its slice of the values) and down (shared memory gives everybody all slices). So what
crosses the network is what one rank a host would send, however many ranks there are. How the stages of several
collectives keep in order is in passage.py.

Every value is summed over a host's ranks in rank order, then over the hosts as Gloo does: the same bits everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, Finished, ReduceOp, Work, check_op
from gradsync.comm.c10d import C10d
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.hosts import describe_hosts, ranks_by_host
from gradsync.comm.lifeline import Lifeline
from gradsync.comm.passage import Aside, Followed, Passage, Roads, Stage
from gradsync.comm.shm import Shm
from gradsync.comm.shm_kernels import SLOT_BYTES, slice_start
from gradsync.comm.watch import Call, Watch

MAX_LANES = 8  # ranks of a host that talk to other hosts
LANE_BYTES = 1 << 19  # what is worth a lane: with less, more lanes are only more messages
PIECE_BYTES = MAX_LANES * LANE_BYTES  # one piece is summed in the host while the one before it is on the wire
NUM_PLACES = 4  # pieces that scratch memory holds: one goes up, two across, one down
FROM_BYTES = 1 << 16  # less than that is broadcast and gathered by torch.distributed alone: fewer meetings

FINISHED = Finished()
DTYPES = (  # that Gloo can sum
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


class Hierarchical(Communicator):
    """Ranks on several hosts that share memory with those of their own. Made on top of a group of them all.

    Args:
        base: the group of all ranks, which every rank has.
        hosts: something for each rank, that is the same on ranks that can share memory.
        why: how it came to be chosen.
        lanes: ranks of a host that talk to the other hosts: at most so many, and not more than the smallest host has.
    """

    transport = "hierarchical"

    def __init__(self, base: C10d, *, hosts: Sequence[Hashable], why: str, lanes: int = MAX_LANES) -> None:
        super().__init__(base.rank, base.world_size, timeout_s=base.timeout_s, feed=base.feed)
        if len(hosts) != base.world_size or lanes < 1:
            raise ValueError(f"a host for each of {base.world_size} ranks, and a lane or more; got {hosts=} {lanes=}.")
        self._base = base
        self._hosts = list(hosts)
        self._ranks = ranks_by_host(hosts)
        self._host = next(at for at, ranks in enumerate(self._ranks) if self.rank in ranks)
        self._local = self._ranks[self._host].index(self.rank)  # this rank's number on its host
        self._given_why, self._given_lanes = why, lanes
        self.lanes = min(lanes, *map(len, self._ranks))
        self.why = f"{why}; {describe_hosts(self._ranks)}: shared memory within, c10d across"
        self._watch = Watch(base.lifeline, base.watch.members, f"{base.watch.key}/hierarchical", base.timeout_s)
        self._is_open = True
        self._up = self._meet_the_host()
        self._down = None if self._up is None else self._up.beside()
        self._lane = self._meet_the_lane()
        # Whether each host has as many ranks, side by side, and all of them are in lanes.
        self._in_blocks = 1 < self.lanes == len(self._ranks[0]) and self._ranks == _blocks(self.world_size, self.lanes)
        self._leader = self._lane if self._local == 0 else None
        self._scratch = Scratch(self._up if len(self._ranks) > 1 else None)
        self._roads = Roads(self._watch, self._up, self._down)
        base.lifeline.before_leaving.append(weakref.WeakMethod(self._roads.give_up))

    def _meet_the_host(self) -> Shm | None:
        found = None
        for ranks in self._ranks:
            group = self._base.split(ranks) if len(ranks) > 1 else None
            found = Shm(group, why=self.why) if isinstance(group, C10d) else found
        return found

    def _meet_the_lane(self) -> C10d | None:
        found = None
        for lane in range(self.lanes if len(self._ranks) > 1 else 0):
            group = self._base.split([ranks[lane] for ranks in self._ranks])
            found = group if isinstance(group, C10d) else found
        return found

    # -- collectives ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        self._check("all_reduce", tensor)
        values, op = _summable(tensor, op)
        if not values.numel():
            return FINISHED
        call = self._enter(f"all_reduce({op})")
        up = self._up
        if len(self._ranks) == 1:
            return self._within(call, None if up is None else lambda: up.all_reduce(values, op=op))
        return self._roads.start([self._reduce(piece, op, call) for piece in _pieces(values)])

    def _reduce(self, piece: Tensor, op: ReduceOp, call: Call) -> Passage:
        up, down = self._up, self._down
        lanes = max(1, min(self.lanes, piece.nbytes // LANE_BYTES))
        if up is None or down is None:
            return Passage(self._roads, call, across=self._sum_across(piece, lanes, op))
        in_place = up.holds(piece)
        if not in_place and piece.nbytes <= SLOT_BYTES:
            return Passage(
                self._roads,
                call,
                up=lambda: up.all_reduce(piece, op=op),
                across=self._sum_across(piece, lanes, op),
                down=lambda: down.broadcast(piece, 0),
            )
        buffer = piece if in_place else self._scratch.part(piece)

        def sum_up() -> Work:
            if not in_place:
                buffer.copy_(piece)
            return up.reduce_slice(buffer, op=op, lanes=lanes)

        passage = Passage(
            self._roads,
            call,
            up=sum_up,
            across=self._sum_across(buffer, lanes, op),
            down=lambda: down.share_slice(buffer, lanes=lanes, out=piece),
            after=None if in_place else self._scratch.user,
        )
        if not in_place:
            self._scratch.pass_on(passage)
        return passage

    def _sum_across(self, buffer: Tensor, lanes: int, op: ReduceOp) -> Stage | None:
        """How this rank's slice is summed over the hosts, if it has one."""
        lane = self._lane
        ends = [slice_start(buffer.numel(), lanes, at) for at in (self._local, self._local + 1)]
        if lane is None or self._local >= lanes or ends[0] == ends[1]:
            return None
        return lambda: lane.all_reduce(buffer[ends[0] : ends[1]], op=op)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        self._check("all_gather", tensor)
        if not tensor.numel():
            return FINISHED
        call = self._enter("all_gather")
        up = self._up
        if up is not None and len(self._ranks) == 1:
            return self._within(call, lambda: up.all_gather(tensor, out=out))
        given, rows = _as_bytes(tensor), _as_bytes(out).view(self.world_size, -1)
        if tensor.nbytes < FROM_BYTES or not self._in_blocks:
            return Aside(self._roads, call, self._base.all_gather(given, out=rows))
        return self._roads.start([self._gather(given, rows, call)])

    def _gather(self, given: Tensor, rows: Tensor, call: Call) -> Passage:
        """Every rank gathers what its lane has; then each host's rows, which lie side by side, are put together."""
        down, lane = self._down, self._lane
        assert down is not None and lane is not None, "where hosts are blocks, all ranks are in lanes"
        column, blocks = given.new_empty(len(self._ranks), given.numel()), rows.split(down.world_size)
        return Passage(
            self._roads,
            call,
            across=lambda: lane.all_gather(given, out=column),
            down=lambda: [down.all_gather(row, out=block) for row, block in zip(column, blocks, strict=True)][-1],
        )

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        self._check("broadcast", tensor)
        if not tensor.numel():
            return FINISHED
        call = self._enter(f"broadcast(src={src})")
        if tensor.nbytes < FROM_BYTES and len(self._ranks) > 1:
            return Aside(self._roads, call, self._base.broadcast(_as_bytes(tensor), src))
        host = next(at for at, ranks in enumerate(self._ranks) if src in ranks)
        return self._roads.start([self._spread(piece, src, host, call) for piece in _pieces(_as_bytes(tensor))])

    def _spread(self, piece: Tensor, src: int, host: int, call: Call) -> Passage:
        """Over the host of ``src``, to the other leaders, over their hosts."""
        up, down, leader = self._up, self._down, self._leader
        return Passage(
            self._roads,
            call,
            up=None if up is None or self._host != host else lambda: up.broadcast(piece, self._ranks[host].index(src)),
            across=None if leader is None else lambda: leader.broadcast(piece, host),
            down=None if down is None or self._host == host else lambda: down.broadcast(piece, 0),
        )

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        self._check("reduce_scatter", tensor)
        up = self._up
        if up is not None and len(self._ranks) == 1:
            return self._within(self._enter(f"reduce_scatter({op})"), lambda: up.reduce_scatter(tensor, out=out, op=op))
        # Gloo's own sums everything too, over all ranks, and can't be asked whether it is done.
        everything = tensor.detach().clone()
        return Followed(self.all_reduce(everything, op=op), lambda: out.copy_(everything[self.rank]))

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)
        self._check("all_to_all", tensor)
        if not tensor.numel():
            return FINISHED
        call = self._enter("all_to_all")
        up = self._up
        if up is not None and len(self._ranks) == 1:
            return self._within(call, lambda: up.all_to_all(tensor, out=out, own=own, used=used))
        given, rows = (_as_bytes(each).view(self.world_size, -1) for each in (tensor, out))
        return Aside(self._roads, call, self._base.all_to_all(given, out=rows, own=own))

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        self._check("send", tensor)
        call = self._enter(f"send to {dst}", pair=True)
        if self._up is not None and dst in self._ranks[self._host]:
            return Aside(self._roads, call, self._up.send(tensor, self._ranks[self._host].index(dst)), bell=self._up)
        return Aside(self._roads, call, self._base.send(_as_bytes(tensor), dst))

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        self._check("recv", tensor)
        call = self._enter(f"recv from {src}", pair=True)
        if self._up is not None and src in self._ranks[self._host]:
            return Aside(self._roads, call, self._up.recv(tensor, self._ranks[self._host].index(src)), bell=self._up)
        return Aside(self._roads, call, self._base.recv(_as_bytes(tensor), src))

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, dtype=torch.uint8)).wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        base = self._base.split(ranks)
        if base is None:
            return None
        assert isinstance(base, C10d), "a split is of the same kind"
        hosts = [self._hosts[rank] for rank in ranks]
        return Hierarchical(base, hosts=hosts, why=self._given_why, lanes=self._given_lanes)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A bucket in the host's shared memory. Blocks: all ranks call it."""
        if self._up is None:
            return super().allocate(numel, dtype, device)
        return self._up.allocate(numel, dtype, device)

    # -- small things ---------------------------------------------------------------------------------------------

    def _check(self, what: str, tensor: Tensor) -> None:
        if not self._is_open:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        if not tensor.is_cpu:
            raise ValueError(f"the hierarchical transport moves CPU tensors; got one on {tensor.device}. Use 'c10d'.")
        check_contiguous(tensor)

    def _enter(self, what: str, *, pair: bool = False) -> Call:
        if self._roads.broken is not None:
            raise self._roads.broken
        call = self._watch.enter(what, pair=pair)
        self._watch.raise_if_lost(call)
        return call

    def _within(self, call: Call, stage: Stage | None) -> Work:
        return self._roads.start([Passage(self._roads, call, up=stage)])

    @property
    def lifeline(self) -> Lifeline:
        return self._base.lifeline

    def note(self, place: str, *, step: int | None = None) -> None:
        self._base.note(place, step=step)

    def close(self) -> None:
        """Leave. Work under way is given up."""
        self._is_open = False
        self._roads.break_off(ValueError("this communicator was closed with work under way."))
        for group in (self._down, self._up, self._lane, self._base):
            if group is not None:
                group.close()


def connect_hierarchical(group: C10d, hosts: Sequence[Hashable]) -> Hierarchical:
    """Put a group of all ranks on shared memory within its hosts. Blocks: every rank calls it, with the same hosts."""
    return Hierarchical(group, hosts=hosts, why=group.why)


class Scratch:
    """Shared memory for the pieces of tensors that lie elsewhere, used round and round."""

    def __init__(self, shm: Shm | None) -> None:
        self._memory = torch.empty(0) if shm is None else shm.reserve(NUM_PLACES * PIECE_BYTES, torch.uint8)
        self._users: list[Passage | None] = [None] * NUM_PLACES
        self._next = 0

    def part(self, piece: Tensor) -> Tensor:
        """As much of the next place as a piece needs."""
        start = self._next * PIECE_BYTES
        return self._memory[start : start + piece.nbytes].view(piece.dtype)

    @property
    def user(self) -> Passage | None:
        """Who has used the next place, and must be over before it is used again."""
        return self._users[self._next]

    def pass_on(self, passage: Passage) -> None:
        """Say who uses the place, and go to the next one."""
        self._users[self._next] = passage
        self._next = (self._next + 1) % NUM_PLACES


def _summable(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp]:
    """A tensor's values, flat, as both shared memory and Gloo can reduce them, and with which op."""
    if tensor.is_complex():
        if op != "sum":
            raise ValueError(f"complex numbers have no order, so op must be sum; got {op=}.")
        tensor = torch.view_as_real(tensor)
    values = tensor.detach().view(-1)
    if values.dtype == torch.bool:  # True + True is True
        values, op = values.view(torch.uint8), "max" if op == "sum" else op
    if values.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"between hosts Gloo sums {names}; got {tensor.dtype}. Convert the tensor to one of them.")
    return values, op


def _blocks(world_size: int, width: int) -> list[list[int]]:
    return [list(range(first, first + width)) for first in range(0, world_size, width)]


def _as_bytes(tensor: Tensor) -> Tensor:
    """What moves is bytes: Gloo does not know every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _pieces(values: Tensor) -> Sequence[Tensor]:
    return list(values.split(PIECE_BYTES // values.itemsize))
