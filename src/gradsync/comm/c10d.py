"""torch.distributed as a transport: Gloo for CPU tensors, NCCL for CUDA ones, with a lifeline that names the dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.comm.base import Communicator, Finished, ReduceOp, Work, check_contiguous, check_op, check_rows
from gradsync.comm.feed import Feed
from gradsync.comm.lifeline import Lifeline
from gradsync.comm.rendezvous import Place, choose_gloo_interface
from gradsync.errors import CollectiveFailed, PeerLost

WAIT_SLICE = timedelta(seconds=0.05)  # how often a blocked rank looks whether a peer is lost
NEWS_PATIENCE_S = 1.0  # Gloo's own error can be quicker than the lifeline's news of who caused it

# Headers and objects are CPU tensors on every machine: a group needs Gloo beside NCCL.
BACKENDS = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class C10dWork(Work):
    """A torch.distributed work whose ``wait`` also watches the lifeline."""

    def __init__(self, comm: C10d, work: dist.Work, number: int, what: str, *, on_cuda: bool) -> None:
        self._comm = comm
        self._work = work
        self._number = number
        self._what = what
        self._on_cuda = on_cuda
        self._started_s = time.monotonic()

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        if self._on_cuda:  # with a timeout NCCL would block the host: without, only the stream waits
            self._comm.raise_if_lost(self._number, self._what, self._started_s)
            self._work.wait()
            return
        while True:
            try:
                if self._work.is_completed():
                    self._work.wait()
                else:
                    self._work.wait(WAIT_SLICE)
                return
            except RuntimeError as error:
                if self._work.is_completed():
                    self._finish(error)
                    return
            self._comm.raise_if_lost(self._number, self._what, self._started_s)
            if time.monotonic() - self._started_s > self._comm.timeout_s:
                self._comm.raise_cause(self._number, self._what, self._started_s, "it timed out")

    def _finish(self, error: RuntimeError) -> None:
        """The work is over: was it the slice that ran out just before, or has it failed?"""
        try:
            self._work.wait()
        except RuntimeError as failed:
            self._comm.raise_cause(self._number, self._what, self._started_s, str(failed))


class C10d(Communicator):
    """A group of torch.distributed. ``connect()`` makes the first; ``split`` and ``clone`` the others."""

    transport = "c10d"

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
        self.lifeline = lifeline
        self._group: dist.ProcessGroup | None = group
        self._members = list(members)  # the world's rank of each rank of this group
        self._key = group.group_name
        self._count = 0

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)
        return self._start(
            f"all_reduce({op})", tensor, lambda g: dist.all_reduce(tensor, op=_OPS[op], group=g, async_op=True)
        )

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, self.world_size, ("out", "tensor"))
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

    def all_to_all(self, tensor: Tensor, *, out: Tensor) -> Work:
        if tensor.shape != out.shape:
            raise ValueError(f"out must have tensor's shape {tuple(tensor.shape)}; got {tuple(out.shape)}.")
        check_rows(tensor, out[0], self.world_size, ("tensor", "out[0]"))
        check_contiguous(out, "out")
        return self._start("all_to_all", tensor, lambda g: dist.all_to_all_single(out, tensor, group=g, async_op=True))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        return self._start(
            f"broadcast(src={src})", tensor, lambda g: dist.broadcast(tensor, group_src=src, group=g, async_op=True)
        )

    def send(self, tensor: Tensor, dst: int) -> Work:
        self._check_peer(dst, "dst")
        check_contiguous(tensor)
        return self._start(f"send to {dst}", tensor, lambda g: dist.isend(tensor, group_dst=dst, group=g), pairs=True)

    def recv(self, tensor: Tensor, src: int) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        return self._start(f"recv from {src}", tensor, lambda g: dist.irecv(tensor, group_src=src, group=g), pairs=True)

    def barrier(self) -> None:
        # A sum and not the backend's own barrier: this one can be waited for in slices, so a lost peer ends it.
        self._start_on("barrier", torch.zeros(1)).wait()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        chosen = self._check_ranks(ranks)
        members = [self._members[rank] for rank in chosen]
        if self.rank not in chosen:
            return None
        group = _new_group(members, self.timeout_s, members_only=len(members) < dist.get_world_size())
        return C10d(group, members, self.lifeline, timeout_s=self.timeout_s, why=self.why, feed=self.feed)

    def note(self, place: str, *, step: int | None = None) -> None:
        self.lifeline.here.note = place
        self.lifeline.here.step = step

    def close(self) -> None:
        """Leave the group. The default one also leaves torch.distributed if gradsync had initialised it."""
        group, self._group = self._group, None
        if group is not None and group is not dist.group.WORLD and dist.is_initialized():
            dist.destroy_process_group(group)

    # -- starting and failing ------------------------------------------------------------------------------------

    def _start_on(self, what: str, tensor: Tensor) -> Work:
        return self._start(what, tensor, lambda g: dist.all_reduce(tensor, group=g, async_op=True))

    def _start(
        self, what: str, tensor: Tensor, launch: Callable[[dist.ProcessGroup], dist.Work | None], *, pairs: bool = False
    ) -> Work:
        if self._group is None:
            raise ValueError(f"this communicator is closed: {what} is no longer possible.")
        if tensor.numel() == 0:
            return Finished()  # the same on every rank, since shapes agree; Gloo refuses some empty tensors
        if not pairs:  # only some ranks take part in a pair: it says nothing about who is behind
            self._count += 1
            self.lifeline.enter(self._key, self._count, what)
        started_s = time.monotonic()
        self.raise_if_lost(self._count, what, started_s)
        try:
            work = launch(self._group)
        except RuntimeError as error:
            self.raise_cause(self._count, what, started_s, str(error))
        assert work is not None, "an asynchronous call of a member returns its work"
        return C10dWork(self, work, self._count, what, on_cuda=tensor.is_cuda)

    def raise_if_lost(self, number: int, what: str, started_s: float) -> None:
        """Raise PeerLost if a rank of this group is known to be dead, or left before it came to this collective."""
        line = self.lifeline
        if not line.lost and not line.left:
            return
        after_s = time.monotonic() - started_s
        if line.rank in line.lost:
            reason = f"the others gave this rank up: {line.lost[line.rank]}"
            raise self._peer_lost(line.rank, reason, after_s, what)
        for rank, reason in list(line.lost.items()):
            if rank in self._members:
                raise self._peer_lost(rank, reason, after_s, what)
        for rank, whereabouts in list(line.left.items()):
            count, last = whereabouts.groups.get(self._key, (0, "nothing"))
            if rank in self._members and count < number:
                reason = (
                    f"it has finished and left (it was at {whereabouts.note or last}; this rank is at "
                    f"{line.here.note or what}). Do the ranks have different numbers of batches? "
                    "Put the loop into `with sync.join():`, or take the data from gradsync.shard()."
                )
                line.declare_lost([rank], reason)
                raise self._peer_lost(rank, reason, after_s, what)

    def raise_cause(self, number: int, what: str, started_s: float, error: str) -> None:
        """A collective failed or timed out: find out who is to blame, tell the others, and raise."""
        end = time.monotonic() + NEWS_PATIENCE_S
        while time.monotonic() < end:
            self.raise_if_lost(number, what, started_s)
            if time.monotonic() - started_s > self.timeout_s:
                break  # news of a death is quick: after so long there is none
            time.sleep(0.01)
        whereabouts = self.lifeline.ask_whereabouts()
        self.raise_if_lost(number, what, started_s)
        after_s = time.monotonic() - started_s
        others = [rank for rank in self._members if rank != self.lifeline.rank]
        silent = [rank for rank in others if rank not in whereabouts]
        behind = {}
        for rank in others:
            if rank in whereabouts and whereabouts[rank].groups.get(self._key, (0, ""))[0] < number:
                last = whereabouts[rank].groups.get(self._key, (0, "no collective of this group yet"))
                behind[rank] = whereabouts[rank].note or last[1]
        late = silent or list(behind)
        if late:
            reason = (
                "it does not answer (frozen, or its host is gone)"
                if silent
                else f"it did not come to {what} in time; it is still at {behind[late[0]]}, "
                f"this rank is at {self.lifeline.here.note or what}"
            )
            self.lifeline.declare_lost(late, reason)
            raise self._peer_lost(late[0], reason, after_s, what)
        raise CollectiveFailed(
            f"{what} failed after {after_s:.1f} s, though every rank is alive and took part: {error}"
        )

    def _peer_lost(self, rank: int, reason: str, after_s: float, what: str) -> PeerLost:
        return PeerLost(rank=rank, reason=reason, after_s=after_s, during=what, step=self.lifeline.here.step)


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
    group = dist.group.WORLD if ours else _new_group(list(world), timeout_s)
    assert isinstance(group, dist.ProcessGroup), "torch.distributed is initialised"
    return C10d(group, world, lifeline, timeout_s=timeout_s, why=why)


def _new_group(members: list[int], timeout_s: float, *, members_only: bool = False) -> dist.ProcessGroup:
    """A group of these ranks; ``members_only``: the other ranks of the world do not make this call."""
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(
        members,
        timeout=timeout,
        backend=BACKENDS,
        use_local_synchronization=members_only,
        sort_ranks=False,  # the caller's order is the group's
    )
    assert isinstance(group, dist.ProcessGroup), "this rank is among the members"
    return group
