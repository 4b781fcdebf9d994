"""The recorder by events of a stream, on a fake GPU: its stream passes events when the test says so."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import gradsync
from gradsync.profiling.clocks import same_clock
from gradsync.profiling.gpu import MAX_UNREAD_STEPS, GpuRecorder
from gradsync.profiling.recorder import Recorder


class Gpu:
    """A stream on which every event is a millisecond after the one before."""

    at_ms = 0.0
    behind = False  # True: the GPU has not passed any event yet


class FakeEvent:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0

    def record(self) -> None:
        Gpu.at_ms += 1.0
        self.at_ms = Gpu.at_ms

    def query(self) -> bool:
        return not Gpu.behind

    def synchronize(self) -> None:
        assert self.at_ms >= 0.0, "an event that was not recorded is never passed"

    def elapsed_time(self, later: FakeEvent) -> float:
        return later.at_ms - self.at_ms


def train(recorder: Recorder, steps: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gradsync.synchronize(model, optimizer)
    engine: Any = sync._engine
    engine.recorder = engine.strategy.recorder = recorder
    engine._adopt_plan()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    sync.close()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> GpuRecorder:
    monkeypatch.setattr(torch, "Event", FakeEvent)
    Gpu.behind, Gpu.at_ms = False, 0.0
    return GpuRecorder(gradsync.connect(), same_clock(1))


def test_gpu_recorder_turns_events_into_times(recorder: GpuRecorder) -> None:
    recorder.detailed = True
    train(recorder, 4)
    steps = recorder.steps()
    assert [step.step for step in steps] == [0, 1, 2, 3]
    for before, step in itertools.pairwise(steps):
        assert before.began_s + before.step_s == pytest.approx(step.began_s)
    step = steps[2]
    assert step.parts.step_s == pytest.approx(step.step_s)
    assert step.step_s * 1e3 == pytest.approx(round(step.step_s * 1e3))  # whole milliseconds, as on the fake stream
    assert 0.0 < step.opened_s < step.backward_s < step.step_s
    assert len(step.gradients) == 4


def test_gpu_recorder_waits_only_for_a_gpu_that_is_far_behind(recorder: GpuRecorder) -> None:
    Gpu.behind = True
    train(recorder, MAX_UNREAD_STEPS)
    assert recorder.steps() == []
    Gpu.behind = False
    train(recorder, 1)
    assert len(recorder.steps()) == MAX_UNREAD_STEPS + 1
    Gpu.behind = True
    train(recorder, MAX_UNREAD_STEPS + 3)
    assert len(recorder.steps()) == MAX_UNREAD_STEPS + 1 + 3
