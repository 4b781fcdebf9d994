"""The step header: a few numbers that all ranks exchange at the start of a synchronizing backward, hidden behind it.

One all-gather of small tensors solves five problems: it gives the sum of the weights; it finds ranks that are at
different steps, at different batches or have different bucket plans; and it carries ``join`` ("I still have data").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import OutOfStep
from gradsync.replicas.batch_context import NO_BATCH, BatchNumber

PLAN = "bucket plan"
HYPERPARAMETERS = "optimizer's hyperparameters"
UNKNOWN_STEPS = -1  # after a resume or a join the ranks may have come here by different paths


class PreviousStepTiming(NamedTuple):
    """When an earlier step of a rank began and ended its work: lets the others see which rank they waited for."""

    step: int  # -1: no step was timed
    opened_us: float  # when its first gradient came, on rank 0's clock
    begun_us: float  # when it began to reduce its last bucket
    busy_us: float  # how long the step took it, without the time that it was stopped in collectives


NO_TIMING = PreviousStepTiming(-1, 0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Header:
    """One rank's header. Every field fits a float64 exactly, because that is how it is sent."""

    step: int  # synchronizing backwards so far
    weight: float  # samples or tokens of the gradients that it contributes
    num_backwards: int  # over how many backwards they were accumulated
    fingerprint: int  # of the bucket plan
    has_data: bool  # False: it takes part without data (see Engine.join)
    buffers_changed: bool = False  # a buffer of the model was written since the last time
    hyperparameters: int = 0  # a checksum of the optimizer's: learning rates and the like
    loss_scale: float = 1.0  # GradScaler's
    checksum: float = 0.0  # of its gradients of the previous step: equal ones mean that ranks read the same data
    epoch: int = NO_BATCH.epoch  # with `position`: which batch this backward is of (see BatchNumber)
    position: int = NO_BATCH.position
    num_steps: int = UNKNOWN_STEPS  # calls of optimizer.step() since the header before
    previous_step: PreviousStepTiming = NO_TIMING

    def pack(self) -> torch.Tensor:
        *values, timing = (getattr(self, name) for name in FIELDS)
        return torch.tensor([*map(float, values), *map(float, timing)], dtype=torch.float64)

    @staticmethod
    def unpack(values: list[float]) -> Header:
        plain = {name: kind(value) for (name, kind), value in zip(KINDS, values, strict=False)}
        return Header(**plain, previous_step=PreviousStepTiming(int(values[len(KINDS)]), *values[len(KINDS) + 1 :]))


FIELDS = tuple(field.name for field in fields(Header))
KINDS = tuple((f.name, {"int": int, "float": float, "bool": bool}[str(f.type)]) for f in fields(Header)[:-1])
NUM_VALUES = len(KINDS) + len(NO_TIMING)


@dataclass(frozen=True)
class StepHeaders:
    """The headers of all ranks, in rank order: the same on every rank."""

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
        """Whether every rank had, bit for bit, the same gradients in the previous step (and they were not all zero)."""
        checksums = {header.checksum for header in self.headers}
        return len(self.headers) > 1 and len(checksums) == 1 and checksums != {0.0}

    def check(self) -> None:
        """Raise HeadersDiffer, the same on every rank, if the ranks are not at the same place of the same run."""
        for what, values, hint in self._compared():
            if len(set(values.values())) <= 1:
                continue
            usual = max(values.values(), key=list(values.values()).count)
            odd = next(rank for rank, value in values.items() if value != usual)
            raise HeadersDiffer(what, odd, f"its {what} is {values[odd]}, that of the others {usual}", hint)

    def _compared(self) -> Iterator[tuple[str, dict[int, Any], str]]:
        """What must be equal: its name, each rank's value, and a hint for when they differ."""
        everyone = dict(enumerate(self.headers))
        # A rank without data has missed the others' batches and updates, and does not step either.
        with_data = {rank: header for rank, header in everyone.items() if header.has_data}
        yield (
            PLAN,
            {rank: header.fingerprint for rank, header in everyone.items()},
            "Were parameters frozen or unfrozen on some ranks only?",
        )
        yield (
            "number of synchronizing backwards",
            {rank: header.step for rank, header in everyone.items()},
            "Was another checkpoint loaded there?",
        )
        yield (
            "batch",
            {rank: BatchNumber(header.epoch, header.position) for rank, header in with_data.items()},
            "Was a backward skipped or taken twice there, or a batch? Every rank must run one backward for each batch: "
            "to leave a batch out, multiply its loss by zero, or call sync.set_weight(0), instead of `continue`.",
        )
        known = all(header.num_steps != UNKNOWN_STEPS for header in with_data.values())
        yield (
            "number of calls of optimizer.step() since the last synchronizing backward",
            {rank: header.num_steps for rank, header in with_data.items()} if known else {},
            "Was a backward skipped or taken twice there? Every rank must run the same backwards and steps.",
        )
        yield (
            HYPERPARAMETERS,
            {rank: header.hyperparameters for rank, header in with_data.items()},
            "Has its learning rate taken another course? A rank that runs out of data misses steps of a schedule: pass "
            "scheduler= to synchronize().",
        )
        yield (
            "GradScaler scale",
            {rank: header.loss_scale for rank, header in with_data.items()},
            "Pass scaler= to synchronize(), and load the same scaler state on all ranks.",
        )


class HeadersDiffer(OutOfStep):
    """The header of one rank does not fit those of the others. Every rank raises it, with the same ``what``."""

    def __init__(self, what: str, rank: int, difference: str, hint: str) -> None:
        self.what, self.rank, self.hint = what, rank, hint
        super().__init__(f"rank {rank} is out of step: {difference}. {hint}")

    def explained(self, difference: str | None) -> OutOfStep:
        """The error that users see, with the values that differ, if known, in place of their checksums."""
        if difference is None:
            return OutOfStep(str(self))
        return OutOfStep(f"rank {self.rank} is out of step: ranks differ in {difference}. {self.hint}")


class HeaderExchange:
    """The all-gather of the headers of one step. ``poll`` does not block, ``wait`` does; both check what came."""

    def __init__(self, header: Header, comm: Communicator) -> None:
        self._sent = header.pack()
        self._received = torch.empty(comm.world_size, NUM_VALUES, dtype=torch.float64)
        self._work = comm.all_gather(self._sent, out=self._received)
        self._headers: StepHeaders | None = None

    def poll(self) -> StepHeaders | None:
        """The headers of all ranks if they have arrived, else None. Does not block."""
        if self._headers is None and self._work.done():
            return self.wait()
        return self._headers

    def wait(self) -> StepHeaders:
        if self._headers is None:
            self._work.wait()
            self._headers = StepHeaders(tuple(Header.unpack(values) for values in self._received.tolist()))
            self._headers.check()
        return self._headers
