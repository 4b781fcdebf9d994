"""Parameters in memory that the ranks of one host share: one copy, which all ranks read and write. For Hogwild."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object
from gradsync.comm.shm.segment import create_segment, host_identity
from gradsync.comm.topology import describe_hosts, ranks_by_host
from gradsync.errors import PeerLost

WORD_BYTES = 8
CACHE_LINE_BYTES = 128  # each counter has a line of its own, or every count would cost the other ranks a cache miss
COUNTERS_BYTES = 2 * CACHE_LINE_BYTES  # a rank's two counters
ALIGN_BYTES = 64
CLOSED = 1 << 62  # in place of a rank's number of arrivals: it has closed, and arrives at no further barrier
POLL_S = 0.0005  # between two looks at the arrivals


class SharedParameters:
    """The parameters in memory that all ranks share, and two counters for each rank.

    Blocks: all ranks create it together. The parameters get rank 0's values. ``updates`` counts, for each rank, how
    often it has changed the parameters.
    """

    def __init__(self, params: Mapping[str, Parameter], comm: Communicator) -> None:
        check_one_host(comm)
        self.comm = comm
        offsets, end = {}, COUNTERS_BYTES
        for name, param in params.items():
            offsets[name] = end
            end += -(-param.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        # The parameters are in rank 0's part. The rest of the others' parts takes no memory: it is never touched.
        segment = create_segment(comm, end)
        words = segment.view(0, comm.world_size * segment.bytes_per_rank // WORD_BYTES, torch.int64)
        stride = segment.bytes_per_rank // WORD_BYTES
        self.updates = words[::stride]
        self._arrivals = words[CACHE_LINE_BYTES // WORD_BYTES :: stride]
        self._params = dict(params)
        self._views: dict[str, Tensor] = {}
        for name, param in params.items():
            view = _view_like(param, segment.view(0, param.numel(), param.dtype, offset_bytes=offsets[name]))
            if comm.rank == 0:
                view.copy_(param.detach())
            self._views[name] = view
        comm.barrier()
        for name, param in params.items():
            param.data = self._views[name]

    def check(self) -> None:
        """Refuse parameters that are no longer in shared memory: the other ranks would never see their updates."""
        for name, param in self._params.items():
            if param.data_ptr() != self._views[name].data_ptr():
                raise ValueError(
                    f"parameter {name} was moved out of the memory that the ranks share, by model.to() or the like, "
                    "after synchronize(). Convert the model first, or close() and synchronize again."
                )

    def barrier(self, what: str, *, require_all: bool) -> None:
        """Block until every rank has arrived as often as this one.

        Ranks that are gone do not count; with ``require_all`` they raise PeerLost. Other ranks may be slow, so there is
        no time limit while any rank makes progress: after ``timeout_s`` without an update or an arrival on any rank,
        the ranks that have not arrived are lost.
        """
        arrival = int(self._arrivals[self.comm.rank]) + 1
        self._arrivals[self.comm.rank] = arrival
        start_s = progress_s = time.monotonic()
        last = None
        while late := (self._arrivals < arrival).nonzero().flatten().tolist():
            gone = self._gone()
            if require_all:
                self._raise_if_gone(gone, what, start_s)
            elif all(rank in gone for rank in late):
                return
            now_s, progress = time.monotonic(), (self.updates.tolist(), self._arrivals.tolist())
            if progress != last:
                last, progress_s = progress, now_s
            elif now_s - progress_s > self.comm.timeout_s:
                reason = f"it did not come to {what}, and no rank made an update meanwhile"
                raise PeerLost(rank=tuple(late), reason=reason, after_s=now_s - start_s, during=what)
            time.sleep(POLL_S)
        if require_all:
            closed = (self._arrivals == CLOSED).nonzero().flatten().tolist()
            self._raise_if_gone(dict.fromkeys(closed, "it has closed its synchronizer"), what, start_s)

    def _gone(self) -> dict[int, str]:
        heartbeat = self.comm.heartbeat
        if heartbeat is None or heartbeat.world_size != self.comm.world_size:
            return {}
        return {**heartbeat.lost, **dict.fromkeys(heartbeat.left, "it has ended")}

    @staticmethod
    def _raise_if_gone(gone: Mapping[int, str], what: str, start_s: float) -> None:
        if gone:
            reason = next(iter(gone.values()))
            raise PeerLost(rank=tuple(gone), reason=reason, after_s=time.monotonic() - start_s, during=what)

    def close(self) -> None:
        """Give every parameter memory of its own again, with its current values. Does not wait for peers."""
        for name, param in self._params.items():
            if param.data_ptr() == self._views[name].data_ptr():
                param.data = param.data.clone()
        self._arrivals[self.comm.rank] = CLOSED


def check_one_host(comm: Communicator) -> None:
    """Refuse ranks that can't share memory. Blocks: all ranks call it."""
    identities = all_gather_object(comm, "/".join(host_identity()) if hasattr(os, "memfd_create") else "")
    if not all(identities):
        raise ValueError("hogwild() needs shared memory by memfd_create; the system of some rank does not have it.")
    hosts = ranks_by_host(identities)
    if len(hosts) > 1:
        raise ValueError(
            f"hogwild() keeps the parameters in the memory of one host; got {describe_hosts(hosts)} (containers with "
            "process or network namespaces of their own count as hosts). Run it on one, or use parameter_server() or "
            "gossip()."
        )


def _view_like(param: Parameter, flat: Tensor) -> Tensor:
    """``flat`` in the parameter's shape, and with its strides where it is dense (channels-last too)."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(param)
    return flat.as_strided(param.shape, param.stride()) if dense else flat.view(param.shape)
