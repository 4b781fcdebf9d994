"""What changes a shard, one record after another: replayed in this order, they make the same shard elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsync.comm.messages import Json
from gradsync.server.clock import Clocks
from gradsync.server.job import checked
from gradsync.server.shard import Push, Shard, Sum


@dataclass
class Record:
    """One change, as it can be sent or written. Its tensors are copies: the shard goes on while they travel."""

    kind: str  # whole, sum, take, read, clocks
    fields: dict[str, Json]
    tensors: dict[str, Tensor]


def whole_record(shard: Shard, clocks: Clocks) -> Record:
    """All of a shard."""
    told, tensors = shard.save()
    copied = {name: tensor.clone() for name, tensor in tensors.items()}
    return Record("whole", {"told": told, "clocks": applied(clocks)}, copied)


def sum_record(total: Sum, square: float | None, clocks: Clocks) -> Record:
    """A bulk-synchronous step."""
    fields = {"groups": total.groups, "square": square, "own": total.square, "clocks": applied(clocks)}
    return Record("sum", fields, {name: grad.clone() for name, grad in total.grads.items()})


def take_record(push: Push, clocks: Clocks) -> Record:
    """A worker's push that is applied by itself."""
    fields = {
        "worker": push.worker,
        "clock": push.clock,
        "groups": push.groups,
        "square": push.square,
        "share": push.share,
        "clocks": applied(clocks),
    }
    return Record("take", fields, {name: grad.clone() for name, grad in push.grads.items()})


def applied(clocks: Clocks) -> dict[str, int]:
    """The clocks without pushes that no step has in it yet: whoever made them has them still, and sends them again."""
    saved = clocks.state_dict()
    if clocks.staleness == 0:
        saved = {key: min(clock, clocks.floor) for key, clock in saved.items()}
    return saved


def redo(record: Record, shard: Shard) -> None:
    """Do to a shard what was done to another; the same bits, as long as both saw the same records."""
    fields = record.fields
    if record.kind == "whole":
        shard.load(fields["told"], record.tensors)
    elif record.kind == "sum":
        total = Sum(dict(record.tensors), checked(fields["groups"]), float(fields["own"]))
        shard.step(total, square=fields["square"])
    elif record.kind == "take":
        groups = checked(fields["groups"])
        square, share = fields["square"], float(fields["share"])
        shard.take(Push(fields["worker"], fields["clock"], 1.0, groups, dict(record.tensors), square, share))
    elif record.kind == "read":
        shard.note_read(int(fields["worker"]))
    elif record.kind != "clocks":
        raise ValueError(f"a record is whole, sum, take, read or clocks; got {record.kind!r:.40}.")
