"""A model's buffers (running statistics, counters) over the ranks: rank 0's, the mean, or each rank its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.replicas.agreement import copy_tensors

BufferMode = Literal["broadcast", "mean", "none"]
STAGED_BYTES = 64 * 1024  # buffers up to here are copied together; memory for them is kept
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
        self._small = StagedTensors([])
        self._seen: list[tuple[Tensor, int]] = []
        self.num_overwritten = 0  # how often the buffers were overwritten from another rank: torch does not count that
        self._remember(self._tree.buffers())

    def move_to(self, comm: Communicator) -> None:
        """Go on with other ranks."""
        self._comm = comm

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
        self.num_overwritten += 1
        buffers = copied = self._tree.buffers()
        if self.mode == "mean":
            self._average([buffer for buffer in buffers if buffer.is_floating_point()], share)
            copied = [buffer for buffer in buffers if not buffer.is_floating_point()]  # a count has no mean
        small = [buffer for buffer in copied if buffer.nbytes <= STAGED_BYTES]
        if not self._small.holds(small):
            self._small = StagedTensors(small)
        self._small.copy_from(src, self._comm)
        copy_tensors(self._comm, [buffer for buffer in copied if buffer.nbytes > STAGED_BYTES], src)
        self._remember(buffers)

    @contextlib.contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """If the block raises, the buffers are what they were before it."""
        buffers = self._tree.buffers()
        before = [buffer.detach().clone() for buffer in buffers]
        try:
            yield
        except BaseException:
            for buffer, saved in zip(buffers, before, strict=True):
                buffer.data.copy_(saved)
            raise

    def merge(self, share: float) -> None:
        """Overwrite the buffers with their mean over all ranks, where they have one; ``share``: this rank's. Blocks."""
        buffers = self._tree.buffers()
        self._average([buffer for buffer in buffers if buffer.is_floating_point()], share)
        copy_tensors(self._comm, [buffer for buffer in buffers if not buffer.is_floating_point()], 0)
        self._remember(buffers)

    def _average(self, buffers: list[Tensor], share: float) -> None:
        with torch.no_grad():
            for dtype in dict.fromkeys((buffer.dtype, buffer.device) for buffer in buffers):
                group = [buffer for buffer in buffers if (buffer.dtype, buffer.device) == dtype]
                flat = torch.cat([buffer.reshape(-1) for buffer in group])
                flat = flat * share if share else torch.zeros_like(flat)
                self._comm.all_reduce(flat).wait()
                for buffer, part in zip(group, flat.split([b.numel() for b in group]), strict=True):
                    buffer.data.copy_(part.view(buffer.shape))

    def _remember(self, buffers: list[Tensor]) -> None:
        self._seen = [(buffer, _version(buffer)) for buffer in buffers]


class StagedTensors:
    """Copies many small tensors from one rank to the others, through flat memory that it keeps.

    A residual network has some 150 running statistics. To cut and copy them one by one takes milliseconds a step; with
    the views at hand it is one call for all of a dtype.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = [(tensor, tensor.data_ptr(), tensor.shape) for tensor in tensors]
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._groups = [_StagedGroup(group) for group in by_kind.values()]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are its tensors, in the memory and the shape in which it knows them."""
        return len(tensors) == len(self._known) and all(
            tensor is known and tensor.data_ptr() == address and tensor.shape == shape
            for tensor, (known, address, shape) in zip(tensors, self._known, strict=True)
        )

    def copy_from(self, src: int, comm: Communicator) -> None:
        """Overwrite every rank's tensors with those of rank ``src``. Blocks."""
        if comm.world_size == 1:
            return
        with torch.no_grad():
            for group in self._groups:
                if comm.rank == src:
                    torch._foreach_copy_(group.parts, group.aliases)
                comm.broadcast(group.flat, src).wait()
                if comm.rank != src:
                    torch._foreach_copy_(group.aliases, group.parts)


class _StagedGroup:
    """Tensors of one dtype on one device, and their places in a flat tensor."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [tensor.numel() for tensor in tensors]
        self.flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
        pieces = zip(tensors, self.flat.split(sizes), strict=True)
        self.parts = [piece.view(tensor.shape) for tensor, piece in pieces]
        # .data: a buffer that a retained graph has saved may be overwritten with equal values
        self.aliases = [tensor.data for tensor in tensors]


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
