"""The messages of gossip: every kind that members send to each other, with the schema of its fields.

Every message also carries ``from`` (the sender's member id) and ``run`` (the run's id).
"""

from __future__ import annotations

from gradsync.messaging.schema import NotRequired, Schema, address, boolean, integer, list_of, number, text, tuple_of

MEMBER = integer(high=1 << 40)
STEP = integer()
MAX_MEMBERS = 100_000

_members = list_of(MEMBER, MAX_MEMBERS)
_membership = tuple_of(
    list_of(tuple_of(MEMBER, address), MAX_MEMBERS),
    list_of(tuple_of(MEMBER, text()), MAX_MEMBERS),
    list_of(tuple_of(MEMBER, STEP), MAX_MEMBERS),
)
_number: Schema = {"number": integer()}
_join_reply: Schema = {"membership": _membership, "clock": STEP, "number": integer()}

_fields: dict[str, Schema] = {
    # synchronous.py: the values that a member pushes to a neighbour at a step
    "mix": {
        "step": STEP,
        "epoch": tuple_of(_members, _members),
        "weight": NotRequired(number(0)),  # push-sum
        "share": NotRequired(number(0, 1)),  # push-sum
        "whole": NotRequired(boolean),  # choco: the values themselves, not an encoded difference
    },
    # peer_mesh.py
    "heartbeat": {"steps_begun": STEP, "waits": boolean},
    "membership": {"membership": _membership},
    # barrier.py; ``number`` is the barrier's
    "arrived": {"number": integer(), "what": text(256), "clock": STEP},
    "contribution": {"number": integer(), "weight": number(0)},
    "mean": _number,
    "request_mean": _number,
    "have_mean": _number,
    # asynchronous.py
    "average_request": {"clock": STEP},
    "average_reply": {"clock": STEP, "fraction": number(0, 1)},
    # join.py
    "fetch": {"address": address},
    "state": _join_reply,
    "hello": {"address": address},
    "welcome": _join_reply,
}
KINDS: dict[str, Schema] = {kind: {"from": MEMBER, "run": text(256), **fields} for kind, fields in _fields.items()}
JOIN_KINDS = frozenset({"fetch", "hello", "state", "welcome"})  # from or to a newcomer that is no member yet
