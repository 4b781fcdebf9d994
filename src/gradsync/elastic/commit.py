"""What a step changes before it is committed, and how it is undone: buffers, random numbers, schedules, the loader.

A step is committed when its synchronizing backward has ended: from then on its optimizer step depends on nobody else.
Parameters and optimizer state change only after that, so they never need to be rolled back. Gradients and the state of
codecs are dropped by the engine and the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync.replicas.batch_context import Rewindable
from gradsync.replicas.buffers import ModuleTree
from gradsync.replicas.training import Training


class RestorePoint:
    """The state of one worker right before the first batch of a step is read.

    ``take`` copies the buffers only if one was written since the last time, so it costs next to nothing for a model
    without running statistics.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._tree = ModuleTree(training.model)
        self._copies: list[tuple[Tensor, int, Tensor]] = []  # each buffer, its version, and its values
        self._num_overwritten = 0
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
        if self._were_written() or [id(each) for each in buffers] != [id(each[0]) for each in self._copies]:
            known = {id(buffer): copy for buffer, _, copy in self._copies}
            copies = []
            with torch.no_grad():
                for buffer in buffers:
                    copy = known.get(id(buffer))
                    if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
                        copy = buffer.detach().clone()
                    else:
                        copy.copy_(buffer)
                    copies.append((buffer, buffer._version, copy))
            self._copies = copies
            self._num_overwritten = training.buffers.num_overwritten
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
        if self._were_written():
            with torch.no_grad():
                for at, (buffer, _, copy) in enumerate(self._copies):
                    buffer.data.copy_(copy)
                    self._copies[at] = (buffer, buffer._version, copy)
            self._num_overwritten = self._training.buffers.num_overwritten
        for schedule, state in zip(self._training.schedules, self._schedules, strict=False):
            schedule.load_state_dict(state)
        for group, values in zip(self._training.optimizer.param_groups, self._hyperparameters, strict=False):
            group.update(values)
        self.restore_random_numbers()
        if self.loader is not None and self.place is not None:
            self.loader.go_to(self.place)

    def _were_written(self) -> bool:
        """Whether any of the buffers was written since they were copied.

        torch's BatchNorm writes its running statistics without a new version, and only its counter has one: so a
        version that is new stands for all of them. Another rank's values come without one too, and are counted: a rank
        without data, or a newcomer, has run no forward.
        """
        overwritten = self._training.buffers.num_overwritten != self._num_overwritten
        return overwritten or any(buffer._version != version for buffer, version, _ in self._copies)

    @property
    def random_numbers(self) -> list[Tensor]:
        """The states of torch's generators: the host's, and that of its accelerator if there is one."""
        return [self._rng, *self._device_rng]

    def restore_random_numbers(self) -> None:
        set_random_numbers(self.random_numbers)


def set_random_numbers(states: Sequence[Tensor]) -> None:
    """Set torch's generators to what ``random_numbers`` was."""
    rng, *device_rng = states
    torch.set_rng_state(rng)
    for state in device_rng if torch.cuda.is_available() else ():
        torch.cuda.set_rng_state(state)
