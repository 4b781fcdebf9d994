"""Step records as curves in TensorBoard."""

from __future__ import annotations

from typing import Protocol

from gradsync.integrations.scalars import change_scalars_of, scalars_of
from gradsync.profiling.record import StepRecord


class ScalarWriter(Protocol):
    """The part of a ``torch.utils.tensorboard.SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class TensorBoard:
    """Writes the record of every n-th step to the script's SummaryWriter, and each change of the members.

    Args:
        writer: the script's own, so that the curves are in the same run as its losses.
        every: the number of steps from one point to the next. Higher => smaller files.
        prefix: of the tags.

    >>> from gradsync.profiling import Breakdown, StepRecord
    >>> from gradsync.integrations.tensorboard import TensorBoard
    >>> class Printer:
    ...     def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
    ...         print(tag, scalar_value, global_step) if tag.endswith("/step_s") else None
    >>> adapter = TensorBoard(Printer(), every=1)
    >>> adapter(StepRecord(step=3, rank=0, began_s=0.0, step_s=0.4, parts=Breakdown(compute_s=0.4)))
    gradsync/step_s 0.4 3
    """

    def __init__(self, writer: ScalarWriter, *, every: int = 10, prefix: str = "gradsync") -> None:
        if every < 1:
            raise ValueError(f"expected at least 1 step between two points; got {every=}.")
        self._writer = writer
        self._every = every
        self._prefix = prefix

    def __call__(self, record: StepRecord) -> None:
        for name, value in change_scalars_of(record).items():
            self._writer.add_scalar(f"{self._prefix}/{name}", value, record.step)
        if record.step % self._every == 0 and not record.discarded:
            for name, value in scalars_of(record).items():
                self._writer.add_scalar(f"{self._prefix}/{name}", value, record.step)
