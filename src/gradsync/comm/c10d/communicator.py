"""``C10d``: torch.distributed as a transport, with Gloo for CPU tensors and NCCL for CUDA ones.

A heartbeat (failure/heartbeat.py) finds dead and frozen ranks, which Gloo does not name. All-to-alls of CPU tensors go
over TCP connections of our own (tcp/mesh.py). ``connect_c10d`` joins or adopts the process group. groups.py says how
groups are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from gradsync.comm.base import Communicator, Finished, ReduceOp, Work, Worker, check_op
from gradsync.comm.c10d.groups import BACKENDS, Groups, TorchGroups
from gradsync.comm.c10d.lazy_mesh import LazyMesh
from gradsync.comm.c10d.p2p import BlockingP2PWork, P2PWork
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.failure.guard import Call, CollectiveGuard
from gradsync.comm.failure.heartbeat import Heartbeat
from gradsync.comm.rendezvous import LaunchInfo, choose_gloo_interface, own_addresses
from gradsync.comm.tcp.handshake import url_address
from gradsync.comm.tcp.mesh import TcpMesh

WAIT_SLICE = timedelta(seconds=0.05)  # how often a blocked rank checks whether a peer is lost

Launch = Callable[[dist.ProcessGroup], dist.Work | None]

_connections = itertools.count()  # how often this process has connected: the same on every rank

# Tags of messages: of the user's send() and recv(), and of the algorithms in allreduce/.
USER_TAG, INTERNAL_TAG = range(2)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class C10dWork(Work):
    """A torch.distributed work whose ``wait`` also checks for lost peers."""

    def __init__(self, work: dist.Work, guard: CollectiveGuard, call: Call, *, on_device: bool) -> None:
        self._work = work
        self._guard = guard
        self._call = call
        self._on_device = on_device

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        if self._on_device:  # with a timeout NCCL would block the host; without one, only the stream waits
            self._guard.raise_if_lost(self._call)
            self._work.wait()
            return
        # The timeout is of the wait: the backward may run for long between the start and here.
        self._call = dataclasses.replace(self._call, started_s=time.monotonic())
        while not self._work.is_completed():
            with contextlib.suppress(RuntimeError):  # the slice has run out, or the work has failed: see below
                self._work.wait(WAIT_SLICE)
                return
            if not self._work.is_completed():
                self._guard.check(self._call)
        try:
            self._work.wait()
        except RuntimeError as failed:
            self._guard.raise_cause(self._call, str(failed))


class C10d(Communicator):
    """A group of torch.distributed. ``connect()`` makes the first; ``split`` and ``clone`` the others."""

    transport = "c10d"
    sends_used_only = True  # of CPU tensors
    runs_in_background = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int],
        heartbeat: Heartbeat,
        *,
        timeout_s: float,
        why: str,
        worker: Worker | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.groups = groups if groups is not None else TorchGroups()
        super().__init__(list(members).index(self.groups.rank), len(members), timeout_s=timeout_s, worker=worker)
        self.why = why
        self.guard = CollectiveGuard(heartbeat, members, group.group_name, timeout_s)
        self._group: dist.ProcessGroup | None = group
        self._splits = 0
        self._mesh: LazyMesh | TcpMesh | None = None  # from the first all_to_all of CPU tensors on
        self._works: list[dist.Work] = []  # under way when the last one was launched
        self._works_lock = threading.Lock()  # an executor's thread starts messages too
        self.groups.hold(group, self)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)
        return self._start(
            f"all_reduce({op})", tensor, lambda g: dist.all_reduce(tensor, op=_OPS[op], group=g, async_op=True)
        )

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        if tensor.is_cpu and self._mesh is not None:  # the same on all ranks: an earlier collective made the mesh
            return self._exchange("all_gather", tensor.expand(out.shape), out, own=True, used=None)
        flat, given = out.view(-1), tensor.view(-1)
        return self._start("all_gather", tensor, lambda g: dist.all_gather_single(flat, given, group=g, async_op=True))

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, self.world_size, ("tensor", "out"))
        flat, into = tensor.view(-1), out.view(-1)
        return self._start(
            f"reduce_scatter({op})",
            tensor,
            lambda g: dist.reduce_scatter_single(into, flat, op=_OPS[op], group=g, async_op=True),
        )

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, self.world_size)
        if not tensor.is_cpu:
            return self._start(
                "all_to_all", tensor, lambda g: dist.all_to_all_single(out, tensor, group=g, async_op=True)
            )
        return self._exchange("all_to_all", tensor, out, own=own, used=used)

    def _exchange(self, what: str, tensor: Tensor, out: Tensor, *, own: bool, used: Sequence[int] | None) -> Work:
        """Send row i to rank i over TCP connections of our own: see tcp/mesh.py.

        (Gloo runs two all-to-alls at a time, and sends nothing of the next before an earlier one is complete: with
        several buckets under way at 100 Mbit/s it took a quarter longer.)
        """
        self._opened(what)
        if own:
            _copy(tensor[self.rank], out[self.rank])
        if tensor.numel() == 0 or self.world_size == 1:
            return Finished()
        call = self.guard.begin(what)
        self.guard.raise_if_lost(call)
        return self._mesh_for(call).exchange(tensor, out, used, call)

    def _mesh_for(self, call: Call) -> LazyMesh | TcpMesh:
        """The connections to the other ranks. Does not block: see [Note: why in the background] in lazy_mesh.py."""
        if self._mesh is None:
            store = self.groups.store_of(self._opened(call.what))
            self._mesh = LazyMesh(self.rank, self.guard, PrefixStore("gradsync/mesh", store))
        return self._mesh

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        return self._start(
            f"broadcast(src={src})", tensor, lambda g: dist.broadcast(tensor, group_src=src, group=g, async_op=True)
        )

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        return self._post(tensor, _isend(tensor, dst, USER_TAG), f"send to {dst}")

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        return self._post(tensor, _irecv(tensor, src, USER_TAG), f"recv from {src}")

    def open_channel(self, what: str) -> C10dChannel:
        """A channel for the messages of one collective that is made of sends and receives: see allreduce/."""
        self._opened(what)
        call = self.guard.begin(what)
        self.guard.raise_if_lost(call)
        return C10dChannel(self, call)

    def barrier(self) -> None:
        # An all-reduce and not the backend's own barrier: it can be waited for in slices, so a lost peer ends it.
        self._start_on("barrier", torch.zeros(1)).wait()

    def split(self, ranks: Sequence[int]) -> C10d | None:
        return self.split_as(type(self), ranks)

    def split_as(self, kind: type[C10d], ranks: Sequence[int]) -> C10d | None:
        """A split that is a communicator of this class."""
        self._opened("split")
        chosen = self._check_ranks(ranks)
        members = [self.guard.members[rank] for rank in chosen]
        self._splits += 1  # every rank of this group splits it, members or not: so they agree on the number
        if self.rank not in chosen:
            return None
        name = f"{self.guard.key}/{self._splits}/{'-'.join(map(str, members))}"
        group = make_group(self.groups, members, name, self.guard)
        return after_barrier(self._made_as(kind, group, members))

    def as_kind(self, kind: type[C10d]) -> C10d:
        """The same group as a communicator of this class, in place of this one. Blocks: every rank calls it."""
        group, self._group = self._opened("as_kind"), None
        return after_barrier(self._made_as(kind, group, self.guard.members))

    def _made_as(self, kind: type[C10d], group: dist.ProcessGroup, members: Sequence[int]) -> C10d:
        return kind(
            group,
            members,
            self.heartbeat,
            timeout_s=self.timeout_s,
            why=self.why,
            worker=self.worker,
            groups=self.groups,
        )

    @property
    def heartbeat(self) -> Heartbeat:
        return self.guard.heartbeat

    def note(self, place: str, *, step: int | None = None) -> None:
        self.heartbeat.progress.note = place
        self.heartbeat.progress.step = step

    def compare(self, largest: Tensor, what: str) -> Work:
        return self._start(
            what, largest, lambda g: dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=g, async_op=True)
        )

    def check_call(self, what: str, tensor: Tensor, op: ReduceOp | None) -> None:
        self._opened(what)

    def close(self) -> None:
        """Leave the group. The default one also leaves torch.distributed if gradsync had initialised it."""
        group, self._group = self._group, None
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()
        with self._works_lock:
            works, self._works = self._works, []
        if group is not None:
            self.groups.release(group, works, self.timeout_s)

    def _start_on(self, what: str, tensor: Tensor) -> Work:
        return self._start(what, tensor, lambda g: dist.all_reduce(tensor, group=g, async_op=True))

    def _start(self, what: str, tensor: Tensor, launch: Launch) -> Work:
        self._opened(what)
        if tensor.numel() == 0:
            return Finished()  # the same on every rank, since shapes agree; Gloo refuses some empty tensors
        call = self.guard.begin(what)
        return C10dWork(self.launch(launch, call), self.guard, call, on_device=not tensor.is_cpu)

    def _post(self, tensor: Tensor, launch: Launch, what: str) -> Work:
        check_contiguous(tensor)
        self._opened(what)
        if tensor.numel() == 0:
            return Finished()
        call = self.guard.begin(what, p2p=True)
        work = self.launch(launch, call)
        if not tensor.is_cpu:
            return C10dWork(work, self.guard, call, on_device=True)
        return P2PWork(work, self.guard, call)

    def _opened(self, what: str) -> dist.ProcessGroup:
        if self._group is None:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        return self._group

    def launch(self, launch: Launch, call: Call) -> dist.Work:
        """Start what belongs to a call."""
        group = self._opened(call.what)
        self.guard.raise_if_lost(call)
        try:
            work = launch(group)
        except RuntimeError as error:
            self.guard.raise_cause(call, str(error))
        assert work is not None, "an asynchronous call of a member returns its work"
        with self._works_lock:
            self._works = [earlier for earlier in self._works if not earlier.is_completed()]
            self._works.append(work)
        return work


class C10dChannel:
    """The messages of one collective of ``allreduce/``: a ``BlockingChannel``, for a ``ThreadExecutor``."""

    def __init__(self, comm: C10d, call: Call) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size
        self._comm = comm
        self._call = call

    def send(self, tensor: Tensor, dst: int) -> Work:
        return self._post(tensor, _isend(tensor, dst, INTERNAL_TAG))

    def recv(self, tensor: Tensor, src: int) -> Work:
        return self._post(tensor, _irecv(tensor, src, INTERNAL_TAG))

    def check(self, waiting_since_s: float) -> None:
        self._comm.guard.check(dataclasses.replace(self._call, started_s=waiting_since_s))

    def retract(self) -> None:
        self._comm.guard.retract(self._call)

    def _post(self, tensor: Tensor, launch: Launch) -> Work:
        if tensor.numel() == 0:
            return Finished()
        return BlockingP2PWork(self._comm.launch(launch, self._call), self._comm.guard, self._call)


def _copy(tensor: Tensor, out: Tensor) -> None:
    with torch.inference_mode():  # autograd does not record it, and it may write tensors made in inference mode
        out.copy_(tensor)


def _isend(tensor: Tensor, dst: int, tag: int) -> Launch:
    return lambda group: dist.isend(tensor, group_dst=dst, group=group, tag=tag)


def _irecv(tensor: Tensor, src: int, tag: int) -> Launch:
    return lambda group: dist.irecv(tensor, group_src=src, group=group, tag=tag)


def connect_c10d(info: LaunchInfo, *, timeout_s: float, why: str) -> C10d:
    """Join the process group that ``info`` describes, or the one that the script has already initialised."""
    ours = not dist.is_initialized()
    if ours:
        choose_gloo_interface(info.master_addr)
        dist.init_process_group(
            BACKENDS,
            store=_rendezvous_store(info, timeout_s),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    world = range(dist.get_world_size())
    store = PrefixStore(f"gradsync/{info.attempt}", dist.distributed_c10d._get_default_store())
    addresses = [info.master_addr] if info.master_addr else [socket.gethostname(), *own_addresses(), "127.0.0.1"]
    heartbeat = Heartbeat(dist.get_rank(), len(world), store, addresses=addresses, timeout_s=timeout_s)
    group, groups = dist.group.WORLD, TorchGroups()
    if not ours:
        group = groups.make(world, f"gradsync/{next(_connections)}", timeout_s, lambda: None)
    assert isinstance(group, dist.ProcessGroup), "torch.distributed is initialised"
    return after_barrier(C10d(group, world, heartbeat, timeout_s=timeout_s, why=why, groups=groups))


def _rendezvous_store(info: LaunchInfo, timeout_s: float) -> Store:
    """The store through which the workers of this attempt find each other.

    [Note: attempts] torchrun's agent serves one store for all attempts, so a restarted worker would find the addresses
    of workers that have ended. Each attempt has keys of its own.
    """
    # If torchrun's agent serves a store at that port, this shares it.
    url = f"tcp://{url_address(info.master_addr)}:{info.master_port}"
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous(url, info.rank, info.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"attempt/{info.attempt}", store)


def after_barrier(group: C10d) -> C10d:
    """The same group, after a barrier: all members have joined it.

    The members find each other through a store that rank 0's process may hold. Without the barrier rank 0 could finish
    and exit, and its store with it, while other members still look each other up.
    """
    group.barrier()
    return group


def make_group(groups: Groups, members: Sequence[int], name: str, guard: CollectiveGuard) -> dist.ProcessGroup:
    """A group of these ranks of the world that ``guard`` watches. Blocks: its members call it."""
    call = guard.begin("connecting a group", p2p=True)
    try:
        return groups.make(members, name, guard.timeout_s, lambda: guard.raise_if_lost(call))
    except RuntimeError as error:
        guard.raise_cause(call, str(error))
