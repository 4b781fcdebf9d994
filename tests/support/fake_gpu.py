"""A GPU that computes nothing, for machines without one: it finds what would make the host wait for a real one.

Tensors of the device "cuda" are torch's FakeTensors: they have a shape, a dtype and a device, but no values.
:class:`FakeGpu` sees every operation on them. It raises :class:`Stall` for those that block the host on a real GPU:
reads of a value, shapes that depend on values, and copies between host and GPU that are not asynchronous. CPU tensors
are real.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradsync.comm import readback
from gradsync.comm.base import Communicator, Finished, ReduceOp, Work

GPU = torch.device("cuda", 0)
_CUDA, _META, _NUM_DEVICE_TYPES = 1, 14, 20  # of c10::DeviceType
_READ_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Stall(AssertionError):
    """The host would wait for the GPU."""


class FakeGpu(TorchDispatchMode):
    """Runs operations on fake CUDA tensors. While ``watching()``, what would block the host raises ``Stall``.

    What the host reads asynchronously (``Readback``) is 1.0. ``log`` has the collectives, their waits and the reads, in
    order; so have the operations on the GPU, by name, if ``log_operations`` is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._watches = False
        self.log: list[str] = []
        self.log_operations = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._watches = True
        try:
            yield
        finally:
            self._watches = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            return torch.ones(args[0], dtype=kwargs["dtype"])
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        target = kwargs.get("device")
        target = None if target is None else torch.device(target).type
        if GPU.type not in devices | {target}:
            return func(*args, **kwargs)
        if self._watches and (reason := _reason_to_wait(func, args, kwargs, target)):
            raise Stall(f"{func}: {reason}")
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0.0  # not within a step
        if func is torch.ops.aten.copy_.default and args[0].device.type == "cpu":
            return args[0]  # an asynchronous read
        if self.log_operations and func.namespace == "aten" and not func.is_view:
            self.log.append(func.overloadpacket.__name__)
        with self._fake:
            return func(*args, **kwargs)


def _reason_to_wait(func: Any, args: Sequence[Any], kwargs: dict[str, Any], target: str | None) -> str:
    """Why an operation blocks the host; empty if it does not."""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        return "the size of what a mask selects is read on the host" if masks else ""
    if _READ_TAGS & set(func.tags):
        return "the host reads a value, or a shape that depends on values"
    given = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), None)
    if name == "_to_copy" and target is not None and given is not None and given.device.type != target:
        return "" if kwargs.get("non_blocking") else f"a blocking copy from {given.device.type} to {target}"
    if name == "copy_" and args[0].device.type != args[1].device.type:
        non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return "" if non_blocking else f"a blocking copy from {args[1].device.type} to {args[0].device.type}"
    return ""


class FakeEvent:
    """Stands for ``torch.Event``: the GPU has always passed it. Those that only mark a time are not logged."""

    gpu: FakeGpu

    def __init__(self, *, device: torch.device = GPU, enable_timing: bool = False) -> None:
        assert device.type == GPU.type
        self._marks_time = enable_timing

    def record(self) -> None:
        self.gpu.log += [] if self._marks_time else ["start to read"]

    def synchronize(self) -> None:
        self.gpu.log += [] if self._marks_time else ["read"]

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1.0


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Make tensors of the device "cuda" possible within the block, and log what the host reads from them."""
    _allow_cuda_tensors()
    gpu = FakeGpu()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(readback.torch, "Event", type("Event", (FakeEvent,), {"gpu": gpu}))
        patch.setattr(FakeTensor, "data_ptr", _address, raising=False)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        for name in ("tolist", "numpy"):  # torch refuses these for subclasses, before an operation is seen
            patch.setattr(FakeTensor, name, _read_one, raising=False)
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # only compared with another
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is then a copy that is seen
        try:
            with gpu:
                yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)


@functools.cache
def _allow_cuda_tensors() -> None:
    """Let a torch that was built without CUDA index fake CUDA tensors.

    Indexing looks up the device's guard, in a table that has none for CUDA then; the one for "meta" does nothing.
    """
    if torch.backends.cuda.is_built():
        return  # FakeTensorMode does the same, where there is no GPU
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    assert guards[_META], "the number of the device type has changed: see c10/core/DeviceType.h"
    guards[_CUDA] = guards[_META]


def _address(tensor: Tensor) -> int:
    """A number that is different for different memory, as an address is."""
    return int(tensor.untyped_storage()._cdata) + int(tensor.storage_offset()) * tensor.element_size()


def _read_one(tensor: Tensor) -> Any:
    return tensor.reshape(-1)[0].item()


class _GpuWork(Work):
    """As a work of NCCL: ``wait`` makes the stream wait, and the collective is not done before the host asks again."""

    def __init__(self, gpu: FakeGpu, what: str) -> None:
        self._gpu, self._what = gpu, what

    def wait(self) -> None:
        self._gpu.log.append(f"stream waits for {self._what}")

    def done(self) -> bool:
        return False


class FakeRanks(Communicator):
    """Rank 0 of several ranks that all send the same. Collectives of the fake GPU are logged, and do nothing."""

    transport = "fake"

    def __init__(self, gpu: FakeGpu, world_size: int) -> None:
        super().__init__(0, world_size, timeout_s=1.0)
        self._gpu = gpu

    def _run(self, what: str, tensor: Tensor, on_cpu: Callable[[], Any]) -> Work:
        if tensor.is_cpu:
            on_cpu()
            return Finished()
        self._gpu.log.append(what)
        return _GpuWork(self._gpu, what)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = "sum") -> Work:
        return self._run("all_reduce", tensor, lambda: tensor.mul_(self.world_size if op == "sum" else 1))

    def all_gather(self, tensor: Tensor, *, out: Tensor) -> Work:
        return self._run("all_gather", tensor, lambda: out.copy_(tensor.expand(out.shape)))

    def reduce_scatter(self, tensor: Tensor, *, out: Tensor, op: ReduceOp = "sum") -> Work:
        return self._run("reduce_scatter", tensor, lambda: out.copy_(tensor[0]))

    def all_to_all(self, tensor: Tensor, *, out: Tensor, own: bool = True, used: Sequence[int] | None = None) -> Work:
        return self._run("all_to_all", tensor, lambda: out.copy_(tensor))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        return self._run("broadcast", tensor, lambda: None)

    def send(self, tensor: Tensor, dst: int) -> Work:
        raise NotImplementedError

    def recv(self, tensor: Tensor, src: int) -> Work:
        raise NotImplementedError

    def barrier(self) -> None:
        return None

    def split(self, ranks: Sequence[int]) -> Communicator:
        return self
