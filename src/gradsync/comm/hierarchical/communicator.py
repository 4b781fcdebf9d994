"""Several CPU ranks on each of several hosts: shared memory within a host, TCP or torch.distributed across.

An all-reduce has three stages:

- *up*: the ranks of a host sum in shared memory;
- *across*: the *leaders*, the first few ranks of every host, sum over the hosts; the i-th leaders of all hosts form a
  group and sum the i-th slice of the values;
- *down*: every rank copies all slices from shared memory.

So a host sends over the network what one rank would send, however many ranks it has. What a codec encodes crosses once
per host too: ``reduce_per_host`` puts the codec's exchange in the place of the stage across, run by one leader for each
bucket. How the stages of several collectives are kept in order is in ``pipeline.py``.

Every value is summed over a host's ranks in rank order, then over the hosts as their transport does: the same bits on
all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from gradsync.comm.base import (
    Communicator,
    Finished,
    HostExchange,
    PostprocessedWork,
    ReduceOp,
    SourceSlice,
    Work,
    check_op,
)
from gradsync.comm.c10d.communicator import C10d
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.failure.heartbeat import Heartbeat
from gradsync.comm.hierarchical.pipeline import (
    ExchangeOfLeaders,
    Passthrough,
    Pipeline,
    PipelinedWork,
    Stage,
)
from gradsync.comm.shm.communicator import Shm
from gradsync.comm.topology import describe_hosts, ranks_by_host
from gradsync.kernels.shm.collectives import SLOT_BYTES, slice_start

MAX_LEADERS = 8  # ranks of a host that communicate with other hosts
LEADER_BYTES = 1 << 19  # data for each leader: with less, more leaders only send more messages
CHUNK_BYTES = MAX_LEADERS * LEADER_BYTES  # a chunk is summed within the host while the previous one is on the wire
NUM_STAGING_SLOTS = 4  # chunks in staging memory: one in the stage up, two across, one down
MIN_HIERARCHICAL_BYTES = 1 << 16  # less data is broadcast and gathered by torch.distributed alone: fewer steps

FINISHED = Finished()
DTYPES = (  # that Gloo can sum
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
)


class Hierarchical(Communicator):
    """Ranks on several hosts that share memory within each host. Made on top of a torch.distributed group of all ranks.

    Args:
        base: the group of all ranks.
        hosts: one value for each rank, equal for ranks that can share memory.
        why: why this transport was chosen.
        leaders: how many ranks of each host communicate with other hosts, at most; the smallest host limits it too.
    """

    transport = "hierarchical"

    def __init__(self, base: C10d, *, hosts: Sequence[Hashable], why: str, leaders: int = MAX_LEADERS) -> None:
        super().__init__(base.rank, base.world_size, timeout_s=base.timeout_s, worker=base.worker)
        if len(hosts) != base.world_size or leaders < 1:
            raise ValueError(
                f"expected a host for each of {base.world_size} ranks and 1 leader or more; got {hosts=} {leaders=}."
            )
        self._base = base
        self._hosts = list(hosts)
        self._ranks = ranks_by_host(hosts)
        self._host = next(at for at, ranks in enumerate(self._ranks) if self.rank in ranks)
        self._local_rank = self._ranks[self._host].index(self.rank)  # this rank's number on its host
        self._given_why, self._given_leaders = why, leaders
        self.num_hosts = len(self._ranks) if 1 < len(self._ranks) < self.world_size else None
        self.leaders = min(leaders, *map(len, self._ranks))
        self.why = f"{why}; {describe_hosts(self._ranks)}: shared memory within, {base.transport} across"
        self._guard = CollectiveGuard(
            base.heartbeat, base.guard.members, f"{base.guard.key}/hierarchical", base.timeout_s
        )
        self._is_open = True
        self._last_exchange: ExchangeOfLeaders | None = None
        self._up = self._connect_host()
        self._down = None if self._up is None else self._up.clone_sharing_buffers()
        self._leader_group = self._connect_leaders()
        # Whether all hosts have equally many ranks with consecutive numbers, all of which are leaders.
        blocks = _blocks(self.world_size, self.leaders)
        self._hosts_are_blocks = 1 < self.leaders == len(self._ranks[0]) and self._ranks == blocks
        self._first_leaders = self._leader_group if self._local_rank == 0 else None
        self._staging = StagingRing(self._up if len(self._ranks) > 1 else None)
        self._pipeline = Pipeline(self._guard, self._up, self._down)
        base.heartbeat.before_leaving.append(weakref.WeakMethod(self._pipeline.retract_pending))
        base.groups.register(self)

    def _connect_host(self) -> Shm | None:
        found = None
        for ranks in self._ranks:
            group = self._base.split_as(C10d, ranks) if len(ranks) > 1 else None
            found = Shm(group, why=self.why) if group is not None else found
        return found

    def _connect_leaders(self) -> C10d | None:
        found = None
        for index in range(self.leaders if len(self._ranks) > 1 else 0):
            found = self._base.split([ranks[index] for ranks in self._ranks]) or found
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
            return self._on_one_host(call, None if up is None else lambda: up.all_reduce(values, op=op))
        return self._pipeline.start([self._reduce_chunk(chunk, op, call) for chunk in _chunks(values)])

    def _reduce_chunk(self, chunk: Tensor, op: ReduceOp, call: Call) -> PipelinedWork:
        up, down = self._up, self._down
        leaders = max(1, min(self.leaders, chunk.nbytes // LEADER_BYTES))
        if up is None or down is None:
            return PipelinedWork(self._pipeline, call, across=self._sum_across(chunk, leaders, op))
        in_place = up.holds(chunk)
        if not in_place and chunk.nbytes <= SLOT_BYTES:
            return PipelinedWork(
                self._pipeline,
                call,
                up=lambda: up.all_reduce(chunk, op=op),
                across=self._sum_across(chunk, leaders, op),
                down=lambda: down.broadcast(chunk, 0),
            )
        buffer = chunk if in_place else self._staging.view_for(chunk)

        def sum_up() -> Work:
            if not in_place:
                buffer.copy_(chunk)
            return up.reduce_slice(buffer, op=op, owners=range(leaders))

        work = PipelinedWork(
            self._pipeline,
            call,
            up=sum_up,
            across=self._sum_across(buffer, leaders, op),
            down=lambda: down.share_slice(buffer, owners=range(leaders), out=chunk),
            after=None if in_place else self._staging.previous_user,
        )
        if not in_place:
            self._staging.assign(work)
        return work

    def _sum_across(self, buffer: Tensor, leaders: int, op: ReduceOp) -> Stage | None:
        """The stage that sums this rank's slice over the hosts; None if it has no slice."""
        leader_group = self._leader_group
        ends = [slice_start(buffer.numel(), leaders, at) for at in (self._local_rank, self._local_rank + 1)]
        if leader_group is None or self._local_rank >= leaders or ends[0] == ends[1]:
            return None
        return lambda: leader_group.all_reduce(buffer[ends[0] : ends[1]], op=op)

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        self._check("all_gather", tensor)
        if not tensor.numel():
            return FINISHED
        call = self._enter("all_gather")
        up = self._up
        if up is not None and len(self._ranks) == 1:
            return self._on_one_host(call, lambda: up.all_gather(tensor, out=out))
        given, rows = _as_bytes(tensor), _as_bytes(out).view(self.world_size, -1)
        if tensor.nbytes < MIN_HIERARCHICAL_BYTES or not self._hosts_are_blocks:
            return Passthrough(self._pipeline, call, self._base.all_gather(given, out=rows))
        return self._pipeline.start([self._gather_by_leaders(given, rows, call)])

    def _gather_by_leaders(self, given: Tensor, rows: Tensor, call: Call) -> PipelinedWork:
        """Every rank gathers the rows of its leader group; then the ranks of each host exchange what they gathered."""
        down, leader_group = self._down, self._leader_group
        assert down is not None and leader_group is not None, "where hosts are blocks, all ranks are leaders"
        column, blocks = given.new_empty(len(self._ranks), given.numel()), rows.split(down.world_size)
        return PipelinedWork(
            self._pipeline,
            call,
            across=lambda: leader_group.all_gather(given, out=column),
            down=lambda: [down.all_gather(row, out=block) for row, block in zip(column, blocks, strict=True)][-1],
        )

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        self._check("broadcast", tensor)
        if not tensor.numel():
            return FINISHED
        call = self._enter(f"broadcast(src={src})")
        if tensor.nbytes < MIN_HIERARCHICAL_BYTES and len(self._ranks) > 1:
            return Passthrough(self._pipeline, call, self._base.broadcast(_as_bytes(tensor), src))
        host = next(at for at, ranks in enumerate(self._ranks) if src in ranks)
        return self._pipeline.start(
            [self._broadcast_chunk(chunk, src, host, call) for chunk in _chunks(_as_bytes(tensor))]
        )

    def _broadcast_chunk(self, chunk: Tensor, src: int, host: int, call: Call) -> PipelinedWork:
        """Broadcast on the host of ``src``, then to the first leaders of the other hosts, then on their hosts."""
        up, down, first_leaders = self._up, self._down, self._first_leaders
        return PipelinedWork(
            self._pipeline,
            call,
            up=None if up is None or self._host != host else lambda: up.broadcast(chunk, self._ranks[host].index(src)),
            across=None if first_leaders is None else lambda: first_leaders.broadcast(chunk, host),
            down=None if down is None or self._host == host else lambda: down.broadcast(chunk, 0),
        )

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        self._check("reduce_scatter", tensor)
        up = self._up
        if up is not None and len(self._ranks) == 1:
            return self._on_one_host(
                self._enter(f"reduce_scatter({op})"), lambda: up.reduce_scatter(tensor, out=out, op=op)
            )
        # Gloo's own reduce_scatter sums everything over all ranks too, and can't be polled for completion.
        everything = tensor.detach().clone()
        return PostprocessedWork(self.all_reduce(everything, op=op), lambda: out.copy_(everything[self.rank]))

    def reduce_slices(self, buffer: Tensor, sources: Sequence[SourceSlice] = ()) -> Work:
        return self.all_reduce_from(buffer, sources)  # reduce_scatter would do that too, on a copy

    def leads_host(self, index: int) -> bool:
        return self._local_rank == index % self.leaders

    def reduce_per_host(self, buffer: Tensor, index: int, exchange: HostExchange) -> Work:
        self._check("reduce_per_host", buffer)
        up, down, leader = self._up, self._down, index % self.leaders
        across = None if leader != self._local_rank else lambda: self._start_exchange(exchange)
        call = self._enter("reduce_per_host")
        if up is None or down is None:  # this rank is alone on its host
            return self._pipeline.start([PipelinedWork(self._pipeline, call, across=across)])
        owner = range(leader, leader + 1)

        def share() -> Work:
            down.share_slice(buffer, owners=owner)
            return down.broadcast(exchange.report, leader)

        return self._pipeline.start(
            [
                PipelinedWork(
                    self._pipeline,
                    call,
                    up=lambda: up.reduce_slice(buffer, owners=owner),
                    across=across,
                    down=share,
                )
            ]
        )

    def _start_exchange(self, exchange: HostExchange) -> ExchangeOfLeaders:
        assert self._leader_group is not None, "every leader has a group with those of the other hosts"
        self._last_exchange = ExchangeOfLeaders(exchange, self._leader_group, self._last_exchange)
        self._last_exchange.done()  # starts its first collective
        return self._last_exchange

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)
        self._check("all_to_all", tensor)
        if not tensor.numel():
            return FINISHED
        call = self._enter("all_to_all")
        up = self._up
        if up is not None and len(self._ranks) == 1:
            return self._on_one_host(call, lambda: up.all_to_all(tensor, out=out, own=own, used=used))
        given, rows = (_as_bytes(each).view(self.world_size, -1) for each in (tensor, out))
        return Passthrough(self._pipeline, call, self._base.all_to_all(given, out=rows, own=own))

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        self._check("send", tensor)
        call = self._enter(f"send to {dst}", pair=True)
        if self._up is not None and dst in self._ranks[self._host]:
            return Passthrough(
                self._pipeline, call, self._up.send(tensor, self._ranks[self._host].index(dst)), shm=self._up
            )
        return Passthrough(self._pipeline, call, self._base.send(_as_bytes(tensor), dst))

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        self._check("recv", tensor)
        call = self._enter(f"recv from {src}", pair=True)
        if self._up is not None and src in self._ranks[self._host]:
            return Passthrough(
                self._pipeline, call, self._up.recv(tensor, self._ranks[self._host].index(src)), shm=self._up
            )
        return Passthrough(self._pipeline, call, self._base.recv(_as_bytes(tensor), src))

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1, dtype=torch.uint8)).wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        base = self._base.split(ranks)
        if base is None:
            return None
        hosts = [self._hosts[rank] for rank in ranks]
        return Hierarchical(base, hosts=hosts, why=self._given_why, leaders=self._given_leaders)

    def control_group(self) -> Communicator:
        return self._base.clone()

    def check_call(self, what: str, tensor: Tensor, op: ReduceOp | None) -> None:
        self._check(what, tensor)
        if op is not None:
            _summable(tensor, op)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A bucket in the host's shared memory. Blocks: all ranks call it."""
        if self._up is None:
            return super().allocate(numel, dtype, device)
        return self._up.allocate(numel, dtype, device)

    # -- lifetime -------------------------------------------------------------------------------------------------

    def _check(self, what: str, tensor: Tensor) -> None:
        if not self._is_open:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        if not tensor.is_cpu:
            raise ValueError(f"the hierarchical transport moves CPU tensors; got one on {tensor.device}. Use 'c10d'.")
        check_contiguous(tensor)

    def _enter(self, what: str, *, pair: bool = False) -> Call:
        if self._pipeline.broken is not None:
            raise self._pipeline.broken
        call = self._guard.begin(what, p2p=pair)
        self._guard.raise_if_lost(call)
        return call

    def _on_one_host(self, call: Call, stage: Stage | None) -> Work:
        return self._pipeline.start([PipelinedWork(self._pipeline, call, up=stage)])

    @property
    def heartbeat(self) -> Heartbeat:
        return self._base.heartbeat

    def note(self, place: str, *, step: int | None = None) -> None:
        self._base.note(place, step=step)

    def close(self) -> None:
        """Leave the group and abandon work under way."""
        self._is_open = False
        self._pipeline.abort(ValueError("this communicator was closed with work under way."))
        for group in (self._down, self._up, self._leader_group, self._base):
            if group is not None:
                group.close()


