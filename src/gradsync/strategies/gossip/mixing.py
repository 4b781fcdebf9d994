"""How synchronous gossip mixes values: the ``Mixer`` interface, and push-sum. Compressed gossip is in choco.py.

A mixer makes the message that a member pushes to its targets at a step, and mixes in the messages that it receives.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync.errors import OutOfStep
from gradsync.messaging.format import Message
from gradsync.strategies.gossip.membership import MembershipEpoch
from gradsync.strategies.gossip.replica import Replica, mean_square


@dataclass(frozen=True, eq=False)
class MixMessage:
    """What one member pushed to another at a step."""

    sender: int
    step: int
    epoch: MembershipEpoch
    message: Message


class ConsensusDistance:
    """How far the models are apart, from samples of what is exchanged anyway: it costs no message and little time."""

    def __init__(self) -> None:
        self.rms = 0.0  # of the differences between this model's values and its peers' at the last exchange
        self.relative = 0.0  # the same over the size of this model's values

    def update(self, measured: Sequence[tuple[float, float, int]]) -> None:
        """``measured``: for each tensor, mean square of the differences, mean square of the values, their number."""
        numel = sum(each[2] for each in measured)
        if numel:
            difference, size = (sum(each[at] * each[2] for each in measured) / numel for at in (0, 1))
            self.rms = math.sqrt(difference)
            self.relative = math.sqrt(difference / size) if size > 0 else 0.0


class Mixer(abc.ABC):
    """Makes messages of a replica's values, and mixes received ones into it. Used by one thread, except ``check``."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.distance = ConsensusDistance()

    @abc.abstractmethod
    def make_message(self, num_targets: int, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The fields and tensors that go to each target. Afterwards the replica holds its own share."""

    @abc.abstractmethod
    def check(self, received: MixMessage) -> None:
        """``ValueError`` for a message that lacks what ``mix_in`` reads. Called by the receive thread."""

    @abc.abstractmethod
    def mix_in(self, messages: Sequence[MixMessage]) -> None:
        """Mix these messages into the replica, in this order."""

    def begin_epoch(self, neighbours: Sequence[int]) -> None:
        """A new epoch begins, with these targets."""
        self.replica.normalize_weight()

    def on_consensus(self, neighbours: Sequence[int]) -> None:  # noqa: B027 - only estimates need to know
        """All members have the same values now."""

    def follow_loaded(self) -> None:
        """The model's values were replaced, on all members alike; its weight stays."""
        self.replica.read_model()

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.replica.values(), "weight": self.replica.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replica.load(state["values"], float(state["weight"]))


class PushSum(Mixer):
    """Equal shares of values and weight go to each target, and one share stays: sums are kept on any graph.

    What is subtracted from this replica is exactly what was sent, rounding included: so 16-bit values lose nothing.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._sent: list[Tensor] = []
        self._weight = 1.0

    @torch.no_grad()
    def make_message(self, num_targets: int, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        replica, share = self.replica, 1.0 / (num_targets + 1)
        # New tensors: those of the last step may still be on their way.
        self._sent = [part.x.to(part.dtype, copy=True) for part in replica.parts]
        self._weight = replica.weight
        for part, sent in zip(replica.parts, self._sent, strict=True):
            part.x.add_(sent, alpha=-share * num_targets)
        replica.weight -= share * num_targets * self._weight
        tensors = {str(at): sent for at, sent in enumerate(self._sent)}
        return {"weight": self._weight, "share": share}, tensors

    def check(self, received: MixMessage) -> None:
        check_flat(received, "weight", "share")
        if not received.message.fields["weight"] > 0:
            raise ValueError("a member's weight is above 0")

    @torch.no_grad()
    def mix_in(self, messages: Sequence[MixMessage]) -> None:
        measured = []
        for received in messages:
            weight, share = float(received.message.fields["weight"]), float(received.message.fields["share"])
            values = values_of(received, [(sent.numel(), sent.dtype) for sent in self._sent])
            for part, sent, theirs in zip(self.replica.parts, self._sent, values, strict=True):
                theirs = theirs.to(part.device)
                measured.append((*mean_square(sent, theirs, (self._weight, weight)), sent.numel()))
                part.x.add_(theirs, alpha=share)
            self.replica.weight += share * weight
        self.distance.update(measured)


def check_flat(received: MixMessage, *fields: str) -> None:
    """``ValueError`` unless a message has these fields, and flat tensors named 0, 1, 2 and so on."""
    missing = [name for name in fields if name not in received.message.fields]
    tensors = received.message.tensors
    if missing or {*tensors} != {str(at) for at in range(len(tensors))}:
        raise ValueError(f"it has no {missing[0]}" if missing else f"its tensors are {sorted(tensors)!r:.60}")
    if any(tensor.dim() != 1 for tensor in tensors.values()):
        raise ValueError("its tensors are not flat")


def values_of(received: MixMessage, expected: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """The message's tensors, one for each part of the replica; OutOfStep if they are not of the ``expected`` kind."""
    tensors = [received.message.tensors.get(str(at)) for at in range(len(received.message.tensors))]
    got = [(tensor.numel(), tensor.dtype) for tensor in tensors if tensor is not None]
    if got != list(expected):
        raise OutOfStep(
            f"rank {received.sender} sent values of {got}; this rank has {list(expected)}. Were parameters frozen or "
            "unfrozen on some ranks only, or is it another model?"
        )
    return [tensor for tensor in tensors if tensor is not None]
