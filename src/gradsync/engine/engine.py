"""The engine: the only code with autograd and optimizer hooks. It turns their events into calls of a Strategy.

How a synchronizing backward runs: the first gradient begins the step, and the header is sent; every gradient is copied
into its bucket, or left where autograd put it if the reducer reads it there; a full bucket is finalized and handed to
the strategy's gradient sync, in plan order; the callback that autograd runs when backward ends finalizes the rest and
waits. When ``backward()`` returns every ``.grad`` is the mean.

[Note: who may see a gradient] Under ``no_sync()`` what was accumulated so far stays visible in ``.grad``, as in one
process. Under ``accumulate=k`` the engine holds it, and ``.grad`` is None until the k-th backward: so the user's loop
may clip, step and zero after every backward, because all of these skip parameters without a gradient.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.buckets.bucket import BUCKET_BYTES, FIRST_BUCKET_BYTES, BucketPlan
from gradsync.buckets.planner import Planner
from gradsync.buckets.slot import AnySlot, LooseSlot, Slot, SparseSlot
from gradsync.comm.base import Communicator, Solo
from gradsync.elastic.membership import Samples
from gradsync.elastic.recovery import LOST
from gradsync.engine.hooks import Hooks
from gradsync.engine.step_gate import StepGate, has_values, run_hooks_once
from gradsync.engine.survival import Survival
from gradsync.engine.window import Window
from gradsync.errors import GradSyncError, OutOfStep
from gradsync.profiling.interface import NOT_RECORDING, Recording
from gradsync.reducers.sparse import sum_sparse
from gradsync.replicas.agreement import (
    HyperparameterChecksum,
    copy_training_state,
    describe_hyperparameters,
    find_difference,
)
from gradsync.replicas.batch_context import BatchContext, batch_source
from gradsync.replicas.buffers import BUFFER_MODES, BufferMode
from gradsync.replicas.header import HYPERPARAMETERS, PLAN, Header, HeaderExchange, HeadersDiffer, StepHeaders
from gradsync.replicas.ownership import claim
from gradsync.replicas.same_data import SameDataDetector
from gradsync.replicas.training import Training
from gradsync.strategies.base import Strategy
from gradsync.strategies.gradient_sync import GradientSync

queue_callback = torch.autograd.Variable._execution_engine.queue_callback

HEADER_WAIT_S = 0.003  # longer => a link starts sooner if ranks are not quite in step, but this one computes later


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of an engine, besides its strategy. All ranks must have the same."""

    accumulate: int = 1  # higher => fewer synchronizations, larger batches
    accumulation: Literal["mean", "sum"] = "mean"  # "sum": for loops that divide the loss themselves, as with DDP
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    buffers: BufferMode = "broadcast"

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1; got {self.accumulate}.")
        if self.accumulation not in ("mean", "sum"):
            raise ValueError(f"accumulation must be 'mean' or 'sum'; got {self.accumulation!r}.")
        if self.buffers not in BUFFER_MODES:
            raise ValueError(f"buffers must be one of {', '.join(BUFFER_MODES)}; got {self.buffers!r}.")
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise ValueError(f"buckets must hold at least a byte; got {self.bucket_bytes=} {self.first_bucket_bytes=}.")


@dataclass
class _Backward:
    """One call of ``backward()`` as the hooks see it."""

    task: int  # autograd's number for it: distinguishes a new backward from one that never ended
    synchronizing: bool
    sync: GradientSync | None  # averages its gradients over the ranks; None: they stay with this rank
    incoming: float  # the factor for its gradients when they arrive
    overtaken: set[str]  # parameters with later hooks of the user: those may change .grad, so it is read at the end
    header: Header | None = None  # this rank's step header; None: this backward does not synchronize
    waited: bool = False  # for the headers, with the first full bucket
    factor: float | None = None  # scales them to this rank's share of the mean; None until all headers have arrived
    next_bucket: int = 0
    onto_slices: bool = False  # gradients of an earlier backward, of which each rank has its slice, were set aside


