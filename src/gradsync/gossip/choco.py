"""Compressed gossip with kept estimates, after CHOCO-SGD: what travels is the codec's word for how an estimate is off.

A codec can't be let loose on raw weights: top-k would zero most of them. So each member keeps an estimate of its own
values, and its neighbours keep the same one, to the bit, because all make it from the same bytes. A step sends C(x -
estimate) and moves each model towards its neighbours' *estimates*:

    x += rate / (neighbours + 1) * sum over neighbours of (their estimate - own estimate)

What one gains another loses, so the mean stays; what the codec left out is still in x - estimate, for the next step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs.base import Codec, Payload
from gradsync.errors import OutOfStep
from gradsync.gossip.mixing import Mail, Mixer, values_of
from gradsync.gossip.replica import Part, Replica, mean_square
from gradsync.reducers.rules import Rules

PROBE_NUMEL = 1 << 14
MIN_RATE = 0.01

Flats = list[Tensor]  # one for each part of the replica


class Choco(Mixer):
    """For graphs whose neighbours stay: each keeps two or three estimates, and all hear every word about them."""

    def __init__(self, replica: Replica, rules: Rules, *, rate: float | None, seed: int, me: int) -> None:
        super().__init__(replica)
        self._rules, self._seed, self._me = rules, seed, me
        rules.check(replica.names)
        self._codecs = {
            name: rules.codec_of(name, torch.nn.Parameter(param, requires_grad=False))
            for part in replica.parts
            for name, param in part.params.items()
        }
        self._gains = {codec: faithfulness(codec) for codec in set(self._codecs.values())}
        self.rate = _rate_for(min(kept for _, kept in self._gains.values())) if rate is None else rate
        self._own: Flats = []
        self._theirs: dict[int, Flats] = {}
        self._whole = False  # the next word is the values themselves: nobody has estimates of this epoch yet

    def num_bytes(self, step: int) -> int:
        """Of what goes to one neighbour at a step."""
        return sum(self._num_bytes(part, step) for part in self.replica.parts)

    def codecs(self) -> dict[str, str]:
        return {name: spec.render(codec) for name, codec in self._codecs.items()}

    def enter(self, neighbours: Sequence[int]) -> None:
        super().enter(neighbours)
        self._own, self._theirs, self._whole = [], {}, True

    def agree(self, neighbours: Sequence[int]) -> None:
        self._own = self._copies()
        self._theirs = {other: self._copies() for other in neighbours}
        self._whole = False

    def _copies(self) -> Flats:
        return [part.x.clone() for part in self.replica.parts]

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def give(self, num_targets: int, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self._whole:
            self._own, self._whole = self._copies(), False
            return {"whole": True}, {str(at): flat for at, flat in enumerate(self._copies())}
        words = {}
        for at, (part, own) in enumerate(zip(self.replica.parts, self._own, strict=True)):
            code = torch.zeros(self._num_bytes(part, step), dtype=torch.uint8, device=part.device)
            off = part.x - own
            for name, values, payload in self._pieces(part, off, code, step):
                self._codecs[name].at(step).encode(values, payload, key=self._key(name, self._me, step))
            self._add(part, own, code, self._me, step)
            words[str(at)] = code
        return {"whole": False}, words

    @torch.no_grad()
    def take(self, mails: Sequence[Mail]) -> None:
        for mail in mails:
            self._learn(mail)
        known = [self._theirs[other] for other in sorted(self._theirs)]
        seen = []
        for at, (part, own) in enumerate(zip(self.replica.parts, self._own, strict=True)):
            for theirs in known:
                share = self.rate / (len(known) + 1)
                part.x.add_(theirs[at], alpha=share).sub_(own, alpha=share)
                seen.append((*mean_square(own, theirs[at]), own.numel()))
        self.distance.note(seen)

    def _learn(self, mail: Mail) -> None:
        """Follow a neighbour's estimate of itself."""
        parts = self.replica.parts
        if mail.message.fields["whole"]:
            came = values_of(mail, [(part.x.numel(), part.x.dtype) for part in parts])
            self._theirs[mail.sender] = [flat.to(part.device) for part, flat in zip(parts, came, strict=True)]
        elif mail.sender in self._theirs:
            came = values_of(mail, [(self._num_bytes(part, mail.step), torch.uint8) for part in parts])
            for part, flat, code in zip(parts, self._theirs[mail.sender], came, strict=True):
                self._add(part, flat, code.to(part.device), mail.sender, mail.step)

    def _add(self, part: Part, flat: Tensor, code: Tensor, sender: int, step: int) -> None:
        for name, values, payload in self._pieces(part, flat, code, step):
            codec = self._codecs[name].at(step)
            gain, _ = self._gains.get(codec) or self._gains.setdefault(codec, faithfulness(codec))
            key = self._key(name, sender, step)
            if not codec.decode(payload, values, gain=gain, add=True, key=key):
                raise OutOfStep(f"rank {sender}'s values of {name} have NaN or inf: its training has diverged.")

    # -- what lies where ------------------------------------------------------------------------------------------

    def _num_bytes(self, part: Part, step: int) -> int:
        return sum(self._room(part, name, step) for name in part.params)

    def _room(self, part: Part, name: str, step: int) -> int:
        return self._codecs[name].at(step).encoded_bytes(part.params[name].numel(), part.x.dtype)

    def _pieces(self, part: Part, flat: Tensor, code: Tensor, step: int) -> list[tuple[str, Tensor, Payload]]:
        values = flat.split([param.numel() for param in part.params.values()])
        payloads = code.split([self._room(part, name, step) for name in part.params])
        return [
            (name, value, Payload(payload)) for name, value, payload in zip(part.params, values, payloads, strict=True)
        ]

    def _key(self, name: str, sender: int, step: int) -> int:
        digest = hashlib.sha256(f"{self._seed}/{sender}/{step}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    # -- what must survive a restart ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        estimates = {str(self._me): self._by_name(self._own)} if self._own else {}
        estimates |= {str(other): self._by_name(flats) for other, flats in self._theirs.items()}
        return {**super().state_dict(), "estimates": estimates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._own, self._theirs, self._whole = [], {}, str(self._me) not in state["estimates"]
        for member, values in state["estimates"].items():
            flats = self._copies()
            for part, flat in zip(self.replica.parts, flats, strict=True):
                for name, view in part.cut(flat).items():
                    view.copy_(values[name])
            if int(member) == self._me:
                self._own = flats
            else:
                self._theirs[int(member)] = flats

    def _by_name(self, flats: Flats) -> dict[str, Tensor]:
        pairs = zip(self.replica.parts, flats, strict=True)
        return {name: view.clone() for part, flat in pairs for name, view in part.cut(flat).items()}


def _rate_for(kept: float) -> float:
    """A rate that a codec bears: a fine one all of the way; a coarse one half of what it says, tried on all of them."""
    return kept if kept > 0.9 else max(MIN_RATE, kept / 2)


def faithfulness(codec: Codec) -> tuple[float, float]:
    """By what its word is best multiplied, and how much of a normal vector's square that then says: 1 for all of it.

    >>> from gradsync.codecs import Int8, TopK
    >>> from gradsync.gossip.choco import faithfulness
    >>> [round(kept, 2) for _, kept in (faithfulness(Int8()), faithfulness(TopK(density=0.01)))]
    [1.0, 0.09]
    """
    x = torch.randn(PROBE_NUMEL, generator=torch.Generator().manual_seed(0))
    payload = Payload(torch.empty(codec.encoded_bytes(x.numel(), x.dtype), dtype=torch.uint8))
    said = torch.empty_like(x)
    codec.encode(x, payload, key=1)
    codec.decode(payload, said, key=1)
    both, size = float(said @ x), float(said @ said)
    return both / size, both * both / (size * float(x @ x))
