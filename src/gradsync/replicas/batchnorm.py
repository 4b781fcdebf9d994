"""Batch normalization over the batch of all ranks, on CPU as on GPU.

[Note: one row for everything] Each call all-reduces one row of one size, whichever layer it comes from and whether it
is a forward or a backward. So a rank that has run out of data need not know what the others are doing: it adds rows of
zeros until no rank adds anything else. And ranks in different layers raise an error, where bare sums would be mixed
silently.

[Note: weights] Every rank's loss is a mean over its own samples, and the engine makes Σ w·g / Σ w of the ranks'
gradients. The gradient that arrives here on rank s is therefore larger by W/w_s than that of the joined loss, and what
leaves here on rank r must be larger by W/w_r. So sums over ranks are taken of w_s·dy, and are divided by w_r.

[Note: elastic runs] There the members change, and the layers follow: synchronize() opens their connection, and renews
it for each epoch (``move_batchnorms``). A peer may be lost within a forward or a backward, so both must run within
``with sync.step():``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from gradsync.comm.base import Communicator
from gradsync.comm.connect import connect
from gradsync.errors import CollectiveFailed, OutOfStep, PeerLost
from gradsync.replicas.batch_context import BatchSource, batch_source
from gradsync.replicas.ownership import context_of

# What convert() knows how to replace. A subclass may do more than normalize, and would lose it.
_CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_HEAD = 4  # of a row: ranks with data, their places, the squares of their places, values per channel
_KINDS = ("forward", "second pass of forward", "backward")
_FORWARD, _REFINE, _BACKWARD = range(len(_KINDS))

# mean² / var above which a float64 variance from sums of squares would lose more than 4 of its 16 digits.
_REFINE_ABOVE = 1e4


class _Channel:
    """How the layers of one model communicate with the same layers on other ranks; shared by all of them."""

    def __init__(self, comm: Communicator | None) -> None:
        self.width = 0  # channels of the widest layer
        self.num_layers = 0
        self._comm: Communicator | None = None
        self._source: BatchSource | None = None  # of its worker; None: nothing was opened yet
        self.is_elastic = False  # see [Note: elastic runs]
        self._device = torch.device("cpu")  # where the last row lived: a rank without data must use the same
        if comm is not None:
            self._open(comm)

    def add_layer(self, num_features: int) -> int:
        """Register a layer with this many channels; returns its index."""
        self.width = max(self.width, num_features)
        self.num_layers += 1
        return self.num_layers - 1

    @property
    def comm(self) -> Communicator:
        """The communicator; connects a channel that has none yet, or none any more: a pickle can't keep it."""
        self._open_if_new()
        if self._comm is None:
            raise ValueError(
                "in an elastic run SyncBatchNorm communicates only in the model that synchronize() keeps in step. "
                "Expected a layer of that model, after synchronize(); got another forward in training mode. Call "
                "synchronize() before, or eval()."
            )
        return self._comm

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, and none can come."""
        self._open_if_new()
        return not self.is_elastic and self.comm.world_size == 1

    def _open_if_new(self) -> None:
        if self._source is None:
            self._open(connect())

    def _open(self, comm: Communicator) -> None:
        self._source = batch_source(comm)
        self._source.subscribe_companion(self._participate_without_data)
        self.is_elastic = comm.members_may_change
        if not self.is_elastic:
            self._comm = comm.unchecked().clone()

    @property
    def is_movable(self) -> bool:
        """Whether its members may change: not if it was opened with a communicator that stays."""
        return self._source is None or self.is_elastic

    def move_to(self, comm: Communicator) -> None:
        """In an elastic run: go on with these ranks. Blocks: all ranks call it."""
        if self._source is None:
            self._source = batch_source(comm)
            self._source.subscribe_companion(self._participate_without_data)
        self.is_elastic = True
        before, self._comm = self._comm, comm.clone()
        if before is not None:
            before.abandon()

    def check_step_block(self) -> None:
        """In an elastic run: refuse a forward or backward where a lost peer could not be caught."""
        if self.is_elastic and self._source is not None and not self._source.in_step_block:
            raise ValueError(
                "SyncBatchNorm communicates within forward and backward, and an elastic run can catch a lost worker "
                "there only within `with sync.step():`. Expected both in such a block; got one outside. Put the body "
                "of the training loop, from forward to optimizer.step(), into `with sync.step():`; to evaluate, call "
                "model.eval() before."
            )

    def sum(self, layer: int, kind: int, count: int, first: Tensor, second: Tensor) -> Tensor:
        """Sum two vectors and a count over the ranks; returns the row: (head, first, second). Blocks on CPU."""
        row = self._empty_row(first.device)
        place = float(len(_KINDS) * layer + kind)
        num_features = first.numel()
        head = (1.0, place, place * place, float(count))
        if row.is_cpu:
            row[:_HEAD] = torch.tensor(head, dtype=torch.float64)
        else:
            for at, value in enumerate(head):
                row[at].fill_(value)  # a copy from the host would stall the stream in every layer
        row[_HEAD : _HEAD + num_features] = first
        row[_HEAD + num_features : _HEAD + 2 * num_features] = second
        with batch_source(self.comm).waiting():
            self.comm.all_reduce(row).wait()
        if row.is_cpu:  # reading a value of a GPU would stall the stream in every layer
            self._check_place(row, layer, kind)
        return row

    def _check_place(self, row: Tensor, layer: int, kind: int) -> None:
        ranks, places, squares, _ = row[:_HEAD].tolist()
        # n·Σp² = (Σp)² only if all p are the same; these are integers, so the sums are exact.
        if ranks * squares != places * places:
            raise OutOfStep(
                f"the ranks are in different batch normalizations: rank {self.comm.rank} is in the {_KINDS[kind]} of "
                f"layer {layer} of {self.num_layers}, another rank elsewhere. Every rank must run the same layers in "
                "the same order; a model whose path depends on its input can't have SyncBatchNorm there."
            )

    def _participate_without_data(self) -> None:
        """This rank has no data left: add nothing to the others' sums until they have none either."""
        comm = self._comm if self.is_elastic else self.comm
        if comm is None or comm.world_size == 1 or self.width == 0:
            return
        try:
            while True:
                row = self._empty_row(self._device)
                comm.all_reduce(row).wait()
                if row[0].item() == 0:
                    return
        except (PeerLost, CollectiveFailed):
            if not self.is_elastic:
                raise
            # The engine meets the same loss, in its own join or in the barrier after it, and goes on with the others.

    def _empty_row(self, device: torch.device) -> Tensor:
        self._device = device
        return torch.zeros(_HEAD + 2 * self.width, dtype=torch.float64, device=device)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Channel:
        return self  # a copy of a model (an average of its weights, say) shares the connection

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_comm": None, "_source": None, "is_elastic": False}


