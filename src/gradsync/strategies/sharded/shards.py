"""The weights in flat buffers laid out as the buckets, and the parts of them that this rank steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsync.buckets.bucket import Bucket, BucketPlan
from gradsync.buckets.slot import Slot
from gradsync.comm.base import Communicator
from gradsync.strategies.sharded.weights import make_weights


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one parameter that this rank steps: ``slot.flat[first:end]``."""

    slot: Slot
    first: int
    end: int
    weights: Tensor  # flat, as real numbers: a view of what the optimizer steps
    gradient: Tensor  # the same values of the bucket


class Shard:
    """The weights of one bucket: a buffer that the bucket's parameters are views of. Each rank owns a slice of it.

    Blocks: all ranks make it together, because the transport may place the buffer in shared memory.
    """

    def __init__(self, bucket: Bucket, comm: Communicator, sent_as: torch.dtype | None) -> None:
        self.buffer = comm.allocate(bucket.storage.numel(), bucket.storage.dtype, bucket.device)
        self.weights = make_weights(self.buffer, comm, sent_as)
        share = self.buffer.numel() // comm.world_size
        self.first, self.end = comm.rank * share, (comm.rank + 1) * share
        self.rebind(bucket)

    def rebind(self, bucket: Bucket) -> None:
        """Take a bucket with the same parameters in the same places, and make the parameters views of the buffer."""
        self.slots = list(bucket.slots)
        self._views = [slot.shaped(_own_storage(self.buffer, slot.start, slot.flat.numel())) for slot in self.slots]
        self.parts = [part for slot in self.slots if (part := self._part_of(slot)) is not None]
        self.take_in()

    def take_in(self) -> None:
        """Bring in parameters that lie elsewhere: new ones, and those that the user has re-pointed (``param.data``)."""
        for slot, view in zip(self.slots, self._views, strict=True):
            if slot.param.data_ptr() != view.data_ptr():
                view.copy_(slot.param.detach())
                slot.param.data = view

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        for slot, view in zip(self.slots, self._views, strict=True):
            if slot.param.data_ptr() == view.data_ptr():
                slot.param.data = view.clone()

    def _part_of(self, slot: Slot) -> Part | None:
        start = slot.start
        first, end = max(self.first - start, 0), min(self.end - start, slot.flat.numel())
        if first >= end:
            return None
        return Part(
            slot=slot,
            first=first,
            end=end,
            weights=self.weights.stepped[start + first - self.first : start + end - self.first],
            gradient=slot.flat[first:end],
        )


class Shards:
    """The shards of all buckets of a plan. ``sent_as``: how weights are sent to other ranks, see weights.py."""

    def __init__(self, plan: BucketPlan, comm: Communicator, sent_as: torch.dtype | None = None) -> None:
        self.layout = plan.layout
        self.shards = [Shard(bucket, comm, sent_as) for bucket in plan.buckets]
        self.sparse = [slot.param for slot in plan.sparse]  # every rank has these whole, and steps them whole

    def rebind(self, plan: BucketPlan) -> None:
        """Take a plan with the same layout."""
        assert plan.layout == self.layout, "another layout needs other buffers"
        for shard, bucket in zip(self.shards, plan.buckets, strict=True):
            shard.rebind(bucket)
        self.sparse = [slot.param for slot in plan.sparse]

    def begin_step(self) -> None:
        """Bring in parameters that the user has re-pointed; then the optimizer may step the parts."""
        for shard in self.shards:
            shard.take_in()
            shard.weights.begin_step()

    def complete(self, comm: Communicator) -> None:
        """Let the weights include what was not sent yet. Blocks: all ranks call it."""
        for shard in self.shards:
            shard.weights.complete(comm)

    def unsent(self) -> dict[str, Tensor]:
        """The residuals of the weights that this rank owns, by parameter name and shape; zero where it owns none."""
        found = {}
        for shard in self.shards:
            residual = shard.weights.residual
            for slot in shard.slots if residual is not None else ():
                flat = torch.zeros_like(slot.flat)
                found[slot.name] = slot.shaped(flat)
            for part in shard.parts if residual is not None else ():
                assert residual is not None
                first = part.slot.start + part.first - shard.first
                flat = residual[first : first + part.end - part.first]
                found[part.slot.name].as_strided((part.slot.flat.numel(),), (1,))[part.first : part.end] = flat
        return found

    def load_unsent(self, saved: Mapping[str, Tensor]) -> None:
        """Load what ``unsent`` returned on a rank with the same parts."""
        for shard in self.shards:
            residual = shard.weights.residual
            for part in shard.parts if residual is not None else ():
                assert residual is not None
                first = part.slot.start + part.first - shard.first
                residual[first : first + part.end - part.first] = part.slot.flattened(saved[part.slot.name])[
                    part.first : part.end
                ]

    def release(self) -> None:
        """Give every parameter memory of its own again."""
        for shard in self.shards:
            shard.release()

    def slots(self) -> Iterator[Slot]:
        for shard in self.shards:
            yield from shard.slots

    def parts(self) -> Sequence[Part]:
        """The parts that this rank steps, in plan order."""
        return [part for shard in self.shards for part in shard.parts]


def _own_storage(buffer: Tensor, start: int, numel: int) -> Tensor:
    """A part of a flat buffer as a tensor with a storage of its own on the same memory, where that is possible.

    ``torch.save`` and ``deepcopy`` write a tensor's whole storage: a parameter must not bring its bucket along.
    """
    part = buffer[start : start + numel]
    if not part.is_cpu:
        return part
    if part.dtype is torch.bfloat16:  # NumPy has none
        return torch.from_numpy(part.view(torch.int16).numpy()).view(torch.bfloat16)
    return torch.from_numpy(part.numpy())
