"""Barriers between workers, held by a server instead of a collective, so that dead workers are not waited for.

Each worker arrives with a value and tensors of its own. When all connected workers have arrived, each of them receives
the values and tensors of all. No socket, no thread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from gradsync.messaging.format import Json, Message

SEP = "\0"  # between a worker's number and the name of its tensor


@dataclass
class Arrival:
    """One worker at a barrier, with its value and tensors."""

    peer: bytes
    value: Json
    tensors: dict[str, Tensor]


class WorkerBarriers:
    """The pending barriers, by tag, and the workers that have arrived at each.

    >>> from gradsync.strategies.parameter_server.server.barrier import Arrival, WorkerBarriers
    >>> barriers = WorkerBarriers()
    >>> barriers.arrive("settle", 0, Arrival(b"zero", 10, {}))
    >>> barriers.complete(connected=[0, 1])
    []
    >>> [peer for peer, _ in barriers.complete(connected=[0])]  # worker 1 is gone
    [b'zero']
    """

    def __init__(self) -> None:
        self._pending: dict[str, dict[int, Arrival]] = {}

    def arrive(self, tag: str, worker: int, arrival: Arrival) -> None:
        """A worker has arrived. A second arrival replaces the first: the worker has lost the reply to that."""
        self._pending.setdefault(tag, {})[worker] = arrival

    def remove(self, worker: int) -> None:
        """Remove a worker that is gone, with its values and tensors."""
        for arrivals in self._pending.values():
            arrivals.pop(worker, None)

    def complete(self, connected: Collection[int]) -> list[tuple[bytes, Message]]:
        """End the barriers at which all connected workers have arrived; returns the replies to them."""
        replies: list[tuple[bytes, Message]] = []
        for tag, arrivals in list(self._pending.items()):
            if not arrivals:
                del self._pending[tag]
            elif arrivals.keys() >= set(connected):
                del self._pending[tag]
                fields = {"tag": tag, "values": [[worker, each.value] for worker, each in sorted(arrivals.items())]}
                tensors = {
                    f"{worker}{SEP}{name}": tensor
                    for worker, each in arrivals.items()
                    for name, tensor in each.tensors.items()
                }
                replies += [(each.peer, Message("barrier_done", fields, tensors)) for each in arrivals.values()]
        return replies


def read_arrivals(message: Message) -> dict[int, Message]:
    """The value and tensors of each worker of a barrier, by its number: ``fields["value"]`` and ``tensors``."""
    arrivals = {int(worker): Message(message.kind, {"value": value}, {}) for worker, value in message.fields["values"]}
    for place, tensor in message.tensors.items():
        worker, _, name = place.partition(SEP)
        arrivals[int(worker)].tensors[name] = tensor
    return arrivals
