"""The headers that all ranks gather before an exchange of weights, and the check that the ranks are in step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import OutOfStep

# In place of a fragment's number:
SETTLE = -1  # settle(): all fragments
FOLLOW = -2  # a rank without data takes part in whatever the others do


@dataclass(frozen=True, kw_only=True)
class ExchangeHeader:
    """One rank's header. Every number fits a float64 exactly."""

    clock: int  # steps so far
    fragment: int  # the part of the model to exchange; or SETTLE, FOLLOW
    has_data: bool  # False: the rank takes part without data (see join)
    fingerprint: int  # of the layout of what is exchanged
    hyperparameters: int  # checksum of the optimizer's: learning rates and the like
    buffers_changed: bool  # a buffer of the model was written since the last exchange
    every: int  # steps to this rank's next exchange of the fragment
    loaded: int  # digest of the weights that were loaded into the model since the last exchange; 0: none were
    exchanges: int = 0  # that this rank's anchors have seen; a late rank's are older
    wants_change: bool = False  # in an elastic run: a worker waits to join, or this one leaves
    has_settled: bool = False  # it holds the mean of a settling that a lost peer has interrupted since
    samples: tuple[float, ...]  # by fragment: the samples since its last exchange

    def pack(self) -> torch.Tensor:
        *plain, samples = astuple(self)
        return torch.tensor([*map(float, plain), *samples], dtype=torch.float64)

    @staticmethod
    def unpack(values: Sequence[float], num_fragments: int) -> ExchangeHeader:
        """The header that ``pack`` made; states that older versions have saved lack the last plain fields."""
        first = len(values) - num_fragments
        plain = {name: kind(value) for (name, kind), value in zip(SCALAR_FIELDS.items(), values[:first], strict=False)}
        return ExchangeHeader(**plain, samples=tuple(values[first:]))


SCALAR_FIELDS = {
    field.name: {"int": int, "bool": bool}[str(field.type)]
    for field in fields(ExchangeHeader)
    if field.name != "samples"
}


@dataclass(frozen=True)
class ExchangeHeaders:
    """The headers of all ranks, in rank order: the same on every rank."""

    headers: tuple[ExchangeHeader, ...]

    @staticmethod
    def gather(header: ExchangeHeader, comm: Communicator, *, decoupled: bool = False) -> ExchangeHeaders:
        """All-gather the ranks' headers; raises OutOfStep, on every rank, if they do not match. Blocks.

        ``decoupled``: ranks may be late, so their steps and learning rates may differ.
        """
        own = header.pack()
        gathered = torch.empty(comm.world_size, len(own), dtype=torch.float64)
        comm.all_gather(own, out=gathered).wait()
        headers = ExchangeHeaders(
            tuple(ExchangeHeader.unpack(values, len(header.samples)) for values in gathered.tolist())
        )
        headers.check(decoupled=decoupled)
        return headers

    @property
    def with_data(self) -> list[int]:
        return [rank for rank, header in enumerate(self.headers) if header.has_data]

    @property
    def leader(self) -> ExchangeHeader:
        """The header of the first rank with data; if no rank has data, of the first with the most steps."""
        return self.headers[self.leading_rank]

    @property
    def leading_rank(self) -> int:
        clocks = [header.clock for header in self.headers]
        return self.with_data[0] if self.with_data else clocks.index(max(clocks))

    @property
    def steps_differ(self) -> bool:
        return len({header.clock for header in self.headers}) > 1

    @property
    def buffers_changed(self) -> bool:
        return any(header.buffers_changed for header in self.headers)

    @property
    def change_wanted(self) -> bool:
        """Whether the members of an elastic run change after this exchange."""
        return any(header.wants_change for header in self.headers)

    @property
    def newest_rank(self) -> int:
        """The first rank that has seen the most exchanges."""
        exchanges = [header.exchanges for header in self.headers]
        return exchanges.index(max(exchanges))

    @property
    def someone_is_late(self) -> bool:
        return len({header.exchanges for header in self.headers}) > 1

    def share(self, rank: int, fragment: int) -> float:
        """A rank's weight in the mean, by samples."""
        total = sum(header.samples[fragment] for header in self.headers)
        return self.headers[rank].samples[fragment] / total if total else 0.0

    def check(self, *, decoupled: bool = False) -> None:
        for name, what, hint in (
            ("fingerprint", "set of trained parameters", "Were parameters frozen or unfrozen on some ranks only?"),
            (
                "loaded",
                "digest of the weights that were loaded into the model (0: none were)",
                "Load the same weights on all ranks, between the same steps, and the model before the synchronizer.",
            ),
            ("clock", "number of steps", "Did it run out of data? Then use gradsync.shard, or with sync.join()."),
            ("fragment", "part of the model to exchange", "Has only one of them called settle()?"),
            (
                "hyperparameters",
                "checksum of the optimizer's hyperparameters",
                "Has its learning rate taken another course? Pass scheduler= to synchronize().",
            ),
        ):
            if decoupled and name in ("clock", "hyperparameters"):
                continue
            # A rank without data has missed steps, and names no fragment: only its fingerprint must match.
            seen = {
                rank: getattr(header, name)
                for rank, header in enumerate(self.headers)
                if header.has_data or name == "fingerprint"
            }
            if len(set(seen.values())) <= 1:
                continue
            usual = max(seen.values(), key=list(seen.values()).count)
            odd = next(rank for rank, value in seen.items() if value != usual)
            raise OutOfStep(
                f"rank {odd} is out of step: its {what} is {_text(seen[odd])}, that of the others {_text(usual)}. "
                + hint
            )


def _text(value: int) -> str:
    return "all of it" if value == SETTLE else str(value)
