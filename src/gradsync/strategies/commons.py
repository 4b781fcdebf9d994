"""Parameters that the ranks of one host have in common: one copy in shared memory, which all read and write."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.comm.base import Communicator
from gradsync.comm.hosts import describe_hosts, ranks_by_host
from gradsync.comm.objects import all_gather_object
from gradsync.comm.segment import host_identity, share
from gradsync.errors import PeerLost

WORD_BYTES = 8
LINE_BYTES = 128  # each rank's counters lie apart from the others', or every count would cost them a cache miss
HEAD_BYTES = 2 * LINE_BYTES  # a rank's two counters
ALIGN_BYTES = 64
GONE = 1 << 62  # in place of how often a rank has come to a meeting: it comes to no more
NAP_S = 0.0005  # between looks at who has come


class Commons:
    """The parameters in memory that all ranks share, and two counters of each rank. Blocks: all ranks make it together.

    Rank 0's values are the ones that all have then. ``updates``: of each rank, how often it has changed the parameters.
    """

    def __init__(self, params: Mapping[str, Parameter], comm: Communicator) -> None:
        check_one_host(comm)
        self.comm = comm
        offsets, end = {}, HEAD_BYTES
        for name, param in params.items():
            offsets[name] = end
            end += -(-param.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        # The parameters are in rank 0's part. The rest of the others' parts takes no memory: nobody ever touches it.
        segment = share(comm, end)
        words = segment.view(0, comm.world_size * segment.bytes_per_rank // WORD_BYTES, torch.int64)
        stride = segment.bytes_per_rank // WORD_BYTES
        self.updates = words[::stride]
        self._arrivals = words[LINE_BYTES // WORD_BYTES :: stride]
        self._params = dict(params)
        self._views: dict[str, Tensor] = {}
        for name, param in params.items():
            view = _shaped_as(param, segment.view(0, param.numel(), param.dtype, offset_bytes=offsets[name]))
            if comm.rank == 0:
                view.copy_(param.detach())
            self._views[name] = view
        comm.barrier()
        for name, param in params.items():
            param.data = self._views[name]

    def check(self) -> None:
        """Refuse parameters that no longer lie in shared memory: the others would never see their updates."""
        for name, param in self._params.items():
            if param.data_ptr() != self._views[name].data_ptr():
                raise ValueError(
                    f"parameter {name} was moved out of the memory that the ranks share, by model.to() or the like, "
                    "after synchronize(). Convert the model first, or close() and synchronize again."
                )

    def meet(self, what: str, *, everyone: bool) -> None:
        """Block until every rank has come as often as this one; ``everyone``: those who are gone are missed.

        Others may be slow, so there is no limit while any rank goes on with its work: after ``timeout_s`` without an
        update or an arrival, whoever has not come is lost.
        """
        come = int(self._arrivals[self.comm.rank]) + 1
        self._arrivals[self.comm.rank] = come
        start_s = moved_s = time.monotonic()
        seen = None
        while late := (self._arrivals < come).nonzero().flatten().tolist():
            gone = self._gone()
            if everyone:
                self._raise_if_gone(gone, what, start_s)
            elif all(rank in gone for rank in late):
                return
            now_s, progress = time.monotonic(), (self.updates.tolist(), self._arrivals.tolist())
            if progress != seen:
                seen, moved_s = progress, now_s
            elif now_s - moved_s > self.comm.timeout_s:
                reason = f"it did not come to {what}, and no rank made an update meanwhile"
                raise PeerLost(rank=tuple(late), reason=reason, after_s=now_s - start_s, during=what)
            time.sleep(NAP_S)
        if everyone:
            closed = (self._arrivals == GONE).nonzero().flatten().tolist()
            self._raise_if_gone(dict.fromkeys(closed, "it has closed its synchronizer"), what, start_s)

    def _gone(self) -> dict[int, str]:
        line = self.comm.lifeline
        if line is None or line.world_size != self.comm.world_size:
            return {}
        return {**line.lost, **dict.fromkeys(line.left, "it has ended")}

    @staticmethod
    def _raise_if_gone(gone: Mapping[int, str], what: str, start_s: float) -> None:
        if gone:
            reason = next(iter(gone.values()))
            raise PeerLost(rank=tuple(gone), reason=reason, after_s=time.monotonic() - start_s, during=what)

    def leave(self) -> None:
        """Give every parameter memory of its own again, with what it holds now. Does not wait for peers."""
        for name, param in self._params.items():
            if param.data_ptr() == self._views[name].data_ptr():
                param.data = param.data.clone()
        self._arrivals[self.comm.rank] = GONE


def check_one_host(comm: Communicator) -> None:
    """Refuse ranks that can't share memory. Blocks: all ranks ask."""
    told = all_gather_object(comm, "/".join(host_identity()) if hasattr(os, "memfd_create") else "")
    if not all(told):
        raise ValueError("hogwild() needs memory that processes share, by memfd; some rank's system has none.")
    hosts = ranks_by_host(told)
    if len(hosts) > 1:
        raise ValueError(
            f"hogwild() keeps the parameters in the memory of one host; got {describe_hosts(hosts)} (containers with "
            "process or network namespaces of their own count as hosts). Run it on one, or use parameter_server() or "
            "gossip()."
        )


def _shaped_as(param: Parameter, flat: Tensor) -> Tensor:
    """``flat`` in the parameter's shape, and in its strides where it is dense (channels-last too)."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(param)
    return flat.as_strided(param.shape, param.stride()) if dense else flat.view(param.shape)
