"""Streaming stores give the bits of torch.mul for any size, layout and values."""

from __future__ import annotations

import pytest
import torch

from gradsync.kernels.streaming import scale_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("numel", [1, 7, 8, 64, 1000, 100_003])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, -2e-3])
def test_scale_into_gives_the_bits_of_mul(dtype: torch.dtype, numel: int, factor: float) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    out = torch.full((numel + 8,), 7.0, dtype=dtype)
    scale_into(out[:numel], values, factor)
    assert torch.equal(out[:numel], values * factor)
    assert bool((out[numel:] == 7.0).all()), "wrote beyond the end"


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_scale_into_works_at_any_alignment(offset: int) -> None:
    values, out = torch.randn(5000), torch.zeros(5000)
    scale_into(out[offset:], values[: 5000 - offset], 0.3)
    assert torch.equal(out[offset:], values[: 5000 - offset] * 0.3)
    scale_into(out[: 5000 - offset], values[offset:], 0.3)
    assert torch.equal(out[: 5000 - offset], values[offset:] * 0.3)


def test_scale_into_handles_other_layouts_and_special_values() -> None:
    values = torch.randn(64, 32)
    values[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    out = torch.zeros(32, 64).t()
    scale_into(out, values, 0.5)
    assert torch.equal(out.isnan(), values.isnan())
    assert torch.equal(out.nan_to_num(), (values * 0.5).nan_to_num())
