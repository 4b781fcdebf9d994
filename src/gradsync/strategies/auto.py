"""The strategy ``auto``: exact all-reduce at first, then the fastest allowed strategy, as the advisor predicts.

Steps are timed at the calls that the engine makes anyway. After some steps all ranks measure the network together,
rank 0 asks the advisor, and broadcasts the answer: so all ranks switch after the same step, or none does.
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
from gradsync.buckets.bucket import BUCKET_BYTES, Bucket, BucketPlan, plan_buckets
from gradsync.comm.allreduce.autotune import autotune, hosts_of
from gradsync.comm.allreduce.selector import SelectedAllReduce
from gradsync.comm.allreduce.table import FORMAT, Table, parse_tables
from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object, broadcast_object
from gradsync.comm.topology import ranks_by_host
from gradsync.profiling.interface import NOT_RECORDING, Recording
from gradsync.replicas.header import Header, StepHeaders
from gradsync.replicas.training import Training
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.base import OwnStep, Placement, Strategy, Verdict
from gradsync.strategies.gradient_sync import ForwardingSync, GradientSync

log = logging.getLogger("gradsync")

WARM_UP_STEPS = 3  # not measured: the bucket layout changes after the first step, and kernels are compiled


class _StepTimer:
    """Times the events of each step: ``backward_start``, ``ready`` of each bucket, ``backward_end``, ``step_end``."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._now: dict[str, Any] = {}
        self._began_s: float | None = None

    def mark(self, what: str) -> None:
        if self._began_s is not None:
            self._now[what] = time.perf_counter() - self._began_s

    def mark_bucket(self, index: int) -> None:
        if self._began_s is not None:
            self._now.setdefault("ready", {})[index] = time.perf_counter() - self._began_s

    def end_step(self) -> None:
        """The optimizer has stepped: keep the step if all of its events were marked, and begin the next."""
        self.mark("step_end")
        if {"backward_start", "ready", "backward_end", "step_end"} <= set(self._now):
            self.steps.append(self._now)
        self._now, self._began_s = {}, time.perf_counter()

    def drop_step(self) -> None:
        """The step was interrupted: the time of what is left of it tells nothing."""
        self._now, self._began_s = {}, None

    def median(self, what: str) -> float:
        return float(statistics.median(step[what] for step in self.steps))

    def ready(self, index: int) -> float:
        return float(statistics.median(step["ready"][index] for step in self.steps if index in step["ready"]))


