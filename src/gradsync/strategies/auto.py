"""Exact at first; then what the adviser finds the fastest of what the user allows.

The steps are timed by what the engine calls anyway. After some of them all ranks measure the network together, rank 0
asks the adviser, and its answer goes to all: so all switch, or none, after the same step.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from gradsync import spec
from gradsync.bucket import Bucket, BucketPlan, plan_buckets
from gradsync.comm.base import Communicator
from gradsync.comm.choice import FORMAT, Table, parse_tables
from gradsync.comm.chosen import Chosen
from gradsync.comm.fastest import fastest, hosts_of
from gradsync.comm.hosts import ranks_by_host
from gradsync.comm.objects import broadcast_object
from gradsync.header import Header, Round
from gradsync.profiling.seam import SILENT, Recording
from gradsync.slot import SparseSlot
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.base import Strategy, Verdict
from gradsync.training import Training

log = logging.getLogger("gradsync")

WARM_UP_STEPS = 3  # buckets are laid out anew after the first, and kernels are compiled


class _Clock:
    """When what happened in a step, and the steps that are known."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._now: dict[str, Any] = {}
        self._began_s: float | None = None

    def note(self, what: str) -> None:
        if self._began_s is not None:
            self._now[what] = time.perf_counter() - self._began_s

    def bucket(self, index: int) -> None:
        if self._began_s is not None:
            self._now.setdefault("ready", {})[index] = time.perf_counter() - self._began_s

    def end(self) -> None:
        """The optimizer has stepped: what was noted is a step, if all of it was, and the next begins."""
        self.note("end")
        if {"opened", "ready", "waited", "end"} <= set(self._now):
            self.steps.append(self._now)
        self._now, self._began_s = {}, time.perf_counter()

    def median(self, what: str) -> float:
        return float(statistics.median(step[what] for step in self.steps))

    def ready(self, index: int) -> float:
        return float(statistics.median(step["ready"][index] for step in self.steps if index in step["ready"]))


