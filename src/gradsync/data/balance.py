"""``balance=True``: each rank's share of a step follows its speed, so that all are done at the same time.

Which samples a step takes does not change, nor their order: only where the step is cut. The synchronizers weigh each
part by its samples, so the gradient is that of the joined batch at any shares.

[Note: when shares change] Every rank must split a step at the same places, and a DataLoader with workers splits steps
ahead. So shares change at step numbers that all ranks know: the ranks exchange their speeds when step a is asked for,
and the new shares hold from step a + lag on, where the lag is one more than any rank's loader can split ahead. A loader
that splits that step waits for the exchange, which has had a whole step's time by then.

[Note: busy] A rank's speed is samples over the time that it was busy: from asking for one batch to asking for the next,
without the time for which the synchronizers waited for other ranks. A fast rank's wait is not its work.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.data.order import BatchSplit, split_by_speed
from gradsync.errors import OutOfStep
from gradsync.replicas.batch_context import batch_source

log = logging.getLogger("gradsync")

NUM_MEASURED = 8  # steps between two changes whose median is a speed: fewer => follows sooner, and noise too
SMOOTHING = 0.5  # of the last measured speed in the new one: higher => follows sooner, and noise too
WORTHWHILE = 1.05  # shares change if a step takes at least this many times as long as it need


class Balance:
    """The shares of one loader: measures this rank, and agrees with the others. Every rank has the same.

    ``num_ahead``: how many steps this rank's loader may cut ahead of the one that is asked for. Blocks: all ranks make
    theirs together.
    """

    def __init__(self, cut: BatchSplit, comm: Communicator, *, num_ahead: int) -> None:
        self._cut = cut
        self._source = batch_source(comm)
        self._comm = comm.unchecked().clone()  # its collectives run beside a backward's
        furthest = torch.tensor([num_ahead])
        self._comm.all_reduce(furthest, op="max").wait()
        self._lag = int(furthest.item()) + 1
        self._period = self._lag + NUM_MEASURED
        self._begin(_even(cut.world_size))

    def _begin(self, shares: tuple[float, ...]) -> None:
        self.next_step = 0  # the number, over all epochs, of the step that is handed out next
        self._shares = shares  # until step _changes_at
        self._later = shares  # from then on
        self._changes_at = 0
        self._speeds: tuple[float, ...] | None = None  # of all ranks, smoothed
        self._exchange: _SpeedExchange | None = None
        self._exchanged_at = 0
        self._num_own = 0  # samples in this rank's current batch, and since when it is busy with them
        self._since_s = self._waited_s = 0.0
        self._seconds: list[float] = []  # per sample, in the steps since the last change

    # -- the loader's side ----------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Note that the next step is asked for: this rank is done with the one before. Must not block."""
        if self._source.wait_unseen_on:
            raise ValueError(
                "balance=True measures work and waiting by the host's clock, but the model is on "
                f"{self._source.wait_unseen_on!r}, where the host does not wait. Leave balance out there."
            )
        now_s = time.perf_counter()
        if self._num_own and self.next_step > self._changes_at:
            busy_s = now_s - self._since_s - (self._source.waited_s - self._waited_s)
            self._seconds.append(max(busy_s, 0.0) / self._num_own)
        self._num_own = 0
        self._since_s, self._waited_s = now_s, self._source.waited_s
        if self.next_step % self._period == 0 and self.next_step > self._exchanged_at:
            assert self._exchange is None, "its step has been cut since"
            self._exchanged_at = self.next_step
            mine = statistics.median(self._seconds) if self._seconds else math.nan
            self._exchange = _SpeedExchange(self._comm, self.next_step, mine)

    def hand_out(self, num_own: int) -> None:
        """Note that the step asked for is handed out, with ``num_own`` samples for this rank."""
        self._num_own = num_own
        self.next_step += 1

    def leave(self) -> None:
        """Note that a loop has ended: the time that follows does not belong to the batch last handed out."""
        self._num_own = 0

    def own(self, step: int, num_in_step: int) -> slice:
        """This rank's part of step number ``step``. May block: see [Note: when shares change]."""
        parts = split_by_speed(num_in_step, self._at(step))
        start = sum(parts[: self._cut.rank])
        return slice(start, start + parts[self._cut.rank])

    def parts(self) -> tuple[int, ...]:
        """The samples that each rank has in a whole step now."""
        return split_by_speed(self._cut.global_batch_size, self._at(self.next_step))

    def state_dict(self) -> dict[str, Any]:
        return {"shares": list(self._at(self.next_step))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved shares; with another number of ranks all begin with equal shares."""
        shares = tuple(float(share) for share in state.get("shares", ()))
        if not all(math.isfinite(share) and share > 0 for share in shares):
            raise ValueError(f"the loader's state must have shares above 0; got {list(shares)}.")
        if self._exchange is not None:
            self._exchange.speeds()  # every rank must take part in it, so that none is left waiting
        self._begin(shares if len(shares) == self._cut.world_size else _even(self._cut.world_size))

    # -- agreeing -------------------------------------------------------------------------------------------------

    def _at(self, step: int) -> tuple[float, ...]:
        """The shares at a step that is not handed out yet."""
        if self._exchange is not None and step >= self._exchange.step + self._lag:
            exchange, self._exchange = self._exchange, None
            with self._source.waiting():
                speeds = exchange.speeds()
            self._shares, self._changes_at = self._later, exchange.step + self._lag
            self._seconds.clear()
            if speeds is not None:
                self._follow(speeds)
        return self._later if step >= self._changes_at else self._shares

    def _follow(self, measured: Sequence[float]) -> None:
        """Change the shares if that is worth it. Only sums, products and quotients: the same bits on any machine."""
        before = self._speeds or measured
        self._speeds = tuple(
            SMOOTHING * new + (1.0 - SMOOTHING) * old for new, old in zip(measured, before, strict=True)
        )
        total = sum(self._speeds)
        shares = tuple(speed / total for speed in self._speeds)
        now, better = (split_by_speed(self._cut.global_batch_size, each) for each in (self._later, shares))
        if self._step_seconds(now) >= WORTHWHILE * self._step_seconds(better):
            self._later = shares
            if self._cut.rank == 0:
                log.info("balance: from step %d on the ranks have %s samples each", self._changes_at, list(better))

    def _step_seconds(self, parts: Sequence[int]) -> float:
        """The seconds that a step of these parts takes."""
        assert self._speeds is not None
        return max(num / speed for num, speed in zip(parts, self._speeds, strict=True))


class _SpeedExchange:
    """One all-gather of the ranks' speeds."""

    def __init__(self, comm: Communicator, step: int, seconds_per_sample: float) -> None:
        self.step = step
        self._mine = torch.tensor([float(step), seconds_per_sample], dtype=torch.float64)
        self._all = torch.empty(comm.world_size, 2, dtype=torch.float64)
        self._work: Work = comm.all_gather(self._mine, out=self._all)

    def speeds(self) -> tuple[float, ...] | None:
        """The samples a second of every rank; None if a rank has no measurement. Blocks until all have sent theirs."""
        self._work.wait()
        steps, seconds = self._all[:, 0].tolist(), self._all[:, 1].tolist()
        for rank, step in enumerate(steps):
            if step != self.step:
                raise OutOfStep(
                    f"rank {rank} has been handed {int(step)} steps by a balanced loader where this rank has had "
                    f"{self.step}. Leave its loops at the same step on all ranks."
                )
        return tuple(1.0 / each for each in seconds) if all(each > 0 for each in seconds) else None


def _even(world_size: int) -> tuple[float, ...]:
    return (1.0 / world_size,) * world_size
