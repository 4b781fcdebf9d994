"""Between a ``GradScaler`` and the engine: steps that the scaler skips, and backwards that leave no gradients."""

from __future__ import annotations

from typing import Any

from gradsync.engine.engine import Engine


class ScalerGuard:
    """Lets a loop call ``unscale_``, ``step`` and ``update`` after every backward, as it may without a scaler.

    A GradScaler refuses to step when no gradient was there to be checked for inf. Between synchronizations there is
    none, nor after a step that an elastic run has rolled back. A step that it leaves out because of inf runs no hook
    of the optimizer, on one rank alone where gradients stay with their ranks: so the strategy is notified here. The
    guard patches the user's own scaler until ``remove``.
    """

    def __init__(self, engine: Engine) -> None:
        assert engine.training.scaler is not None
        self._scaler = engine.training.scaler
        for name in ("unscale_", "step", "update"):
            setattr(self._scaler, name, self._skipping_accumulation(getattr(self._scaler, name), engine, name))
        self._scaler._unscale_grads_ = self._agreeing(self._scaler._unscale_grads_, engine)  # type: ignore[method-assign]

    @staticmethod
    def _agreeing(unscale: Any, engine: Engine) -> Any:
        """All ranks must skip the same steps, also where each has only looked for inf in a part of the gradients."""

        def call(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            found = unscale(optimizer, *args, **kwargs)
            if optimizer is engine.training.optimizer:
                for value in found.values():
                    engine.guard(engine.strategy.agree_on_inf, value)
            return found

        return call

    @staticmethod
    def _skipping_accumulation(method: Any, engine: Engine, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if engine.discarded or (engine.settings.accumulate > 1 and not engine.synchronized):
                return None
            result = method(*args, **kwargs)
            if name == "step" and engine.training.optimizer in (*args, *kwargs.values()):
                engine.gate.scaler_stepped()
            elif name == "update":
                engine.training.follow_loss_scale()  # the next backward reads it: get_scale() would stall a GPU
            return result

        return call

    def remove(self) -> None:
        for name in ("unscale_", "step", "update", "_unscale_grads_"):
            delattr(self._scaler, name)
