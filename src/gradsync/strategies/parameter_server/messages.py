"""The messages between workers and servers: their kinds, and the schema of each kind's fields.

A request names its shard. A worker sends ``REQUESTS`` and receives ``REPLIES``. A server sends "replicate" to the
server that holds the copy of its shard, and receives ``MIRROR_REPLIES``.
"""

from __future__ import annotations

from gradsync.messaging.schema import (
    MAX_TEXT,
    Schema,
    address,
    any_json,
    boolean,
    integer,
    json_object,
    list_of,
    number,
    optional,
    text,
    tuple_of,
)

MAX_SERVERS = 100_000
SHARD = integer(high=MAX_SERVERS)
WORKER = integer(high=1 << 31)
CLOCK = integer()
SQUARED_NORM = number(finite=False)  # not always finite: gradients may have overflowed
HYPERPARAMETERS = list_of(any_json, 10_000)  # of each group; ``HyperparameterCheck`` checks them further
MAX_REASON = MAX_TEXT // 2  # characters of a refusal's reason
RETRY_PREFIX = "retry:"  # a refusal's reason begins with it if the same request may succeed a moment later

_of_shard: Schema = {"shard": SHARD}

# What a server accepts.
REQUESTS: dict[str, Schema] = {
    "join": {
        "shard": SHARD,
        "worker": optional(WORKER),
        "job": json_object,
        "servers": list_of(address, MAX_SERVERS),
        "groups": HYPERPARAMETERS,
        "clock": optional(CLOCK),
        "read_version": optional(CLOCK),  # of a worker that comes back
        "observer": boolean,
        "run": text(256),
        "resume": boolean,
    },
    "fill": _of_shard,
    "push": {
        "shard": SHARD,
        "clock": CLOCK,
        "weight": number(0),
        "groups": HYPERPARAMETERS,
        "squared_norm": optional(SQUARED_NORM),
    },
    "pull": {"shard": SHARD, "clock": CLOCK, "newest": boolean},
    "clip": {"shard": SHARD, "step": CLOCK, "squared_norm": SQUARED_NORM},
    "get_state": _of_shard,
    "load": {"shard": SHARD, "metadata": any_json, "clocks": json_object},
    "get_stats": _of_shard,
    "leave": _of_shard,
    "observe": _of_shard,
    "barrier": {"shard": SHARD, "tag": text(256), "value": any_json},
    "replicate": {  # a ``LogRecord``; job and groups are those of a snapshot
        "shard": SHARD,
        "sequence": integer(),
        "kind": text(16),
        "fields": any_json,
        "job": optional(json_object),
        "num_servers": integer(high=MAX_SERVERS),
        "groups": HYPERPARAMETERS,
    },
}

# What a worker accepts.
REPLIES: dict[str, Schema] = {
    "joined": {
        "shard": SHARD,
        "clock": CLOCK,
        "worker": WORKER,
        "version": integer(),
        "fill": boolean,
        "lost": list_of(text()),
    },
    "refused": {"shard": SHARD, "reason": text()},
    "filled": _of_shard,
    "pushed": {"shard": SHARD, "clock": CLOCK},
    "parameters": {"shard": SHARD, "version": integer(), "step": integer(-1), "squared_norm": SQUARED_NORM},
    "norm": {"shard": SHARD, "step": CLOCK, "squared_norm": SQUARED_NORM},
    "state": {"shard": SHARD, "clocks": json_object, "metadata": any_json},
    "loaded": _of_shard,
    "stats": {
        "shard": SHARD,
        "taus": list_of(tuple_of(integer(), integer())),
        "clocks": list_of(tuple_of(WORKER, CLOCK)),
        "awaited_s": list_of(tuple_of(WORKER, number(0))),
        "version": integer(),
        "dropped": integer(),
        "late": integer(),
        "lost": list_of(text()),
        "malformed": integer(),
    },
    "barrier_done": {"shard": SHARD, "tag": text(256), "values": list_of(tuple_of(WORKER, any_json))},
}

# What a server accepts from the server that holds the copy of its shard.
MIRROR_REPLIES: dict[str, Schema] = {
    "replicated": {"shard": SHARD, "sequence": integer()},
    "refused": {"shard": SHARD, "reason": text()},
}
