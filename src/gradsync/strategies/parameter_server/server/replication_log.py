"""The replication log of a shard: every change is a ``LogRecord``; replayed in order, they make an identical shard.

``ShardService`` makes the records, ``mirror.py`` sends them to the server that holds the second copy, and
``apply_record`` replays them there. A snapshot on disk is a record of the kind "snapshot".
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradsync.messaging.format import Json
from gradsync.strategies.parameter_server.job import parse_hyperparameters
from gradsync.strategies.parameter_server.server.clock import WorkerClocks
from gradsync.strategies.parameter_server.server.shard import AggregatedGradients, Push, Shard


@dataclass
class LogRecord:
    """One change, as it is sent or written. Its tensors are copies, so that the shard can step while they are sent."""

    kind: str  # snapshot, step, push, read, clocks
    fields: dict[str, Json]
    tensors: dict[str, Tensor]


def snapshot_record(shard: Shard, clocks: WorkerClocks) -> LogRecord:
    """The whole state of a shard."""
    metadata, tensors = shard.save()
    copied = {name: tensor.clone() for name, tensor in tensors.items()}
    # "told" is the key of snapshots on disk.
    return LogRecord("snapshot", {"told": metadata, "clocks": applied_clocks(clocks)}, copied)


def step_record(gradients: AggregatedGradients, squared_norm: float | None, clocks: WorkerClocks) -> LogRecord:
    """A bulk-synchronous step."""
    fields = {
        "groups": gradients.groups,
        "squared_norm": squared_norm,
        "own_squared_norm": gradients.squared_norm,
        "clocks": applied_clocks(clocks),
    }
    return LogRecord("step", fields, {name: grad.clone() for name, grad in gradients.grads.items()})


def push_record(push: Push, clocks: WorkerClocks) -> LogRecord:
    """One worker's push, stale-synchronous or asynchronous."""
    fields = {
        "worker": push.worker,
        "clock": push.clock,
        "groups": push.groups,
        "squared_norm": push.squared_norm,
        "lr_share": push.lr_share,
        "clocks": applied_clocks(clocks),
    }
    return LogRecord("push", fields, {name: grad.clone() for name, grad in push.grads.items()})


def applied_clocks(clocks: WorkerClocks) -> dict[str, int]:
    """The clocks without the pushes that no step includes yet: their workers still have them, and send them again."""
    saved = clocks.state_dict()
    if clocks.staleness == 0:
        saved = {key: min(clock, clocks.current_step) for key, clock in saved.items()}
    return saved


def apply_record(record: LogRecord, shard: Shard) -> None:
    """Replay a change. Two shards that replay the same records are equal bit for bit."""
    fields = record.fields
    if record.kind == "snapshot":
        shard.load(fields["told"], record.tensors)
    elif record.kind == "step":
        groups, own_squared_norm = parse_hyperparameters(fields["groups"]), float(fields["own_squared_norm"])
        gradients = AggregatedGradients(dict(record.tensors), groups, own_squared_norm)
        shard.step(gradients, squared_norm=fields["squared_norm"])
    elif record.kind == "push":
        groups = parse_hyperparameters(fields["groups"])
        squared_norm, lr_share = fields["squared_norm"], float(fields["lr_share"])
        push = Push(fields["worker"], fields["clock"], 1.0, groups, dict(record.tensors), squared_norm, lr_share)
        shard.apply_push(push)
    elif record.kind == "read":
        shard.record_read(int(fields["worker"]))
    elif record.kind != "clocks":
        raise ValueError(f"a record is a snapshot, step, push, read or clocks; got {record.kind!r:.40}.")
