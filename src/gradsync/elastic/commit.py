"""What a step changes before it is committed, and how it is undone: buffers, random numbers, schedules, the loader.

A step is committed when its synchronizing backward has ended: from then on its optimizer step depends on nobody else.
Parameters and optimizer state change only after that, so they never need to be rolled back. Gradients and the state of
codecs are dropped by the engine and the strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsync.replicas.batch_context import Rewindable
from gradsync.replicas.buffers import ModuleTree
from gradsync.replicas.training import Training


class RestorePoint:
    """The state of one worker right before the first batch of a step is read.

    ``take`` copies only the buffers that were written since the last time, so it costs next to nothing for a model
    without running statistics.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._tree = ModuleTree(training.model)
        self._copies: list[tuple[Tensor, int, Tensor]] = []  # each buffer, its version, and its values
        self._rng = torch.get_rng_state()
        self._device_rng: list[Tensor] = []
        # Schedules may step with every batch of an accumulation, and write into the optimizer's groups.
        self._schedules: list[dict[str, Any]] = []
        self._hyperparameters: list[dict[str, Any]] = []
        self.loader: Rewindable | None = None
        self.place: dict[str, Any] | None = None
        self.take(None)

    def take(self, loader: Rewindable | None) -> None:
        """Record the present state; ``loader``: the one that is about to read a batch, if it is known."""
        training, buffers = self._training, self._tree.buffers()
        known = {id(buffer): (version, copy) for buffer, version, copy in self._copies}
        copies = []
        with torch.no_grad():
            for buffer in buffers:
                version, copy = known.get(id(buffer), (None, None))
                if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
                    copy = buffer.detach().clone()
                elif version != buffer._version:
                    copy.copy_(buffer)
                copies.append((buffer, buffer._version, copy))
        self._copies = copies
        self._rng = torch.get_rng_state()
        if torch.accelerator.is_available():
            self._device_rng = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
        if training.schedules:
            self._schedules = [dict(schedule.state_dict()) for schedule in training.schedules]
            groups = training.optimizer.param_groups
            self._hyperparameters = [{key: group[key] for key in group if key != "params"} for group in groups]
        self.loader = loader
        self.place = None if loader is None else loader.place()

    def restore(self) -> None:
        """Undo what a discarded step has done. The loader goes back to its place by itself, at its next batch."""
        with torch.no_grad():
            for at, (buffer, version, copy) in enumerate(self._copies):
                if buffer._version != version:
                    buffer.data.copy_(copy)
                    self._copies[at] = (buffer, buffer._version, copy)
        for schedule, state in zip(self._training.schedules, self._schedules, strict=False):
            schedule.load_state_dict(state)
        for group, values in zip(self._training.optimizer.param_groups, self._hyperparameters, strict=False):
            group.update(values)
        self.restore_random_numbers()
        if self.loader is not None and self.place is not None:
            self.loader.go_to(self.place)

    def restore_random_numbers(self) -> None:
        torch.set_rng_state(self._rng)
        for state in self._device_rng:
            torch.cuda.set_rng_state(state)