def connect_hierarchical(group: C10d, hosts: Sequence[Hashable]) -> Hierarchical:
    """Make the hierarchical communicator of a group of all ranks. Blocks: every rank calls it, with the same hosts."""
    return Hierarchical(group, hosts=hosts, why=group.why)


class StagingRing:
    """A ring of slots in shared memory, for the chunks of tensors that are not in shared memory themselves."""

    def __init__(self, shm: Shm | None) -> None:
        self._memory = torch.empty(0) if shm is None else shm.reserve(NUM_STAGING_SLOTS * CHUNK_BYTES, torch.uint8)
        self._users: list[PipelinedWork | None] = [None] * NUM_STAGING_SLOTS
        self._next = 0

    def view_for(self, chunk: Tensor) -> Tensor:
        """As much of the next slot as a chunk needs."""
        start = self._next * CHUNK_BYTES
        return self._memory[start : start + chunk.nbytes].view(chunk.dtype)

    @property
    def previous_user(self) -> PipelinedWork | None:
        """The work that used the next slot before; it must be complete before the slot is used again."""
        return self._users[self._next]

    def assign(self, work: PipelinedWork) -> None:
        """Give the next slot to a work, and go on to the one after it."""
        self._users[self._next] = work
        self._next = (self._next + 1) % NUM_STAGING_SLOTS


def _summable(tensor: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp]:
    """A tensor's values, flat, in a dtype that both shared memory and Gloo can reduce, and the op to use."""
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
    """View a tensor as bytes, which is how it is moved: Gloo does not know every dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _chunks(values: Tensor) -> Sequence[Tensor]:
    return list(values.split(CHUNK_BYTES // values.itemsize))
