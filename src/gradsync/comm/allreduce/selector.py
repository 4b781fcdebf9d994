"""``SelectedAllReduce``: a communicator whose all-reduce uses the algorithm measured to be fastest for a tensor's size.

``select_all_reduce`` wraps a transport with it when rank 0 has tables (table.py) for the group. The algorithms
(algorithms.py) send through a channel, and an executor (executor.py) runs them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradsync.comm.allreduce.algorithms import ALGORITHMS
from gradsync.comm.allreduce.executor import BlockingChannel, Executor, PollingExecutor, ThreadExecutor
from gradsync.comm.allreduce.primitives import Channel
from gradsync.comm.allreduce.table import (
    CHOICES,
    FORMAT,
    NATIVE,
    Table,
    TableFile,
    load_if_there,
    load_tables,
    parse_tables,
    this_machine,
)
from gradsync.comm.base import Communicator, Finished, ReduceOp, SourceSlice, Work, check_op
from gradsync.comm.checks import check_contiguous
from gradsync.comm.forwarding import Forwarding
from gradsync.comm.objects import all_gather_object, broadcast_object
from gradsync.comm.shm.segment import host_identity

log = logging.getLogger("gradsync")


@runtime_checkable
class OpensChannels(Protocol):
    """A transport that can keep the messages of our algorithms apart from the users' sends and receives."""

    def open_channel(self, what: str) -> BlockingChannel:
        """A channel for one collective."""


def select_all_reduce(comm: Communicator, file: TableFile) -> Communicator:
    """``comm`` with the algorithms of rank 0's tables in ``file``; ``comm`` itself if none of them is for it.

    Blocks: every rank must call it. Rank 0's tables are used on all ranks, whatever files the others have. Tables of
    other machines are skipped, and the log says so, unless the user has named the file.
    """
    if comm.world_size == 1:
        return comm
    content = broadcast_object(comm, _read(file, comm.transport) if comm.rank == 0 else None, src=0)
    if "problem" in content:
        raise ValueError(content["problem"])
    tables = parse_tables(content)
    if not tables:
        return comm
    return SelectedAllReduce(comm, tables, all_gather_object(comm, host_identity()))


def _read(file: TableFile, transport: str) -> dict[str, Any]:
    """What rank 0 broadcasts: the tables that apply here, or why they can't be read."""
    try:
        tables = load_tables(file.path) if file.named else load_if_there(file.path)
    except ValueError as error:
        return {"problem": str(error)}
    except FileNotFoundError:
        return {"problem": f"there is no file {file.path}, which GRADSYNC_COLLECTIVES names."}
    here, holding = this_machine(), []
    for table in sorted(tables, key=lambda table: table.machine != here):  # this machine's tables first
        if table.transport == transport and (file.named or table.machine == here):
            holding.append(table.as_json())
        elif table.transport == transport:
            log.info(
                "%s: the algorithms for %d ranks over %s were measured on %s and are not used on %s. "
                "To measure here: gradsync tune-comm -n %d",
                *(file.path, table.world_size, transport, table.machine, here, table.world_size),
            )
    return {"format": FORMAT, "tables": holding}


class SelectedAllReduce(Forwarding):
    """Wraps any communicator, and uses its all-reduce or one of ours, by size. Made by :func:`select_all_reduce`.

    Tensors on a GPU, and buckets that the transport has placed in memory of its own, always use the transport's.

    Args:
        comm: what moves the tensors. Every rank wraps its own, with the same tables.
        tables: what was measured. Groups without a table use the transport's all-reduce.
        hosts: an identifier of each rank's host.
    """

    def __init__(self, comm: Communicator, tables: Sequence[Table], hosts: Sequence[object]) -> None:
        super().__init__(comm)
        self._tables = list(tables)
        self._hosts = list(hosts)
        group = (comm.transport, comm.world_size, len({str(host) for host in hosts}))
        self.table = next((table for table in tables if table.group == group), None)
        if self.table is not None:
            self.why += "; all-reduce algorithms as measured"
        self._executor: Executor = ThreadExecutor() if isinstance(comm, OpensChannels) else PollingExecutor()
        self._p2p_group: Communicator | None = None  # for our messages, where the transport has no channels for them
        self._placed: set[int] = set()  # the addresses of buckets that the transport has placed
        if self.table is not None and {name for _, name in self.table.rules} != {NATIVE}:
            self.open_p2p_group()
        if comm.heartbeat is not None:
            comm.heartbeat.before_leaving.append(weakref.WeakMethod(self._executor.retract))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        return self.all_reduce_by(self.algorithm_for(tensor), tensor, op=op)

    def all_reduce_from(self, buffer: Tensor, sources: Sequence[SourceSlice]) -> Work:
        if self.algorithm_for(buffer) == NATIVE:
            return self.inner.all_reduce_from(buffer, sources)
        return Communicator.all_reduce_from(self, buffer, sources)  # by way of all_reduce above

    def algorithm_for(self, tensor: Tensor) -> str:
        """The algorithm that an all-reduce of this tensor uses: the same on all ranks, since sizes agree."""
        if self.table is None or tensor.device.type != "cpu" or tensor.data_ptr() in self._placed:
            return NATIVE
        return self.table.algorithm_for(tensor.nbytes)

    def all_reduce_by(self, algorithm: str, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        """All-reduce by the algorithm of this name, whatever the tables say."""
        if algorithm == NATIVE:
            return self.inner.all_reduce(tensor, op=op)
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(CHOICES)}; got {algorithm!r}.")
        check_op(op)
        check_contiguous(tensor)
        if tensor.is_complex() and op != "sum":
            raise ValueError(f"complex numbers have no order, so op must be sum; got {op=}.")
        if self.world_size == 1 or tensor.numel() == 0:
            return Finished()
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # .data: as with any backend, autograd does not count this as a change.
        flat = values.data.view(-1)
        channel = self._open_channel(f"all_reduce({op}) by {algorithm}")
        return self._executor.start(channel, ALGORITHMS[algorithm](channel, flat, op))

    def open_p2p_group(self) -> None:
        """Prepare for our own algorithms. May block: every rank must call it."""
        if self._p2p_group is None and not isinstance(self.inner, OpensChannels):
            self._p2p_group = self.inner.clone()

    def _open_channel(self, what: str) -> Channel:
        if isinstance(self.inner, OpensChannels):
            return self.inner.open_channel(what)
        assert self._p2p_group is not None, "open_p2p_group() comes first"
        return self._p2p_group

    # -- groups and memory ----------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        group = self.inner.split(ranks)
        return None if group is None else SelectedAllReduce(group, self._tables, [self._hosts[rank] for rank in ranks])

    def check_call(self, what: str, tensor: Tensor, op: ReduceOp | None) -> None:
        self.inner.check_call(what, tensor, op)
        if tensor.is_complex() and op not in (None, "sum") and self.algorithm_for(tensor) != NATIVE:
            raise ValueError(f"complex numbers have no order, so op must be sum; got {op=}.")

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self.inner.allocate(numel, dtype, device)
        if type(self.inner).allocate is not Communicator.allocate:
            address = buffer.data_ptr()
            self._placed.add(address)
            weakref.finalize(buffer, self._placed.discard, address)
        return buffer

    def close(self) -> None:
        """Abort what is under way, and close the wrapped communicator."""
        self._executor.abort(ValueError("this communicator was closed."))
        if self._p2p_group is not None:
            self._p2p_group.close()
        self.inner.close()
