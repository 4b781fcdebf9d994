"""Local SGD: every rank steps on its own gradients, and every n-th step the weights are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.reducers.base import Reducer
from gradsync.reducers.codec_rules import CodecRule
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.reducers.plain import Plain
from gradsync.replicas.header import StepHeaders
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.base import Verdict
from gradsync.strategies.gradient_sync import ForwardingSync, GradientSync
from gradsync.strategies.periodic.base import Periodic
from gradsync.strategies.periodic.headers import ExchangeHeaders
from gradsync.strategies.periodic.inner_rate import Rate
from gradsync.strategies.periodic.optimizer_state import average_state, averaged_values

SCHEDULES = ("fixed", "quadratic")
OPTIMIZER_STATES = ("keep", "average")
MAX_EVERY_FACTOR = 16  # max_every / every, by default


@spec.register("strategy", "local_sgd")
class LocalSGD(Periodic):
    """Every rank trains on its own for ``every`` steps; then the weights become their mean, weighted by samples.

    Args:
        every: steps from one averaging to the next. Higher => fewer bytes, and replicas that are farther apart.
        exact_steps: initial steps in which gradients are averaged exactly at every step ("post-local" SGD). Higher => a
            safer start: the first steps are the longest, and momentum has yet to settle. The exact phase ends at the
            first step from then on at which every rank has data.
        schedule: "quadratic" lets ``every`` grow with the inverse square of the learning rate: at half of the highest
            rate so far, 4 times as many steps. (Each step then moves the replicas apart less.) "fixed" does not.
        max_every: the limit of that; default: 16 times ``every``.
        optimizer_state: "keep" leaves momenta to each rank. "average" averages them with the weights: more bytes (once
            or twice the weights, uncompressed), and momenta that fit the averaged weights.
        codec: compresses the differences. What it leaves out stays in the rank's own weights, and is sent later.
        reducer: how differences become their mean, where a codec is not enough: ``powersgd(rank=4)``.
        rate: "sqrt" multiplies the learning rate by √n while n ranks step on their own. For Adam and its like, whose
            steps are shorter for a rank's own, smaller batch than for the joined one. "same" leaves it as it is.
        quorum: in an elastic run: with so many workers an averaging begins without the others, ``grace_s`` after they
            have come. Who is late takes part in the next one, with all its samples. Lower => no waiting for
            stragglers. Default: all wait for all.
        grace_s: how long a quorum waits for the others. Higher => fewer are late.

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
        quorum: int | None = None,
        grace_s: float = 0.0,
    ) -> None:
        super().__init__(
            every=every,
            codec=codec,
            reducer=reducer,
            keeps_residual=True,
            rate=rate,
            quorum=quorum,
            grace_s=grace_s,
        )
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
        self.in_exact_phase = exact_steps > 0  # gradients are averaged at every step
        self._exact = AllReduce()
        self._exact_sync = _ExactSync(self)
        self._everyone_has_data = True  # at the last backward
        self._peak_rates: list[float] = []  # the highest learning rate of each parameter group so far

    def spec_arguments(self) -> dict[str, Any]:
        """The arguments for its spec."""
        return {
            "every": self.every,
            "exact_steps": self.exact_steps,
            "schedule": self.schedule,
            "max_every": self.max_every,
            "optimizer_state": self.optimizer_state,
            **self._reducer_arguments(),
            "rate": self._inner_rate.rate,
            "quorum": self.quorum,
            "grace_s": self.grace_s,
        }

    def _reducer_arguments(self) -> dict[str, Any]:
        if self._codec is not None and isinstance(self._reducer, Compressed):
            return {"codec": self._reducer.rules.as_argument()}
        return {"reducer": None if type(self._reducer) is Plain else self._reducer}

    # -- the exact phase ------------------------------------------------------------------------------------------

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        self._exact.recorder = self.recorder
        self._exact.attach(plan, comm)

    def gradient_sync(self, step: int) -> GradientSync | None:
        return self._exact_sync if self.in_exact_phase else None

    def note_headers(self, headers: StepHeaders) -> None:
        """An exact backward has ended, with these headers."""
        self._everyone_has_data = headers.all_have_data

    def before_step(self, step: int) -> Verdict:
        return Verdict.APPLY if self.in_exact_phase else super().before_step(step)

    def after_step(self, step: int) -> None:
        self._inner_rate.restore()
        self._record_rates()
        if self.in_exact_phase:
            self._step_exactly(step)
        else:
            super().after_step(step)

    def skipped_step(self, step: int) -> None:
        if self.in_exact_phase:
            self._step_exactly(step)
        else:
            super().skipped_step(step)

    def _step_exactly(self, step: int) -> None:
        """Take the engine's step count, which ranks without data have too; end the exact phase if all have data."""
        self._clock = step
        if step >= self.exact_steps and self._everyone_has_data:
            self.in_exact_phase = False
            self._next_exchange = [step + self.every_now()]
            self._exchanged_at = [step]
            self._load_watcher.reset()  # the anchors are set to the current weights now
            if self._exchange is not None:
                self._exchange.reset_anchors()

    # -- schedule and optimizer state -----------------------------------------------------------------------------

    def every_now(self) -> int:
        if self.schedule == "fixed" or not self._peak_rates:
            return self.every
        most = MAX_EVERY_FACTOR * self.every if self.max_every is None else self.max_every
        pairs = zip(self._current_rates(), self._peak_rates, strict=True)
        highest = max(rate / peak if peak else 1.0 for rate, peak in pairs)
        return min(most, int(self.every / highest**2)) if highest else most

    def _record_rates(self) -> None:
        now = self._current_rates()
        self._peak_rates = [max(pair) for pair in zip(now, self._peak_rates or now, strict=True)]

    def _current_rates(self) -> list[float]:
        return [abs(float(group["lr"])) for group in self._training.optimizer.param_groups]

    def _average_beside(self, headers: ExchangeHeaders, fragment: int) -> Callable[[], None]:
        commit = None
        if self.optimizer_state == "average":
            assert self._exchange is not None
            shares = [headers.share(rank, fragment) for rank in range(len(headers.headers))]
            commit = average_state(self._training.optimizer, shares, self._exchange.comm)
        beside = super()._average_beside(headers, fragment)
        return commit or beside

    def settle(self) -> None:
        if not self.in_exact_phase:
            super().settle()

    # -- a lost peer: in the exact phase the transaction is the step ----------------------------------------------

    def commit_number(self, step: int) -> int:
        return step if self.in_exact_phase else super().commit_number(step)

    def discard_step(self) -> None:
        self._exact.discard_step()
        super().discard_step()

    def accept_step(self, shared: dict[str, Any]) -> list[str]:
        if not self.in_exact_phase:
            return super().accept_step(shared)
        self._clock, self._peak_rates = int(shared["clock"]), list(shared["peaks"])
        return self._exact.accept_step({"reducer": {}})

    def retry_exchange(self) -> None:
        if not self.in_exact_phase:
            super().retry_exchange()

    def steps_since_exchange(self) -> int:
        return 0 if self.in_exact_phase else super().steps_since_exchange()

    def shared_state(self) -> dict[str, Any]:
        if self.in_exact_phase:
            return {"clock": self._clock, "peaks": list(self._peak_rates)}
        return super().shared_state()

    def join_run(self, state: dict[str, Any]) -> None:
        if state["together"]:
            self._interrupted = None
            self.load_state_dict({key: value for key, value in state.items() if key != "shared"})
        else:
            super().join_run(state)

    def state_for_newcomer(self) -> dict[str, Any]:
        return {**self.state_dict(), "shared": {}} if self.in_exact_phase else super().state_for_newcomer()

    def diverge_obstacle(self) -> str:
        if self.in_exact_phase:
            return f"its first {self.exact_steps} steps are exact: {super(Periodic, self).diverge_obstacle()}"
        return super().diverge_obstacle()

    # -- statistics and state -------------------------------------------------------------------------------------

    def bytes_per_step(self) -> int:
        if self.in_exact_phase:
            return self._exact.bytes_per_step()
        sent = super().bytes_per_step()
        if self.optimizer_state == "average" and self.comm.world_size > 1:
            kept = sum(value.nbytes for _, _, value in averaged_values(self._training.optimizer))
            sent += 2 * (self.comm.world_size - 1) * kept // self.comm.world_size // self.every_now()
        return sent

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "together": self.in_exact_phase, "peaks": list(self._peak_rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rest = {key: value for key, value in state.items() if key not in ("together", "peaks")}
        if len(rest) + 2 != len(state):
            raise ValueError(f"expected the state of local_sgd; got {sorted(state)}.")
        super().load_state_dict(rest)
        self.in_exact_phase = bool(state["together"])
        self._peak_rates = [float(rate) for rate in state["peaks"]]

    def close(self) -> None:
        self._exact.close()
        super().close()


class _ExactSync(ForwardingSync):
    """The gradient sync of the exact phase: it notes whether every rank had data."""

    def __init__(self, strategy: LocalSGD) -> None:
        super().__init__(strategy._exact.sync)
        self._strategy = strategy

    def finish(self) -> None:
        headers = self.headers(block=True)
        assert headers is not None
        self._strategy.note_headers(headers)
        super().finish()
