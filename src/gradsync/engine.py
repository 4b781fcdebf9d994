"""The engine: the only code with autograd and optimizer hooks. It turns their events into calls of a Strategy.

How a synchronizing backward runs: the first gradient opens a round (the header goes on its way); every gradient is
moved into its bucket; a full bucket is sealed and handed to the strategy in plan order; the callback that autograd runs
when backward ends seals the rest and waits. When ``backward()`` returns every ``.grad`` is the mean.

[Note: who may see a gradient] Under ``no_sync()`` what was gathered so far stays visible in ``.grad``, as in one
process. Under ``accumulate=k`` the engine holds it, and ``.grad`` is None until the k-th backward: so the user's loop
may clip, step and zero after every backward, and all of it passes over parameters without a gradient.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync.bucket import BucketPlan
from gradsync.claims import claim
from gradsync.comm.base import Communicator
from gradsync.errors import GradSyncError
from gradsync.header import Header, Round
from gradsync.hooks import Hooks
from gradsync.planning import Planner
from gradsync.profiling.seam import SILENT, Recording
from gradsync.replicas import copy_training_state, hyperparameter_checksum
from gradsync.samedata import SameDataWatch
from gradsync.settings import Settings
from gradsync.slot import AnySlot, SparseSlot
from gradsync.stepping import StepGate
from gradsync.strategies.base import Strategy
from gradsync.training import Training
from gradsync.window import Window

queue_callback = torch.autograd.Variable._execution_engine.queue_callback


@dataclass
class _Backward:
    """One call of ``backward()`` as the hooks see it."""

    task: int  # autograd's number for it: tells a new backward from one that never ended
    synchronizing: bool
    together: bool  # its gradients are averaged over the ranks; else they stay this rank's own
    incoming: float  # what its gradients are multiplied by as they come in
    factor: float | None = None  # what makes them this rank's share of the mean; None until the header is back
    next_bucket: int = 0


class Engine:
    """Drives one strategy for one model. Owns the buckets; the parameters' ``.grad`` are views of them."""

    def __init__(
        self,
        training: Training,
        strategy: Strategy,
        comm: Communicator,
        settings: Settings,
        *,
        sparse: Sequence[str] = (),
        recorder: Recording = SILENT,
    ) -> None:
        self.training = training
        self.strategy = strategy
        self.recorder = strategy.recorder = recorder
        self.comm = comm
        self.settings = settings
        self.step = 0  # synchronizing backwards so far: the clock that all ranks share
        self.exposed_s = 0.0  # how long the last backward waited for the wire
        self.synchronized = True  # whether the last backward was a synchronizing one
        self.window = Window()
        self._backward: _Backward | None = None
        self._no_sync_depth = 0
        self._said_weight: float | None = None
        self._failure: BaseException | None = None
        self._same_data = SameDataWatch()
        self._uneven_leader: int | None = None
        self._lock = threading.RLock()  # on CUDA hooks come from autograd's device threads
        release = claim(training.params)
        self._hooks = Hooks(self, training.model)
        self._hooks.also_remove(release)
        self._planner = Planner(
            training.params,
            comm,
            sparse=sparse,
            bucket_bytes=settings.bucket_bytes,
            first_bucket_bytes=settings.first_bucket_bytes,
        )
        self.strategy.meet(training)
        self._adopt_plan()
        self._hooks.on_gradients(training.params.items(), Engine._on_gradient)
        if settings.accumulate > 1:
            self.watch_incoming()
        self.gate = StepGate(self)
        self._hooks.also_remove(training.optimizer.register_step_pre_hook(self.gate.before_step).remove)
        self._hooks.also_remove(training.optimizer.register_step_post_hook(self.gate.after_step).remove)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _adopt_plan(self) -> None:
        self.recorder.planned(self.plan.buckets)
        self.strategy.attach(self.plan, self.comm)

    def watch_incoming(self) -> None:
        """Also see gradients before autograd adds them up: needed once a window can have several backwards."""
        self._hooks.on_incoming(self.training.params.values(), Engine._on_incoming)

    def guard(self, event: Callable[..., Any], *args: Any) -> Any:
        """Run what a hook asks for, alone, and leave the engine marked if it fails: collectives may be half done."""
        with self._lock:
            try:
                return event(*args)
            except BaseException as error:
                self._failure = self._failure or error
                raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise GradSyncError(f"this synchronizer has failed and can't go on: {self._failure}") from self._failure

    def _on_incoming(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        entered = self.recorder.now()
        factor = self._current_backward().incoming
        self.recorder.hooked(entered)
        if factor == 1.0:
            return None
        # Out of place: autograd may have handed the same tensor to another parameter. See [Note: weight zero].
        return tuple(torch.zeros_like(grad) if factor == 0.0 else grad * factor for grad in grads)

    def _on_gradient(self, name: str) -> None:
        entered = self.recorder.now()
        self._take_gradient(name)
        self.recorder.hooked(entered, name)

    def _take_gradient(self, name: str) -> None:
        backward = self._current_backward()
        slot = self._planner.slots.get(name)
        if slot is None:  # frozen by now, and another backward was under way
            return
        grad = slot.param.grad
        assert grad is not None, "the hook runs after the gradient was accumulated"
        if isinstance(slot, SparseSlot):
            if grad.layout == torch.strided:
                raise ValueError(f"{name} was said to have sparse gradients; got a dense one.")
            return
        if grad.layout != torch.strided:
            raise ValueError(
                f"parameter {name} got a sparse gradient, but not from an Embedding(sparse=True) of the model. "
                f"Say so on all ranks: synchronize(..., sparse=[{name!r}])."
            )
        if not backward.synchronizing:
            slot.collect()
            return
        if not backward.together:
            return  # it is right where autograd put it; what several backwards have gathered is put right at the end
        if slot.ready:
            raise GradSyncError(f"parameter {name} got a second gradient in one backward, after the first was sent.")
        if self.window.num_backwards > 1:
            slot.collect()
        elif not slot.is_small:  # small ones the bucket takes when it is sealed
            if backward.factor is None:
                self._learn_factor(block=False)
            slot.bring_in(backward.factor, may_lend=self.strategy.reads_fresh_gradients)
        bucket = slot.bucket
        slot.ready = True
        bucket.missing -= 1
        if self._planner.ready_order is not None:
            self._planner.ready_order.append(name)
        if not bucket.missing:
            self.recorder.ready(bucket.index)
        elif slot.is_small:
            return  # a hook costs most where it runs through code that the caches have lost since the last one
        if not self._launch(final=False):
            self.strategy.advance()

    # -- one backward ---------------------------------------------------------------------------------------------

    def _current_backward(self) -> _Backward:
        task = torch._C._current_graph_task_id()
        if self._backward is not None and self._backward.task == task:
            return self._backward
        self._raise_failure()
        unfinished = self._backward
        if unfinished is not None and unfinished.synchronizing and unfinished.together and self.comm.world_size > 1:
            raise GradSyncError(
                "the last backward did not come to its end on this rank (an exception in it?), so the ranks are out of "
                "step. Restart from a checkpoint."
            )
        self._backward = self._begin(task)
        queue_callback(lambda: self.guard(self._finish))
        return self._backward

    def _begin(self, task: int) -> _Backward:
        if self.window.num_backwards and not any(slot.holds_something() for slot in self._all()):
            # The user has dropped what was gathered (zero_grad): its weight, and what was set aside, go with it.
            self.window = Window()
            for slot in self._all():
                slot.carried = None
        if self._planner.follow_model(mid_window=self.window.num_backwards > 0):
            self._adopt_plan()
        if not self.window.num_backwards and self._planner.follow_size(self.strategy.wanted_bucket_bytes):
            self._adopt_plan()
        weight = self.comm.feed.batch_weight if self._said_weight is None else self._said_weight
        in_window = self.window.num_backwards + 1
        synchronizing = self._no_sync_depth == 0 and in_window >= self.settings.accumulate
        if in_window == 1 and (not synchronizing or weight == 0.0):
            for slot in self._all():
                slot.set_aside()
        incoming = self.window.add(weight)
        if synchronizing:
            self._open(has_data=True)
        return _Backward(task=task, synchronizing=synchronizing, together=self.strategy.together, incoming=incoming)

    def _open(self, *, has_data: bool) -> None:
        self.comm.note(f"step {self.step}" if has_data else f"join, at step {self.step}", step=self.step)
        self.recorder.opened(self.step, has_data=has_data)
        loss_scale = self.training.loss_scale
        for bucket in self.plan.buckets:
            bucket.open()
            bucket.loss_scale, bucket.may_overflow = loss_scale, self.training.scaler is not None
        self.strategy.open(self._header(has_data=has_data))

    def _header(self, *, has_data: bool) -> Header:
        return Header(
            step=self.step,
            weight=self.window.weight,
            num_backwards=self.window.num_backwards,
            fingerprint=self.plan.fingerprint,
            has_data=has_data,
            buffers_changed=has_data and self.training.buffers.changed(),
            hyperparameters=hyperparameter_checksum(self.training.optimizer),
            loss_scale=self.training.loss_scale,
            checksum=self._same_data.take_checksum(),
            told=self.recorder.told(),
        )

    def _learn_factor(self, *, block: bool) -> None:
        """Set what this rank's gradients are multiplied by, once all ranks' weights are known."""
        assert self._backward is not None
        round = self.strategy.round(block=block)
        if round is not None:
            self._backward.factor = self.window.unit * self._per_weight(round.total_weight, round.num_backwards)

    def _per_weight(self, total: float, num_backwards: int) -> float:
        return 0.0 if total == 0.0 else (num_backwards if self.settings.accumulation == "sum" else 1) / total

    def _launch(self, *, final: bool) -> int:
        """Seal full buckets (``final``: all) and hand them over in plan order; returns how many."""
        backward, buckets = self._backward, self.plan.buckets
        assert backward is not None
        first = backward.next_bucket
        while backward.next_bucket < len(buckets):
            bucket = buckets[backward.next_bucket]
            if bucket.missing and not final:
                break
            if backward.factor is None:
                self._learn_factor(block=final)
                if backward.factor is None:
                    break
            bucket.seal(backward.factor, lend_small=self.strategy.reads_small_gradients)
            self._same_data.taste(bucket)
            self.strategy.on_bucket_ready(bucket)
            backward.next_bucket += 1
        return backward.next_bucket - first

    def _finish(self) -> None:
        """Autograd is done with this backward."""
        if torch._C._current_autograd_node() is not None:
            raise GradSyncError(
                "a backward runs inside another one, as torch.utils.checkpoint does with use_reentrant=True: gradients "
                "would be sent before they are complete. Use checkpoint(..., use_reentrant=False)."
            )
        backward = self._backward
        assert backward is not None
        self._said_weight = self.comm.feed.said_weight = None
        self.synchronized = backward.synchronizing
        if backward.synchronizing and backward.together:
            self._complete()
        elif backward.synchronizing:
            self._complete_alone()
        elif self._no_sync_depth == 0:  # see [Note: who may see a gradient]
            for slot in self._all():
                slot.hold()
        self._backward = None

    def _complete(self) -> Round:
        """Send what is left, wait, and leave every ``.grad`` the mean."""
        start_s = time.perf_counter()
        self.recorder.ended_backward()
        self._launch(final=True)
        backward, round = self._backward, self.strategy.round(block=True)
        assert backward is not None and round is not None
        if backward.factor is None:
            self._learn_factor(block=True)
        if self.window.num_backwards == 1 and round.total_weight > 0.0:
            for slot in self._all():
                slot.carried = None  # set aside for a weight of zero; the ranks that have weight bring it along
        if self.plan.sparse:
            self.strategy.on_sparse(self.plan.sparse, backward.factor or 0.0)
        self.strategy.after_backward()
        for bucket in self.plan.buckets:
            bucket.unseal()
        leader = (round.with_data or [0])[0]
        if round.buffers_changed:
            entered = self.recorder.now()
            share = self.window.weight * self._per_weight(round.total_weight, round.num_backwards)
            self.training.buffers.synchronize(share, leader)
            self.recorder.spent(entered)
        self.exposed_s = time.perf_counter() - start_s
        self._tell_wait()
        self.recorder.ended_step(round.headers, weight=self.window.weight)
        self._tick()
        if len(round.with_data) < self.comm.world_size:
            self._uneven_leader = leader
        self._same_data.judge(round, self.comm.rank)
        if self._planner.follow_ready_order(leader):
            self._adopt_plan()
        return round

    def _complete_alone(self) -> None:
        """Leave every ``.grad`` this rank's own mean over its backwards."""
        window = self.window
        self.recorder.ended_backward()
        if window.num_backwards > 1 or window.weight == 0.0:  # else the mean is the gradient itself
            factor = window.unit * self._per_weight(window.weight, window.num_backwards)
            for bucket in self.plan.buckets:
                bucket.seal(factor)
                bucket.unseal()
            if self.plan.sparse:
                self.strategy.on_sparse(self.plan.sparse, factor)
        self.strategy.after_backward()
        self.exposed_s = 0.0
        self.recorder.ended_step((), weight=window.weight)
        self._tick()

    def _tell_wait(self) -> None:
        """Let a balancing loader know how long this backward waited; on other devices the host does not."""
        self.comm.feed.waited_s += self.exposed_s
        self.comm.feed.wait_unseen_on = next((b.device.type for b in self.plan.buckets if b.device.type != "cpu"), "")

    def _tick(self) -> None:
        self.step += 1
        self.gate.expect_step()
        self.window = Window()

    # -- ranks without data ---------------------------------------------------------------------------------------

    def join(self) -> None:
        """Keep the others company until no rank has data; then all have the same state again. Blocks."""
        self.guard(self._join)

    def _join(self) -> None:
        if self.strategy.together:
            while self._keep_company():
                pass
            leader, self._uneven_leader = self._uneven_leader, None
        else:
            leader = self.strategy.join()
        if leader is not None:
            training = self.training
            copy_training_state(self.comm, training.model, training.optimizer, training.travelling, leader)
            if self.comm.rank != leader:
                self.drop_gradients()

    def _keep_company(self) -> bool:
        """Take part in one round with what this rank has left, most often nothing; False when nobody has data."""
        self._raise_failure()
        self._backward = _Backward(task=-1, synchronizing=True, together=True, incoming=1.0)
        if not self.window.num_backwards:
            self.drop_gradients()  # the last mean must not pass for gradients that this rank has
        try:
            self._open(has_data=False)
            round = self.strategy.round(block=True)
            assert round is not None
            if round.with_data:
                self._complete()
            return bool(round.with_data)
        finally:
            self._backward = None

    # -- small things ---------------------------------------------------------------------------------------------

    @property
    def plan(self) -> BucketPlan:
        return self._planner.plan

    def _all(self) -> list[AnySlot]:
        return list(self._planner.slots.values())

    def drop_gradients(self) -> None:
        """Leave the optimizer nothing to apply."""
        for slot in self._all():
            slot.param.grad = None

    def has_unsynchronized_gradients(self) -> bool:
        """Whether ``.grad`` shows gradients that only this rank has: backwards under ``no_sync()`` so far."""
        return self.window.num_backwards > 0 and any(slot.param.grad is not None for slot in self._all())

    def set_weight(self, weight: float) -> None:
        """Say what the next backward's mean loss stands for."""
        if weight == 0.0:
            self.watch_incoming()  # an earlier mean must be set aside before autograd adds to it
        self._said_weight = self.comm.feed.said_weight = weight

    def enter_no_sync(self) -> None:
        self.watch_incoming()
        self._no_sync_depth += 1

    def leave_no_sync(self) -> None:
        self._no_sync_depth -= 1

    def state_dict(self) -> dict[str, Any]:
        """The clock, the plan and the open window; tensors are copies."""
        gathered = {slot.name: slot.gathered() for slot in self._all()} if self.window.num_backwards else {}
        kept = {name: grad for name, grad in gathered.items() if grad is not None}
        return {"step": self.step, **self._planner.state_dict(), "window": {**vars(self.window), "gathered": kept}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave: the same sums, in the same places, from the same clock."""
        self._planner.load_state_dict(state)
        self._adopt_plan()
        self.step = int(state["step"])
        self._backward = None
        saved = dict(state["window"])
        gathered = saved.pop("gathered")
        self.window = Window(**saved)
        for name, grad in gathered.items():
            self.training.params[name].grad = grad.clone()
            self._planner.slots[name].hold()
        if self.window.num_backwards:
            self.watch_incoming()

    def close(self) -> None:
        """Remove every hook, and give each parameter a gradient of its own again."""
        self._hooks.remove()
        self.strategy.close()
        for slot in self._all():
            slot.param.grad = slot.gathered()
        self._planner.drop()
