"""torch.distributed as a transport: Gloo for CPU tensors, NCCL for CUDA ones, with a lifeline that names the dead."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator, Finished, ReduceOp, Work, check_op
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.doors import Door, meet
from gradsync.comm.feed import Feed
from gradsync.comm.letters import Letter, OwnLetter
from gradsync.comm.lifeline import Lifeline
from gradsync.comm.objects import all_gather_object
from gradsync.comm.rendezvous import Place, choose_gloo_interface, gloo_addresses
from gradsync.comm.watch import Call, Watch
from gradsync.comm.wires import Wires

WAIT_SLICE = timedelta(seconds=0.05)  # how often a blocked rank looks whether a peer is lost

# Headers and objects are CPU tensors on every machine: a group needs Gloo beside NCCL.
BACKENDS = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"

Launch = Callable[[dist.ProcessGroup], dist.Work | None]

_naming = threading.Lock()
_connections = itertools.count()  # how often this process has connected, as every rank has

# Tags of messages: those of send() and recv(), and those that our own collectives are made of.
USERS, OURS = range(2)

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class C10dWork(Work):
    """A torch.distributed work whose ``wait`` also watches the lifeline."""

    def __init__(self, work: dist.Work, watch: Watch, call: Call, *, on_cuda: bool) -> None:
        self._work = work
        self._watch = watch
        self._call = call
        self._on_cuda = on_cuda

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        if self._on_cuda:  # with a timeout NCCL would block the host: without, only the stream waits
            self._watch.raise_if_lost(self._call)
            self._work.wait()
            return
        # What counts is how long this rank waits: backward may take its time before it comes here.
        self._call = dataclasses.replace(self._call, started_s=time.monotonic())
        while not self._work.is_completed():
            with contextlib.suppress(RuntimeError):  # the slice has run out, or the work has failed: see below
                self._work.wait(WAIT_SLICE)
                return
            if not self._work.is_completed():
                self._watch.check(self._call)
        try:
            self._work.wait()
        except RuntimeError as failed:
            self._watch.raise_cause(self._call, str(failed))


class C10d(Communicator):
    """A group of torch.distributed. ``connect()`` makes the first; ``split`` and ``clone`` the others."""

    transport = "c10d"
    sends_used_only = True  # of CPU tensors

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int],
        lifeline: Lifeline,
        *,
        timeout_s: float,
        why: str,
        feed: Feed | None = None,
    ) -> None:
        super().__init__(list(members).index(dist.get_rank()), len(members), timeout_s=timeout_s, feed=feed)
        self.why = why
        self.watch = Watch(lifeline, members, group.group_name, timeout_s)
        self._group: dist.ProcessGroup | None = group
        self._splits = 0
        self._wires: Wires | None = None  # from the first all_to_all of CPU tensors on
        self._works: list[dist.Work] = []  # that were under way when last looked at
        self._noting = threading.Lock()  # letters are started in other threads too

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)
        return self._start(
            f"all_reduce({op})", tensor, lambda g: dist.all_reduce(tensor, op=_OPS[op], group=g, async_op=True)
        )

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
        if tensor.is_cpu and self._wires is not None:  # on all ranks alike: they have met in an earlier collective
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
        """Give row i to rank i, over connections of our own: see wires.py.

        (Gloo's all-to-all runs two at a time, and sends nothing of the next before all of an earlier one is there: with
        several buckets under way at 100 Mbit/s it took a quarter longer.)
        """
        self._opened(what)
        if own:
            _copy(tensor[self.rank], out[self.rank])
        if tensor.numel() == 0 or self.world_size == 1:
            return Finished()
        call = self.watch.enter(what)
        self.watch.raise_if_lost(call)
        if self._wires is None:
            self._wires = Wires(self.rank, self._meet(call), self.watch)
        return self._wires.exchange(tensor, out, used, call)

    def _meet(self, call: Call) -> dict[int, socket.socket]:
        def share(door: Door) -> list[Door]:
            return [Door(**said) for said in all_gather_object(self, dataclasses.asdict(door))]

        try:
            return meet(self.rank, share, gloo_addresses(), self.watch, call)
        except OSError as error:
            self.watch.raise_cause(call, str(error))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        return self._start(
            f"broadcast(src={src})", tensor, lambda g: dist.broadcast(tensor, group_src=src, group=g, async_op=True)
        )

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        return self._post(tensor, _isend(tensor, dst, USERS), f"send to {dst}")

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        return self._post(tensor, _irecv(tensor, src, USERS), f"recv from {src}")

    def letters(self, what: str) -> OwnLetters:
        """What a collective of our own sends and receives through."""
        self._opened(what)
        call = self.watch.enter(what)
        self.watch.raise_if_lost(call)
        return OwnLetters(self, call)

    def barrier(self) -> None:
        # A sum and not the backend's own barrier: this one can be waited for in slices, so a lost peer ends it.
        self._start_on("barrier", torch.zeros(1)).wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        chosen = self._check_ranks(ranks)
        members = [self.watch.members[rank] for rank in chosen]
        self._splits += 1  # every rank of this group splits it, members or not: so they agree on the number
        if self.rank not in chosen:
            return None
        name = f"{self.watch.key}/{self._splits}/{'-'.join(map(str, members))}"
        group = _new_group(members, self.timeout_s, name)
        return _met(C10d(group, members, self.lifeline, timeout_s=self.timeout_s, why=self.why, feed=self.feed))

    @property
    def lifeline(self) -> Lifeline:
        return self.watch.lifeline

    def note(self, place: str, *, step: int | None = None) -> None:
        self.lifeline.here.note = place
        self.lifeline.here.step = step

    def close(self) -> None:
        """Leave the group. The default one also leaves torch.distributed if gradsync had initialised it."""
        group, self._group = self._group, None
        wires, self._wires = self._wires, None
        if wires is not None:
            wires.close()
        # Destroying waits for what is under way, and a peer may never come to it: such a group is left to the exit.
        busy = any(not work.is_completed() for work in self._works)
        if group is not None and group is not dist.group.WORLD and dist.is_initialized() and not busy:
            dist.destroy_process_group(group)

    def _start_on(self, what: str, tensor: Tensor) -> Work:
        return self._start(what, tensor, lambda g: dist.all_reduce(tensor, group=g, async_op=True))

    def _start(self, what: str, tensor: Tensor, launch: Launch) -> Work:
        self._opened(what)
        if tensor.numel() == 0:
            return Finished()  # the same on every rank, since shapes agree; Gloo refuses some empty tensors
        call = self.watch.enter(what)
        return C10dWork(self.launch(launch, call), self.watch, call, on_cuda=tensor.is_cuda)

    def _post(self, tensor: Tensor, launch: Launch, what: str) -> Work:
        check_contiguous(tensor)
        self._opened(what)
        if tensor.numel() == 0:
            return Finished()
        call = self.watch.enter(what, pair=True)
        work = self.launch(launch, call)
        if tensor.is_cuda:
            return C10dWork(work, self.watch, call, on_cuda=True)
        return Letter(work, self.watch, call)

    def _opened(self, what: str) -> dist.ProcessGroup:
        if self._group is None:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        return self._group

    def launch(self, launch: Launch, call: Call) -> dist.Work:
        """Start what belongs to a call."""
        group = self._opened(call.what)
        self.watch.raise_if_lost(call)
        try:
            work = launch(group)
        except RuntimeError as error:
            self.watch.raise_cause(call, str(error))
        assert work is not None, "an asynchronous call of a member returns its work"
        with self._noting:
            self._works = [earlier for earlier in self._works if not earlier.is_completed()]
            self._works.append(work)
        return work


class OwnLetters:
    """The messages of one collective of our own: a port for steps.py, for a lane with a thread (lane.py)."""

    def __init__(self, comm: C10d, call: Call) -> None:
        self.rank = comm.rank
        self.world_size = comm.world_size
        self._comm = comm
        self._call = call

    def send(self, tensor: Tensor, dst: int) -> Work:
        return self._post(tensor, _isend(tensor, dst, OURS))

    def recv(self, tensor: Tensor, src: int) -> Work:
        return self._post(tensor, _irecv(tensor, src, OURS))

    def check(self, waiting_since_s: float) -> None:
        self._comm.watch.check(dataclasses.replace(self._call, started_s=waiting_since_s))

    def retract(self) -> None:
        self._comm.watch.retract(self._call)

    def _post(self, tensor: Tensor, launch: Launch) -> Work:
        if tensor.numel() == 0:
            return Finished()
        return OwnLetter(self._comm.launch(launch, self._call), self._comm.watch, self._call)


def _copy(tensor: Tensor, out: Tensor) -> None:
    with torch.inference_mode():  # not autograd's business, and right for tensors of inference mode too
        out.copy_(tensor)


def _isend(tensor: Tensor, dst: int, tag: int) -> Launch:
    return lambda group: dist.isend(tensor, group_dst=dst, group=group, tag=tag)


def _irecv(tensor: Tensor, src: int, tag: int) -> Launch:
    return lambda group: dist.irecv(tensor, group_src=src, group=group, tag=tag)


def connect_c10d(place: Place, *, timeout_s: float, why: str) -> C10d:
    """Join the process group that ``place`` describes, or the one that the script has already initialised."""
    ours = not dist.is_initialized()
    if ours:
        choose_gloo_interface(place.master_addr)
        dist.init_process_group(
            BACKENDS,
            # torchrun's agent already serves a store at that port, and env:// knows how to share it
            init_method="env://" if place.source == "torchrun" else f"tcp://{place.master_addr}:{place.master_port}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    world = range(dist.get_world_size())
    store = torch._C._distributed_c10d.PrefixStore("gradsync", dist.distributed_c10d._get_default_store())
    addresses = [place.master_addr] if place.master_addr else []
    lifeline = Lifeline(dist.get_rank(), len(world), store, addresses=addresses, timeout_s=timeout_s)
    group = dist.group.WORLD if ours else _new_group(list(world), timeout_s, f"gradsync/{next(_connections)}")
    assert isinstance(group, dist.ProcessGroup), "torch.distributed is initialised"
    return _met(C10d(group, world, lifeline, timeout_s=timeout_s, why=why))


def _met(group: C10d) -> C10d:
    """This group, once all its members are in it.

    They find each other through the store that rank 0's process may hold. A rank that had found all would otherwise be
    free to end, and take the store with it from those that still look.
    """
    group.barrier()
    return group


def _new_group(members: list[int], timeout_s: float, name: str) -> dist.ProcessGroup:
    """A group of these ranks, who alone make this call.

    [Note: names of groups] Ranks meet in the store under the group's name, so it must be the same on all and never come
    again. torch can't be given one: left alone it counts the groups that a rank is in just now, which is not the same
    on all ranks, and comes again after one was destroyed.
    """
    torch_names: Any = dist.distributed_c10d
    with _naming:
        before = torch_names._process_group_name
        torch_names._process_group_name = lambda *_, **__: name
        try:
            group = dist.new_group(
                members,
                timeout=timedelta(seconds=timeout_s),
                backend=BACKENDS,
                use_local_synchronization=True,
                sort_ranks=False,  # the caller's order is the group's
            )
        finally:
            torch_names._process_group_name = before
    assert isinstance(group, dist.ProcessGroup), "this rank is among the members"
    return group
