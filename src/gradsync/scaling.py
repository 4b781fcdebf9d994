"""``GradScaler`` under ``accumulate=k``: its calls between synchronizations pass over gradients that are not there."""

from __future__ import annotations

from typing import Any

from gradsync.engine import Engine


class ScalerGuard:
    """Lets a loop call ``unscale_``, ``step`` and ``update`` after every backward, as it may without a scaler.

    A GradScaler refuses to step when no gradient was there to be checked for inf, and between synchronizations there is
    none. The guard sits on the user's own scaler object until ``remove``.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.scaler is not None
        self._scaler = engine.scaler
        for name in ("unscale_", "step", "update"):
            setattr(self._scaler, name, self._passing_over(getattr(self._scaler, name), engine))

    @staticmethod
    def _passing_over(method: Any, engine: Engine) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if engine.synchronized else None

        return call

    def remove(self) -> None:
        for name in ("unscale_", "step", "update"):
            delattr(self._scaler, name)
