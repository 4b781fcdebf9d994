"""SyncBatchNorm on N ranks against plain BatchNorm in one process on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.replicas.batch_context import batch_source
from gradsync.replicas.batchnorm import SyncBatchNorm
from gradsync.testing.threads import run_ranks

TOLERANCE = 1e-9  # of float64, norm of the difference over norm


def model_2d() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None)
    )


def model_of(dims: int, **options: Any) -> nn.Module:
    """Channels 3 to 4 to 2, for inputs of ``dims`` dimensions."""
    conv = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[dims]
    norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dims]
    return nn.Sequential(conv(3, 4, 1), norm(4, **options), nn.Tanh(), conv(4, 2, 1), norm(2, **options))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the samples; zero for a rank that has none."""
    each = (output - target).square().flatten(1).sum(1)
    return each.mean() if len(each) else each.sum()


Outcome = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]


def run_one(model: nn.Module, batches: Sequence[Tensor], targets: Sequence[Tensor], weights: Tensor | None) -> Outcome:
    """Outputs, parameters' gradients, buffers and input gradients of the joined batch.

    ``weights``: of each sample in the loss, if they are not all the same.
    """
    outputs, inputs = [], []
    for batch, target in zip(batches, targets, strict=True):
        model.zero_grad()
        x = batch.clone().requires_grad_()
        output = model(x)
        if weights is None:
            loss_of(output, target).backward()
        else:
            each = (output - target).square().flatten(1).sum(1)
            (each @ weights).backward()
        outputs.append(output.detach())
        assert x.grad is not None
        inputs.append(x.grad)
    return outputs, [p.grad.clone() for p in model.parameters() if p.grad is not None], list(model.buffers()), inputs


def run_part(
    model: nn.Module,
    comm: Communicator,
    batches: Sequence[Tensor],
    targets: Sequence[Tensor],
    part: slice,
    weight: float,
) -> Outcome:
    """The same on one rank, with the sums that an engine makes: Σ w·g / Σ w."""
    own = SyncBatchNorm.convert(copy.deepcopy(model), comm)
    batch_source(comm).batch_weight = weight
    parts = [batch[part] for batch in batches], [target[part] for target in targets]
    outputs, grads, buffers, inputs = run_one(own, *parts, None)
    total = torch.tensor([weight], dtype=torch.float64)
    comm.all_reduce(total).wait()
    for grad in grads:
        grad.mul_(weight / total.item())
        comm.all_reduce(grad).wait()
    # What an input's gradient is worth in the joined loss.
    return outputs, grads, buffers, [grad * (weight / total.item()) for grad in inputs]


def close(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = TOLERANCE) -> None:
    for one, other in zip(got, expected, strict=True):
        one, other = one.double(), other.double()
        assert one.shape == other.shape
        assert (one - other).norm() <= tolerance * other.norm().clamp(min=1e-3), (one, other)


def compare(
    model: nn.Module,
    shape: tuple[int, ...],
    sizes: Sequence[int],
    *,
    weights: Sequence[float] | None = None,
    offset: float = 0.0,
    num_steps: int = 2,
) -> None:
    """Run the joined batch in one process and its parts on ranks, and compare everything."""
    model = model.double()
    generator = torch.Generator().manual_seed(5)
    batches = [
        torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64) + offset for _ in range(num_steps)
    ]
    with torch.no_grad():
        out_shape = copy.deepcopy(model)(batches[0]).shape
    targets = [torch.randn(out_shape, generator=generator, dtype=torch.float64) for _ in range(num_steps)]
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    per_sample = None
    if weights is not None:  # the loss is a weighted mean of the ranks' means
        shares = [w / sum(weights) / size if size else 0.0 for w, size in zip(weights, sizes, strict=True)]
        per_sample = torch.cat([torch.full((n,), s, dtype=torch.float64) for n, s in zip(sizes, shares, strict=True)])
    outputs, grads, buffers, inputs = run_one(copy.deepcopy(model), batches, targets, per_sample)
    rank_weights = weights if weights is not None else sizes

    results = run_ranks(
        len(sizes),
        lambda comm: run_part(model, comm, batches, targets, parts[comm.rank], float(rank_weights[comm.rank])),
    )
    for part, (own_outputs, own_grads, own_buffers, own_inputs) in zip(parts, results, strict=True):
        close(own_outputs, [output[part] for output in outputs])
        close(own_grads, grads)
        close(own_buffers, buffers)
        close(own_inputs, [grad[part] for grad in inputs])
        assert all(torch.equal(a, b) for a, b in zip(own_buffers, results[0][2], strict=True)), "the same bits"


# -- exactness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_sync_batchnorm_on_equal_parts(num_ranks: int) -> None:
    compare(model_2d(), (3,), [4] * num_ranks)


@pytest.mark.parametrize("sizes", [[5, 2], [1, 6, 3], [4, 0, 2], [3, 1, 0, 0], [1, 1, 1]])
def test_sync_batchnorm_on_unequal_and_empty_parts(sizes: list[int]) -> None:
    compare(model_2d(), (3,), sizes)


@pytest.mark.parametrize(
    ("sizes", "weights"), [([4, 4], [1.0, 3.0]), ([5, 2], [1.0, 1.0]), ([2, 3, 4], [7.0, 0.5, 130.0])]
)
def test_sync_batchnorm_with_token_weights(sizes: list[int], weights: list[float]) -> None:
    compare(model_2d(), (3,), sizes, weights=weights)


