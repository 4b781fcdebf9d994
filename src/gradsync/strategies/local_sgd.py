"""Local SGD: every rank steps on its own, and every so many steps the weights are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gradsync import spec
from gradsync.bucket import Bucket, BucketPlan
from gradsync.comm.base import Communicator
from gradsync.header import Header, Round
from gradsync.reducers.allreduce import Plain
from gradsync.reducers.base import Reducer
from gradsync.reducers.compressed import Compressed
from gradsync.reducers.rules import CodecRule
from gradsync.slot import SparseSlot
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.attendance import Attendance
from gradsync.strategies.base import Verdict
from gradsync.strategies.inner_rate import Rate
from gradsync.strategies.optimizer_state import average_state, averaged_values
from gradsync.strategies.periodic import Periodic

SCHEDULES = ("fixed", "quadratic")
OPTIMIZER_STATES = ("keep", "average")
MOST = 16  # times `every`: how far a schedule may go, unless said


@spec.register("strategy", "local_sgd")
class LocalSGD(Periodic):
    """Every rank trains by itself for ``every`` steps, then all take the mean of their weights, by samples.

    Args:
        every: steps from one averaging to the next. Higher => fewer bytes, and replicas that are farther apart.
        exact_steps: before it gradients are averaged at every step, exactly ("post-local" SGD). Higher => a safer
            start: the first steps are the longest, and momentum has yet to settle. It ends at the first step after it
            at which every rank has data.
        schedule: "quadratic" lets ``every`` grow as the learning rate falls, by the square: at half of the highest
            rate so far 4 times as many steps. What a step moves the replicas apart falls, too. "fixed" does not.
        max_every: where that ends; 16 times ``every`` unless said.
        optimizer_state: "keep" leaves momenta to each rank. "average" takes their mean with the weights: more bytes
            (once or twice the weights, whole), and momenta that fit the weights they are used on.
        codec: what differences are compressed by. What it leaves out stays in the rank's own weights, and is sent
            later.
        reducer: how differences become their mean, for more than a codec: ``powersgd(rank=4)``.
        rate: "sqrt" multiplies the learning rate by √n while n ranks are apart, for Adam and its like, whose steps are
            shorter for a rank's own, smaller batch than for the joined one. "same" leaves it as it is.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> sync = gradsync.synchronize(model, optimizer, "local_sgd(every=8, exact_steps=100)")
    >>> sync.close()
    """

    def __init__(
        self,
        *,
        every: int = 8,
        exact_steps: int = 0,
        schedule: Literal["fixed", "quadratic"] = "fixed",
        max_every: int | None = None,
        optimizer_state: Literal["keep", "average"] = "keep",
        codec: CodecRule | None = None,
        reducer: Reducer | str | None = None,
        rate: Rate = "same",
    ) -> None:
        super().__init__(every=every, codec=codec, reducer=reducer, keeps_unsent=True, rate=rate)
        if exact_steps < 0:
            raise ValueError(f"exact_steps is a number of steps, 0 or more; got {exact_steps=}.")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}; got {schedule!r}.")
        if max_every is not None and max_every < every:
            raise ValueError(f"max_every must be at least every; got {max_every=} {every=}.")
        if optimizer_state not in OPTIMIZER_STATES:
            raise ValueError(f"optimizer_state must be one of {', '.join(OPTIMIZER_STATES)}; got {optimizer_state!r}.")
        self.exact_steps = exact_steps
        self.schedule = schedule
        self.max_every = max_every
        self.optimizer_state = optimizer_state
        self.together = exact_steps > 0
        self._exact = AllReduce()
        self._everyone_has_data = True  # at the last backward
        self._peaks: list[float] = []  # the highest learning rate of each parameter group so far

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs."""
        return {
            "every": self.every,
            "exact_steps": self.exact_steps,
            "schedule": self.schedule,
            "max_every": self.max_every,
            "optimizer_state": self.optimizer_state,
            **self._reducer_arguments(),
            "rate": self._inner.rate,
        }

    def _reducer_arguments(self) -> dict[str, Any]:
        if self._codec is not None and isinstance(self._reducer, Compressed):
            return {"codec": self._reducer.rules.written()}
        return {"reducer": None if type(self._reducer) is Plain else self._reducer}

    # -- the exact beginning --------------------------------------------------------------------------------------

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self._exact.recorder = self.recorder
        self._exact.attach(plan, comm)

    def open(self, header: Header) -> None:
        super().open(header)
        if self.together:
            self._exact.open(header)

    def round(self, *, block: bool) -> Round | None:
        return self._exact.round(block=block) if self.together else super().round(block=block)

    def on_bucket_ready(self, bucket: Bucket) -> None:
        if self.together:
            self._exact.on_bucket_ready(bucket)

    def advance(self) -> None:
        if self.together:
            self._exact.advance()

    def on_sparse(self, slots: Sequence[SparseSlot], factor: float) -> None:
        if self.together:
            self._exact.on_sparse(slots, factor)
        else:
            super().on_sparse(slots, factor)

    def after_backward(self) -> None:
        if self.together:
            round = self._exact.round(block=True)
            assert round is not None
            self._everyone_has_data = len(round.with_data) == self.comm.world_size
            self._exact.after_backward()

    def before_step(self, step: int) -> Verdict:
        return Verdict.APPLY if self.together else super().before_step(step)

    def after_step(self, step: int) -> None:
        self._inner.restore()
        self._note_rates()
        if self.together:
            self._step_exactly(step)
        else:
            super().after_step(step)

    def skipped_step(self, step: int) -> None:
        if self.together:
            self._step_exactly(step)
        else:
            super().skipped_step(step)

    def _step_exactly(self, step: int) -> None:
        """Count the engine's steps, which a rank without data counts too; part when all ranks are there to see it."""
        self._clock = step
        if step >= self.exact_steps and self._everyone_has_data:
            self.together = False
            self._next = [step + self.every_now()]
            if self._exchange is not None:
                self._exchange.capture()

    # -- when, and what else --------------------------------------------------------------------------------------

    def every_now(self) -> int:
        if self.schedule == "fixed" or not self._peaks:
            return self.every
        most = MOST * self.every if self.max_every is None else self.max_every
        highest = max(rate / peak if peak else 1.0 for rate, peak in zip(self._rates_now(), self._peaks, strict=True))
        return min(most, int(self.every / highest**2)) if highest else most

    def _note_rates(self) -> None:
        now = self._rates_now()
        self._peaks = [max(pair) for pair in zip(now, self._peaks or now, strict=True)]

    def _rates_now(self) -> list[float]:
        return [abs(float(group["lr"])) for group in self._training.optimizer.param_groups]

    def _landed(self, fragment: int, attendance: Attendance) -> None:
        super()._landed(fragment, attendance)
        if self.optimizer_state == "average":
            shares = [attendance.share(rank, fragment) for rank in range(self.comm.world_size)]
            average_state(self._training.optimizer, shares, self.comm)

    def settle(self) -> None:
        if not self.together:
            super().settle()

    # -- what it tells and keeps ----------------------------------------------------------------------------------

    def bytes_per_step(self) -> int:
        if self.together:
            return self._exact.bytes_per_step()
        sent = super().bytes_per_step()
        if self.optimizer_state == "average" and self.comm.world_size > 1:
            kept = sum(value.nbytes for _, _, value in averaged_values(self._training.optimizer))
            sent += 2 * (self.comm.world_size - 1) * kept // self.comm.world_size // self.every_now()
        return sent

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "together": self.together, "peaks": list(self._peaks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rest = {key: value for key, value in state.items() if key not in ("together", "peaks")}
        if len(rest) + 2 != len(state):
            raise ValueError(f"expected the state of local_sgd; got {sorted(state)}.")
        super().load_state_dict(rest)
        self.together = bool(state["together"])
        self._peaks = [float(rate) for rate in state["peaks"]]

    def close(self) -> None:
        self._exact.close()
        super().close()
