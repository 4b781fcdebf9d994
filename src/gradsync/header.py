"""The header: a few numbers that go round at the start of every synchronizing backward, hidden behind it.

One mechanism for four problems: the sum of the weights, ranks at different steps, ranks with different plans, and
``join`` ("I still have data").
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import OutOfStep


class Told(NamedTuple):
    """What a rank says of an earlier step of its own, so that the others can see whom they waited for."""

    step: int  # -1: nothing to say
    opened_us: float  # when its first gradient came, on rank 0's clock
    begun_us: float  # when it began to reduce its last bucket
    busy_us: float  # how long the step took it, without the time that it was stopped in collectives


NOTHING_TOLD = Told(-1, 0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one rank says as it begins to synchronize. Every field fits a float64 exactly."""

    step: int  # synchronizing backwards so far
    weight: float  # what the gradients that it brings stand for: samples, tokens
    num_backwards: int  # over how many backwards they were gathered
    fingerprint: int  # of the bucket plan
    has_data: bool  # False: it only keeps the others company (see join)
    buffers_changed: bool = False  # a buffer of the model was written since the last time
    hyperparameters: int = 0  # a checksum of the optimizer's: learning rates and the like
    loss_scale: float = 1.0  # GradScaler's
    checksum: float = 0.0  # of the gradients that it brought last time: equal ones mean that ranks read the same data
    told: Told = NOTHING_TOLD

    def pack(self) -> torch.Tensor:
        *values, told = (getattr(self, name) for name in FIELDS)
        return torch.tensor([*map(float, values), *map(float, told)], dtype=torch.float64)

    @staticmethod
    def unpack(values: list[float]) -> Header:
        said = {name: kind(value) for (name, kind), value in zip(KINDS, values, strict=False)}
        return Header(**said, told=Told(int(values[len(KINDS)]), *values[len(KINDS) + 1 :]))


FIELDS = tuple(field.name for field in fields(Header))
KINDS = tuple((f.name, {"int": int, "float": float, "bool": bool}[str(f.type)]) for f in fields(Header)[:-1])
NUM_VALUES = len(KINDS) + len(NOTHING_TOLD)


@dataclass(frozen=True)
class Round:
    """What all ranks said, in rank order: the same on every rank."""

    headers: tuple[Header, ...]

    @property
    def total_weight(self) -> float:
        return sum(header.weight for header in self.headers)

    @property
    def num_backwards(self) -> int:
        return max(header.num_backwards for header in self.headers)

    @property
    def with_data(self) -> list[int]:
        return [rank for rank, header in enumerate(self.headers) if header.has_data]

    @property
    def buffers_changed(self) -> bool:
        return any(header.buffers_changed for header in self.headers)

    def same_gradients(self) -> bool:
        """Whether every rank brought, bit for bit, the same gradients last time (and they were not all zero)."""
        checksums = {header.checksum for header in self.headers}
        return len(self.headers) > 1 and len(checksums) == 1 and checksums != {0.0}

    def check(self) -> None:
        """Raise OutOfStep, the same on every rank, if the ranks are not at the same place of the same run."""
        for name, what in (
            ("fingerprint", "bucket plan"),
            ("step", "synchronizing backward"),
            ("hyperparameters", "checksum of the optimizer's hyperparameters"),
            ("loss_scale", "GradScaler scale"),
        ):
            # A rank without data has missed the others' updates of these two, and does not step either.
            seen = {
                rank: getattr(header, name)
                for rank, header in enumerate(self.headers)
                if header.has_data or name in ("fingerprint", "step")
            }
            if len(set(seen.values())) <= 1:
                continue
            usual = max(seen.values(), key=list(seen.values()).count)
            odd = next(rank for rank, value in seen.items() if value != usual)
            raise OutOfStep(
                f"rank {odd} is out of step: its {what} is {seen[odd]}, that of the others {usual}. "
                + {
                    "fingerprint": "Were parameters frozen or unfrozen on some ranks only?",
                    "step": "Was another checkpoint loaded there, or a backward skipped?",
                    "hyperparameters": "Has its learning rate taken another course? A rank that runs out of data "
                    "misses steps of a schedule: pass scheduler= to synchronize().",
                    "loss_scale": "Pass scaler= to synchronize(), and load the same scaler state on all ranks.",
                }[name]
            )


class HeaderExchange:
    """A header on its way round. ``poll`` asks; ``wait`` blocks; both check what came."""

    def __init__(self, header: Header, comm: Communicator) -> None:
        self._sent = header.pack()
        self._received = torch.empty(comm.world_size, NUM_VALUES, dtype=torch.float64)
        self._work = comm.all_gather(self._sent, out=self._received)
        self._round: Round | None = None

    def poll(self) -> Round | None:
        """What everyone said if it is here, else None. Does not block."""
        if self._round is None and self._work.done():
            return self.wait()
        return self._round

    def wait(self) -> Round:
        if self._round is None:
            self._work.wait()
            self._round = Round(tuple(Header.unpack(values) for values in self._received.tolist()))
            self._round.check()
        return self._round
