"""The interface of every transport: ``Communicator``, and the ``Work`` that its calls return.

A communicator only moves and sums. It never divides (scaling happens once, before) and never compresses. ``Solo``, the
communicator of a world of one, is here too.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradsync.comm import hugepages
from gradsync.comm.checks import check_contiguous, check_exchange, check_rows
from gradsync.comm.failure.heartbeat import Heartbeat

ReduceOp = Literal["sum", "max", "min"]
REDUCE_OPS: tuple[ReduceOp, ...] = ("sum", "max", "min")

DEFAULT_TIMEOUT_S = 300.0  # lower => a stalled peer is found sooner, but rank 0 may not take so long over a checkpoint


class Work(abc.ABC):
    """A collective that was started and may not have finished.

    >>> import gradsync, torch
    >>> work = gradsync.connect().all_reduce(torch.ones(2))
    >>> work.wait()
    >>> work.done()
    True
    """

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the result is in place; raise what went wrong. At most ``timeout_s`` of the communicator.

        On a GPU it makes the current stream wait, not the host, as torch.distributed does.
        """

    @abc.abstractmethod
    def done(self) -> bool:
        """Ask, without blocking, whether ``wait()`` would return (or raise) at once."""


class Finished(Work):
    """Work that was over when its call returned."""

    def wait(self) -> None:
        return None

    def done(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class SourceSlice:
    """Values that an all-reduce reads where they are, instead of from its buffer: see ``all_reduce_from``.

    They stand for ``buffer[first : first + values.numel()]``, multiplied by ``factor``.
    """

    first: int
    values: Tensor  # flat
    factor: float


@dataclass(frozen=True, kw_only=True)
class HostExchange:
    """What the leader of a host does with the sum of a buffer over its host: see ``Communicator.reduce_per_host``."""

    run: Callable[[Communicator], Iterator[Work]]  # given the group of leaders: starts collectives, and yields each
    num_collectives: int  # that ``run`` yields
    report: Tensor  # a small tensor that ``run`` fills: the other ranks of the host get it too
    sent_bytes: int  # by this rank, for records


class Worker:
    """The identity of a worker (one process; in tests one thread). A communicator's splits and clones share it.

    It is the key for state that is kept per worker, whichever of its communicators is at hand.
    """


class Communicator(abc.ABC):
    """Moves tensors between the ranks of one group; made by :func:`gradsync.connect`.

    Every rank of the group makes the same calls in the same order. Each call but ``barrier`` and ``split`` returns a
    :class:`Work` at once; the tensors it was given belong to it until ``wait()`` has returned. Tensors are contiguous.

    >>> import gradsync, torch
    >>> comm = gradsync.connect()          # a world of one, outside of a launcher
    >>> t = torch.ones(3)
    >>> comm.all_reduce(t).wait()
    >>> comm.rank, comm.world_size, t.tolist()
    (0, 1, [1.0, 1.0, 1.0])
    """

    transport: str = "none"  # what moves the bytes: "c10d", "threads", ...
    sends_used_only: bool = False  # all_to_all sends only the ``used`` bytes of a row
    runs_in_background: bool = False  # a collective completes even while ranks are in no call of the transport
    compares_calls: bool = False  # the transport itself finds ranks whose calls differ: see checked.py
    num_hosts: int | None = None  # ``reduce_per_host`` sums within so many hosts first; None: it can't
    bucket_bytes: int | None = None  # buckets of this size suit its all-reduce; None: the strategy's own default
    members_may_change: bool = False  # it belongs to an elastic run
    why: str = ""  # why this transport was chosen, for `gradsync info` and sync.stats()

    def __init__(self, rank: int, world_size: int, *, timeout_s: float, worker: Worker | None = None) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0; got {timeout_s=}.")
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.worker = worker if worker is not None else Worker()  # the same for all splits

    # -- what a transport implements ------------------------------------------------------------------------------

    @abc.abstractmethod
    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        """Overwrite ``tensor`` on every rank with the sum (max, min) over the ranks: the same bits everywhere."""

    @abc.abstractmethod
    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        """Fill ``out``, of shape (world_size, *tensor.shape), with every rank's ``tensor`` in rank order."""

    @abc.abstractmethod
    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        """Sum ``tensor``, of shape (world_size, *out.shape), over the ranks; ``out`` gets this rank's row."""

    @abc.abstractmethod
    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        """Send row i of ``tensor`` to rank i; row j of ``out`` is what rank j sent here. Both (world_size, ...).

        ``own=False``: this rank's own row of ``out`` will not be read, so it need not be written.
        ``used``: how many bytes of each row are used. A transport that ``sends_used_only`` does not send the rest; the
        receiver's row is not changed there.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """Overwrite ``tensor`` on every rank with that of rank ``src``."""

    @abc.abstractmethod
    def send(self, tensor: Tensor, dst: int) -> Work:
        """Send ``tensor`` to rank ``dst``, which calls ``recv`` with a tensor of the same shape and dtype."""

    @abc.abstractmethod
    def recv(self, tensor: Tensor, src: int) -> Work:
        """Overwrite ``tensor`` with what rank ``src`` sends."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Block until every rank of the group has called it."""

    @abc.abstractmethod
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Make a group of some ranks of this one, with an order of collectives of its own.

        Called by *every* rank of this group with the same ``ranks``; a rank that is not among them gets None.
        """

    def close(self) -> None:  # noqa: B027 - a transport that holds nothing has nothing to release
        """Release what the transport holds. Does not wait for peers. Safe to call twice."""

    # -- what a transport may override ----------------------------------------------------------------------------

    def abandon(self) -> None:
        """Leave a world that has lost a rank, or whose members change: ``close`` for a world with work under way.

        Does not block and does not wait for the work. Its peers' collectives with this rank raise. A buffer that
        ``allocate`` gave stays valid memory, but a peer that has not noticed yet may still write to it: use new ones.
        """
        self.close()

    def reconfigure_handle(self) -> str:
        """What names this member in the list that ``reconfigure`` takes: the same in all its worlds."""
        raise ValueError(self._why_members_are_fixed())

    def reconfigure(self, generation: str, handles: Sequence[str], *, timeout_s: float | None = None) -> Communicator:
        """The communicator of another world, whose members are those with these handles; this one is abandoned.

        Every member calls it with the same arguments, and blocks until all have come, at most ``timeout_s`` (default:
        that of this communicator). Its rank is the place of its handle. ``generation`` names the new world, and is used
        once. Raises :class:`gradsync.PeerLost` if a member does not come. (torch's process groups are to get the same
        call: a handle for each member, and a list of handles for each new set of members.)
        """
        raise ValueError(self._why_members_are_fixed())

    def _why_members_are_fixed(self) -> str:
        return (
            f"the {self.transport} transport can't change its members here: expected the world communicator of an "
            "elastic run (connect_members); got another one, whose ranks stay those that it was made with."
        )

    @property
    def heartbeat(self) -> Heartbeat | None:
        """What finds dead ranks, where the transport has one."""
        return None

    def note(self, place: str, *, step: int | None = None) -> None:  # noqa: B027 - only a heartbeat shares it
        """Record where this rank is ("step 12"), so that an error on a peer can say so."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A zeroed flat tensor for an engine's bucket; a transport may place it in memory that it reduces in place."""
        return hugepages.zeros(numel, dtype, device)

    def owned_range(self, buffer: Tensor) -> tuple[int, int]:
        """The range (from, to) of an allocated buffer that this rank sums for all ranks.

        Only there may a :class:`SourceSlice` replace the buffer's values in ``all_reduce_from``: no other rank reads
        this rank's part of it. Empty where the transport can't do it.
        """
        return 0, 0

    def all_reduce_from(self, buffer: Tensor, sources: Sequence[SourceSlice]) -> Work:
        """Sum a buffer over all ranks without copying ``sources`` into it first, where the transport can do that.

        Each source replaces the buffer's values of this rank in its ``owned_range``. The bits of the result are those
        of an all-reduce after copying the sources into the buffer, as this default does.
        """
        copy_in(sources, buffer)
        return self.all_reduce(buffer)

    def reduce_slices(self, buffer: Tensor, sources: Sequence[SourceSlice] = ()) -> Work:
        """Sum an allocated buffer over all ranks; this rank's slice of it gets the sum, the rest is undefined.

        The buffer has equal slices, one for each rank in rank order. ``sources``: as for ``all_reduce_from``.
        """
        copy_in(sources, buffer)
        rows = buffer.view(self.world_size, -1)
        total, own = torch.empty_like(rows[self.rank]), rows[self.rank]
        return PostprocessedWork(self.reduce_scatter(rows, out=total), lambda: own.copy_(total))

    def gather_slices(self, buffer: Tensor) -> Work:
        """Overwrite each slice of an allocated buffer with that of its owner: see ``reduce_slices``."""
        rows = buffer.view(self.world_size, -1)
        return self.all_gather(rows[self.rank], out=rows)

    def leads_host(self, index: int) -> bool:
        """Whether this rank exchanges the buffer with this number for its host, in ``reduce_per_host``."""
        raise ValueError(f"the {self.transport} transport has no leaders of hosts: ask num_hosts first.")

    def reduce_per_host(self, buffer: Tensor, index: int, exchange: HostExchange) -> Work:
        """Let one rank of each host exchange the host's sum of an allocated buffer; then all its ranks have the result.

        The buffer is summed within each host. The rank that leads the host for this ``index`` gets the sum, and runs
        the exchange with the leaders of the other hosts, which turns the buffer into the result. Then the ranks of its
        host copy the buffer and the report.
        """
        raise ValueError(f"the {self.transport} transport does not sum within hosts first: ask num_hosts first.")

    def unchecked(self) -> Communicator:
        """The same group without the comparison of calls, for callers that agree on them by a plan, as engines do.

        The communicator that ``connect`` returns compares the ranks' calls before each collective, where the transport
        does not (see checked.py). Clones and splits of an unchecked one are unchecked too.
        """
        return self

    def control_group(self) -> Communicator:
        """A group of the same ranks for comparing calls by small all-reduces. Blocks: every rank calls it."""
        return self.clone()

    def compare(self, largest: Tensor, what: str) -> Work:
        """Overwrite ``largest`` with the maximum over the ranks; ``what``: the call that an error names."""
        return self.all_reduce(largest, op="max")

    def check_call(self, what: str, tensor: Tensor, op: ReduceOp | None) -> None:  # noqa: B027 - most take anything
        """Refuse a call that this transport can't make, before the ranks compare calls; ``op``: of a reduction."""

    def clone(self) -> Communicator:
        """The same ranks with an order of collectives of their own: each synchronizer has a clone.

        Two groups never see each other's collectives, so two models may interleave their backwards as they like.
        """
        group = self.split(range(self.world_size))
        assert group is not None, "every rank is in the group of all ranks"
        return group

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}, transport={self.transport!r})"

    def _check_ranks(self, ranks: Sequence[int]) -> list[int]:
        chosen = list(ranks)
        if not chosen or sorted(set(chosen)) != sorted(chosen) or not set(chosen) <= set(range(self.world_size)):
            raise ValueError(f"ranks must be distinct and from 0 to {self.world_size - 1}; got {chosen}.")
        return chosen

    def _check_peer(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{what} must be a rank from 0 to {self.world_size - 1}; got {what}={rank}.")


def copy_in(sources: Sequence[SourceSlice], buffer: Tensor) -> None:
    """Write values that an all-reduce would read where they are into its buffer."""
    for source in sources:
        torch.mul(source.values, source.factor, out=buffer[source.first : source.first + source.values.numel()])


class PostprocessedWork(Work):
    """Work whose ``wait()`` runs ``then`` on the result, once. ``then`` must not start communication."""

    def __init__(self, work: Work, then: Callable[[], object]) -> None:
        self._work = work
        self._then: Callable[[], object] | None = then

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.wait()
        then, self._then = self._then, None
        if then is not None:
            with torch.inference_mode():  # invisible to autograd, and works on tensors of inference mode too
                then()


def check_op(op: str) -> None:
    """Refuse an unknown reduction."""
    if op not in REDUCE_OPS:
        raise ValueError(f"op must be one of {', '.join(REDUCE_OPS)}; got {op!r}.")


class Solo(Communicator):
    """A world of one: every collective is a copy at most. ``python train.py`` without a launcher uses it."""

    transport = "solo"
    compares_calls = True
    why = "one worker: nothing to talk to"

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S, worker: Worker | None = None) -> None:
        super().__init__(0, 1, timeout_s=timeout_s, worker=worker)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_contiguous(tensor)
        return Finished()

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        check_rows(out, tensor, 1, ("out", "tensor"))
        out[0].copy_(tensor)
        return Finished()

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        check_op(op)
        check_rows(tensor, out, 1, ("tensor", "out"))
        out.copy_(tensor[0])
        return Finished()

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        check_exchange(tensor, out, 1)
        out.copy_(tensor)
        return Finished()

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self._check_peer(src, "src")
        check_contiguous(tensor)
        return Finished()

    def send(self, tensor: Tensor, dst: int) -> Work:
        raise ValueError(f"a world of one has no rank to send to; got {dst=}.")

    def recv(self, tensor: Tensor, src: int) -> Work:
        raise ValueError(f"a world of one has no rank to receive from; got {src=}.")

    def barrier(self) -> None:
        return None

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        self._check_ranks(ranks)
        return Solo(timeout_s=self.timeout_s, worker=self.worker)
