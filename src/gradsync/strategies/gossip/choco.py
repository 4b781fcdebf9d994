"""Compressed gossip, after CHOCO-SGD: members send encoded differences of their values from estimates that peers keep.

A codec can't encode raw weights: top-k would zero most of them. So each member keeps an estimate of its own values, and
its neighbours keep the same one, bit for bit, because all compute it from the same bytes. A step sends C(x - estimate)
and moves each model towards its neighbours' *estimates*:

    x += rate / (neighbours + 1) * sum over neighbours of (their estimate - own estimate)

What one member gains another loses, so the mean stays. What the codec left out is still in x - estimate, and is sent at
a later step.
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
from gradsync.reducers.codec_rules import CodecRules
from gradsync.strategies.gossip.mixing import Mixer, MixMessage, check_flat, values_of
from gradsync.strategies.gossip.replica import Part, Replica, mean_square

PROBE_NUMEL = 1 << 14  # values of the random vector that a codec's quality is measured with
MIN_RATE = 0.01

Flats = list[Tensor]  # one for each part of the replica


class Choco(Mixer):
    """For topologies with fixed neighbours: each member keeps an estimate of each, and receives all of its messages."""

    def __init__(self, replica: Replica, rules: CodecRules, *, rate: float | None, seed: int, member_id: int) -> None:
        super().__init__(replica)
        self._rules, self._seed, self._member_id = rules, seed, member_id
        rules.check(replica.names)
        self._codecs = {
            name: rules.codec_of(name, torch.nn.Parameter(param, requires_grad=False))
            for part in replica.parts
            for name, param in part.params.items()
        }
        self._quality = {codec: codec_quality(codec) for codec in set(self._codecs.values())}
        self.rate = _rate_for_quality(min(kept for _, kept in self._quality.values())) if rate is None else rate
        self._own_estimate: Flats = []
        self._peer_estimates: dict[int, Flats] = {}
        self._send_whole = False  # the next message holds the values themselves: no peer has an estimate yet

    def num_bytes(self, step: int) -> int:
        """Bytes that go to one neighbour at a step."""
        return sum(self._num_bytes(part, step) for part in self.replica.parts)

    def codecs(self) -> dict[str, str]:
        return {name: spec.render(codec) for name, codec in self._codecs.items()}

    def begin_epoch(self, neighbours: Sequence[int]) -> None:
        super().begin_epoch(neighbours)
        self._own_estimate, self._peer_estimates, self._send_whole = [], {}, True

    def on_consensus(self, neighbours: Sequence[int]) -> None:
        self._own_estimate = self._copies()
        self._peer_estimates = {other: self._copies() for other in neighbours}
        self._send_whole = False

    def follow_loaded(self) -> None:
        super().follow_loaded()
        self._send_whole = True  # a coarse codec would need many steps to move an estimate of the old values here

    def _copies(self) -> Flats:
        return [part.x.clone() for part in self.replica.parts]

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def make_message(self, num_targets: int, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if self._send_whole:
            self._own_estimate, self._send_whole = self._copies(), False
            return {"whole": True}, {str(at): flat for at, flat in enumerate(self._copies())}
        codes = {}
        for at, (part, own) in enumerate(zip(self.replica.parts, self._own_estimate, strict=True)):
            code = torch.zeros(self._num_bytes(part, step), dtype=torch.uint8, device=part.device)
            difference = part.x - own
            for name, values, payload in self._split_by_param(part, difference, code, step):
                self._codecs[name].at(step).encode(values, payload, key=self._rng_key(name, self._member_id, step))
            self._add_decoded(part, own, code, self._member_id, step)
            codes[str(at)] = code
        return {"whole": False}, codes

    def check(self, received: MixMessage) -> None:
        check_flat(received, "whole")

    @torch.no_grad()
    def mix_in(self, messages: Sequence[MixMessage]) -> None:
        for received in messages:
            self._update_estimate(received)
        estimates = [self._peer_estimates[other] for other in sorted(self._peer_estimates)]
        measured = []
        for at, (part, own) in enumerate(zip(self.replica.parts, self._own_estimate, strict=True)):
            for theirs in estimates:
                share = self.rate / (len(estimates) + 1)
                part.x.add_(theirs[at], alpha=share).sub_(own, alpha=share)
                measured.append((*mean_square(own, theirs[at]), own.numel()))
        self.distance.update(measured)

    def _update_estimate(self, received: MixMessage) -> None:
        """Apply a neighbour's message to the estimate of its values."""
        parts = self.replica.parts
        if received.message.fields["whole"]:
            values = values_of(received, [(part.x.numel(), part.x.dtype) for part in parts])
            self._peer_estimates[received.sender] = [
                flat.to(part.device) for part, flat in zip(parts, values, strict=True)
            ]
        elif received.sender in self._peer_estimates:
            values = values_of(received, [(self._num_bytes(part, received.step), torch.uint8) for part in parts])
            for part, flat, code in zip(parts, self._peer_estimates[received.sender], values, strict=True):
                self._add_decoded(part, flat, code.to(part.device), received.sender, received.step)

    def _add_decoded(self, part: Part, flat: Tensor, code: Tensor, sender: int, step: int) -> None:
        for name, values, payload in self._split_by_param(part, flat, code, step):
            codec = self._codecs[name].at(step)
            gain, _ = self._quality.get(codec) or self._quality.setdefault(codec, codec_quality(codec))
            key = self._rng_key(name, sender, step)
            if not codec.decode(payload, values, gain=gain, add=True, key=key):
                raise OutOfStep(f"rank {sender}'s values of {name} have NaN or inf: its training has diverged.")

    # -- layout of the encoded bytes ------------------------------------------------------------------------------

    def _num_bytes(self, part: Part, step: int) -> int:
        return sum(self._code_bytes(part, name, step) for name in part.params)

    def _code_bytes(self, part: Part, name: str, step: int) -> int:
        return self._codecs[name].at(step).encoded_bytes(part.params[name].numel(), part.x.dtype)

    def _split_by_param(self, part: Part, flat: Tensor, code: Tensor, step: int) -> list[tuple[str, Tensor, Payload]]:
        values = flat.split([param.numel() for param in part.params.values()])
        payloads = code.split([self._code_bytes(part, name, step) for name in part.params])
        return [
            (name, value, Payload(payload)) for name, value, payload in zip(part.params, values, payloads, strict=True)
        ]

    def _rng_key(self, name: str, sender: int, step: int) -> int:
        digest = hashlib.sha256(f"{self._seed}/{sender}/{step}/{name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    # -- what must survive a restart ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        estimates = {str(self._member_id): self._by_name(self._own_estimate)} if self._own_estimate else {}
        estimates |= {str(other): self._by_name(flats) for other, flats in self._peer_estimates.items()}
        return {**super().state_dict(), "estimates": estimates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._own_estimate, self._peer_estimates = [], {}
        self._send_whole = str(self._member_id) not in state["estimates"]
        for member, values in state["estimates"].items():
            flats = self._copies()
            for part, flat in zip(self.replica.parts, flats, strict=True):
                for name, view in part.views_of(flat).items():
                    view.copy_(values[name])
            if int(member) == self._member_id:
                self._own_estimate = flats
            else:
                self._peer_estimates[int(member)] = flats

    def _by_name(self, flats: Flats) -> dict[str, Tensor]:
        pairs = zip(self.replica.parts, flats, strict=True)
        return {name: view.clone() for part, flat in pairs for name, view in part.views_of(flat).items()}


def _rate_for_quality(kept: float) -> float:
    """A rate that is stable with a codec that keeps this fraction of a vector. It was tried with all of our codecs.

    A fine codec (above 0.9) gets the fraction itself, a coarse one half of it.
    """
    return kept if kept > 0.9 else max(MIN_RATE, kept / 2)


def codec_quality(codec: Codec) -> tuple[float, float]:
    """The factor for decoded values that fits best, and the fraction of a normal vector's square that they then keep.

    The fraction is 1 for a codec that loses nothing.

    >>> from gradsync.codecs import Int8, TopK
    >>> from gradsync.strategies.gossip.choco import codec_quality
    >>> [round(kept, 2) for _, kept in (codec_quality(Int8()), codec_quality(TopK(density=0.01)))]
    [1.0, 0.09]
    """
    x = torch.randn(PROBE_NUMEL, generator=torch.Generator().manual_seed(0))
    payload = Payload(torch.empty(codec.encoded_bytes(x.numel(), x.dtype), dtype=torch.uint8))
    decoded = torch.empty_like(x)
    codec.encode(x, payload, key=1)
    codec.decode(payload, decoded, key=1)
    product, size = float(decoded @ x), float(decoded @ decoded)
    return product / size, product * product / (size * float(x @ x))
