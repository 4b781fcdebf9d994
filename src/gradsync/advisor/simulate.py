"""A discrete-event simulation of one training step: compute, encode, wire and decode. Pure and deterministic.

All ranks are assumed to be alike, so one of them is simulated. Three things run: the main thread, a background thread
where the reducer has one, and the wire, which carries one transfer after the other. They affect each other:

- [Note: shared core] Without a spare core, threads that run at the same time run at half speed each.
- [Note: stolen cycles] While bytes move, the transport takes a part of the core from the thread that computes; and the
  transport itself is slower while a thread computes.

Time advances from event to event: at each, everything that runs has a rate, and the first to end is the next event.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gradsync.advisor.network import Network

TINY_S = 1e-12  # less is a rounding error
MAX_STOLEN = 0.9  # the most of a computing core that the transport takes: the scheduler is fair


@dataclass(frozen=True)
class StageWork:
    """One stage of a bucket: computing, and the collective that follows it."""

    cpu_s: float
    num_bytes: float  # that this rank sends
    rounds: int = 2  # of messages, one after the other
    half: bool = False  # the transport sums 16-bit floats


@dataclass(frozen=True)
class BucketWork:
    """The work for one bucket, from its last gradient to its mean."""

    stages: tuple[StageWork, ...]
    finish_s: float = 0.0  # computing after the last collective


@dataclass(frozen=True)
class Program:
    """The step to simulate. ``backward``: pieces of computing, each with the buckets it completes, in plan order."""

    forward_s: float
    backward: tuple[tuple[float, tuple[int, ...]], ...]
    buckets: tuple[BucketWork, ...]
    after_s: float
    threaded: bool = False  # a background thread reduces the buckets; else hooks and the end of backward do
    spare_core: bool = False


@dataclass(frozen=True)
class SimulatedSpan:
    """What was computed or sent in an interval: for a timeline."""

    what: str  # "compute", "encode", "decode", "wire"
    start_s: float
    end_s: float
    bucket: int | None = None


@dataclass
class Timeline:
    """The result of a simulated step."""

    step_s: float = 0.0
    last_gradient_s: float = 0.0
    exposed_s: float = 0.0  # from the last gradient to the last mean
    work_s: float = 0.0  # encoding and decoding, on any thread
    wire_s: float = 0.0  # while the wire was busy
    spans: list[SimulatedSpan] = field(default_factory=list)


def simulate(program: Program, network: Network) -> Timeline:
    """Run a step.

    >>> from gradsync.advisor import Network
    >>> from gradsync.advisor.simulate import BucketWork, Program, StageWork, simulate
    >>> wire = Network(name="test", bytes_per_s=100, busy_bytes_per_s=100, call_s=0, busy_call_s=0, cpu_s_per_byte=0)
    >>> buckets = tuple(BucketWork((StageWork(0.0, 100),)) for _ in range(2))        # a second on the wire each
    >>> step = simulate(Program(1.0, ((0.5, (0,)), (0.5, (1,))), buckets, 0.25), wire)
    >>> step.step_s, step.exposed_s                         # the first bucket's second half, and the second bucket
    (3.75, 1.5)
    """
    return _Simulation(program, network).run()


Until = Callable[[], bool]
Steps = Iterator["float | Until"]  # seconds of work, or a condition to wait for


class _Thread:
    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.left_s = 0.0
        self.until: Until | None = None
        self.finished = False

    @property
    def running(self) -> bool:
        return not self.finished and self.until is None

    def start_next(self) -> bool:
        """Start the next piece of work if the current one is done; returns whether anything has changed."""
        if self.finished or self.left_s > TINY_S or (self.until is not None and not self.until()):
            return False
        self.until = None
        try:
            step = next(self.steps)
        except StopIteration:
            self.finished = True
            return True
        if callable(step):
            self.until = step
        else:
            self.left_s = step
        return True


@dataclass
class _Transfer:
    key: tuple[int, int]
    left: float
    rounds: int
    start_s: float
    num_bytes: float
    extra_s: float = 0.0  # the transport's own work for each byte


class _Simulation:
    def __init__(self, program: Program, network: Network) -> None:
        self.program, self.network = program, network
        self.now_s = 0.0
        self.timeline = Timeline()
        self.credit = network.burst_bytes
        self.queue: list[_Transfer] = []
        self.arrives: dict[tuple[int, int], float] = {}
        self.ready: set[int] = set()
        threads = [_Thread(self._main())]
        if program.threaded:
            threads.append(_Thread(self._driver()))
        self.threads = threads

    def run(self) -> Timeline:
        main = self.threads[0]
        while True:
            while sum(thread.start_next() for thread in self.threads):
                pass
            if main.finished:
                break
            self._run_to_next_event()
        self.timeline.step_s = self.now_s
        return self.timeline

    def _run_to_next_event(self) -> None:
        running = [thread for thread in self.threads if thread.running]
        moving = bool(self.queue)
        extra_s = self.queue[0].extra_s if moving else 0.0
        wire_rate = self.network.busy_bytes_per_s if running else self.network.bytes_per_s
        wire_rate = 1.0 / (1.0 / wire_rate + extra_s)
        speed = 1.0 if self.program.spare_core or len(running) < 2 else 1.0 / len(running)  # [Note: shared core]
        if moving:  # [Note: stolen cycles]
            speed *= 1.0 - min(MAX_STOLEN, wire_rate * (self.network.cpu_s_per_byte + extra_s))
        waits = [thread.left_s / speed for thread in running]
        if moving:
            waits.append(self.queue[0].left / wire_rate)
        waits += [when - self.now_s for when in self.arrives.values() if when > self.now_s]
        assert waits, "a thread waits for an event that never happens"
        taken_s = min(waits)
        for thread in running:
            thread.left_s -= taken_s * speed
        if moving:
            self.timeline.wire_s += taken_s
            self.queue[0].left -= taken_s * wire_rate
        else:
            self.credit = min(self.network.burst_bytes, self.credit + taken_s * self.network.bytes_per_s)
        self.now_s += taken_s
        if moving and self.queue[0].left <= TINY_S * wire_rate:
            self._arrive(self.queue.pop(0), busy=bool(running))

    # -- the wire -------------------------------------------------------------------------------------------------

    def _send(self, bucket: int, number: int) -> None:
        stage = self.program.buckets[bucket].stages[number]
        free = min(self.credit, stage.num_bytes)
        self.credit -= free
        extra_s = self.network.half_s_per_byte if stage.half else 0.0
        transfer = _Transfer(
            (bucket, number), stage.num_bytes - free, stage.rounds, self.now_s, stage.num_bytes, extra_s
        )
        if transfer.left <= 0.0 and not self.queue:
            self._arrive(transfer, busy=any(thread.running for thread in self.threads))
        else:
            self.queue.append(transfer)

    def _arrive(self, transfer: _Transfer, *, busy: bool) -> None:
        late_s = self.network.rounds_s(transfer.rounds, busy=busy) if transfer.num_bytes else 0.0
        self.arrives[transfer.key] = self.now_s + late_s
        self._add_span("wire", transfer.start_s, transfer.key[0], end_s=self.now_s + late_s)

    def _has_arrived(self, bucket: int, number: int) -> bool:
        return self.arrives.get((bucket, number), float("inf")) <= self.now_s + TINY_S

    # -- the threads ----------------------------------------------------------------------------------------------

    def _main(self) -> Steps:
        program = self.program
        start_s = self.now_s
        yield program.forward_s
        for seconds, complete in program.backward:
            yield seconds
            for bucket in complete:
                if program.threaded:
                    self.ready.add(bucket)
                    continue
                self._add_span("compute", start_s, None)
                yield from self._work("encode", bucket, program.buckets[bucket].stages[0].cpu_s)
                self._send(bucket, 0)
                start_s = self.now_s
        self._add_span("compute", start_s, None)
        self.timeline.last_gradient_s = self.now_s
        if program.threaded:
            yield lambda: self.threads[1].finished
        else:
            for bucket in range(len(program.buckets)):
                yield from self._finish(bucket)
        self.timeline.exposed_s = self.now_s - self.timeline.last_gradient_s
        start_s = self.now_s
        yield program.after_s
        self._add_span("compute", start_s, None)

    def _driver(self) -> Steps:
        """As reducers/background.py: one bucket's stages after the other; completed buckets are decoded in between."""
        in_flight: list[int] = []
        for bucket, work in enumerate(self.program.buckets):
            while bucket not in self.ready:
                yield functools.partial(self._has_work, bucket, in_flight)
                for other in [each for each in in_flight if self._last_stage_has_arrived(each)]:
                    if bucket in self.ready:
                        break
                    in_flight.remove(other)
                    yield from self._finish(other)
            for number, stage in enumerate(work.stages):
                if number:
                    yield functools.partial(self._has_arrived, bucket, number - 1)
                yield from self._work("encode", bucket, stage.cpu_s)
                self._send(bucket, number)
            in_flight.append(bucket)
        for bucket in in_flight:
            yield from self._finish(bucket)

    def _has_work(self, bucket: int, in_flight: list[int]) -> bool:
        return bucket in self.ready or any(self._last_stage_has_arrived(other) for other in in_flight)

    def _finish(self, bucket: int) -> Steps:
        yield lambda: self._last_stage_has_arrived(bucket)
        yield from self._work("decode", bucket, self.program.buckets[bucket].finish_s)

    def _last_stage_has_arrived(self, bucket: int) -> bool:
        return self._has_arrived(bucket, len(self.program.buckets[bucket].stages) - 1)

    def _work(self, what: str, bucket: int, seconds: float) -> Steps:
        start_s = self.now_s
        self.timeline.work_s += seconds
        yield seconds
        self._add_span(what, start_s, bucket)

    def _add_span(self, what: str, start_s: float, bucket: int | None, *, end_s: float | None = None) -> None:
        end_s = self.now_s if end_s is None else end_s
        if end_s > start_s:
            self.timeline.spans.append(SimulatedSpan(what, start_s, end_s, bucket))
