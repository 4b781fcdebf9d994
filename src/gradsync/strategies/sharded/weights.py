"""How the weights of one bucket get from the ranks that have stepped them to all others: exactly, or as differences.

[Note: differences of weights] ``CastWeights`` sends how much the weights of a slice have changed, in 16 bits. Every
rank, the owner too, adds the same 16-bit values to the same weights, so the replicas stay bitwise equal. What 16 bits
could not hold is the *residual*: the owner keeps it, and steps the weights plus the residual. So nothing is lost; it
arrives with a later step. (A learning rate that rounds to no change at all in 16 bits still adds up in the residual.)
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, PostprocessedWork, Work


class Weights(abc.ABC):
    """The weights of one bucket: a buffer with equal slices, one for each rank, which the parameters are views of."""

    stepped: Tensor  # what this rank's optimizer steps: its slice of the weights, or a copy of it
    residual: Tensor | None = None  # of this rank's slice; None: weights are sent exactly

    def __init__(self, buffer: Tensor, rank: int, world_size: int) -> None:
        self._buffer = buffer
        self._rank = rank
        self._slices = buffer.view(world_size, -1)
        self._own = self._slices[rank]

    def begin_step(self) -> None:  # noqa: B027 - a slice that is stepped in place is ready
        """The optimizer is about to step ``stepped``."""

    @abc.abstractmethod
    def start_gather(self, comm: Communicator) -> Work:
        """The optimizer has stepped: send the slice to all ranks. The result is in the buffer after ``wait()``."""

    def complete(self, comm: Communicator) -> None:  # noqa: B027 - what is sent exactly is complete
        """Send the residual too: then the buffer holds all there is. Blocks: all ranks call it."""


class ExactWeights(Weights):
    """Each rank sends its slice as it is."""

    def __init__(self, buffer: Tensor, rank: int, world_size: int) -> None:
        super().__init__(buffer, rank, world_size)
        self.stepped = self._own

    def start_gather(self, comm: Communicator) -> Work:
        return comm.gather_slices(self._buffer)


class CastWeights(Weights):
    """Each rank sends by how much its slice has changed, in 16 bits. See [Note: differences of weights]."""

    def __init__(self, buffer: Tensor, rank: int, world_size: int, dtype: torch.dtype) -> None:
        super().__init__(buffer, rank, world_size)
        self.stepped = torch.zeros_like(self._own)
        self.residual: Tensor = torch.zeros_like(self._own)
        self._sent = torch.empty_like(self._own, dtype=dtype)
        self._received = torch.empty_like(self._slices, dtype=dtype)

    def begin_step(self) -> None:
        torch.add(self._own, self.residual, out=self.stepped)

    def start_gather(self, comm: Communicator) -> Work:
        with torch.no_grad():
            difference = torch.sub(self.stepped, self._own, out=self.stepped)
            self._sent.copy_(difference)
            torch.sub(difference, self._sent, out=self.residual)
            self._own += self._sent
        return PostprocessedWork(comm.all_gather(self._sent, out=self._received), self._add_received)

    def _add_received(self) -> None:
        for rank, (weights, difference) in enumerate(zip(self._slices, self._received, strict=True)):
            if rank != self._rank:
                weights += difference

    def complete(self, comm: Communicator) -> None:
        with torch.no_grad():
            self._own += self.residual
            self.residual.zero_()
        comm.gather_slices(self._buffer).wait()


def make_weights(buffer: Tensor, comm: Communicator, dtype: torch.dtype | None) -> Weights:
    """``dtype``: that of the differences to send; None: exact, as are weights that have 16 bits themselves."""
    if dtype is None or buffer.dtype.itemsize <= dtype.itemsize:
        return ExactWeights(buffer, comm.rank, comm.world_size)
    return CastWeights(buffer, comm.rank, comm.world_size, dtype)
