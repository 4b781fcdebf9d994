"""Around ``optimizer.step()``: a strategy's verdict is carried out; a step that would part the replicas is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gradsync.strategies.base import Verdict

if TYPE_CHECKING:
    from gradsync.engine import Engine


class StepGate:
    """Two hooks on the user's optimizer, which stays the user's.

    To skip a step the gradients become None: that leaves the parameters and the state of every torch.optim class but
    LBFGS (which is refused) as they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_optimized = _num_parameters(engine.training.optimizer)
        self._awaits_step = False  # a synchronizing backward has ended, and the optimizer has not stepped since
        self._entered = 0  # when the optimizer's own step began, for the recorder

    def expect_step(self) -> None:
        """A synchronizing backward has ended."""
        self._awaits_step = True

    def note_scaler_stepped(self) -> None:
        """A ``GradScaler`` was asked to step; where it left the step out, the strategy must know."""
        if self._awaits_step:
            self._awaits_step = False
            self._engine.guard(self._engine.strategy.skipped_step, self._engine.step)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        engine = self._engine
        if engine.has_unsynchronized_gradients():
            raise ValueError(
                f"optimizer.step() would apply gradients of {engine.window.num_backwards} backward(s) under no_sync() "
                "that were never synchronized, and the replicas would drift apart. Run the last backward before step() "
                "outside of no_sync(), or drop the gradients with zero_grad()."
            )
        if _num_parameters(optimizer) != self._num_optimized:
            raise ValueError(
                "parameters were added to the optimizer after synchronize(): nobody averages their gradients. "
                "Close this synchronizer and call synchronize() again."
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None and not self._awaits_step:
            return None  # within an accumulation: there are no gradients, and the optimizer passes over them
        if closure is not None and engine.strategy.steps_itself:
            with torch.enable_grad():
                closure = _already_run(closure())
        entered = engine.recorder.now()
        with engine.comm.feed.waiting():
            verdict = engine.strategy.before_step(engine.step)
        self._note_meeting(entered)
        if verdict is not Verdict.APPLY:
            engine.drop_gradients()
            closure = None if closure is None else self._leaving_nothing(closure)
        self._entered = engine.recorder.now()
        if closure is None:
            return None
        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    def after_step(self, *_: Any) -> None:
        engine = self._engine
        if self._awaits_step:
            self._awaits_step = False
            engine.recorder.optimized(self._entered)
            entered = engine.recorder.now()
            with engine.comm.feed.waiting():
                engine.strategy.after_step(engine.step)
            self._note_meeting(entered)

    def _note_meeting(self, entered: int) -> None:
        """Where gradients stay with their rank, a strategy talks to the others around the step, and nowhere else."""
        if not self._engine.strategy.together:
            self._engine.recorder.met(entered)

    def _leaving_nothing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose backward leaves no gradients behind."""

        def run() -> Any:
            loss = closure()
            self._engine.drop_gradients()
            return loss

        return run


def _already_run(loss: Any) -> Callable[[], Any]:
    return lambda: loss


def _num_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