@spec.register("strategy", "auto")
class Auto(Strategy):
    """Start exact, measure some steps, then switch to what the adviser recommends; the log says to what and why.

    Args:
        allow: "exact": the maths stays the same, and only how it is done may change (the size of buckets; between three
            ranks or more, the all-reduce's algorithm). Or a list of specs that may be taken as well:
            ``["allreduce(codec=int8)", "diloco(every=50)"]``.
        steps: that are measured before it decides. More => a steadier picture, and a later change.
        seconds: that measuring the network may take, once. All ranks stand still meanwhile.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = gradsync.synchronize(model, optimizer, strategy="auto")
    >>> sync.stats()["auto"]
    'measuring: exact so far'
    >>> sync.close()
    """

    def __init__(self, *, allow: str | Sequence[Any] = "exact", steps: int = 20, seconds: float = 1.0) -> None:
        super().__init__()
        if isinstance(allow, str) and allow != "exact":
            raise ValueError(f"allow must be 'exact' or a list of specs; got {allow!r}. For one: allow=[{allow}].")
        if steps < 1:
            raise ValueError(f"steps must be at least 1; got {steps=}.")
        if seconds <= 0:
            raise ValueError(f"seconds must be above 0; got {seconds=}.")
        self.steps, self.seconds = steps, seconds
        self._allow = allow if isinstance(allow, str) else [spec.resolve(each, "strategy") for each in allow]
        self._recorder: Recording = SILENT
        self._inner: Strategy = AllReduce()
        self._decided = False
        self._all_have_data = False  # at the last backward; all ranks know alike
        self._why = "measuring: exact so far"
        self._clock = _Clock()
        self._training: Training | None = None
        self._wrapped: Chosen | None = None
        self._table: Table | None = None  # the all-reduce algorithm, where another than the transport's own is faster

    def spec_arguments(self) -> dict[str, Any]:
        """What it was made with, for specs."""
        return {"allow": self._allow, "steps": self.steps, "seconds": self.seconds}

    # -- the decision ---------------------------------------------------------------------------------------------

    def after_step(self, step: int) -> None:
        self._inner.after_step(step)
        if self._decided:
            return
        self._clock.end()
        # A rank without data takes part in backwards, but not in steps: it would not be here to decide.
        if step >= WARM_UP_STEPS + self.steps and self._clock.steps and self._all_have_data:
            self._decide()

    def _decide(self) -> None:
        """Measure, ask, and switch. Blocks: every rank is here after the same step."""
        from gradsync.advisor import Choice, measure_costs, measure_network  # it imports the strategies

        self._decided = True
        if self.comm.world_size == 1:
            self._why = "one worker: nothing to choose"
            return
        self._clock.steps = self._clock.steps[-self.steps :]
        choices, measured = self._choices(), self._measured(max(map(len, ranks_by_host(hosts_of(self.comm)))))
        network = recorded_on = measure_network(self.comm, seconds=self.seconds)
        self._table = _same_everywhere(self.comm, fastest(self.comm, max(b.num_bytes for b in self.plan.buckets)))
        if self._table is not None:
            self.attach(self.plan, self.comm)
            network = measure_network(self.comm, seconds=self.seconds)
        costs = measure_costs(measured.gradients, choices, world_size=self.comm.world_size, comm=self.comm)
        answer: list[Any] | None = None
        if self.comm.rank == 0:
            answer = self._ask(measured, network, recorded_on, costs, choices)
        strategy, bucket_bytes, self._why = broadcast_object(self.comm, answer, src=0)
        chosen = Choice(strategy, bucket_bytes)
        if chosen != measured.choice:
            self._switch(chosen.strategy, chosen.bucket_bytes)
        if self.comm.rank == 0:
            log.info("auto, after %d steps: %s", len(self._clock.steps), self._why)

    def _ask(self, measured: Any, network: Any, recorded_on: Any, costs: Any, choices: Any) -> list[Any]:
        from gradsync.advisor import advise

        allow = "exact" if isinstance(self._allow, str) else [spec.render(each) for each in self._allow]
        advice = advise(measured, network, costs=costs, allow=allow, choices=choices, recorded_on=recorded_on)
        best = advice.best.choice
        said = f"{best} (a step of {advice.now.step_s * 1e3:.0f} ms, {advice.best.step_s * 1e3:.0f} expected)"
        why = f"{said}: {advice.sentence}" if advice.change else f"exact all-reduce stays: {advice.sentence}"
        if self._table is not None:
            why = f"all-reduces by {self._table.rules[-1][1]}, which is faster here; {why}"
        return [best.strategy, best.bucket_bytes, why]

    def _choices(self) -> list[Any]:
        """What may be chosen: sizes of buckets, unless the user has said one, and the specs that are allowed."""
        from gradsync.advisor import Choice, default_choices

        found = [Choice("allreduce")]
        usual = plan_buckets([(slot.name, slot.param) for bucket in self.plan.buckets for slot in bucket.slots])
        if usual == self.plan.layout:
            found = [choice for choice in default_choices() if choice.strategy == "allreduce"]
        if not isinstance(self._allow, str):
            found += [Choice(spec.render(each)) for each in self._allow]
        return found

    def _measured(self, ranks_per_host: int) -> Any:
        """The typical step of this rank, as the adviser reads it."""
        from gradsync.advisor import Measurement
        from gradsync.advisor.measurement import gradients_of

        clock, buckets = self._clock, self.plan.buckets
        opened, waited, end = (clock.median(what) for what in ("opened", "waited", "end"))
        ready = {bucket.slots[-1].name: max(opened, clock.ready(bucket.index)) for bucket in buckets}
        last = min(waited, max(ready.values()))
        params = [(slot.name, slot.param) for bucket in buckets for slot in bucket.slots]
        return Measurement(
            gradients=gradients_of(params, ready),
            forward_s=opened,
            backward_s=last - opened,
            exposed_s=waited - last,
            after_s=max(0.0, end - waited),
            world_size=self.comm.world_size,
            ranks_per_host=ranks_per_host,
            cores_per_host=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
        )

    def _switch(self, strategy: str, bucket_bytes: int | None) -> None:
        before, self._inner = self._inner, spec.parse(strategy, "strategy")
        before.close()
        self._inner.recorder = self._recorder
        assert self._training is not None, "meet() comes first"
        self._inner.meet(self._training)
        self._inner.attach(self.plan, self.comm)
        # Buckets are laid out anew before the next backward, if this is not their size already.
        self.wanted_bucket_bytes = self._inner.bucket_bytes if bucket_bytes is None else bucket_bytes

    # -- the seam: what the inner strategy does, and when ---------------------------------------------------------

    @property
    def together(self) -> bool:  # type: ignore[override]
        return self._inner.together

    @property
    def steps_itself(self) -> bool:  # type: ignore[override]
        return self._inner.steps_itself

    @property
    def reads_fresh_gradients(self) -> bool:  # type: ignore[override]
        return self._inner.reads_fresh_gradients

    @property
    def reads_small_gradients(self) -> bool:  # type: ignore[override]
        return self._inner.reads_small_gradients

    @property
    def recorder(self) -> Recording:
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recording) -> None:
        self._recorder = self._inner.recorder = recorder

    def meet(self, training: Training) -> None:
        self._training = training
        self._inner.meet(training)
        for strategy in [] if isinstance(self._allow, str) else self._allow:
            strategy.meet(training)  # what it can't do is refused now, and not in the middle of a run

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        if self._table is not None and not isinstance(comm, Chosen):
            comm = self._wrapped = self._wrapped or Chosen(comm, [self._table], hosts_of(comm))
        if not self._decided:
            self._clock.steps.clear()  # they had other buckets
        super().attach(plan, comm)
        self._inner.attach(plan, comm)

    def open(self, header: Header) -> None:
        self._clock.note("opened")
        self._inner.open(header)

    def round(self, *, block: bool) -> Round | None:
        return self._inner.round(block=block)

    def on_bucket_ready(self, bucket: Bucket) -> None:
        self._clock.bucket(bucket.index)
        self._inner.on_bucket_ready(bucket)

    def on_sparse(self, slots: Sequence[SparseSlot], factor: float) -> None:
        self._inner.on_sparse(slots, factor)

    def advance(self) -> None:
        self._inner.advance()

    def after_backward(self) -> None:
        if not self._decided:
            round = self._inner.round(block=True)
            self._all_have_data = round is not None and len(round.with_data) == self.comm.world_size
        self._inner.after_backward()
        self._clock.note("waited")

    def before_step(self, step: int) -> Verdict:
        return self._inner.before_step(step)

    def skipped_step(self, step: int) -> None:
        self._inner.skipped_step(step)
        self._clock.end()

    def settle(self) -> None:
        self._inner.settle()

    def join(self) -> int | None:
        return self._inner.join()

    def stats(self) -> dict[str, Any]:
        return {**self._inner.stats(), "auto": self._why, "chosen": spec.render(self._inner)}

    def bytes_per_step(self) -> int:
        return self._inner.bytes_per_step()

    def codecs(self) -> dict[str, str]:
        return self._inner.codecs()

    def close(self) -> None:
        self._inner.close()

    # -- what must survive a restart ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        chosen = spec.render(self._inner) if self._decided else None
        table = None if self._table is None else self._table.as_json()
        return {"chosen": chosen, "why": self._why, "algorithms": table, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"chosen", "why", "algorithms", "inner"}:
            raise ValueError(f"expected the state of auto; got {sorted(state)}. Saved by another strategy?")
        if state["chosen"] is not None:  # what was decided stays so; the buckets come with the engine's state
            self._decided, self._why = True, state["why"]
            if state["algorithms"] is not None:
                (self._table,) = parse_tables({"format": FORMAT, "tables": [state["algorithms"]]})
                self.attach(self.plan, self.comm)
            if state["chosen"] != spec.render(self._inner):
                self._switch(state["chosen"], None)
                self.wanted_bucket_bytes = None
        self._inner.load_state_dict(state["inner"])

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        inner = self._inner
        if states[0]["chosen"] is not None:
            inner = spec.parse(states[0]["chosen"], "strategy")
        merged = inner.redistribute([state["inner"] for state in states], rank, world_size)
        return {**states[0], "inner": merged}

    def is_own(self, state: dict[str, Any]) -> bool:
        inner = self._inner if state["chosen"] is None else spec.parse(state["chosen"], "strategy")
        return bool(inner.is_own(state["inner"]))


def _same_everywhere(comm: Communicator, table: Table | None) -> Table | None:
    """Rank 0's table: its machine's name is in it, and must not be each rank's own."""
    told = broadcast_object(comm, None if table is None else table.as_json(), src=0)
    return None if told is None else parse_tables({"format": FORMAT, "tables": [told]})[0]
