"""How values mix: what a member gives at a step, and what it makes of what it gets. Push-sum here; see choco.py."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync.comm.messages import Message
from gradsync.errors import OutOfStep
from gradsync.gossip.book import Epoch
from gradsync.gossip.replica import Replica, mean_square


@dataclass(frozen=True, eq=False)
class Mail:
    """What one member gave another at a step."""

    sender: int
    step: int
    epoch: Epoch
    message: Message


class Distance:
    """How far the models are apart, from samples of what is exchanged anyhow: no message and hardly any time for it."""

    def __init__(self) -> None:
        self.rms = 0.0  # of the differences between this model's values and its peers' at the last exchange
        self.relative = 0.0  # the same over the size of this model's values

    def note(self, seen: Sequence[tuple[float, float, int]]) -> None:
        """``seen``: mean squares of differences and of values, and how many values they stand for."""
        numel = sum(each[2] for each in seen)
        if numel:
            apart, size = (sum(each[at] * each[2] for each in seen) / numel for at in (0, 1))
            self.rms = math.sqrt(apart)
            self.relative = math.sqrt(apart / size) if size > 0 else 0.0


class Mixer(abc.ABC):
    """Gives and takes a replica's values. Used by one thread."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.distance = Distance()

    @abc.abstractmethod
    def give(self, num_targets: int, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The fields and tensors that go to each target. Afterwards the replica has its own share left."""

    @abc.abstractmethod
    def take(self, mails: Sequence[Mail]) -> None:
        """Add what came, in this order."""

    def enter(self, neighbours: Sequence[int]) -> None:
        """A new epoch begins."""
        self.replica.count_as_one()

    def agree(self, neighbours: Sequence[int]) -> None:  # noqa: B027 - only estimates need to know
        """All members have the same values now."""

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.replica.values(), "weight": self.replica.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.replica.load(state["values"], float(state["weight"]))


class PushSum(Mixer):
    """Equal shares of values and weight to each target, and one that stays: sums are kept, whatever the graph.

    What is taken away from this replica is what was given, as rounded as that: so nothing is lost with 16 bits either.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self._given: list[Tensor] = []
        self._weight = 1.0

    @torch.no_grad()
    def give(self, num_targets: int, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        replica, share = self.replica, 1.0 / (num_targets + 1)
        # Fresh tensors: what was given at the last step may still be on its way.
        self._given = [part.x.to(part.dtype, copy=True) for part in replica.parts]
        self._weight = replica.weight
        for part, given in zip(replica.parts, self._given, strict=True):
            part.x.add_(given, alpha=-share * num_targets)
        replica.weight -= share * num_targets * self._weight
        tensors = {str(at): given for at, given in enumerate(self._given)}
        return {"weight": self._weight, "share": share}, tensors

    @torch.no_grad()
    def take(self, mails: Sequence[Mail]) -> None:
        seen = []
        for mail in mails:
            weight, share = float(mail.message.fields["weight"]), float(mail.message.fields["share"])
            came = values_of(mail, [(given.numel(), given.dtype) for given in self._given])
            for part, given, theirs in zip(self.replica.parts, self._given, came, strict=True):
                theirs = theirs.to(part.device)
                seen.append((*mean_square(given, theirs, (self._weight, weight)), given.numel()))
                part.x.add_(theirs, alpha=share)
            self.replica.weight += share * weight
        self.distance.note(seen)


def values_of(mail: Mail, expected: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """The tensors of a mail that holds one for each part of the replica."""
    tensors = [mail.message.tensors.get(str(at)) for at in range(len(mail.message.tensors))]
    got = [(tensor.numel(), tensor.dtype) for tensor in tensors if tensor is not None]
    if got != list(expected):
        raise OutOfStep(
            f"rank {mail.sender} sent values of {got}; this rank has {list(expected)}. Were parameters frozen or "
            "unfrozen on some ranks only, or is it another model?"
        )
    return [tensor for tensor in tensors if tensor is not None]
