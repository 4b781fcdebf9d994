"""``Readback``: values of a GPU that the host reads later, so that it need not wait for the GPU now.

[Note: read one step later] ``float(tensor)`` of a GPU's tensor blocks the host until the GPU has done everything that
was launched before. The GPU is then idle until the host has launched more. So what the host must know about a step is
copied to pinned memory, in the order of the stream, and read at the first gradient of the next step. By then the
optimizer's step and the next forward are launched behind the copy, and keep the GPU busy if the host still has to wait.
All ranks read at the same place, so they decide the same at the same step.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """A copy of some values on its way to the host. On the CPU it is a plain copy.

    >>> import torch
    >>> from gradsync.comm.readback import Readback
    >>> Readback(torch.tensor([1.0, 2.0])).values()
    [1.0, 2.0]
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.Event | None = None
        with torch.no_grad():
            flat = values.detach().reshape(-1)
            if flat.is_cpu:
                self._host = flat.clone()
                return
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
        self._event = torch.Event(device=flat.device)
        self._event.record()

    def values(self) -> list[float]:
        """The values. Blocks until the device has passed the copy."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return [float(value) for value in self._host.tolist()]


class HostValue:
    """The host's copy of one small tensor, which is written rarely: it is copied only when it was written since.

    >>> import torch
    >>> from gradsync.comm.readback import HostValue
    >>> HostValue().current(torch.tensor(2.0))
    [2.0]
    """

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._version = -1
        self._copy: Readback | None = None
        self._values: list[float] = []

    def follow(self, tensor: Tensor) -> None:
        """Start to copy the tensor, if it is another one or was written since the last copy. Does not block."""
        version = -1 if tensor.is_inference() else tensor._version
        if tensor is not self._tensor or version != self._version or version == -1:
            self._tensor, self._version, self._copy = tensor, version, Readback(tensor)

    def current(self, tensor: Tensor) -> list[float]:
        """The tensor's values. Blocks until its device has passed the copy that ``follow`` has started."""
        self.follow(tensor)
        return self._read()

    def recent(self, tensor: Tensor) -> list[float]:
        """The values at the last call; the first call, and every call for a tensor on the CPU, gives those of now."""
        known = self._tensor is not None and not tensor.is_cpu
        values = self._read()
        self.follow(tensor)
        return values if known else self._read()

    def _read(self) -> list[float]:
        if self._copy is not None:
            self._values, self._copy = self._copy.values(), None
        return self._values
