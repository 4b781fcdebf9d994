"""What the ranks say to one another as they come to an exchange of weights, and whether they are there for the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import OutOfStep

SETTLE = -1  # in place of a fragment's number: all of them, to bring the replicas together
FOLLOW = -2  # a rank without data: whatever the others came for


@dataclass(frozen=True, kw_only=True)
class Word:
    """What one rank says. Every number fits a float64 exactly."""

    clock: int  # steps so far
    fragment: int  # which part of the model it came to exchange; SETTLE, FOLLOW
    has_data: bool  # False: it only keeps the others company (see join)
    fingerprint: int  # of what is exchanged
    hyperparameters: int  # a checksum of the optimizer's: learning rates and the like
    buffers_changed: bool  # a buffer of the model was written since the last time
    every: int  # in how many steps it would come again
    samples: tuple[float, ...]  # of each fragment: what its difference from the anchor stands for

    def pack(self) -> torch.Tensor:
        *plain, samples = astuple(self)
        return torch.tensor([*map(float, plain), *samples], dtype=torch.float64)

    @staticmethod
    def unpack(values: Sequence[float]) -> Word:
        plain = {name: kind(value) for (name, kind), value in zip(PLAIN.items(), values, strict=False)}
        return Word(**plain, samples=tuple(values[len(PLAIN) :]))


PLAIN = {field.name: {"int": int, "bool": bool}[str(field.type)] for field in fields(Word) if field.name != "samples"}


@dataclass(frozen=True)
class Attendance:
    """What all ranks said, in rank order: the same on every rank."""

    words: tuple[Word, ...]

    @staticmethod
    def take(word: Word, comm: Communicator) -> Attendance:
        """Say one's word and hear all others'; raise OutOfStep, on every rank, if they don't fit. Blocks."""
        said = word.pack()
        heard = torch.empty(comm.world_size, len(said), dtype=torch.float64)
        comm.all_gather(said, out=heard).wait()
        attendance = Attendance(tuple(Word.unpack(values) for values in heard.tolist()))
        attendance.check()
        return attendance

    @property
    def with_data(self) -> list[int]:
        return [rank for rank, word in enumerate(self.words) if word.has_data]

    @property
    def leader(self) -> Word:
        """The first that has data, or else the first of those that came farthest."""
        return self.words[self.leading_rank]

    @property
    def leading_rank(self) -> int:
        clocks = [word.clock for word in self.words]
        return self.with_data[0] if self.with_data else clocks.index(max(clocks))

    @property
    def uneven(self) -> bool:
        return len({word.clock for word in self.words}) > 1

    @property
    def buffers_changed(self) -> bool:
        return any(word.buffers_changed for word in self.words)

    def share(self, rank: int, fragment: int) -> float:
        """This rank's part of the mean, by samples."""
        total = sum(word.samples[fragment] for word in self.words)
        return self.words[rank].samples[fragment] / total if total else 0.0

    def check(self) -> None:
        for name, what, hint in (
            ("fingerprint", "set of trained parameters", "Were parameters frozen or unfrozen on some ranks only?"),
            ("clock", "number of steps", "Did it run out of data? Then use gradsync.shard, or with sync.join()."),
            ("fragment", "part of the model to exchange", "Has only one of them called settle()?"),
            (
                "hyperparameters",
                "checksum of the optimizer's hyperparameters",
                "Has its learning rate taken another course? Pass scheduler= to synchronize().",
            ),
        ):
            # A rank without data has missed steps, and has no part of its own to exchange.
            seen = {
                rank: getattr(word, name)
                for rank, word in enumerate(self.words)
                if word.has_data or name == "fingerprint"
            }
            if len(set(seen.values())) <= 1:
                continue
            usual = max(seen.values(), key=list(seen.values()).count)
            odd = next(rank for rank, value in seen.items() if value != usual)
            raise OutOfStep(
                f"rank {odd} is out of step: its {what} is {_shown(seen[odd])}, that of the others {_shown(usual)}. "
                + hint
            )


def _shown(value: int) -> str:
    return "all of it" if value == SETTLE else str(value)
