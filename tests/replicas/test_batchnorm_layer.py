"""SyncBatchNorm as a layer: when it communicates, and how it is converted, copied, pickled and compiled."""

from __future__ import annotations

import copy
import io
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync.comm.base import Communicator, ReduceOp, Solo, Work
from gradsync.errors import OutOfStep
from gradsync.replicas.batch_context import batch_source
from gradsync.replicas.batchnorm import SyncBatchNorm
from gradsync.testing.threads import run_ranks
from tests.replicas.test_batchnorm import model_2d


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.norm(self.first(x)).tanh())
        return output


class _Twin(Solo):
    """One of two ranks; the other rank always has the same values."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2
        self.sent: list[Tensor] = []

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        self.sent.append(tensor.clone())
        tensor.mul_(2)
        return super().all_reduce(tensor, op=op)

    def clone(self) -> Communicator:
        return self


# The compiler itself looks at .grad of a tensor between two graphs, and hides the warning only where it is printed.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_sync_batchnorm_compiled_sees_each_weight() -> None:
    comm = _Twin()
    model = SyncBatchNorm.convert(_Net(), comm)
    num_graphs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    x = torch.randn(5, 3)
    for batch_source(comm).batch_weight in (1.0, 5.0):
        comm.sent.clear()
        grads = []
        for either in (model, compiled):
            model.zero_grad()
            either(x).square().mean().backward()
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert len(comm.sent) == 4, "forward and backward, twice"
        assert torch.equal(comm.sent[1], comm.sent[3])
    assert num_graphs == 2, "before the layer and after it"


def test_sync_batchnorm_eval_and_world_of_one_do_not_communicate() -> None:
    def rank(comm: Communicator) -> None:
        layer = SyncBatchNorm(3, comm=comm)
        layer.eval()
        x = torch.randn(2, 3)
        if comm.rank == 0:  # a collective would time out, because rank 1 does not take part
            assert torch.equal(
                layer(x), F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
            )

    run_ranks(2, rank, timeout_s=5.0)
    alone, plain = SyncBatchNorm(3, comm=Solo()), nn.BatchNorm1d(3)
    x = torch.randn(4, 3)
    assert torch.equal(alone(x), plain(x))
    assert alone.running_var is not None
    assert plain.running_var is not None
    assert torch.equal(alone.running_var, plain.running_var)


def test_sync_batchnorm_finds_ranks_in_different_layers() -> None:
    def rank(comm: Communicator) -> str:
        model = SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)), comm)
        with pytest.raises(
            OutOfStep, match=r"different batch normalizations: rank . is in the forward of layer"
        ) as info:
            model.get_submodule(str(comm.rank))(torch.randn(4, 3))
        return str(info.value)

    texts = run_ranks(2, rank)
    assert "rank 1 is in the forward of layer 1 of 2" in texts[1]


def test_sync_batchnorm_of_two_models_may_interleave() -> None:
    def rank(comm: Communicator) -> list[Tensor]:
        models = [SyncBatchNorm.convert(nn.BatchNorm1d(2, momentum=1.0), comm) for _ in range(2)]
        x = torch.arange(4.0).reshape(2, 2) + comm.rank
        turns = [
            threading.Thread(target=model, args=(x * factor,)) for model, factor in zip(models, (1, 10), strict=True)
        ]
        for turn in turns if comm.rank == 0 else reversed(turns):
            turn.start()
            time.sleep(0.1)  # so that its sum has been begun
        for turn in turns:
            turn.join()
        return [model.get_buffer("running_mean") for model in models]

    for first, second in run_ranks(2, rank):
        assert first.tolist() == [1.5, 2.5]
        assert second.tolist() == [15.0, 25.0]


def test_sync_batchnorm_counts_values_over_all_ranks() -> None:
    def rank(comm: Communicator) -> None:
        layer = SyncBatchNorm(3, comm=comm)
        layer(torch.randn(1, 3))  # two in all
        with pytest.raises(ValueError, match=r"more than 1 value per channel over all ranks when training; got 1"):
            layer(torch.randn(1 - comm.rank, 3))

    run_ranks(2, rank)
    with pytest.raises(ValueError, match=r"shape \(samples, 3, ...\); got shape \(4, 2\)"):
        SyncBatchNorm(3, comm=Solo())(torch.randn(4, 2))


def test_convert_keeps_what_a_layer_is() -> None:
    inner = nn.BatchNorm2d(4, eps=0.5, momentum=0.3, dtype=torch.float64)
    model = nn.ModuleDict(
        {"a": nn.Sequential(inner, nn.InstanceNorm2d(4)), "b": nn.BatchNorm1d(2, affine=False), "c": inner}
    )
    model["b"].eval()
    inner.weight.requires_grad_(False)
    seen: list[str] = []
    inner.register_forward_hook(lambda *_: seen.append("hook"))
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    keys = list(model.state_dict())
    assert SyncBatchNorm.convert(model, Solo()) is model
    assert isinstance(inner, SyncBatchNorm)
    assert isinstance(model["b"], SyncBatchNorm)
    assert model["c"] is inner
    assert type(model.get_submodule("a.1")) is nn.InstanceNorm2d
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert (inner.eps, inner.momentum, inner.training, model["b"].training) == (0.5, 0.3, True, False)
    assert list(model.state_dict()) == keys
    inner(torch.randn(2, 4, 3, 3, dtype=torch.float64))
    assert seen == ["hook"]
    channel = inner._channel
    assert SyncBatchNorm.convert(model, Solo()) is model
    assert inner._channel is channel, "a converted layer is left alone"


def test_convert_takes_torchs_own_and_a_root_layer() -> None:
    assert isinstance(SyncBatchNorm.convert(nn.SyncBatchNorm(3), Solo()), SyncBatchNorm)
    plain = nn.Linear(2, 2)
    assert SyncBatchNorm.convert(plain, Solo()) is plain


class _WithActivation(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_convert_refuses_subclasses() -> None:
    with pytest.raises(TypeError, match="0 is a _WithActivation, which may do more"):
        SyncBatchNorm.convert(nn.Sequential(_WithActivation(3)), Solo())
    with pytest.raises(TypeError, match=r"the model is a LazyBatchNorm1d.*run a lazy"):
        SyncBatchNorm.convert(nn.LazyBatchNorm1d(), Solo())


def test_sync_batchnorm_copy_shares_the_connection() -> None:
    source = model_2d()

    def rank(comm: Communicator) -> Tensor:
        model = SyncBatchNorm.convert(copy.deepcopy(source), comm)
        twin = copy.deepcopy(model)
        twin(torch.full((2, 3), float(comm.rank)) + torch.arange(2.0).view(2, 1))
        layer, original = twin.get_submodule("1"), model.get_submodule("1")
        assert isinstance(layer, SyncBatchNorm)
        assert isinstance(original, SyncBatchNorm)
        assert layer._channel is original._channel
        assert layer.running_mean is not None
        assert original.get_buffer("running_mean").norm() == 0, "the statistics are its own"
        return layer.running_mean

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)


def test_sync_batchnorm_pickle_reconnects() -> None:
    def rank(comm: Communicator) -> bytes:
        model = SyncBatchNorm.convert(model_2d(), comm)
        file = io.BytesIO()
        torch.save(model, file)
        return file.getvalue()

    body = run_ranks(2, rank)[0]
    model = torch.load(io.BytesIO(body), weights_only=False)
    first, second = model[1], model[4]
    assert first._channel is second._channel, "one connection for the model, as before"
    assert first._channel._comm is None
    model.eval()(torch.randn(2, 3))
    assert first._channel._comm is None, "not needed to evaluate"
    model.train()(torch.randn(2, 3))
    assert first._channel.comm.world_size == 1


def test_sync_batchnorm_state_dict_fits_batchnorm() -> None:
    plain = nn.BatchNorm1d(3)
    plain(torch.randn(8, 3))
    layer = SyncBatchNorm(3, comm=Solo())
    layer.load_state_dict(plain.state_dict())
    again = nn.BatchNorm1d(3)
    again.load_state_dict(layer.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
