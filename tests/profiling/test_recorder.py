"""The recorder under a real engine: its records, its cost in collectives, its listeners."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync.comm import Communicator
from gradsync.profiling import Breakdown, StepRecord, load, set_recording
from gradsync.profiling.clocks import same_clock
from gradsync.profiling.recorder import Recorder
from gradsync.profiling.start import StepsDone
from gradsync.testing import run_ranks
from gradsync.testing.threads import Threads

STRATEGIES = ("allreduce", "allreduce(codec=int8)", "allreduce(reducer=powersgd(rank=1))", "allreduce(codec=fp16)")


@pytest.fixture(autouse=True)
def _reset_recording() -> Iterator[None]:
    yield
    set_recording()


def train(
    comm: Communicator,
    strategy: str = "allreduce",
    *,
    steps: int = 6,
    before: Callable[[int], None] = lambda step: None,
    watch: Callable[[gradsync.Synchronizer], None] = lambda sync: None,
    **options: Any,
) -> gradsync.Synchronizer:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"bucket_bytes": 20_000, "first_bucket_bytes": 10_000} | options
    sync = gradsync.synchronize(model, optimizer, strategy, comm=comm, **options)
    watch(sync)
    data = torch.Generator().manual_seed(comm.rank)
    for step in range(steps):
        optimizer.zero_grad()
        before(step)
        model(torch.randn(4, 48, generator=data)).square().mean().backward()
        optimizer.step()
    return sync


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recorder_records_every_step(strategy: str, world_size: int) -> None:
    def work(comm: Communicator) -> tuple[list[StepRecord], int, int]:
        sync = train(comm, strategy)
        stats = sync.stats()
        return sync.record.steps(), stats["bytes_per_step"], len(stats["bucket_bytes"])

    for rank, (steps, bytes_per_step, num_buckets) in enumerate(run_ranks(world_size, work)):
        assert [step.step for step in steps] == list(range(6 if world_size == 1 else 5))  # the last is not complete yet
        for before, step in itertools.pairwise(steps):
            assert before.began_s + before.step_s == pytest.approx(step.began_s, abs=1e-9)  # no gap
        for step in steps[2:]:
            assert step.rank == rank
            assert step.parts.step_s == pytest.approx(step.step_s, rel=1e-6)
            assert all(value >= 0.0 for value in vars_of(step.parts).values())
            assert 0.0 < step.optimizer_s < step.opened_s <= step.backward_s <= step.step_s
            assert len(step.buckets) == num_buckets
            assert abs(step.sent_bytes - bytes_per_step) <= 2 * num_buckets  # rounded in other places
            for bucket in step.buckets:
                assert 0.0 <= bucket.ready_s <= bucket.started_s <= bucket.all_started_s
                assert bucket.started_s <= bucket.done_s <= step.step_s


def vars_of(parts: Breakdown) -> dict[str, float]:
    return {name: getattr(parts, f"{name}_s") for name in ("compute", "pack", "encode", "decode", "waiting", "wire")}


def test_recorder_sees_encoding_and_decoding() -> None:
    def work(comm: Communicator, strategy: str) -> list[StepRecord]:
        return train(comm, strategy).record.steps()[2:]

    for world_size in (2, 3):  # in hooks, and in a background thread
        for steps in run_ranks(world_size, lambda comm: work(comm, "allreduce(codec=int8)")):
            assert all(bucket.encode_s > 0.0 and bucket.decode_s > 0.0 for step in steps for bucket in step.buckets)
            in_background = any(span.kind == "encode" and not span.main for step in steps for span in step.spans)
            assert in_background == (world_size == 3)


@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_recorder_adds_no_collective(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    lock = threading.Lock()
    names = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "broadcast", "send", "recv", "barrier")

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(Threads, name)

        def call(self: Threads, *args: Any, **kwargs: Any) -> Any:
            with lock:
                calls[name] += 1
            return original(self, *args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(Threads, name, counted(name))

    def per_step(*, enabled: bool) -> Counter[str]:
        set_recording(enabled=enabled)
        counts = []
        for steps in (4, 9):
            calls.clear()
            run_ranks(2, lambda comm, steps=steps: train(comm, strategy, steps=steps).close())
            counts.append(Counter(calls))
        return counts[1] - counts[0]

    plain, recorded = per_step(enabled=False), per_step(enabled=True)
    assert plain == recorded
    assert plain["all_reduce"] >= 20  # two for each of five headers, on two ranks: something was counted


def test_recorder_finds_the_straggler_on_every_rank() -> None:
    """Rank 1 sleeps; sleeping takes at least so long, so whatever else the machine does, rank 1 is the slowest."""

    def work(comm: Communicator) -> dict[str, Any]:
        return train(comm, steps=9, before=lambda step: time.sleep(0.05) if comm.rank == 1 else None).stats()

    quick, slow = run_ranks(2, work)
    assert quick["straggler"] == slow["straggler"] == 1
    assert quick["busy_s"] == slow["busy_s"]
    assert quick["breakdown"]["waiting_s"] > slow["breakdown"]["waiting_s"]
    assert slow["breakdown"]["compute_s"] >= 0.05
    assert sum(value for name, value in quick["breakdown"].items() if name != "step_s") == pytest.approx(
        quick["breakdown"]["step_s"]
    )


def test_listener_gets_every_step_until_it_is_removed() -> None:
    def work(comm: Communicator) -> tuple[list[int], list[int]]:
        received: list[StepRecord] = []
        removers: list[Callable[[], None]] = []
        seen: list[int] = []

        def watch(sync: gradsync.Synchronizer) -> None:
            removers.append(sync.record.on_step(received.append))
            removers.append(sync.record.on_step(lambda record: seen.append(record.step)))

        def before(step: int) -> None:
            if step == 4:
                removers[0]()
                removers[0]()  # twice is no harm

        train(comm, before=before, watch=watch)
        return [record.step for record in received], seen

    for received, seen in run_ranks(2, work):
        assert received == [0, 1, 2]  # one step late
        assert seen == [0, 1, 2, 3, 4]


def test_listener_of_one_rank_gets_every_step_once() -> None:
    received: list[int] = []
    sync = train(gradsync.connect(), watch=lambda sync: sync.record.on_step(lambda r: received.append(r.step)) and None)
    assert received == [0, 1, 2, 3, 4, 5]
    assert len(sync.stats()["busy_s"]) == 1


def test_recorder_learns_the_busy_times_of_many_ranks_over_several_steps() -> None:
    def work(comm: Communicator) -> list[int]:
        known = []
        train(comm, steps=6, watch=lambda sync: known.append(sync), before=lambda step: known.append(known[0].stats()))
        return [len(stats["busy_s"]) for stats in known[1:]]

    num_ranks = 18  # the headers of a step bring 16 times, one step late; the first two steps do not count
    for lengths in run_ranks(num_ranks, work):
        assert lengths == [0] * 5 + [num_ranks]


def test_listener_that_raises_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    def fails(record: StepRecord) -> None:
        raise ConnectionError("the dashboard is down")

    with caplog.at_level(logging.ERROR, logger="gradsync"):
        sync = train(gradsync.connect(), watch=lambda sync: sync.record.on_step(fails) and None)
    assert sync.stats()["step"] == 6
    assert len(caplog.records) == 1
    assert "is called for no more steps" in caplog.text
    assert "the dashboard is down" in caplog.text


def test_recorder_keeps_only_the_last_steps() -> None:
    set_recording(keep_steps=3)
    sync = train(gradsync.connect(), steps=8)
    assert [step.step for step in sync.record.steps()] == [5, 6, 7]


def test_set_recording_turns_recording_off() -> None:
    set_recording(enabled=False)
    sync = train(gradsync.connect())
    assert "breakdown" not in sync.stats()
    with pytest.raises(ValueError, match="nothing is recorded here"):
        sync.record  # noqa: B018
    with pytest.raises(ValueError, match="at least 1 step"):
        set_recording(stop_after_steps=0)
    with pytest.raises(ValueError, match="keep_steps=0"):
        set_recording(keep_steps=0)


def test_detailed_recorder_records_every_gradient() -> None:
    def watch(sync: gradsync.Synchronizer) -> None:
        sync.record.detailed = True

    step = train(gradsync.connect(), watch=watch).record.steps()[-1]
    assert [name for name, _ in step.gradients][0] in ("5.weight", "5.bias")
    assert len(step.gradients) == 12
    times = [when_s for _, when_s in step.gradients]
    assert times == sorted(times)
    assert times[0] <= step.opened_s <= times[1] <= times[-1] <= step.backward_s  # the first one opens the step


def test_recorder_counts_an_accumulation_as_one_step() -> None:
    sync = train(gradsync.connect(), accumulate=3)
    assert [step.step for step in sync.record.steps()] == [0, 1]


def test_set_recording_writes_files_and_ends_the_script(tmp_path: Path) -> None:
    set_recording(folder=tmp_path, stop_after_steps=4)

    def work(comm: Communicator) -> None:
        with pytest.raises(StepsDone) as ended:
            train(comm, steps=100)
        assert ended.value.code == 0

    work(gradsync.connect())
    run = load(tmp_path)
    assert run.num_steps == 4
    assert [step.step for step in run.steps(0)] == [0, 1, 2, 3]
    assert run.meta.strategy == "allreduce"
    assert run.meta.params["0.weight"] == ((48, 48), "float32")
    assert len(run.steps(0)[-1].gradients) == 12


def test_writer_gives_a_second_synchronizer_its_own_folder(tmp_path: Path) -> None:
    set_recording(folder=tmp_path)
    train(gradsync.connect(), steps=2).close()
    train(gradsync.connect(), steps=3).close()
    assert load(tmp_path).num_steps == 2
    assert load(tmp_path / "synchronizer-1").num_steps == 3


def test_recorder_refuses_to_keep_no_step() -> None:
    comm = gradsync.connect()
    with pytest.raises(ValueError, match="keep=0"):
        Recorder(comm, clocks=None, keep=0)  # type: ignore[arg-type]


class TickingRecorder(Recorder):
    """A recorder whose clock advances by a millisecond at every reading."""

    ticks = 0

    def now(self) -> int:
        self.ticks += 1
        return self.ticks * 1_000_000


def test_recorder_counts_time_in_hooks_as_pack() -> None:
    recorder = TickingRecorder(gradsync.connect(), same_clock(1))  # it begins at 1 ms
    recorder.buckets_planned([])
    entered = recorder.now()  # 2
    recorder.backward_started(0, has_data=True)  # 3
    recorder.grad_hook_ended(entered, "weight")  # 4
    recorder.backward_ended()  # 5
    recorder.step_ended(None, weight=1.0)  # 6
    (step,) = recorder.steps()
    assert step.step_s == pytest.approx(0.005)
    assert step.parts.pack_s == pytest.approx(0.003)  # 2 to 4, 5 to 6
    assert step.parts.compute_s == pytest.approx(0.002)


def test_recorder_separates_encoding_from_decoding() -> None:
    recorder = TickingRecorder(gradsync.connect(), same_clock(1))
    comm = recorder.instrument(gradsync.connect())
    recorder.buckets_planned([])
    recorder.backward_started(0, has_data=True)
    recorder.backward_ended()  # 3
    recorder.reducer_resumed(0)  # 4
    work = comm.all_reduce(torch.ones(4))  # begins at 5, has begun at 6
    recorder.reducer_paused()  # a collective was begun: nothing was decoded
    work.wait()  # 7 to 8
    recorder.reducer_resumed(0)  # 9
    recorder.reducer_paused()  # 10
    recorder.step_ended(None, weight=1.0)  # 11
    (step,) = recorder.steps()
    assert step.parts.encode_s == pytest.approx(0.001)
    assert step.parts.wire_s == pytest.approx(0.002)  # 5 to 6, 7 to 8
    assert step.parts.decode_s == pytest.approx(0.001)
    assert step.parts.pack_s == pytest.approx(0.004)  # the rest of 3 to 11
