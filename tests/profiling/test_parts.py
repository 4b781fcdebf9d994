"""From raw marks to step records: planted times come out as planted."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradsync.profiling import Breakdown, StepRecord, load, typical
from gradsync.profiling.parts import build_record, last_rank_starts
from gradsync.profiling.raw import DECODE, ENCODE, JOIN, STRATEGY_COMM, WAIT, Op, RawStep
from gradsync.profiling.record import PARTS
from gradsync.replicas.header import PreviousStepTiming, StepTimings
from tests.profiling.raw_records import MS, PLAN, a_step, write_rank, write_run


def parts_ms(parts: Breakdown) -> dict[str, float]:
    names = ("compute", "pack", "encode", "decode", "waiting", "wire")
    return {name: round(getattr(parts, f"{name}_s") * 1e3, 6) for name in names}


@pytest.mark.parametrize(("late_ms", "wire_ms"), [(0, 30), (40, 30), (40, 3), (200, 300)])
def test_record_separates_waiting_from_wire(tmp_path: Path, late_ms: int, wire_ms: int) -> None:
    run = load(write_run(tmp_path, late_ms=late_ms, wire_ms=wire_ms))
    quick, slow = (parts_ms(run.steps(rank)[3].parts) for rank in range(2))
    assert quick == {"compute": 60, "pack": 2, "encode": 0, "decode": 0, "waiting": late_ms, "wire": wire_ms}
    assert slow == {"compute": 60 + late_ms, "pack": 2, "encode": 0, "decode": 0, "waiting": 0, "wire": wire_ms}


def test_record_separates_codecs_from_wire(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, late_ms=10, codec=True))
    assert parts_ms(run.steps(0)[0].parts) == {
        "compute": 60,
        "pack": 2,
        "encode": 3,
        "decode": 4,
        "waiting": 10,
        "wire": 30,
    }


def test_record_parts_add_up_to_the_step(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, late_ms=25, codec=True))
    for rank in range(2):
        for step in run.steps(rank):
            assert step.parts.step_s == pytest.approx(step.step_s, rel=1e-9)


def test_bucket_record_separates_waiting_wire_and_exposed(tmp_path: Path) -> None:
    first, second = load(write_run(tmp_path, late_ms=40)).steps(0)[2].buckets
    assert (first.num_bytes, first.sent_bytes) == (4_000_000, 4_000_000)
    assert first.ready_s == pytest.approx(0.050)
    assert first.started_s == pytest.approx(0.062)
    assert first.all_started_s == pytest.approx(0.102)
    assert first.done_s == pytest.approx(0.112)
    assert first.waiting_s == pytest.approx(0.040)
    assert first.wire_s == pytest.approx(0.010)
    assert first.exposed_s == pytest.approx(0.050)
    assert second.wire_s == pytest.approx(0.020)  # from the end of the first: they share the wire
    assert second.exposed_s == pytest.approx(0.020)


def test_run_corrects_clock_offsets(tmp_path: Path) -> None:
    ahead_ms = 3_600_000
    write_rank(tmp_path, 0, [a_step(n, 0, late_ms=40) for n in range(8)], error_ms=2)
    ahead = [a_step(n, 1, late_ms=40, ahead_ms=ahead_ms) for n in range(8)]
    write_rank(tmp_path, 1, ahead, offset_ms=-ahead_ms, error_ms=2)
    run = load(tmp_path)
    quick, slow = run.steps(0)[3], run.steps(1)[3]
    assert parts_ms(quick.parts)["waiting"] == 40
    assert parts_ms(slow.parts)["waiting"] == 0
    assert quick.began_s == pytest.approx(slow.began_s)


def test_run_narrows_an_offset_that_was_measured_badly(tmp_path: Path) -> None:
    """Rank 1's clock is an hour ahead; the measured offset is 80 ms off."""
    ahead_ms = 3_600_000
    write_rank(tmp_path, 0, [a_step(n, 0, late_ms=40) for n in range(8)], error_ms=90)
    write_rank(
        tmp_path,
        1,
        [a_step(n, 1, late_ms=40, ahead_ms=ahead_ms) for n in range(8)],
        offset_ms=-ahead_ms - 80,  # 80 ms wrong: more than the collectives allow
        error_ms=90,
    )
    parts = parts_ms(load(tmp_path).steps(0)[3].parts)
    # The bound: rank 1 finished at least 70 ms after rank 0 had entered; 30 ms of it are wire.
    assert parts["waiting"] + parts["wire"] == pytest.approx(70)
    assert 0 <= parts["waiting"] <= 70