def _channels(model: nn.Module) -> list[_Channel]:
    """The channels of a model's layers, each once, in the order of the layers."""
    layers = (module for module in model.modules() if isinstance(module, SyncBatchNorm))
    return list({id(layer._channel): layer._channel for layer in layers}.values())


def check_movable(model: nn.Module) -> None:
    """In an elastic run: refuse layers with a communicator that stays when the members change."""
    if not all(channel.is_movable for channel in _channels(model)):
        raise ValueError(
            "a SyncBatchNorm of the model has a communicator of its own, which can't follow the members of an elastic "
            "run. Expected gradsync.connect()'s, or none; leave out comm=."
        )


def move_batchnorms(model: nn.Module, comm: Communicator) -> None:
    """In an elastic run: connect a model's layers with the members of a new epoch. Blocks: all ranks call it."""
    for channel in _channels(model):
        channel.move_to(comm)


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the statistics of all ranks' batches together, on CPU as on GPU.

    N ranks on parts of a batch give what one process gives on the whole batch, forward and backward, also when the
    parts have different sizes or are empty, and while ranks that have run out of data wait for the others. In eval mode
    it is plain batch normalization, without communication.

    Most models are converted: :meth:`convert`. The gradients of weight and bias stay those of the rank's own batch:
    :func:`gradsync.synchronize` averages them like all others. The connection is not part of ``state_dict``; a copy
    shares it, and a layer without one (made without ``comm``, or unpickled) takes :func:`gradsync.connect`'s when it is
    first trained. In an elastic run the layer is trained within ``with sync.step():``, and follows the members.

    >>> import gradsync, torch
    >>> layer = gradsync.SyncBatchNorm(3)
    >>> layer(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])).round(decimals=3).tolist()
    [[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]
    """

    _channel: _Channel
    _place: int

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, bias=bias)
        self._attach(_Channel(comm))

    @classmethod
    def convert(cls, model: nn.Module, comm: Communicator | None = None) -> nn.Module:
        """Make every BatchNorm of ``model`` (1d, 2d, 3d, torch's SyncBatchNorm) a synchronized one; returns ``model``.

        In place: the layers stay the same objects with the same parameters, buffers, names and hooks, so it does not
        matter whether an optimizer has been made already. Every rank makes the same call. Other layers are left alone.

        >>> import gradsync, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> gradsync.SyncBatchNorm.convert(model)
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
          (1): SyncBatchNorm(8, eps=1e-05, momentum=0.1, affine=True, bias=True, track_running_stats=True)
        )
        """
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
        todo = [(name, layer) for name, layer in layers if not isinstance(layer, cls)]
        for name, layer in todo:
            if type(layer) not in _CONVERTIBLE:
                raise TypeError(
                    f"expected {', '.join(kind.__name__ for kind in _CONVERTIBLE)}; {name or 'the model'} is a "
                    f"{type(layer).__name__}, which may do more than normalize. Replace it by one of these, run a lazy "
                    "layer once before, or remove its parametrization."
                )
        if todo:
            channel = _Channel(comm if comm is not None else connect())
            for _, layer in todo:
                layer.__class__ = cls
                assert isinstance(layer, cls)
                layer._attach(channel)
        return model

    def _attach(self, channel: _Channel) -> None:
        self._channel = channel
        self._place = channel.add_layer(self.num_features)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input`` of shape (samples, channels, ...); in training it waits for the other ranks."""
        self._check_input_dim(input)
        if not self.training or self._channel.is_alone:
            return super().forward(input)
        return self._normalize(input)

    # A compiler would take the weight of the first backward for a constant, and can't trace a collective: a graph ends
    # here and another begins after it. (torch.compiler.disable would import the compiler with this file, for 2 s.)
    @_disable_dynamo
    def _normalize(self, input: Tensor) -> Tensor:
        self._channel.check_step_block()
        if self._channel.comm.world_size == 1:  # it may grow again
            return super().forward(input)
        with torch.no_grad():
            count, mean, var = self._statistics(input.detach())
            if self.track_running_stats:
                self._follow(count, mean, var)
        output: Tensor = _Normalize.apply(input, self.weight, self.bias, mean, var, count, self)  # type: ignore[no-untyped-call]
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"expected input of shape (samples, {self.num_features}, ...); got shape {tuple(input.shape)}."
            )

    def _statistics(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values per channel, mean and (biased) variance over all ranks, in float64; the same bits on every rank."""
        here = input.numel() // self.num_features
        if here > 0:
            own_var, own_mean = torch.var_mean(_accurate(input), _all_but_channels(input), correction=0)
            own_mean, own_square = own_mean.double(), own_var.double() * here
        else:  # a rank may have no samples: it adds zeros, not a mean that is NaN
            own_mean = own_square = torch.zeros(self.num_features, dtype=torch.float64, device=input.device)
        row = self._channel.sum(self._place, _FORWARD, here, own_mean * here, own_square + own_mean.square() * here)
        count, total, square = _split(row, self.num_features)
        if row.is_cpu and count.item() <= 1:
            raise ValueError(
                f"expected more than 1 value per channel over all ranks when training; got {int(count.item())} in all, "
                f"input of shape {tuple(input.shape)} on rank {self._channel.comm.rank}."
            )
        mean = total / count
        var = square / count - mean.square()
        # The difference of two large numbers has few digits. Only float64 inputs had more to lose; all ranks see the
        # same row, so all take a second pass, or none.
        if input.dtype == torch.float64 and bool((mean.square() > _REFINE_ABOVE * var).any()):
            spread = own_square + (own_mean - mean).square() * here
            row = self._channel.sum(self._place, _REFINE, here, torch.zeros_like(spread), spread)
            var = _split(row, self.num_features)[2] / count
        return count, mean, var.clamp_(min=0.0)

    def _weight(self) -> float:
        """The weight of the current backward: the engine weights its gradients by the same."""
        context = context_of(self)
        return batch_source(self._channel.comm).batch_weight if context is None else context.weight

    def _follow(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        """Move the running statistics, as torch does: by ``momentum``, or to the mean of all batches if it is None."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / (count - 1).clamp(min=1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _Normalize(torch.autograd.Function):
    """(input - mean) / std · weight + bias, whose backward knows that mean and std depend on every rank's input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        layer: SyncBatchNorm,
    ) -> Tensor:
        kind = _accurate(input).dtype
        ctx.save_for_backward(input, weight, mean.to(kind), (var + layer.eps).rsqrt().to(kind), count)
        ctx.layer = layer
        if input.numel() == 0:
            return torch.empty_like(input)
        return F.batch_norm(
            input,
            mean.to(kind),
            var.to(kind),
            weight.to(kind) if weight is not None else None,
            bias.to(kind) if bias is not None else None,
            training=False,
            eps=layer.eps,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inv_std, count = ctx.saved_tensors
        layer: SyncBatchNorm = ctx.layer
        shape = [1, -1] + [1] * (input.dim() - 2)
        dims = _all_but_channels(input)
        dy = grad.to(mean.dtype)
        centred = input.to(mean.dtype) - mean.view(shape)
        sum_dy = dy.sum(dims)
        sum_dy_centred = (dy * centred).sum(dims)

        d_input = None
        if ctx.needs_input_grad[0]:
            layer._channel.check_step_block()
            # See [Note: weights].
            own_weight = layer._weight()
            row = layer._channel.sum(
                layer._place, _BACKWARD, 0, sum_dy.double() * own_weight, sum_dy_centred.double() * own_weight
            )
            _, all_dy, all_dy_centred = _split(row, layer.num_features)
            to_own = 1.0 / own_weight if own_weight else 0.0  # what has no weight is multiplied by zero in the end
            mean_dy = (all_dy / count * to_own).to(mean.dtype)
            slope = (all_dy_centred / count * to_own).to(mean.dtype) * inv_std.square()
            scale = inv_std if weight is None else inv_std * weight.to(mean.dtype)
            d_input = (dy - mean_dy.view(shape)).sub_(centred.mul_(slope.view(shape))).mul_(scale.view(shape))
            d_input = d_input.to(input.dtype)
        d_weight = (sum_dy_centred * inv_std).to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = sum_dy.to(weight.dtype) if ctx.needs_input_grad[2] else None  # no layer has a bias and no weight
        return d_input, d_weight, d_bias, None, None, None, None


def _accurate(tensor: Tensor) -> Tensor:
    """At least float32: 16 bits are too few to sum in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _all_but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _split(row: Tensor, num_features: int) -> tuple[Tensor, Tensor, Tensor]:
    """A row's count and its two vectors."""
    return row[_HEAD - 1], row[_HEAD : _HEAD + num_features], row[_HEAD + num_features : _HEAD + 2 * num_features]
