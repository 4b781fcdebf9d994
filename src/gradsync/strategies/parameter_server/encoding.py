"""Compressed pushes: the worker's ``Encoder``, with error feedback, and the server's ``Decoder``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs.base import Codec, Payload, Residual, compute_dtype
from gradsync.codecs.chain import Chain
from gradsync.codecs.sparse import Sparse
from gradsync.messaging.format import DTYPES
from gradsync.reducers.spikes import TypicalMagnitude, drop_beyond, peak_magnitude, warn_dropped
from gradsync.strategies.parameter_server.job import Job

FEEDBACKS = ("ef", "none")


class Encoder:
    """The worker's side: encodes gradients, and adds the residual of each to the next push.

    >>> import torch
    >>> from gradsync.strategies.parameter_server.encoding import Decoder, Encoder
    >>> from gradsync.strategies.parameter_server.job import Job, Param
    >>> param = Param("w", (4096,), "float32", 0)
    >>> job = Job(params=(param,), optimizer="SGD", num_workers=1, codecs={"w": "int8"})
    >>> encoder = Encoder(job, worker=0)
    >>> payload = encoder.encode("w", torch.ones(4096), clock=0)
    >>> payload.nbytes < 4096 * 4 / 3
    True
    >>> Decoder(job).decode("w", payload, worker=0, clock=0)[:2]
    tensor([1., 1.])
    """

    def __init__(self, job: Job, worker: int, *, feedback: str = "ef") -> None:
        if feedback not in FEEDBACKS:
            raise ValueError(
                f"for pushes to a server, feedback is one of {', '.join(FEEDBACKS)}; got {feedback!r}. (ef21 would "
                "need an estimate of every worker at the server.)"
            )
        self._worker = worker
        self._feedback = feedback
        self._codecs = _ParameterCodecs(job)
        self._spread = math.sqrt(job.num_workers)
        self._typical_magnitudes: dict[str, TypicalMagnitude] = {}  # by parameter name
        self.residuals: dict[str, Tensor] = {}  # flat, by parameter name
        self.velocities: dict[str, Tensor] = {}  # of codecs that accumulate momentum before they choose entries

    def encodes(self, name: str) -> bool:
        return name in self._codecs.by_name

    def encode(self, name: str, grad: Tensor, *, clock: int) -> Tensor:
        """Encode a gradient; its residual is kept for the next one."""
        codec, key = self._codecs.codec(name, clock), self._codecs.key(name, clock, self._worker)
        dtype = compute_dtype(grad.dtype)
        x = grad.detach().to("cpu", dtype).contiguous().reshape(-1)
        payload = Payload(torch.empty(codec.encoded_bytes(x.numel(), dtype), dtype=torch.uint8))
        residual = None
        if self._feedback == "ef":
            kept = _entry(self.residuals, name, x)
            residual = Residual(kept, kept)
        if isinstance(codec, Sparse | Chain) and codec.momentum:
            x = self._accumulate_momentum(name, x, codec)
            codec.encode(x, payload, residual=residual, key=key)
            codec.erase(payload, x, key=key)
        else:
            codec.encode(x, payload, residual=residual, key=key)
        if residual is not None:
            self._drop_spikes(name, codec.magnitudes(payload, x.numel(), dtype))
        return payload

    def _drop_spikes(self, name: str, magnitudes: Tensor | None) -> None:
        """See [Note: spikes] in reducers/spikes.py."""
        if magnitudes is None:
            return
        bound = self._typical_magnitudes.setdefault(name, TypicalMagnitude()).observe(peak_magnitude([magnitudes]))
        if bound is not None:
            kept = [tensors[name] for tensors in (self.residuals, self.velocities) if name in tensors]
            dropped = [drop_beyond(values, bound) for values in kept]
            warn_dropped([name] if any(dropped) else [])

    def _accumulate_momentum(self, name: str, x: Tensor, codec: Sparse | Chain) -> Tensor:
        """Add a gradient to its velocity, and return that: see ``Dgc``."""
        gain = 1.0
        if codec.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(x))
            gain = min(1.0, codec.clip_norm / self._spread / norm) if norm > 0 else 1.0
        return _entry(self.velocities, name, x).mul_(codec.momentum).add_(x, alpha=gain)

    def state_dict(self) -> dict[str, Any]:
        """Copies of residuals and velocities; zeros before the first push, so that all keys exist from the start."""
        codecs = self._codecs.by_name
        with_residual = codecs if self._feedback == "ef" else {}
        with_velocity = [name for name, codec in codecs.items() if isinstance(codec, Sparse | Chain) and codec.momentum]
        return {
            "residuals": {name: self._copied(self.residuals, name) for name in with_residual},
            "velocities": {name: self._copied(self.velocities, name) for name in with_velocity},
        }

    def _copied(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        if name in tensors:
            return tensors[name].clone()
        return torch.zeros(math.prod(self._codecs.shapes[name]), dtype=compute_dtype(self._codecs.dtypes[name]))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"residuals", "velocities"}:
            raise ValueError(f"expected residuals and velocities, as a worker keeps them; got {sorted(state)}.")
        self.residuals = {name: tensor.clone() for name, tensor in state["residuals"].items()}
        self.velocities = {name: tensor.clone() for name, tensor in state["velocities"].items()}


class Decoder:
    """The server's side: decodes payloads into gradients."""

    def __init__(self, job: Job) -> None:
        self._codecs = _ParameterCodecs(job)

    def decodes(self, name: str) -> bool:
        return name in self._codecs.by_name

    def decode(self, name: str, payload: Tensor, *, worker: int, clock: int) -> Tensor:
        """Decode a payload; ``ValueError`` if it does not have the expected size."""
        codec, shape, dtype = self._codecs.codec(name, clock), self._codecs.shapes[name], self._codecs.dtypes[name]
        numel, wide = math.prod(shape), compute_dtype(dtype)
        expected = codec.encoded_bytes(numel, wide)
        if payload.dtype != torch.uint8 or payload.shape != (expected,):
            raise ValueError(
                f"the payload of {name!r} has {expected} bytes; got {payload.dtype} {tuple(payload.shape)}."
            )
        out = torch.empty(numel, dtype=wide)
        codec.decode(Payload(payload), out, key=self._codecs.key(name, clock, worker))
        return out.to(dtype).view(shape)


class _ParameterCodecs:
    """The codec, shape and dtype of each parameter: the same on both sides."""

    def __init__(self, job: Job) -> None:
        self.by_name: dict[str, Codec] = {name: spec.parse(text, "codec") for name, text in job.codecs.items()}
        self.shapes = {param.name: param.shape for param in job.params}
        self.dtypes = {param.name: DTYPES[param.dtype] for param in job.params}
        self._numbers = {param.name: number for number, param in enumerate(job.params)}
        self._seed = job.seed

    def codec(self, name: str, clock: int) -> Codec:
        return self.by_name[name].at(clock)

    def key(self, name: str, clock: int, worker: int) -> int:
        """The seed of the codec's randomness: the same on both sides, different for every push."""
        mixed = 0
        for part in (self._seed, clock, self._numbers[name], worker + 1):
            mixed = (mixed ^ (part & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
            mixed ^= mixed >> 32
        return mixed >> 1


_MASK = (1 << 64) - 1


def _entry(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    known = tensors.get(name)
    if known is None:
        known = tensors[name] = torch.zeros_like(like)
    return known