class Engine:
    """Drives one strategy for one model. Owns the buckets; the parameters' ``.grad`` are views of them.

    ``plan``: another rank's ``plan_state()``, to begin with its layout of buckets.
    """

    def __init__(
        self,
        training: Training,
        strategy: Strategy,
        comm: Communicator,
        settings: EngineSettings,
        *,
        sparse: Sequence[str] = (),
        undoable: bool = False,
        recorder: Recording = NOT_RECORDING,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        self.training = training
        self.strategy = strategy
        strategy.undoable = undoable
        self.recorder = strategy.recorder = recorder
        self.comm = comm
        self.settings = settings
        self.undoable = undoable  # a backward that a lost peer interrupts can be undone: see Strategy.discard_step
        self.step = 0  # synchronizing backwards so far: the clock that all ranks share
        self.samples = Samples()  # that were trained in this epoch of an elastic run
        self.exposed_s = 0.0  # how long the last backward waited for the wire
        self.synchronized = True  # whether the last backward was a synchronizing one
        self.window = Window()
        self._backward: _Backward | None = None
        self._no_sync_depth = 0
        self.batch = BatchContext(batch_source(comm))
        self._failure: BaseException | None = None
        self.survival: Survival | None = None  # in an elastic run
        self._interrupted: BaseException | None = None  # there: a peer was lost, and the rest of this backward is void
        self.discarded = False  # there: the last backward was rolled back, and its batch comes again
        self.change_agreed = False  # there: all ranks know that the members change before the next step
        # There: the first step that others have made, and this rank without data could not; its weights are older.
        self._missed_since: int | None = None
        self._order_leader: int | None = None  # there: buckets are to follow the order of this rank's gradients
        self.block_began_at: int | None = None  # the step with which the open `with sync.step():` began, if one is open
        self._hyperparameters = HyperparameterChecksum(training.optimizer)
        self._same_data = SameDataDetector(type(training.model).__name__)
        self._accumulated: tuple[Parameter, Tensor, int] | None = None
        self._uneven_leader: int | None = None
        self._lock = threading.RLock()  # on CUDA hooks come from autograd's device threads
        release = claim(training.model, training.params, self.batch)
        self._hooks = Hooks(self, training.model)
        self._hooks.also_remove(release)
        try:
            self._attach(sparse, plan)
        except BaseException:
            self._hooks.remove()  # leave a refused model as it was
            raise

    def _attach(self, sparse: Sequence[str], plan: Mapping[str, Any] | None) -> None:
        training, settings = self.training, self.settings
        self.strategy.setup(training)  # before buckets are allocated: it may refuse
        self._planner = Planner(
            training.params,
            self.comm,
            sparse=sparse,
            bucket_bytes=settings.bucket_bytes,
            first_bucket_bytes=settings.first_bucket_bytes,
            bucketed=self.strategy.gradient_sync(self.step) is not None,
            sliced=self.strategy.slices_buckets,
            plan=plan,
        )
        self._adopt_plan()
        self._hooks.on_gradients(training.params.items(), Engine._on_gradient)
        if settings.accumulate > 1 or self.strategy.slices_buckets:
            self.watch_incoming()
        self.gate = StepGate(self)
        run_hooks_once(training.optimizer)
        self._hooks.also_remove(training.optimizer.register_step_pre_hook(self.gate.before_step).remove)
        self._hooks.also_remove(training.optimizer.register_step_post_hook(self.gate.after_step).remove)

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _adopt_plan(self) -> None:
        self.recorder.buckets_planned(self.plan.buckets)
        self.strategy.attach(self.plan, self.comm)

    def watch_incoming(self) -> None:
        """Also hook gradients before autograd adds them up: needed once a window can have several backwards."""
        self._hooks.on_incoming(self.training.params.values(), Engine._on_incoming)

    def guard(self, event: Callable[..., Any], *args: Any) -> Any:
        """Run a hook's event under the lock. If it raises, the engine has failed: collectives may be half done.

        In an elastic run a lost peer only interrupts it: ``_go_on_if_interrupted`` or ``leave_block`` must follow.
        """
        with self._lock:
            if self._interrupted is not None:
                return None
            try:
                return event(*args)
            except LOST as error:
                if self.survival is not None:
                    self._interrupted = error
                    return None
                self._failure = self._failure or error
                raise
            except BaseException as error:
                self._failure = self._failure or error
                raise

    def _go_on_if_interrupted(self, *, begun: bool, keeps_step: bool = False) -> bool:
        """In an elastic run: if a peer was lost, go on with the others. Blocks. Returns whether that was so.

        ``begun``: a step had begun. Within ``with sync.step():`` it raises what has happened: the survivors go on at
        the end of the block. ``keeps_step``: nothing but an exchange was interrupted, and what this rank has trained
        stays.
        """
        with self._lock:
            if self._interrupted is None:
                return False
            assert self.survival is not None, "only an elastic run is interrupted"
            if keeps_step:
                begun = False
            elif self.block_began_at is not None:
                raise self._interrupted
            else:
                begun = begun or self.window.num_backwards > 0
                self._backward = None
            if begun:
                self.recorder.step_interrupted(self.step)
            try:
                self.survival.survive(self._interrupted, begun=begun, keeps_step=keeps_step)
            except BaseException as error:
                self._failure = self._failure or error
                raise
            finally:
                self._interrupted = None
            if not keeps_step:
                self.survival.end_taken_step()
                self.discarded, self.synchronized = True, False
            return True

    def attempt(self, event: Callable[[], Any]) -> bool:
        """Run what communicates outside of a backward; in an elastic run, go on with the others if one is lost.

        Returns whether it came to its end.
        """
        self.guard(event)
        keeps_step = self.trains_apart
        if not self._go_on_if_interrupted(begun=False, keeps_step=keeps_step):
            return True
        if keeps_step:  # it may have interrupted an exchange that overlaps with steps
            self.run_exchange(self.strategy.retry_exchange)
        return False

    def run_exchange(self, event: Callable[[], Any], *, again: Callable[[], Any] | None = None) -> Any:
        """Run what a strategy does around the optimizer's step; in an elastic run again, while a peer is lost in it.

        ``again``: what is run then, if it is something else.
        """
        if self.survival is None:
            return event()
        result = self.guard(event)
        while self._go_on_if_interrupted(begun=False, keeps_step=True):
            result = self.guard(again or event)
        if self.strategy.change_agreed:
            self.change_agreed, self.strategy.change_agreed = True, False
        return result

    def end_step(self) -> None:
        """The optimizer has stepped. In an elastic run, follow others that have noticed a loss."""
        if self.survival is not None and self.trains_apart:
            self.run_exchange(self.survival.raise_if_over, again=self.strategy.retry_exchange)

    @property
    def trains_apart(self) -> bool:
        """Whether ranks step on their own between two exchanges: see elastic/membership.py."""
        return self.survival is not None and self.strategy.gradient_sync(self.step) is None

    def enter_block(self) -> None:
        """``with sync.step():`` begins. In an elastic run the members may change here. Then it blocks."""
        if self.survival is not None:
            self._raise_failure()
            self.survival.before_block()
            self.discarded = False
        self.block_began_at = self.step

    def leave_block(self, error: BaseException | None) -> bool:
        """``with sync.step():`` ends, with this error; returns whether it was dealt with.

        In an elastic run, if a peer was lost in the block, it goes on with the others. Blocks. Another error of a block
        in which a peer was lost is taken for a consequence: the step is void, and the user's own errors come again.
        """
        self.block_began_at = None
        if self.survival is None:
            return False
        if isinstance(error, LOST):
            self._interrupted = self._interrupted or error
        if error is not None and not isinstance(error, Exception):
            return False
        return self._go_on_if_interrupted(begun=True)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise GradSyncError(f"this synchronizer has failed and can't go on: {self._failure}") from self._failure

    def _on_incoming(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        entered = self.recorder.now()
        factor = self._current_backward().incoming
        self.recorder.grad_hook_ended(entered)
        if factor == 1.0:
            return None
        # Out of place: autograd may have handed the same tensor to another parameter. See [Note: weight zero].
        return tuple(
            grad if grad is None else torch.zeros_like(grad) if factor == 0.0 else grad * factor for grad in grads
        )

    def _on_gradient(self, name: str) -> None:
        entered = self.recorder.now()
        self._take_gradient(name)
        self.recorder.grad_hook_ended(entered, name)

    def _take_gradient(self, name: str) -> None:
        backward = self._current_backward()
        slot = self._planner.slots.get(name)
        if slot is None or name in backward.overtaken:  # frozen since; or hooks of the user are yet to run
            return
        grad = slot.param.grad
        if grad is None:  # a custom autograd function returned None: the parameter was not used
            return
        if isinstance(slot, SparseSlot):
            if grad.layout == torch.strided:
                raise ValueError(f"expected sparse gradients of {name}, as sparse= or its layer says; got a dense one.")
            return
        if grad.layout != torch.strided:
            raise ValueError(
                f"parameter {name} got a sparse gradient, but not from an Embedding(sparse=True) of the model. "
                f"Name it on all ranks: synchronize(..., sparse=[{name!r}])."
            )
        if not backward.synchronizing:
            slot.collect()
            return
        if isinstance(slot, LooseSlot):
            return  # it stays where autograd put it; the sum of several backwards is scaled at the end
        if slot.ready:
            raise GradSyncError(f"parameter {name} got a second gradient in one backward, after the first was sent.")
        if self.window.num_backwards > 1:
            slot.collect()
        elif not slot.is_small:  # the bucket copies small ones when it is finalized
            if backward.factor is None:
                self._learn_factor(block=False)
            slot.place(backward.factor)
        bucket = slot.bucket
        slot.ready = True
        bucket.missing -= 1
        if self._planner.ready_order is not None:
            self._planner.ready_order.append(name)
        if not bucket.missing:
            self.recorder.bucket_ready(bucket.index)
        elif slot.is_small:
            return  # launching runs code that is out of the caches by now: too slow for every small gradient
        if not self._launch(final=False):
            assert backward.sync is not None, "gradients that stay with their rank are in no bucket"
            backward.sync.advance()

    # -- one backward ---------------------------------------------------------------------------------------------

    def _current_backward(self) -> _Backward:
        task = torch._C._current_graph_task_id()
        if self._backward is not None and self._backward.task == task:
            return self._backward
        self._raise_failure()
        unfinished = self._backward
        if unfinished is not None and unfinished.synchronizing and unfinished.sync and self.comm.world_size > 1:
            raise GradSyncError(
                "the last backward did not come to its end on this rank (an exception in it?), so the ranks are out of "
                "step. Restart from a checkpoint."
            )
        if self.survival is not None:
            self.survival.before_backward()
        self.discarded = False
        queue_callback(self._end_backward)  # first: a lost peer may interrupt the next line
        self._backward = self._begin(task)
        return self._backward

    def _end_backward(self) -> None:
        """Autograd is done with this backward."""
        self.guard(self._finish)
        self._go_on_if_interrupted(begun=True)

    def _begin(self, task: int) -> _Backward:
        if self.window.num_backwards and not self._still_holds_gradients():
            # The user has dropped the accumulated gradients (zero_grad): drop their weight and stashed means too.
            self.window = Window()
            for slot in self._all():
                slot.stashed = None
        if self._order_leader is not None:
            leader, self._order_leader = self._order_leader, None
            self._follow_ready_order(leader)
        sync = self.strategy.gradient_sync(self.step)
        if self._planner.follow(
            mid_window=self.window.num_backwards > 0,
            bucketed=sync is not None,
            bucket_bytes=self.strategy.wanted_bucket_bytes,
            agree=self._agree_on_plan,
        ):
            self._adopt_plan()
        weight = self.batch.weight
        synchronizing = self._no_sync_depth == 0 and self.window.position + 1 >= self.settings.accumulate
        if synchronizing and self.survival is not None and self.block_began_at not in (None, self.step):
            raise ValueError(
                "with sync.step() holds one synchronizing backward: if a worker is lost, the block is rolled back as a "
                "whole. Expected the block to end after it; got a second one. Put each into a block of its own."
            )
        # Each rank has another slice of such a mean, so it can't be averaged once more with what is added to it.
        onto_slices = self.strategy.slices_buckets and any(slot.is_partial for slot in self._all())
        if not self.window.num_backwards and (not synchronizing or weight == 0.0 or onto_slices):
            for slot in self._all():
                slot.stash()
        incoming = self.window.add(weight)
        return _Backward(
            task=task,
            synchronizing=synchronizing,
            sync=sync,
            incoming=incoming,
            header=self._begin_step(sync, has_data=True) if synchronizing else None,
            overtaken=self._hooks.move_behind_user_hooks(),
            onto_slices=onto_slices,
        )

    def _begin_step(self, sync: GradientSync | None, *, has_data: bool) -> Header:
        """Begin a synchronizing backward: send the header, if there is a gradient sync."""
        self.comm.note(f"step {self.step}" if has_data else f"join, at step {self.step}", step=self.step)
        self.recorder.backward_started(self.step, has_data=has_data)
        loss_scale = self.training.loss_scale
        for bucket in self.plan.buckets:
            bucket.begin_step()
            bucket.loss_scale, bucket.may_overflow = loss_scale, self.training.scaler is not None
            bucket.may_roll_back = bucket.may_overflow or self.undoable
        header = self._header(has_data=has_data, loss_scale=loss_scale)
        if sync is not None:
            sync.begin_step(header)
        return header

    def _header(self, *, has_data: bool, loss_scale: float) -> Header:
        return Header(
            step=self.step,
            weight=self.window.weight,
            num_backwards=self.window.num_backwards,
            fingerprint=self.plan.fingerprint,
            has_data=has_data,
            buffers_changed=has_data and self.training.buffers.changed(),
            hyperparameters=self._hyperparameters.take(),
            loss_scale=loss_scale,
            checksum=self._same_data.take_checksum(),
            epoch=self.batch.number.epoch,
            position=self.batch.number.position,
            num_steps=self.gate.take_num_steps(),
            wants_change=self.survival is not None and self.survival.wants_change(),
            previous_step=self.recorder.previous_step(),
        )

    def _headers(self, *, block: bool) -> StepHeaders | None:
        """What the headers of all ranks give; raises if they do not fit together."""
        assert self._backward is not None and self._backward.sync is not None
        try:
            return self._backward.sync.headers(block=block)
        except HeadersDiffer as differ:
            raise self._explained(differ) from None

    def _agree_on_plan(self, fingerprint: int) -> None:
        """See [Note: agree, then allocate]. Negated: no header of a rank that keeps its plan has such a fingerprint."""
        try:
            HeaderExchange(
                Header(step=self.step, weight=0.0, num_backwards=0, fingerprint=-fingerprint, has_data=True), self.comm
            ).wait()
        except HeadersDiffer as differ:
            raise self._explained(differ) from None

    def _explained(self, differ: HeadersDiffer) -> OutOfStep:
        """Name what differs, where the header holds only a checksum of it. Blocks: every rank has seen the same."""
        if differ.what == PLAN:
            lines = self._planner.describe()
        elif differ.what == HYPERPARAMETERS:
            lines = describe_hyperparameters(self.training.optimizer)
        else:
            return differ.explained(None)
        try:
            difference = find_difference(self.comm, lines)
        except GradSyncError:  # the ranks are too far apart even for that
            difference = None
        return differ.explained(difference)

    def _learn_factor(self, *, block: bool) -> None:
        """Set the factor for this rank's gradients, once all ranks' weights are known."""
        assert self._backward is not None
        headers = self._headers(block=block)
        if headers is not None:
            self._backward.factor = self.window.unit * self._per_weight(headers.total_weight, headers.num_backwards)

    def _wait_briefly_for_headers(self, backward: _Backward) -> None:
        """A bucket is full, for the first time in this backward: a link must not be idle until the next gradient comes.

        That may take tens of milliseconds. The headers of ranks in step arrive within one or two.
        """
        if backward.waited or self.comm.bucket_bytes is None:  # within a host no link is idle meanwhile
            return
        backward.waited = True
        until = time.perf_counter() + HEADER_WAIT_S
        while backward.factor is None and time.perf_counter() < until:
            self._learn_factor(block=False)

    def _per_weight(self, total: float, num_backwards: int) -> float:
        return 0.0 if total == 0.0 else (num_backwards if self.settings.accumulation == "sum" else 1) / total

    def _launch(self, *, final: bool) -> int:
        """Finalize full buckets (``final``: all) and launch them in plan order; returns how many."""
        backward, buckets = self._backward, self.plan.buckets
        assert backward is not None and backward.sync is not None
        first = backward.next_bucket
        while backward.next_bucket < len(buckets):
            bucket = buckets[backward.next_bucket]
            if bucket.missing and not final:
                break
            if backward.factor is None:
                self._learn_factor(block=final)
                self._wait_briefly_for_headers(backward)
                if backward.factor is None:
                    break
            bucket.finalize(backward.factor)
            self._same_data.update_checksum(bucket)
            backward.sync.launch(bucket)
            backward.next_bucket += 1
        return backward.next_bucket - first

    def _finish(self) -> None:
        if torch._C._current_autograd_node() is not None:
            raise GradSyncError(
                "a backward runs inside another one, as torch.utils.checkpoint does with use_reentrant=True: gradients "
                "would be sent before they are complete. Use checkpoint(..., use_reentrant=False)."
            )
        backward = self._backward
        assert backward is not None
        self.batch.clear()
        self.synchronized = backward.synchronizing
        if backward.synchronizing and backward.sync is not None:
            self._complete()
        elif backward.synchronizing:
            self._complete_locally()
        elif self._no_sync_depth == 0:  # see [Note: who may see a gradient]
            for slot in self._all():
                slot.hold()
        else:
            self._accumulated = self._find_accumulated()
        self._backward = None

    def _find_accumulated(self) -> tuple[Parameter, Tensor, int] | None:
        """A gradient on a GPU that this backward has left in ``.grad``, with its version; None on a CPU."""
        for slot in self._all():
            grad = slot.param.grad
            if grad is not None and not grad.is_cpu:
                return slot.param, grad, grad._version
        return None

    def _still_holds_gradients(self) -> bool:
        """Whether the user has not dropped (``zero_grad``) what the window has accumulated.

        On a GPU a gradient that nobody has written since is proof enough. Looking at the values would stall.
        """
        if self._accumulated is not None:
            param, grad, version = self._accumulated
            if param.grad is grad and grad._version == version:
                return True
        return any(slot.holds_something() for slot in self._all())

    def _complete(self) -> None:
        """Launch the remaining buckets, wait, and set every ``.grad`` to the mean."""
        start_s = time.perf_counter()
        self.recorder.backward_ended()
        self._launch(final=True)
        backward, headers = self._backward, self._headers(block=True)
        assert backward is not None and backward.sync is not None and headers is not None
        if backward.factor is None:
            self._learn_factor(block=True)
        if self.window.num_backwards == 1 and headers.total_weight > 0.0 and not backward.onto_slices:
            for slot in self._all():
                slot.stashed = None  # stashed for a weight of zero; the ranks that have weight contribute it
        if self.plan.sparse:
            backward.sync.reduce_sparse(self.plan.sparse, backward.factor or 0.0)
        backward.sync.finish()
        for bucket in self.plan.buckets:
            bucket.publish()
        if headers.buffers_changed:
            entered = self.recorder.now()
            share = self.window.weight * self._per_weight(headers.total_weight, headers.num_backwards)
            self.training.buffers.synchronize(share, headers.leader)
            self.recorder.engine_communicated(entered)
        self.exposed_s = time.perf_counter() - start_s
        self._report_wait()
        self.recorder.step_ended(headers, weight=self.window.weight)
        backward.sync.end_step()
        if self.survival is not None:
            self.samples = Samples(self.samples.own, self.samples.together + headers.total_weight)
        self._tick([slot for bucket in self.plan.buckets for slot in bucket.slots if slot.param.grad is None])
        # A rank without data is not between two steps: it waits for the next header of the others.
        self.change_agreed = headers.change_wanted and headers.all_have_data
        if not headers.all_have_data:
            self._uneven_leader = headers.leader
        self._same_data.check(headers, self.comm.rank)
        if self.survival is None:
            self._follow_ready_order(headers.leader)
        else:
            self._order_leader = headers.leader  # see [Note: after the commit]
            self.survival.backward_committed()

    def _follow_ready_order(self, leader: int) -> None:
        """After the first step: lay the buckets out anew, in the order in which gradients became ready. Blocks.

        [Note: after the commit] In an elastic run a peer may be lost in here. Where a step is committed already, its
        gradients must stay for the optimizer. So there this waits for the beginning of the next backward.
        """
        if self._planner.follow_ready_order(leader):
            self._adopt_plan()

    def _complete_locally(self) -> None:
        """Set every ``.grad`` to this rank's own mean over its backwards."""
        backward, window = self._backward, self.window
        assert backward is not None and backward.header is not None
        self.recorder.backward_ended()
        if window.num_backwards > 1 or window.weight == 0.0:  # else the mean is the gradient itself
            factor = window.unit * self._per_weight(window.weight, window.num_backwards)
            for slot in self.plan.loose:
                slot.scale(factor)
                slot.unstash()
            if self.plan.sparse:
                sum_sparse(self.plan.sparse, factor, Solo())
        self.strategy.end_local_backward(backward.header)
        self.exposed_s = 0.0
        self.recorder.step_ended(None, weight=window.weight)
        if self.survival is not None:
            self.samples = Samples(self.samples.own + window.weight, self.samples.together)
        self._tick()

    def _report_wait(self) -> None:
        """Report to a balancing loader how long this backward waited; on a GPU the host does not wait."""
        batch_source(self.comm).waited_s += self.exposed_s
        batch_source(self.comm).wait_unseen_on = next(
            (b.device.type for b in self.plan.buckets if b.device.type != "cpu"), ""
        )

    def _tick(self, unused: Sequence[Slot] = ()) -> None:
        self.step += 1
        self.gate.expect_step(unused)
        self.window, self._accumulated = Window(), None

    # -- ranks without data ---------------------------------------------------------------------------------------

    def join(self) -> None:
        """Take part in the others' steps until no rank has data; then all have the same state again. Blocks.

        In an elastic run a rank that was interrupted here is sent back to its loader, and comes again.
        """
        self.attempt(self._join)

    def join_at_end(self) -> None:
        """As ``join``, for a loop whose loader is not ours: nothing sends this rank here again. Blocks."""
        while not self.attempt(self._join) and self.trains_apart:
            pass

    def _join(self) -> None:
        sync = self.strategy.gradient_sync(self.step)
        if sync is not None:
            while self._participate_without_data(sync):
                pass
            leader, self._uneven_leader = self._uneven_leader, None
        else:
            leader = self.strategy.join()
        self.gate.forget_num_steps()  # some took part without data while others stepped
        if leader is not None:
            training = self.training
            copy_training_state(self.comm, training.model, training.optimizer, training.copied_with_state, leader)
            training.buffers.num_overwritten += 1
            if self.comm.rank != leader:
                self.drop_gradients()
        self._missed_since = None
        self.strategy.joined()

    def _participate_without_data(self, sync: GradientSync) -> bool:
        """Take part in one step with what this rank has left, most often nothing; False when no rank has data."""
        self._raise_failure()
        if self.survival is not None:
            self.survival.before_backward()
        self._backward = _Backward(task=-1, synchronizing=True, sync=sync, incoming=1.0, overtaken=set())
        if not self.window.num_backwards:
            self.drop_gradients()  # the last mean must not be taken for gradients of this rank
        try:
            self._begin_step(sync, has_data=False)
            headers = self._headers(block=True)
            assert headers is not None
            if headers.any_have_data:
                step = self.step
                self._complete()
                self._missed_since = step if self._missed_since is None else self._missed_since
            elif headers.num_backwards_differ:
                # Some ranks have had one backward less in this epoch. All count from 0 again, or they would synchronize
                # at different batches. What each has accumulated so far stays, with its weight.
                self.window.position = 0
            return headers.any_have_data
        finally:
            self._backward = None

    # -- other members, in an elastic run ------------------------------------------------------------------------

    @property
    def applied_step(self) -> int:
        """The steps that this rank's weights have seen. A rank without data takes part in steps, and makes none."""
        return self.step if self._missed_since is None else self._missed_since

    @property
    def is_between_steps(self) -> bool:
        """Whether nothing has begun that is not committed: no accumulation, no backward."""
        return self._backward is None and not self.window.num_backwards

    def drop_step(self) -> None:
        """Drop what a step that was not committed has left: gradients, and the weights of its backwards."""
        self._backward = None
        self.step, self._missed_since = self.applied_step, None
        self.window, self._accumulated, self._uneven_leader = Window(), None, None
        for slot in self._all():
            slot.param.grad = None
            slot.forget()
        self.gate.drop_step()
        self.batch.clear()

    def move_to(self, comm: Communicator, plan: Mapping[str, Any] | None) -> None:
        """Go on with other ranks; ``plan``: another rank's, if this one is behind. Blocks: all ranks call it."""
        before, self.comm = self.comm, comm
        self._order_leader = None  # it has another rank now, if it is still there
        self.training.buffers.move_to(comm)
        self.recorder.ranks_changed(comm)
        self._planner.move_to(comm, plan)
        self._adopt_plan()
        before.abandon()

    def plan_state(self) -> dict[str, Any]:
        """The layout of the buckets, and their size, for a rank that is to have the same."""
        return {**self._planner.state_dict(), "bucket_bytes": self._planner.bucket_bytes}

    # -- gradients and state --------------------------------------------------------------------------------------

    @property
    def plan(self) -> BucketPlan:
        return self._planner.plan

    def _all(self) -> list[AnySlot]:
        return list(self._planner.slots.values())

    def drop_gradients(self) -> None:
        """Set every ``.grad`` to None, so that the optimizer has nothing to apply."""
        for slot in self._all():
            slot.param.grad = None

    def has_unsynchronized_gradients(self) -> bool:
        """Whether ``.grad`` shows gradients that only this rank has: backwards under ``no_sync()`` so far."""
        return self.window.num_backwards > 0 and any(slot.param.grad is not None for slot in self._all())

    def find_gradient(self) -> str | None:
        """The name of a parameter with a gradient that is not all zeros, if there is one."""
        return next((name for name, param in self.training.params.items() if has_values(param.grad)), None)

    def set_weight(self, weight: float) -> None:
        """Set how many samples or tokens the mean loss of the next backward covers."""
        if weight == 0.0:
            self.watch_incoming()  # an earlier mean must be stashed before autograd adds to it
        self.batch.user_weight = weight

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
        """Load what ``state_dict`` returned: the clock, the bucket layout and the accumulated gradients."""
        self._planner.load_state_dict(state)
        self._adopt_plan()
        self.step = int(state["step"])
        self.gate.forget_num_steps()
        self._backward = None
        saved = dict(state["window"])
        gathered = saved.pop("gathered")
        self.window = Window(**{"position": saved["num_backwards"], **saved})
        for name, grad in gathered.items():
            param = self.training.params[name]
            param.grad = grad.to(param.device, copy=True)
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
