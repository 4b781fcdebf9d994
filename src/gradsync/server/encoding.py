"""Gradients on their way to a server in fewer bytes: what a worker encodes, and keeps of it; how a server reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradsync import spec
from gradsync.codecs.base import Codec, Payload, Residual
from gradsync.codecs.chain import Chain
from gradsync.codecs.sparse import Sparse
from gradsync.comm.messages import DTYPES
from gradsync.reducers.shards import worked_in
from gradsync.server.job import Job

FEEDBACKS = ("ef", "none")


class Encoder:
    """A worker's side: gradients to payloads, with what these leave out added to the next push.

    >>> import torch
    >>> from gradsync.server.encoding import Decoder, Encoder
    >>> from gradsync.server.job import Job, Param
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
                f"on the way to a server, feedback is one of {', '.join(FEEDBACKS)}; got {feedback!r}. (ef21 would "
                "need an estimate of every worker at the server.)"
            )
        self._worker = worker
        self._feedback = feedback
        self._table = _Table(job)
        self._spread = math.sqrt(job.num_workers)
        self.residuals: dict[str, Tensor] = {}  # flat, by parameter name
        self.velocities: dict[str, Tensor] = {}  # of codecs that gather momentum before they choose

    def encodes(self, name: str) -> bool:
        return name in self._table.codecs

    def encode(self, name: str, grad: Tensor, *, clock: int) -> Tensor:
        """The payload of a gradient; what it leaves out is kept for the next."""
        codec, key = self._table.codec(name, clock), self._table.key(name, clock, self._worker)
        dtype = worked_in(grad.dtype)
        x = grad.detach().to("cpu", dtype).contiguous().reshape(-1)
        payload = Payload(torch.empty(codec.encoded_bytes(x.numel(), dtype), dtype=torch.uint8))
        residual = None
        if self._feedback == "ef":
            kept = _entry(self.residuals, name, x)
            residual = Residual(kept, kept)
        if isinstance(codec, Sparse | Chain) and codec.momentum:
            x = self._gathered(name, x, codec)
            codec.encode(x, payload, residual=residual, key=key)
            codec.erase(payload, x, key=key)
        else:
            codec.encode(x, payload, residual=residual, key=key)
        return payload

    def _gathered(self, name: str, x: Tensor, codec: Sparse | Chain) -> Tensor:
        """The velocity with this gradient in it: see ``Dgc``."""
        gain = 1.0
        if codec.clip_norm is not None:
            norm = float(torch.linalg.vector_norm(x))
            gain = min(1.0, codec.clip_norm / self._spread / norm) if norm > 0 else 1.0
        return _entry(self.velocities, name, x).mul_(codec.momentum).add_(x, alpha=gain)

    def state_dict(self) -> dict[str, Any]:
        return {
            "residuals": {name: tensor.clone() for name, tensor in self.residuals.items()},
            "velocities": {name: tensor.clone() for name, tensor in self.velocities.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"residuals", "velocities"}:
            raise ValueError(f"expected residuals and velocities, as a worker keeps them; got {sorted(state)}.")
        self.residuals = {name: tensor.clone() for name, tensor in state["residuals"].items()}
        self.velocities = {name: tensor.clone() for name, tensor in state["velocities"].items()}


class Decoder:
    """A server's side: payloads to gradients."""

    def __init__(self, job: Job) -> None:
        self._table = _Table(job)

    def decodes(self, name: str) -> bool:
        return name in self._table.codecs

    def decode(self, name: str, payload: Tensor, *, worker: int, clock: int) -> Tensor:
        """The gradient that a payload says; ``ValueError`` if it can't be one."""
        codec, shape, dtype = self._table.codec(name, clock), self._table.shapes[name], self._table.dtypes[name]
        numel, wide = math.prod(shape), worked_in(dtype)
        expected = codec.encoded_bytes(numel, wide)
        if payload.dtype != torch.uint8 or payload.shape != (expected,):
            raise ValueError(
                f"the payload of {name!r} has {expected} bytes; got {payload.dtype} {tuple(payload.shape)}."
            )
        out = torch.empty(numel, dtype=wide)
        codec.decode(Payload(payload), out, key=self._table.key(name, clock, worker))
        return out.to(dtype).view(shape)


class _Table:
    """What both sides know of each parameter."""

    def __init__(self, job: Job) -> None:
        self.codecs: dict[str, Codec] = {name: spec.parse(text, "codec") for name, text in job.codecs.items()}
        self.shapes = {param.name: param.shape for param in job.params}
        self.dtypes = {param.name: DTYPES[param.dtype] for param in job.params}
        self._numbers = {param.name: number for number, param in enumerate(job.params)}
        self._seed = job.seed

    def codec(self, name: str, clock: int) -> Codec:
        return self.codecs[name].at(clock)

    def key(self, name: str, clock: int, worker: int) -> int:
        """What all that is random comes from: the same on both sides, another for every push."""
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
