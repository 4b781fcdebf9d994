"""A model's buffers (running statistics, counters) over the ranks: rank 0's, the mean, or each rank its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.replicas.agreement import copy_tensors

BufferMode = Literal["broadcast", "mean", "none"]
BUFFER_MODES: tuple[BufferMode, ...] = ("broadcast", "mean", "none")


class BufferSync:
    """Brings the buffers in step at the end of a synchronizing backward.

    Nothing is sent while no rank has changed a buffer since the last time: torch's version counters show it, and the
    header reports it to all ranks. So the masks and tables of a transformer cost nothing.
    """

    def __init__(self, model: nn.Module, mode: BufferMode, comm: Communicator) -> None:
        self._tree = ModuleTree(model)
        self.mode = mode
        self._comm = comm
        self._seen: list[tuple[Tensor, int]] = []
        self._remember()

    def changed(self) -> bool:
        """Whether a buffer of this rank was written since the last ``synchronize``."""
        if self.mode == "none":
            return False
        buffers = self._tree.buffers()
        return len(buffers) != len(self._seen) or any(
            buffer is not before or _version(buffer) != version
            for buffer, (before, version) in zip(buffers, self._seen, strict=True)
        )

    def synchronize(self, share: float, src: int) -> None:
        """Overwrite the buffers with those of rank ``src``, or with the mean; ``share`` is this rank's part. Blocks."""
        buffers = self._tree.buffers()
        if self.mode == "mean":
            self._average([buffer for buffer in buffers if buffer.is_floating_point()], share)
            buffers = [buffer for buffer in buffers if not buffer.is_floating_point()]  # a count has no mean
        copy_tensors(self._comm, buffers, src)
        self._remember()

    def _average(self, buffers: list[Tensor], share: float) -> None:
        with torch.no_grad():
            for dtype in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
                group = [buffer for buffer in buffers if (buffer.dtype, buffer.device) == dtype]
                flat = torch.cat([buffer.reshape(-1) for buffer in group])
                flat = flat * share if share else torch.zeros_like(flat)
                self._comm.all_reduce(flat).wait()
                for buffer, part in zip(group, flat.split([b.numel() for b in group]), strict=True):
                    buffer.data.copy_(part.view(buffer.shape))

    def _remember(self) -> None:
        self._seen = [(buffer, _version(buffer)) for buffer in self._tree.buffers()]


class ModuleTree:
    """A model's parameters and buffers, found at every step; its modules are walked only when they have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._walk()

    def _walk(self) -> None:
        modules = list(self._model.modules())
        self._children = [module._modules for module in modules]
        self._known = self._children_now()
        self._buffers = [module._buffers for module in modules]
        self._parameters = [module._parameters for module in modules]

    def _children_now(self) -> list[list[nn.Module | None]]:
        return [list(children.values()) for children in self._children]

    def _follow(self) -> None:
        if self._children_now() != self._known:
            self._walk()

    def buffers(self) -> list[Tensor]:
        """As ``nn.Module.buffers``: each once, in the order of the modules."""
        self._follow()
        return _distinct(self._buffers)

    def parameters(self) -> list[Tensor]:
        """As ``nn.Module.parameters``: each once, in the order of the modules."""
        self._follow()
        return _distinct(self._parameters)


def _distinct(owned: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    found = {id(tensor): tensor for tensors in owned for tensor in tensors.values() if tensor is not None}
    return list(found.values())


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
