"""A communicator whose all-reduce takes the algorithm that was measured to be the fastest for the tensor's size."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradsync.comm.algorithms import ALGORITHMS
from gradsync.comm.base import Communicator, Finished, Loan, ReduceOp, Work, check_op
from gradsync.comm.checks import check_contiguous
from gradsync.comm.choice import (
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
from gradsync.comm.forwarding import Forwarding
from gradsync.comm.lane import DrivenLane, Lane, Letters, PolledLane
from gradsync.comm.objects import all_gather_object, broadcast_object
from gradsync.comm.segment import host_identity
from gradsync.comm.steps import Port

log = logging.getLogger("gradsync")


@runtime_checkable
class SendsLetters(Protocol):
    """A transport that can keep our own collectives' messages apart from the users'."""

    def letters(self, what: str) -> Letters:
        """A port for one collective."""


def choose(comm: Communicator, file: TableFile) -> Communicator:
    """``comm`` with the algorithms of rank 0's tables in ``file``; ``comm`` itself if none of them is for it.

    Blocks: every rank must call it. What rank 0 has read holds for all ranks, whatever files the others have. Tables
    of other machines are left alone, which the log says, unless the user has named the file.
    """
    if comm.world_size == 1:
        return comm
    told = broadcast_object(comm, _read(file, comm.transport) if comm.rank == 0 else None, src=0)
    if "problem" in told:
        raise ValueError(told["problem"])
    tables = parse_tables(told)
    if not tables:
        return comm
    return Chosen(comm, tables, all_gather_object(comm, host_identity()))


def _read(file: TableFile, transport: str) -> dict[str, Any]:
    """What rank 0 tells the others: the tables that hold here, or why they can't be read."""
    try:
        tables = load_tables(file.path) if file.named else load_if_there(file.path)
    except ValueError as error:
        return {"problem": str(error)}
    except FileNotFoundError:
        return {"problem": f"there is no file {file.path}, which GRADSYNC_COLLECTIVES names."}
    here, holding = this_machine(), []
    for table in sorted(tables, key=lambda table: table.machine != here):  # of two that would do, this machine's
        if table.transport == transport and (file.named or table.machine == here):
            holding.append(table.as_json())
        elif table.transport == transport:
            log.info(
                "%s: the algorithms for %d ranks over %s were measured on %s and are not used on %s. "
                "To measure here: gradsync tune-comm -n %d",
                *(file.path, table.world_size, transport, table.machine, here, table.world_size),
            )
    return {"format": FORMAT, "tables": holding}


class Chosen(Forwarding):
    """Wraps any communicator, and takes its all-reduce or one of ours, by size. Made by :func:`choose`.

    Tensors on a GPU, and buckets that the transport has placed in memory of its own, are always the transport's.

    Args:
        comm: what moves the tensors. Every rank wraps its own, with the same tables.
        tables: what was measured. Groups for which there is none are the transport's own affair.
        hosts: something for each rank that is the same on ranks of one host.
    """

    def __init__(self, comm: Communicator, tables: Sequence[Table], hosts: Sequence[object]) -> None:
        super().__init__(comm)
        self._tables = list(tables)
        self._hosts = list(hosts)
        group = (comm.transport, comm.world_size, len({str(host) for host in hosts}))
        self.table = next((table for table in tables if table.group == group), None)
        if self.table is not None:
            self.why += "; all-reduce algorithms as measured"
        self._lane: Lane = DrivenLane() if isinstance(comm, SendsLetters) else PolledLane()
        self._mail: Communicator | None = None  # a group for our own messages, where the transport can't tell them
        self._placed: set[int] = set()  # the addresses of buckets that the transport has placed
        if self.table is not None and {name for _, name in self.table.rules} != {NATIVE}:
            self.open_mail()
        if comm.lifeline is not None:
            comm.lifeline.before_leaving.append(weakref.WeakMethod(self._lane.give_up))

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        return self.all_reduce_by(self.algorithm_for(tensor), tensor, op=op)

    def all_reduce_lent(self, buffer: Tensor, loans: Sequence[Loan]) -> Work:
        if self.algorithm_for(buffer) == NATIVE:
            return self.inner.all_reduce_lent(buffer, loans)
        return Communicator.all_reduce_lent(self, buffer, loans)  # by way of all_reduce above

    def algorithm_for(self, tensor: Tensor) -> str:
        """The algorithm that an all-reduce of this tensor takes: the same on all ranks, since sizes agree."""
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
        port = self._open_port(f"all_reduce({op}) by {algorithm}")
        return self._lane.start(port, ALGORITHMS[algorithm](port, flat, op))

    def open_mail(self) -> None:
        """Make ready for our own algorithms. May block: every rank must call it."""
        if self._mail is None and not isinstance(self.inner, SendsLetters):
            self._mail = self.inner.clone()

    def _open_port(self, what: str) -> Port:
        if isinstance(self.inner, SendsLetters):
            return self.inner.letters(what)
        assert self._mail is not None, "open_mail() comes first"
        return self._mail

    # -- groups and memory ----------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        group = self.inner.split(ranks)
        return None if group is None else Chosen(group, self._tables, [self._hosts[rank] for rank in ranks])

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = self.inner.allocate(numel, dtype, device)
        if type(self.inner).allocate is not Communicator.allocate:
            address = buffer.data_ptr()
            self._placed.add(address)
            weakref.finalize(buffer, self._placed.discard, address)
        return buffer

    def close(self) -> None:
        """Give up what is under way, and close what is wrapped."""
        self._lane.break_off(ValueError("this communicator was closed."))
        if self._mail is not None:
            self._mail.close()
        self.inner.close()