@spec.register("strategy", "auto")
class Auto(Strategy):
    """Start exact, measure some steps, then switch to what the advisor recommends; the log says to what and why.

    Args:
        allow: "exact": the result stays the same, and only its computation may change (the size of buckets; with three
            ranks or more, the all-reduce algorithm). Or a list of specs that may be chosen as well:
            ``["allreduce(codec=int8)", "diloco(every=50)"]``.
        steps: measured before the decision. More => steadier figures, and a later change.
        seconds: the time for measuring the network, once. All ranks wait meanwhile.

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
        self._recorder: Recording = NOT_RECORDING
        exact = AllReduce()
        self._inner: Strategy = exact
        self._decided = False
        self._all_have_data = False  # at the last backward; the same on all ranks
        self._why = "measuring: exact so far"
        self._timer = _StepTimer()
        self._timed_sync = _TimedSync(exact.sync, self, self._timer)
        self._training: Training | None = None
        self._wrapped: SelectedAllReduce | None = None
        self._table: Table | None = None  # the all-reduce algorithms, if others than the transport's own are faster

    def spec_arguments(self) -> dict[str, Any]:
        """The arguments for its spec."""
        return {"allow": self._allow, "steps": self.steps, "seconds": self.seconds}

    # -- the decision ---------------------------------------------------------------------------------------------

    def after_step(self, step: int) -> None:
        self._inner.after_step(step)
        if self._decided:
            return
        self._timer.end_step()
        # A rank without data takes part in backwards, but not in steps: it would be missing in _decide().
        if step >= WARM_UP_STEPS + self.steps and self._timer.steps and self._all_have_data:
            try:
                self._decide()
            except BaseException:  # a lost peer: the others may go on, and decide later
                self._decided, self._table, self._wrapped = False, None, None
                raise

    def _decide(self) -> None:
        """Measure, ask the advisor, and switch. Blocks: all ranks call it after the same step."""
        from gradsync.advisor import Choice, measure_costs, measure_network  # it imports the strategies

        self._decided = True
        if self.comm.world_size == 1:
            self._why = "one worker: nothing to choose"
            return
        self._timer.steps = self._timer.steps[-self.steps :]
        choices, measured = self._choices(), self._measured(max(map(len, ranks_by_host(hosts_of(self.comm)))))
        network = recorded_on = measure_network(self.comm, seconds=self.seconds)
        self._table = _broadcast_table(self.comm, autotune(self.comm, max(b.num_bytes for b in self.plan.buckets)))
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
            log.info("auto, after %d steps: %s", len(self._timer.steps), self._why)

    def _ask(self, measured: Any, network: Any, recorded_on: Any, costs: Any, choices: Any) -> list[Any]:
        from gradsync.advisor import advise

        allow = "exact" if isinstance(self._allow, str) else [spec.render(each) for each in self._allow]
        advice = advise(measured, network, costs=costs, allow=allow, choices=choices, recorded_on=recorded_on)
        best = advice.best.choice
        choice = f"{best} (a step of {advice.now.step_s * 1e3:.0f} ms, {advice.best.step_s * 1e3:.0f} expected)"
        why = f"{choice}: {advice.sentence}" if advice.change else f"exact all-reduce stays: {advice.sentence}"
        if self._table is not None:
            why = f"all-reduces by {self._table.rules[-1][1]}, which is faster here; {why}"
        return [best.strategy, best.bucket_bytes, why]

    def _choices(self) -> list[Any]:
        """What may be chosen: bucket sizes, unless the user has set one, and the allowed specs."""
        from gradsync.advisor import Choice, default_choices

        found = [Choice("allreduce")]
        usual = plan_buckets([(slot.name, slot.param) for bucket in self.plan.buckets for slot in bucket.slots])
        if usual == self.plan.layout:
            found = [choice for choice in default_choices() if choice.strategy == "allreduce"]
        if not isinstance(self._allow, str):
            found += [Choice(spec.render(each)) for each in self._allow]
        return found

    def _measured(self, ranks_per_host: int) -> Any:
        """The typical step of this rank, as the advisor reads it."""
        from gradsync.advisor import Measurement
        from gradsync.advisor.measurement import gradients_of

        timer, buckets = self._timer, self.plan.buckets
        backward_start, backward_end = timer.median("backward_start"), timer.median("backward_end")
        step_end = timer.median("step_end")
        ready = {bucket.slots[-1].name: max(backward_start, timer.ready(bucket.index)) for bucket in buckets}
        last = min(backward_end, max(ready.values()))
        params = [(slot.name, slot.param) for bucket in buckets for slot in bucket.slots]
        return Measurement(
            exact_bucket_bytes=self.comm.bucket_bytes or BUCKET_BYTES,
            gradients=gradients_of(params, ready),
            forward_s=backward_start,
            backward_s=last - backward_start,
            exposed_s=backward_end - last,
            after_s=max(0.0, step_end - backward_end),
            world_size=self.comm.world_size,
            ranks_per_host=ranks_per_host,
            cores_per_host=len(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
        )

    def _switch(self, strategy: str, bucket_bytes: int | None) -> None:
        before, self._inner = self._inner, spec.parse(strategy, "strategy")
        before.close()
        self._inner.recorder = self._recorder
        self._inner.elastic_session, self._inner.undoable = self.elastic_session, self.undoable
        assert self._training is not None, "setup() comes first"
        self._inner.setup(self._training)
        self._inner.attach(self.plan, self.comm)
        # The engine changes the bucket layout before the next backward, if this is not its size already.
        self.wanted_bucket_bytes = bucket_bytes or self._inner.bucket_bytes_on(self.comm)

    # -- forwarded to the inner strategy --------------------------------------------------------------------------

    @property
    def recorder(self) -> Recording:
        return self._recorder

    @recorder.setter
    def recorder(self, recorder: Recording) -> None:
        self._recorder = self._inner.recorder = recorder

    @property
    def change_agreed(self) -> bool:
        return self._inner.change_agreed

    @change_agreed.setter
    def change_agreed(self, agreed: bool) -> None:
        self._inner.change_agreed = agreed

    def setup(self, training: Training) -> None:
        self._training = training
        for strategy in [self._inner, *([] if isinstance(self._allow, str) else self._allow)]:
            strategy.elastic_session, strategy.undoable = self.elastic_session, self.undoable
        self._inner.setup(training)
        for strategy in [] if isinstance(self._allow, str) else self._allow:
            strategy.setup(training)  # so that it refuses what it can't do now, and not in the middle of a run

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        if isinstance(comm, SelectedAllReduce):
            pass  # it chooses its own algorithms
        elif self._wrapped is not None and self._wrapped.inner is not comm:
            self._table = self._wrapped = None  # measured between other ranks
        elif self._table is not None:
            comm = self._wrapped = self._wrapped or SelectedAllReduce(comm, [self._table], hosts_of(comm))
        if not self._decided:
            self._timer.steps.clear()  # they were measured with other buckets
        super().attach(plan, comm)
        self._inner.attach(plan, comm)

    def bucket_bytes_on(self, comm: Communicator) -> int:
        return self._inner.bucket_bytes_on(comm)

    def gradient_sync(self, step: int) -> GradientSync | None:
        inner = self._inner.gradient_sync(step)
        if inner is None or self._decided:
            return inner
        self._timed_sync.inner = inner
        return self._timed_sync

    def note_headers(self, headers: StepHeaders) -> None:
        """A measured backward is about to end, with these headers."""
        self._all_have_data = headers.all_have_data

    def end_local_backward(self, header: Header) -> None:
        self._inner.end_local_backward(header)

    def own_step(self) -> OwnStep | None:
        return self._inner.own_step()

    def before_step(self, step: int) -> Verdict:
        return self._inner.before_step(step)

    def skipped_step(self, step: int) -> None:
        self._inner.skipped_step(step)
        self._timer.end_step()

    def elastic_obstacle(self) -> str:
        possible = [self._inner] if self._decided or isinstance(self._allow, str) else [self._inner, *self._allow]
        found = ((strategy, strategy.elastic_obstacle()) for strategy in possible)
        return next((f"{spec.render(strategy)}: {obstacle}" for strategy, obstacle in found if obstacle), "")

    def discard_step(self) -> None:
        self._inner.discard_step()
        self._timer.drop_step()

    def accept_step(self, shared: dict[str, Any]) -> list[str]:
        self._timer.drop_step()
        return self._inner.accept_step(shared["inner"])

    def commit_number(self, step: int) -> int:
        return self._inner.commit_number(step)

    def agree_again(self) -> None:
        """Agree on the decision: some ranks may have switched when a lost peer interrupted the others."""
        decision = [spec.render(self._inner), self._why, self.wanted_bucket_bytes] if self._decided else None
        decisions = [each for each in all_gather_object(self.comm, decision) if each is not None]
        if decisions and not self._decided:
            strategy, self._why, bucket_bytes = decisions[0]
            if strategy != spec.render(self._inner):
                self._switch(strategy, None)
            self._decided, self.wanted_bucket_bytes = True, bucket_bytes
        self._inner.agree_again()

    def retry_exchange(self) -> None:
        self._inner.retry_exchange()

    def steps_since_exchange(self) -> int:
        return self._inner.steps_since_exchange()

    def state_for_newcomer(self) -> dict[str, Any]:
        return {**self.state_dict(), "inner": self._inner.state_for_newcomer()}

    def join_run(self, state: dict[str, Any]) -> None:
        self._load_decision(state)
        self._inner.join_run(state["inner"])

    def diverge_obstacle(self) -> str:
        return self._inner.diverge_obstacle()

    def merge_sides(self, comm: Communicator, share: float) -> float:
        return self._inner.merge_sides(comm, share)

    def shared_state(self) -> dict[str, Any]:
        return {"inner": self._inner.shared_state()}

    def settle(self) -> None:
        self._inner.settle()

    def join(self) -> int | None:
        return self._inner.join()

    def joined(self) -> None:
        self._inner.joined()

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
        self._load_decision(state)
        self._inner.load_state_dict(state["inner"])

    def _load_decision(self, state: dict[str, Any]) -> None:
        if state["chosen"] is not None:  # the decision stays; the buckets come with the engine's state
            self._decided, self._why = True, state["why"]
            if state["algorithms"] is not None:
                (self._table,) = parse_tables({"format": FORMAT, "tables": [state["algorithms"]]})
                self.attach(self.plan, self.comm)
            if state["chosen"] != spec.render(self._inner):
                self._switch(state["chosen"], None)
                self.wanted_bucket_bytes = None

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        inner = self._inner
        if states[0]["chosen"] is not None:
            inner = spec.parse(states[0]["chosen"], "strategy")
        merged = inner.redistribute([state["inner"] for state in states], rank, world_size)
        return {**states[0], "inner": merged}

    def placement(self, path: tuple[str, ...]) -> Placement:
        if path[0] in ("chosen", "why"):
            return Placement.SHARED
        return Placement.VARYING  # the state of another strategy, once one is chosen


def _broadcast_table(comm: Communicator, table: Table | None) -> Table | None:
    """Rank 0's table, on all ranks: a table holds a machine's name, and must be the same everywhere."""
    received = broadcast_object(comm, None if table is None else table.as_json(), src=0)
    return None if received is None else parse_tables({"format": FORMAT, "tables": [received]})[0]


class _TimedSync(ForwardingSync):
    """The gradient sync of the steps that are measured: it marks their events in the timer."""

    def __init__(self, inner: GradientSync, strategy: Auto, timer: _StepTimer) -> None:
        super().__init__(inner)
        self._strategy = strategy
        self._timer = timer

    def begin_step(self, header: Header) -> None:
        self._timer.mark("backward_start")
        super().begin_step(header)

    def launch(self, bucket: Bucket) -> None:
        self._timer.mark_bucket(bucket.index)
        super().launch(bucket)

    def finish(self) -> None:
        headers = self.headers(block=True)
        assert headers is not None
        self._strategy.note_headers(headers)
        super().finish()
        self._timer.mark("backward_end")
