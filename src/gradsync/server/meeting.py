"""Workers that wait for each other at a server, without a collective: who has died is not waited for. No socket."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from gradsync.comm.messages import Json, Message

SEP = "\0"  # between a worker's number and the name of what it brought


@dataclass
class Brought:
    """What one worker has come to a meeting with."""

    peer: bytes
    fields: Json
    tensors: dict[str, Tensor]


class Meetings:
    """Who has come to which meeting so far.

    >>> from gradsync.server.meeting import Brought, Meetings
    >>> meetings = Meetings()
    >>> meetings.come("settle", 0, Brought(b"zero", 10, {}))
    >>> meetings.ended(present=[0, 1])
    []
    >>> [peer for peer, _ in meetings.ended(present=[0])]      # worker 1 is gone
    [b'zero']
    """

    def __init__(self) -> None:
        self._open: dict[str, dict[int, Brought]] = {}

    def come(self, tag: str, worker: int, brought: Brought) -> None:
        """A worker is here; whoever comes twice has lost the answer to its first question."""
        self._open.setdefault(tag, {})[worker] = brought

    def forget(self, worker: int) -> None:
        """A worker is gone, and what it brought with it."""
        for came in self._open.values():
            came.pop(worker, None)

    def ended(self, present: Collection[int]) -> list[tuple[bytes, Message]]:
        """The answers of the meetings that all who are present have come to."""
        answers: list[tuple[bytes, Message]] = []
        for tag, came in list(self._open.items()):
            if not came:
                del self._open[tag]
            elif came.keys() >= set(present):
                del self._open[tag]
                told = {"tag": tag, "brought": [[worker, each.fields] for worker, each in sorted(came.items())]}
                tensors = {
                    f"{worker}{SEP}{name}": tensor
                    for worker, each in came.items()
                    for name, tensor in each.tensors.items()
                }
                answers += [(each.peer, Message("met", told, tensors)) for each in came.values()]
        return answers


def read_met(message: Message) -> dict[int, Message]:
    """What each worker brought, by its number."""
    met = {int(worker): Message(message.kind, {"brought": fields}, {}) for worker, fields in message.fields["brought"]}
    for place, tensor in message.tensors.items():
        worker, _, name = place.partition(SEP)
        met[int(worker)].tensors[name] = tensor
    return met
