"""The base of strategies that average no gradients during backward: they communicate around the optimizer's step."""

from __future__ import annotations

from gradsync import spec
from gradsync.replicas.header import Header
from gradsync.replicas.training import Training
from gradsync.strategies.base import Strategy
from gradsync.strategies.gradient_sync import GradientSync


class Local(Strategy):
    """Every rank steps on its own. A subclass brings the replicas together, in ``before_step`` or ``after_step``.

    The engine starts no collective of its own under it, so ranks may run at different speeds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.header: Header | None = None  # of the last backward: its weight, and the loss scale

    def setup(self, training: Training) -> None:
        training.check_all_optimized(spec.render(self))

    def gradient_sync(self, step: int) -> GradientSync | None:
        return None

    def end_local_backward(self, header: Header) -> None:
        self.header = header