def test_record_attributes_a_join_to_the_background_thread() -> None:
    raw = RawStep(0)
    raw.step, raw.opened, raw.backward, raw.end = 0, 10 * MS, 60 * MS, 100 * MS
    raw.ops = [Op(0, 0, "all_to_all", 10, 50 * MS, done=80 * MS, seen=True)]
    raw.spans = [
        (ENCODE, 0, 40 * MS, 50 * MS, False),  # hidden behind backward
        (WAIT, 0, 50 * MS, 80 * MS, False),  # 20 ms of it after backward
        (DECODE, 0, 80 * MS, 95 * MS, False),
        (JOIN, -1, 60 * MS, 98 * MS, True),
    ]
    parts = parts_ms(build_record(raw, [65 * MS], [PLAN], rank=0).parts)
    assert parts == {"compute": 60, "pack": 5, "encode": 0, "decode": 15, "waiting": 5, "wire": 15}


def test_record_counts_communication_around_the_optimizer_as_wire() -> None:
    raw = RawStep(0)
    raw.step, raw.opened, raw.backward, raw.end = 0, 50 * MS, 99 * MS, 100 * MS
    raw.spans = [(STRATEGY_COMM, -1, 10 * MS, 30 * MS, True)]
    parts = parts_ms(build_record(raw, [], [PLAN], rank=0).parts)
    assert parts == {"compute": 79, "pack": 1, "encode": 0, "decode": 0, "waiting": 0, "wire": 20}


def test_last_rank_starts_separates_waiting_from_wire() -> None:
    raws = [a_step(5, rank, late_ms=40) for rank in range(2)]
    sent = [PreviousStepTiming(5, raw.opened / 1e3, raw.ops[1].called / 1e3, 62_000.0) for raw in raws]
    timings = StepTimings(
        step=5,
        last_opened_us=max(timing.opened_us for timing in sent),
        last_begun_us=max(timing.begun_us for timing in sent),
        busy_us={rank: timing.busy_us for rank, timing in enumerate(sent)},
    )
    for raw, timing in zip(raws, sent, strict=True):
        raw.own_timing, raw.timings = timing, timings
    quick = build_record(raws[0], last_rank_starts(raws[0], 0), [PLAN], rank=0)
    assert parts_ms(quick.parts) | {"pack": 2} == {
        "compute": 60,
        "pack": 2,
        "encode": 0,
        "decode": 0,
        "waiting": 40,
        "wire": 30,
    }
    slow = build_record(raws[1], last_rank_starts(raws[1], 0), [PLAN], rank=1)
    assert parts_ms(slow.parts)["waiting"] == 0


def test_typical_leaves_out_warm_up_and_outliers() -> None:
    parts = Breakdown(compute_s=0.1)
    steps = [StepRecord(step=n, rank=0, began_s=0.0, step_s=10.0 if n == 7 else 0.1, parts=parts) for n in range(10)]
    assert [step.step for step in typical(steps)] == [2, 3, 4, 5, 6, 8, 9]
    assert [step.step for step in typical(steps[:2])] == [0, 1]  # better than nothing
    assert typical([]) == []


def test_record_survives_json(tmp_path: Path) -> None:
    record = load(write_run(tmp_path)).steps(1)[4]
    assert record.gradients[0][0] == "head.bias"
    assert StepRecord.from_dict(record.as_dict()) == record


def test_record_spans_agree_with_its_parts(tmp_path: Path) -> None:
    """Waiting in the header's collective counts as waiting, and so does waiting in a later stage."""
    for rank in range(2):
        steps = []
        for number in range(4):
            raw = a_step(number, rank, late_ms=40, wire_ms=30)
            at = raw.start + 70 * MS if rank == 1 else raw.start + 30 * MS  # rank 1 opens its step 40 ms later
            raw.ops[0].called, raw.ops[0].done = at, raw.start + 71 * MS
            if rank == 0:
                raw.spans.insert(0, (WAIT, 0, at, raw.start + 71 * MS, True))
                raw.hook_ns += 41 * MS
            steps.append(raw)
        write_rank(tmp_path, rank, steps)
    record = load(tmp_path).steps(0)[-1]
    drawn = {why: [span for span in record.spans if span.kind == "stopped" and span.name == why] for why in PARTS}
    for why, total_s in (("waiting", record.parts.waiting_s), ("wire", record.parts.wire_s)):
        assert sum(span.end_s - span.start_s for span in drawn[why]) == pytest.approx(total_s, abs=1e-4)
    header = [span for span in drawn["waiting"] if span.bucket == -1]
    assert [span.end_s - span.start_s for span in header] == [pytest.approx(0.040)]
    gather = next(span for span in record.spans if span.name == "all_gather")
    assert gather.all_started_s == pytest.approx(0.070)
