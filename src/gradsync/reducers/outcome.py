"""``StepOutcome``: what the host must know about the means of one step, read without stalling a GPU.

A reducer that keeps residuals must know whether all means are finite, and their largest magnitude (see spikes.py). On a
CPU it knows that at once. On a GPU it knows it one step later: see [Note: read one step later] in comm/readback.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.codecs.base import Finite, all_finite
from gradsync.comm.readback import Readback


class StepOutcome:
    """The parameters whose means have NaN or inf, and the largest magnitude that was sent.

    >>> import torch
    >>> from gradsync.reducers.outcome import StepOutcome
    >>> outcome = StepOutcome()
    >>> outcome.add(["a"], True)
    >>> outcome.add_tensors(["b", "c"], [torch.ones(2), torch.tensor([torch.nan])])
    >>> outcome.is_known, outcome.nonfinite
    (True, ['c'])
    """

    def __init__(self) -> None:
        self._nonfinite: list[str] = []
        self._peak = 0.0
        self._flags: list[tuple[list[str], Tensor]] = []  # on a GPU: one element for all names, or one for each
        self._peaks: list[Tensor] = []  # on a GPU
        self._readbacks: list[tuple[list[list[str] | None], list[int], Readback]] = []

    def add(self, names: Sequence[str], finite: Finite) -> None:
        """``finite``: whether the means of these parameters are finite; a tensor may have an element for each."""
        if isinstance(finite, Tensor):
            self._flags.append((list(names), finite))
        elif not finite:
            self._nonfinite += names

    def add_tensors(self, names: Sequence[str], means: Sequence[Tensor], *, whole: Tensor | None = None) -> None:
        """As ``add``, for means that are still to be looked at; ``whole``: a tensor that contains all of them."""
        if whole is not None and whole.is_cpu and all_finite(whole):
            return  # on a CPU one call is cheaper than one for each, and nearly always enough
        filled = [(name, mean) for name, mean in zip(names, means, strict=True) if mean.numel()]
        if not filled:
            return
        norms = torch._foreach_norm([mean for _, mean in filled], math.inf)
        finite = torch.stack(list(norms)).isfinite()
        if finite.is_cpu:
            self._nonfinite += [name for (name, _), good in zip(filled, finite.tolist(), strict=True) if not good]
        else:
            self._flags.append(([name for name, _ in filled], finite))

    def add_peak(self, peak: float | Tensor) -> None:
        """``peak``: a magnitude among what was sent; a tensor has one element."""
        if isinstance(peak, Tensor):
            self._peaks.append(peak)
        else:
            self._peak = max(self._peak, peak)

    @property
    def is_known(self) -> bool:
        """Whether the host knows the outcome without waiting for a GPU."""
        return not self._flags and not self._peaks and not self._readbacks

    def start_reading(self) -> None:
        """Start to copy what is on a GPU to the host. Does not block."""
        parts: dict[torch.device, list[tuple[list[str] | None, Tensor]]] = {}
        for names, flags in self._flags:
            parts.setdefault(flags.device, []).append((names, flags))
        for peak in self._peaks:
            parts.setdefault(peak.device, []).append((None, peak))
        self._flags, self._peaks = [], []
        for on_device in parts.values():
            tensors = [part.reshape(-1).to(torch.float64) for _, part in on_device]
            sizes = [tensor.numel() for tensor in tensors]
            self._readbacks.append(([names for names, _ in on_device], sizes, Readback(torch.cat(tensors))))

    @property
    def nonfinite(self) -> list[str]:
        """The parameters whose means have NaN or inf. Blocks until a GPU has passed the step."""
        self._read()
        return self._nonfinite

    @property
    def peak(self) -> float:
        """The largest magnitude. Blocks until a GPU has passed the step."""
        self._read()
        return self._peak

    def _read(self) -> None:
        self.start_reading()
        readbacks, self._readbacks = self._readbacks, []
        for all_names, sizes, readback in readbacks:
            values = iter(readback.values())
            for names, size in zip(all_names, sizes, strict=True):
                read = [next(values) for _ in range(size)]
                if names is None:
                    self._peak = max(self._peak, *read)
                elif size == 1:
                    self._nonfinite += [] if read[0] else names
                else:
                    self._nonfinite += [name for name, finite in zip(names, read, strict=True) if not finite]
