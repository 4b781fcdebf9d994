"""The outcome of a step that is known one step later, as on a GPU: the same residuals, the same errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.codecs.blockwise import Blockwise
from gradsync.comm import Communicator
from gradsync.errors import NonFiniteGradient
from gradsync.reducers.adasum import _add_scaled, _add_scaled_on_device, _BucketState
from gradsync.reducers.compressed.feedback import _clipping_on_device
from gradsync.reducers.outcome import StepOutcome
from gradsync.reducers.spikes import peak_magnitude, peak_on_device
from gradsync.testing import run_ranks


def test_outcome_reads_flags_and_peaks_later() -> None:
    outcome = StepOutcome()
    outcome.add(["a"], torch.tensor(True))
    outcome.add(["b", "c"], torch.tensor([False, True]))
    outcome.add(["d", "e"], torch.tensor(False))  # one flag for both
    outcome.add(["f"], False)
    outcome.add_peak(2.0)
    outcome.add_peak(torch.tensor(3.0, dtype=torch.float64))
    assert not outcome.is_known
    outcome.start_reading()
    assert not outcome.is_known
    assert outcome.peak == 3.0
    assert outcome.nonfinite == ["f", "b", "d", "e"]
    assert outcome.is_known


def test_outcome_of_tensors_looks_at_each_only_if_needed() -> None:
    fine, inf, nan = torch.ones(3), torch.tensor([1.0, torch.inf]), torch.tensor([torch.nan])
    outcome = StepOutcome()
    outcome.add_tensors("ab", [fine, inf], whole=fine)
    assert outcome.nonfinite == []
    outcome.add_tensors(["a", "b", "c", "d"], [fine, inf, nan, torch.empty(0)], whole=torch.cat([fine, inf, nan]))
    assert outcome.nonfinite == ["b", "c"]


@pytest.fixture(params=[False, True], ids=["known at once", "known later"])
def known_later(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let int8 return tensors, as on a GPU, so that ReducerSync settles a step when the next one begins."""
    if request.param:
        for name in ("decode", "decode_sum", "merge"):
            monkeypatch.setattr(Blockwise, name, _returning_tensor(getattr(Blockwise, name)))
    return bool(request.param)


def _returning_tensor(method: Any) -> Any:
    return lambda *args, **kwargs: torch.as_tensor(method(*args, **kwargs))


def train(comm: Communicator, nan_at: int | None, *, scaled: bool) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(comm.rank)  # ranks are threads, which share torch's own generator
    model = nn.Linear(100, 80)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1, generator=draw)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    sync = gradsync.synchronize(model, optimizer, "allreduce(codec=int8)", comm=comm, scaler=scaler)
    reached = -1
    try:
        for step in range(5):
            loss = model(torch.randn(4, 100, generator=draw)).square().mean()
            if step == nan_at:
                loss = loss * torch.inf
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            reached = step
        return {"state": sync.state_dict(), "weight": model.weight.detach().clone(), "reached": reached}
    except NonFiniteGradient:
        return {"reached": reached}
    finally:
        sync.close()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_residuals_are_the_same_whenever_the_outcome_is_known(
    monkeypatch: pytest.MonkeyPatch, world_size: int, scaled: bool
) -> None:
    nan_at = 2 if scaled else None  # a scaler skips the step, and its residuals are rolled back
    at_once = run_ranks(world_size, lambda comm: train(comm, nan_at, scaled=scaled))
    for name in ("decode", "decode_sum", "merge"):
        monkeypatch.setattr(Blockwise, name, _returning_tensor(getattr(Blockwise, name)))
    later = run_ranks(world_size, lambda comm: train(comm, nan_at, scaled=scaled))
    for one, other in zip(at_once, later, strict=True):
        assert one["reached"] == other["reached"] == 4
        assert torch.equal(one["weight"], other["weight"])
        assert _tensors(one["state"])
        assert _equal(_tensors(one["state"]), _tensors(other["state"]))


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [tensor for item in state for tensor in _tensors(item)] if isinstance(state, list | tuple) else []


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("nan_at", [1, 4])
def test_nonfinite_gradient_is_raised_on_all_ranks(known_later: bool, nan_at: int) -> None:
    results = run_ranks(2, lambda comm: train(comm, nan_at, scaled=False))
    # At the next backward; after the last one by state_dict(), so that such a state is not saved.
    assert results == [{"reached": nan_at if known_later else nan_at - 1}] * 2


def test_arithmetic_for_gpus_gives_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 12, dtype=torch.float64, generator=generator)
    coefficients = torch.rand(2, 2, dtype=torch.float64, generator=generator)
    state = _BucketState.__new__(_BucketState)
    state.slot_ranges, state.scratch = [(0, 0, 5), (1, 5, 12)], torch.zeros(12, dtype=torch.float64)
    expected, result = a.clone(), a.clone()
    _add_scaled(state, expected, b, coefficients.tolist())
    _add_scaled_on_device(state, result, b, coefficients)
    assert torch.allclose(result, expected, rtol=1e-14)
    assert [float(_clipping_on_device(torch.tensor(norm), 2.0)) for norm in (0.0, 1.0, 8.0)] == [1.0, 1.0, 0.25]
    views = [torch.tensor([1.0, -7.0]), torch.empty(0), torch.tensor([5.0])]
    peak = peak_on_device(views)
    assert peak is not None
    assert float(peak) == peak_magnitude(views) == 7.0
    assert peak_on_device([torch.empty(0)]) is None
