"""Hooks around ``optimizer.step()``: carry out the strategy's verdict; refuse steps that let replicas drift apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradsync.buckets.partial import PartialGradient
from gradsync.buckets.slot import Slot
from gradsync.replicas.batch_context import batch_source
from gradsync.replicas.header import UNKNOWN_STEPS
from gradsync.replicas.validation import ParameterMonitor
from gradsync.strategies.base import Verdict

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine


class StepGate:
    """Two hooks on the user's optimizer, which stays the user's.

    To skip a step the gradients become None: that leaves the parameters and the state of every torch.optim class but
    LBFGS (which is refused) as they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_optimized = _num_parameters(engine.training.optimizer)
        self._watch = ParameterMonitor(engine.training.model)
        self._awaits_step = False  # a synchronizing backward has ended, and the optimizer has not stepped since
        self._unused: Sequence[Slot] = ()  # parameters to which that backward has given no gradient on any rank
        self._num_steps = UNKNOWN_STEPS  # calls of optimizer.step() since the last header
        self.is_ending_step = False  # the optimizer has stepped, and the user's schedules have not yet
        self._entered = 0  # when the optimizer's own step began, for the recorder

    def expect_step(self, unused: Sequence[Slot]) -> None:
        """A synchronizing backward has ended; ``unused`` have got no gradient from it on any rank."""
        if self._awaits_step and unused:  # one more before the step: what an earlier one has given counts too
            before = {slot.name for slot in self._unused}
            unused = [slot for slot in unused if slot.name in before]
        self._awaits_step = True
        self._unused = unused

    def take_num_steps(self) -> int:
        """The calls of ``optimizer.step()`` since the last call of this method, for the header."""
        taken, self._num_steps = self._num_steps, 0
        return taken

    def forget_num_steps(self) -> None:
        """Forget the number of calls: the ranks came here by different paths, so their numbers may differ."""
        self._num_steps = UNKNOWN_STEPS

    def drop_step(self) -> None:
        """In an elastic run: the last backward was rolled back, and the step that would follow it does nothing."""
        self._awaits_step, self._unused = False, ()
        self.forget_num_steps()

    def scaler_stepped(self) -> None:
        """A ``GradScaler`` has ended its step; if it skipped the optimizer's, notify the strategy."""
        if self._awaits_step:
            self._awaits_step = False
            engine, strategy = self._engine, self._engine.strategy
            if engine.survival is None:
                engine.guard(strategy.skipped_step, engine.step)
                return
            self.is_ending_step = True
            engine.run_exchange(lambda: strategy.skipped_step(engine.step), again=strategy.retry_exchange)
            engine.end_step()
            self.is_ending_step = False

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        engine = self._engine
        if self._num_steps != UNKNOWN_STEPS:
            self._num_steps += 1
        self._check_parameters(optimizer)
        own_step = engine.strategy.own_step()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            self._check_gradients()
            if not self._awaits_step:
                return None  # within an accumulation: there are no gradients, and the optimizer passes over them
        elif own_step is not None:
            with torch.enable_grad():
                closure = _already_run(closure())
            self._check_gradients()
        else:
            closure = self._checked(closure)
        entered = engine.recorder.now()
        with batch_source(engine.comm).waiting():
            decide = own_step or engine.strategy.before_step
            verdict = engine.run_exchange(lambda: decide(engine.step))
        self._note_exchange(entered)
        if verdict is not Verdict.APPLY:
            engine.drop_gradients()
            closure = None if closure is None else self._dropping_gradients(closure)
        self._entered = engine.recorder.now()
        if closure is None:
            return None
        return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})

    def _check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        if _num_parameters(optimizer) != self._num_optimized:
            raise ValueError(
                "parameters were added to the optimizer after synchronize(): nobody averages their gradients. "
                "Close this synchronizer and call synchronize() again."
            )
        stranger = self._watch.find_new_parameter() if self._engine.comm.world_size > 1 else None
        if stranger is not None:
            raise ValueError(
                f"the model has a new parameter {stranger} since synchronize(), by load_state_dict(assign=True) or a "
                "new layer: nobody averages its gradients. Load without assign=True, or close this synchronizer and "
                "call synchronize() again, with an optimizer over the new parameters."
            )

    def _check_gradients(self) -> None:
        """Refuse a step that would apply gradients which are one rank's own, or may be."""
        engine = self._engine
        if engine.has_unsynchronized_gradients():
            raise ValueError(
                f"optimizer.step() would apply gradients of {engine.window.num_backwards} backward(s) under no_sync() "
                "that were never synchronized, and the replicas would drift apart. Run the last backward before step() "
                "outside of no_sync(), or drop the gradients with zero_grad()."
            )
        if engine.comm.world_size == 1:
            return
        odd = next((slot.name for slot in self._unused if has_values(slot.param.grad)), None)
        if not self._awaits_step:
            odd = engine.find_gradient()
        if odd is not None:
            raise ValueError(
                f"optimizer.step() would apply a gradient of {odd} that no synchronizing backward has made since the "
                "last step, and the replicas could drift apart. Run loss.backward() once before each step(), and "
                "zero_grad() after it. Gradients that are set by hand, by torch.autograd.grad() or by a pipeline "
                "schedule that splits the backward (ScheduleInterleavedZeroBubble) call no hooks and are not averaged."
            )

    def _checked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure: it runs its backward within the step, so its gradients are checked right after it."""

        def run() -> Any:
            loss = closure()
            self._check_gradients()
            return loss

        return run

    def after_step(self, *_: Any) -> None:
        engine = self._engine
        if self._awaits_step:
            self._awaits_step, self._unused = False, ()
            engine.recorder.optimizer_stepped(self._entered)
            entered = engine.recorder.now()
            with batch_source(engine.comm).waiting():
                strategy = engine.strategy
                self.is_ending_step = True
                engine.run_exchange(lambda: strategy.after_step(engine.step), again=strategy.retry_exchange)
                engine.end_step()
                self.is_ending_step = False
            self._note_exchange(entered)
            if engine.survival is not None:
                engine.survival.after_step()

    def _note_exchange(self, entered: int) -> None:
        """Record the time since ``entered`` as communication, if gradients stay with their rank."""
        if self._engine.strategy.gradient_sync(self._engine.step) is None:
            self._engine.recorder.strategy_communicated(entered)

    def _dropping_gradients(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose backward leaves no gradients behind."""

        def run() -> Any:
            loss = closure()
            self._engine.drop_gradients()
            return loss

        return run


def has_values(grad: Tensor | None) -> bool:
    """Whether a gradient is there and not all zeros.

    Zeros are the same on all ranks: zero_grad(set_to_none=False) leaves them, loops fill in those that are missing, and
    torch.distributed.checkpoint steps with them to make an optimizer's state.
    """
    if isinstance(grad, PartialGradient) and grad.is_partial:
        return True
    return grad is not None and bool(grad.any())


def _already_run(loss: Any) -> Callable[[], Any]:
    return lambda: loss


def run_hooks_once(optimizer: torch.optim.Optimizer) -> None:
    """Let ``step()`` call its hooks once.

    torch wraps a class's ``step`` when the first optimizer of it is made: twice if two threads make their first ones at
    the same time. Every hook would then run twice in each step.
    """
    kind: Any = type(optimizer)
    inner = getattr(kind.step, "__wrapped__", None)
    if inner is not None and getattr(inner, "__code__", None) is getattr(kind.step, "__code__", inner):
        kind.step = inner  # the flag of torch, `hooked`, may be on one of the two only
        kind.step.hooked = True


def _num_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
