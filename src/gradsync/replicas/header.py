"""The step header: a few numbers that all ranks exchange at the start of a synchronizing backward, hidden behind it.

The headers solve five problems: they give the sum of the weights; they find ranks that are at different steps, at
different batches or have different bucket plans; and they carry ``join`` ("I still have data").

[Note: reduced, not gathered] Two small all-reduces, a sum and a maximum, give all that a step needs, so a rank's work
does not grow with the number of ranks. Each compared value x is sent as x and -x: the maxima are then its largest and
its smallest value, and the ranks agree if these are equal. All ranks see the same maxima. If a value differs, all of
them gather the headers, to name the rank that is out of step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from gradsync.comm.base import Communicator
from gradsync.errors import OutOfStep
from gradsync.replicas.batch_context import NO_BATCH, BatchNumber

PLAN = "bucket plan"
HYPERPARAMETERS = "optimizer's hyperparameters"
UNKNOWN_STEPS = -1  # after a resume or a join the ranks may have come here by different paths
BUSY_SLOTS = 16  # ranks whose busy times are sent in one step: see `busy_window`


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
    wants_change: bool = False  # in an elastic run: a worker waits to join, or this one leaves
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

# What is reduced to the smallest and the largest value: over all ranks, and over the ranks with data. A rank without
# data has missed the others' batches and updates, and does not step either.
OF_ALL_RANKS = ("fingerprint", "step", "num_backwards", "checksum")
OF_RANKS_WITH_DATA = ("epoch", "position", "num_steps", "hyperparameters", "loss_scale")
NUM_SUMS = 4  # before the busy times: the weight, has it data, has it changed buffers, does it want other members
NUM_MAXIMA = 2 * (len(OF_ALL_RANKS) + 1 + len(OF_RANKS_WITH_DATA)) + 3


def reduced_sizes(world_size: int) -> tuple[int, int]:
    """How many float64 values a step sums over the ranks, and of how many it takes the maximum.

    >>> from gradsync.replicas.header import reduced_sizes
    >>> reduced_sizes(2), reduced_sizes(16), reduced_sizes(1024)
    ((6, 23), (20, 23), (20, 23))
    """
    return NUM_SUMS + min(world_size, BUSY_SLOTS), NUM_MAXIMA


def busy_window(step: int, world_size: int) -> list[int]:
    """The ranks whose busy times are in the headers of a step: all, or 16 of them, others in every step.

    >>> from gradsync.replicas.header import busy_window
    >>> busy_window(7, 3), busy_window(1, 20)[:6]
    ([0, 1, 2], [16, 17, 18, 19, 0, 1])
    """
    if world_size <= BUSY_SLOTS:
        return list(range(world_size))
    return [(step * BUSY_SLOTS + slot) % world_size for slot in range(BUSY_SLOTS)]


class Extremes(NamedTuple):
    """The smallest and the largest of the ranks' values."""

    low: float
    high: float

    @property
    def differ(self) -> bool:
        return self.low != self.high


@dataclass(frozen=True, kw_only=True)
class StepTimings:
    """The timings that all ranks sent of one earlier step, reduced."""

    step: int
    last_opened_us: float  # when the last rank got its first gradient, on rank 0's clock
    last_begun_us: float  # when the last rank began to reduce its last bucket
    busy_us: dict[int, float]  # by rank, of the ranks in `busy_window`


@dataclass(frozen=True, kw_only=True)
class StepHeaders:
    """What the headers of all ranks give together: the same on every rank, and no larger in a larger world."""

    world_size: int
    total_weight: float
    num_backwards: int  # the largest of any rank
    num_backwards_differ: bool
    num_with_data: int  # ranks that have data
    leader: int  # the first rank with data; 0 if none has any
    buffers_changed: bool  # on any rank
    change_wanted: bool  # by any rank: after this step the members of an elastic run change
    same_gradients: bool  # every rank had, bit for bit, the same ones in the previous step, and they were not all zero
    timings: StepTimings | None  # None: the ranks have not timed the same step

    @property
    def any_have_data(self) -> bool:
        return self.num_with_data > 0

    @property
    def all_have_data(self) -> bool:
        return self.num_with_data == self.world_size


def find_odd_rank(headers: Sequence[Header]) -> HeadersDiffer | None:
    """The error that every rank raises if the ranks are not at the same place of the same run. In rank order."""
    for what, values, hint in _compared(headers):
        if len(set(values.values())) <= 1:
            continue
        usual = max(values.values(), key=list(values.values()).count)
        odd = next(rank for rank, value in values.items() if value != usual)
        return HeadersDiffer(what, odd, f"its {what} is {values[odd]}, that of the others {usual}", hint)
    return None