@pytest.fixture(autouse=True)
def _the_same_models_every_time() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dims", [3, 4, 5])
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"bias": False, "eps": 0.1}]
)
def test_sync_batchnorm_in_all_dimensions_and_settings(dims: int, options: dict[str, Any]) -> None:
    compare(model_of(dims, **options), (3, *[2, 3, 2][: dims - 2]), [2, 3])


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 1),
    features=st.integers(1, 6),
    offset=st.sampled_from([0.0, 1.0, -30.0]),
)
def test_sync_batchnorm_on_random_parts(sizes: list[int], features: int, offset: float) -> None:
    model = nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, 2), nn.BatchNorm1d(2))
    compare(model, (features,), sizes, offset=offset)


@pytest.mark.parametrize("offset", [1e3, 1e6, -1e7])
def test_sync_batchnorm_keeps_precision_far_from_zero(offset: float) -> None:
    """The variance of the joined batch, to what the inputs themselves can still tell apart."""
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + offset
    layers = run_ranks(3, lambda comm: _fed(SyncBatchNorm(3, momentum=1.0, dtype=torch.float64, comm=comm), x, comm))
    for layer in layers:
        assert layer.running_var is not None
        assert layer.running_mean is not None
        close([layer.running_var], [x.var(0)], 1e-9)
        close([layer.running_mean], [x.mean(0)], 1e-15)


def _fed(layer: SyncBatchNorm, x: Tensor, comm: Communicator) -> SyncBatchNorm:
    layer(x.chunk(comm.world_size)[comm.rank])
    return layer


def test_sync_batchnorm_gradients_match_finite_differences() -> None:
    """As gradcheck does, over the ranks: the joined loss is a function of both ranks' inputs."""
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    parts = [slice(0, 2), slice(2, 5)]

    def losses(x: Tensor) -> tuple[float, Tensor]:
        def rank(comm: Communicator) -> tuple[float, Tensor]:
            own = x[parts[comm.rank]].clone().requires_grad_()
            batch_source(comm).batch_weight = float(len(own))
            loss = SyncBatchNorm(2, dtype=torch.float64, comm=comm)(own).sin().square().sum(1).mean()
            loss.backward()
            assert own.grad is not None
            return loss.item() * len(own) / 5, own.grad * len(own) / 5

        values, grads = zip(*run_ranks(2, rank), strict=True)
        return sum(values), torch.cat(grads)

    _, grad = losses(x)
    step = 1e-6
    for index in range(x.numel()):
        moved = torch.zeros_like(x).view(-1)
        moved[index] = step
        slope = (losses(x + moved.view_as(x))[0] - losses(x - moved.view_as(x))[0]) / (2 * step)
        assert slope == pytest.approx(grad.view(-1)[index].item(), abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sync_batchnorm_sums_16_bit_values_in_64(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 4, 5, generator=torch.Generator().manual_seed(3)) * 3 + 2).to(dtype)
    whole = nn.BatchNorm1d(4)
    expected = whole(x.float())

    def rank(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        layer = SyncBatchNorm(4, comm=comm)  # float32 parameters with 16-bit inputs, as under autocast
        own = x.chunk(2)[comm.rank].clone().requires_grad_()
        output = layer(own)
        output.float().square().sum().backward()
        assert output.dtype == dtype
        assert own.grad is not None
        assert own.grad.dtype == dtype
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32
        assert layer.running_var is not None
        return output.detach(), layer.running_var, layer.weight.grad

    outputs, running_vars, _ = zip(*run_ranks(2, rank), strict=True)
    assert whole.running_var is not None
    assert torch.allclose(torch.cat(outputs).float(), expected, rtol=0.0, atol=8 * torch.finfo(dtype).eps)
    assert torch.allclose(running_vars[0], whole.running_var, rtol=1e-6)


def test_sync_batchnorm_under_autocast() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    x = torch.randn(4, 3, 5, 5)

    def rank(comm: Communicator) -> list[Tensor]:
        own = SyncBatchNorm.convert(copy.deepcopy(model), comm)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = own(x.chunk(2)[comm.rank])
        output.float().square().mean().backward()
        assert output.dtype == torch.bfloat16
        return [p.grad for p in own.parameters() if p.grad is not None]

    grads = run_ranks(2, rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().square().mean().backward()
    for first, second, parameter in zip(*grads, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose((first + second) / 2, parameter.grad, rtol=0.1, atol=0.02)


def test_sync_batchnorm_rank_without_data_takes_part() -> None:
    """The last step of an epoch has fewer samples than ranks: the statistics are those of the ranks with samples."""
    model = model_2d().double()
    batches = [torch.randn(6, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)]
    targets = [torch.randn(6, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)]
    expected = run_one(copy.deepcopy(model), batches, targets, None)[0]

    def rank(comm: Communicator) -> list[Tensor]:
        own = SyncBatchNorm.convert(copy.deepcopy(model), comm)
        outputs = []
        for batch, target in zip(batches, targets, strict=True):
            parts = [part for part in batch.chunk(3) if len(part)]
            if comm.rank < len(parts):
                batch_source(comm).batch_weight = float(len(parts[comm.rank]))
                output = own(parts[comm.rank])
                loss_of(output, target.chunk(3)[comm.rank]).backward()
                outputs.append(output.detach())
        batch_source(comm).end()
        return outputs

    results = run_ranks(3, rank, timeout_s=10.0)
    assert [len(outputs) for outputs in results] == [2, 2, 1]
    for step, whole in enumerate(expected):
        close([torch.cat([outputs[step] for outputs in results if step < len(outputs)])], [whole])