def _compared(headers: Sequence[Header]) -> Iterator[tuple[str, dict[int, Any], str]]:
    """What must be equal: its name, each rank's value, and a hint for when they differ."""
    everyone = dict(enumerate(headers))
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
    """The exchange of the headers of one step: see [Note: reduced, not gathered].

    ``poll`` does not block while the headers are on the way, ``wait`` does; both check what came.
    """

    def __init__(self, header: Header, comm: Communicator) -> None:
        self._header = header
        self._comm = comm
        self._sums = torch.tensor(_pack_sums(header, comm.rank, comm.world_size), dtype=torch.float64)
        self._maxima = torch.tensor(_pack_maxima(header, comm.rank), dtype=torch.float64)
        self._works = (comm.all_reduce(self._sums), comm.all_reduce(self._maxima, op="max"))
        self._headers: StepHeaders | None = None
        self._differ: HeadersDiffer | None = None

    def poll(self) -> StepHeaders | None:
        """What the headers of all ranks give if they have arrived, else None."""
        if self._headers is None and all(work.done() for work in self._works):
            return self.wait()
        return self._headers

    def wait(self) -> StepHeaders:
        """What the headers of all ranks give; raises HeadersDiffer on every rank if they do not fit together."""
        if self._differ is not None:
            raise self._differ
        if self._headers is None:
            for work in self._works:
                work.wait()
            headers, extremes = _read(self._sums.tolist(), self._maxima.tolist(), self._header.step, self._comm)
            if _are_out_of_step(headers, extremes):
                self._differ = self._find_odd_rank()
                raise self._differ
            self._headers = headers
        return self._headers

    def _find_odd_rank(self) -> HeadersDiffer:
        """Gather all headers. Blocks: all ranks have seen the same extremes, so all of them call it."""
        own = self._header.pack()
        everyone = torch.empty(self._comm.world_size, NUM_VALUES, dtype=torch.float64)
        self._comm.all_gather(own, out=everyone).wait()
        differ = find_odd_rank([Header.unpack(values) for values in everyone.tolist()])
        assert differ is not None, "a value whose extremes differ is not the same on all ranks"
        return differ


def _pack_sums(header: Header, rank: int, world_size: int) -> list[float]:
    busy = [0.0] * min(world_size, BUSY_SLOTS)
    slot = rank if world_size <= BUSY_SLOTS else (rank - header.step * BUSY_SLOTS) % world_size
    if slot < len(busy):
        busy[slot] = header.previous_step.busy_us
    flags = (header.has_data, header.buffers_changed, header.wants_change)
    return [header.weight, *map(float, flags), *busy]


def _pack_maxima(header: Header, rank: int) -> list[float]:
    compared = [float(getattr(header, name)) for name in OF_ALL_RANKS]
    compared.append(float(header.previous_step.step))
    if header.has_data:
        with_data = [float(getattr(header, name)) for name in OF_RANKS_WITH_DATA]
        largest, smallest, leader = with_data, [-value for value in with_data], float(-rank)
    else:  # -inf changes no maximum
        largest = smallest = [-math.inf] * len(OF_RANKS_WITH_DATA)
        leader = -math.inf
    values = [*compared, *largest, *(-value for value in compared), *smallest]
    # NaN is unequal to itself. What the maximum of NaN and a number is, depends on the transport: so inf is sent, as x
    # and as -x.
    values = [math.inf if math.isnan(value) else value for value in values]
    return [*values, leader, header.previous_step.opened_us, header.previous_step.begun_us]


def _read(
    sums: list[float], maxima: list[float], step: int, comm: Communicator
) -> tuple[StepHeaders, dict[str, Extremes]]:
    """What the headers give, and the extremes of all compared values, by name."""
    weight, num_with_data, num_changed, num_wanting, *busy_us = sums
    *compared, leader, opened_us, begun_us = maxima
    names = (*OF_ALL_RANKS, "timed_step", *OF_RANKS_WITH_DATA)
    pairs = zip(names, compared[len(names) :], compared[: len(names)], strict=True)
    extremes = {name: Extremes(-negated, largest) for name, negated, largest in pairs}
    timed, checksum = extremes["timed_step"], extremes["checksum"]
    timings = None
    if timed.low == timed.high != NO_TIMING.step:
        window = busy_window(step, comm.world_size)
        timings = StepTimings(
            step=int(timed.high),
            last_opened_us=opened_us,
            last_begun_us=begun_us,
            busy_us=dict(zip(window, busy_us, strict=True)),
        )
    headers = StepHeaders(
        world_size=comm.world_size,
        total_weight=weight,
        num_backwards=int(extremes["num_backwards"].high),
        num_backwards_differ=extremes["num_backwards"].differ,
        num_with_data=int(num_with_data),
        leader=int(-leader) if num_with_data else 0,
        buffers_changed=num_changed > 0,
        change_wanted=num_wanting > 0,
        same_gradients=comm.world_size > 1 and checksum.low == checksum.high != 0.0,
        timings=timings,
    )
    return headers, extremes


def _are_out_of_step(headers: StepHeaders, extremes: dict[str, Extremes]) -> bool:
    """Whether the ranks are not at the same place of the same run; ``find_odd_rank`` then says which one and where."""
    if headers.world_size == 1:
        return False
    compared = ["fingerprint", "step"]
    if headers.any_have_data:
        compared += ["epoch", "position", "hyperparameters", "loss_scale"]
        if extremes["num_steps"].low != UNKNOWN_STEPS:  # the numbers of all ranks are known, as no other is smaller
            compared.append("num_steps")
    return any(extremes[name].differ for name in compared)
