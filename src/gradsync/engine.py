"""The engine: the only code with autograd and optimizer hooks. It turns their events into calls of a Strategy.

How a synchronizing backward runs: the first gradient opens a round (the header goes on its way); every gradient is moved
into its bucket; a full bucket is sealed and handed to the strategy in plan order; the callback that autograd runs when
backward ends seals the rest and waits. When ``backward()`` returns every ``.grad`` is the mean.

[Note: who may see a gradient] Under ``no_sync()`` what was gathered so far stays visible in ``.grad``, as in one process.
Under ``accumulate=k`` the engine holds it, and ``.grad`` is None until the k-th backward: so the user's loop may clip,
step and zero after every backward, and all of it passes over parameters without a gradient.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gradsync.bucket import BUCKET_BYTES, FIRST_BUCKET_BYTES, BucketPlan, Slot, SparseSlot, plan_buckets
from gradsync.buffers import BufferMode, BufferSync
from gradsync.comm.base import Communicator
from gradsync.errors import GradSyncError, SameDataWarning
from gradsync.header import Header, Round
from gradsync.replicas import copy_training_state, plain_name
from gradsync.strategies.base import Strategy, Verdict
from gradsync.window import Window

log = logging.getLogger("gradsync")

WATCHED_ROUNDS = 5  # rounds at the start in which gradients are compared between ranks, to find ranks with the same data
SUSPICIOUS_ROUNDS = 3  # so many of them alike are no coincidence

queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an engine runs, beside its strategy. All ranks must have the same."""

    accumulate: int = 1  # higher => fewer synchronizations, larger batches
    accumulation: Literal["mean", "sum"] = "mean"  # "sum": as DDP's users know it, who divide the loss themselves
    bucket_bytes: int = BUCKET_BYTES
    first_bucket_bytes: int = FIRST_BUCKET_BYTES
    buffers: BufferMode = "broadcast"

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1; got {self.accumulate}.")
        if self.accumulation not in ("mean", "sum"):
            raise ValueError(f"accumulation must be 'mean' or 'sum'; got {self.accumulation!r}.")
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise ValueError(f"buckets must hold at least a byte; got {self.bucket_bytes=} {self.first_bucket_bytes=}.")


@dataclass
class _Backward:
    """One call of ``backward()`` as the hooks see it."""

    task: int  # autograd's number for it: tells a new backward from one that never ended
    synchronizing: bool
    incoming: float  # what its gradients are multiplied by as they come in
    factor: float | None = None  # what makes them this rank's share of the mean; None until the header is back
    next_bucket: int = 0


class Engine:
    """Drives one strategy for one model. Owns the buckets; the parameters' ``.grad`` are views of them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        comm: Communicator,
        settings: Settings,
        *,
        sparse: Sequence[str] = (),
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.strategy = strategy
        self.comm = comm
        self.settings = settings
        self.scaler = scaler
        self.step = 0  # synchronizing backwards so far: the clock that all ranks share
        self.exposed_s = 0.0  # how long the last backward waited for the wire
        self.synchronized = True  # whether the last backward was a synchronizing one
        self.window = Window()
        self._params = {plain_name(name): param for name, param in model.named_parameters()}
        self._sparse_names = set(sparse)
        self._buffers = BufferSync(model, settings.buffers, comm)
        self._backward: _Backward | None = None
        self._no_sync_depth = 0
        self._said_weight: float | None = None
        self._failure: BaseException | None = None
        self._ready_order: list[str] | None = []  # None once the plan follows it
        self._checksum = 0.0
        self._alike = 0
        self._uneven_leader: int | None = None
        self._lock = threading.RLock()  # on CUDA hooks come from autograd's device threads
        self._hooked: set[str] = set()
        self._incoming_hooked: set[str] = set()
        self._accumulators: list[Any] = []  # autograd drops a node nobody holds, and its hooks with it
        self._removers: list[Callable[[], None]] = []
        self._slots: dict[str, Slot | SparseSlot] = {}
        self._trainable = self._trainable_now()
        # Autograd runs about backwards through the model: until it has shown the real order, this is the best guess.
        self._install(self._layout([name for name, on in reversed(self._trainable.items()) if on]))
        if settings.accumulate > 1:
            self.watch_incoming()
        self._hook_optimizer()

    # -- hooks ----------------------------------------------------------------------------------------------------

    def _hook_parameters(self) -> None:
        for name in self._slots:
            if name not in self._hooked:
                self._hooked.add(name)
                hook = self._guarded(lambda _, name=name: self._on_gradient(name))
                self._removers.append(self._params[name].register_post_accumulate_grad_hook(hook).remove)
        if self._incoming_hooked:
            self.watch_incoming()

    def watch_incoming(self) -> None:
        """Also see gradients before autograd adds them up: needed once a window can have several backwards."""
        for name in self._slots:
            if name in self._incoming_hooked:
                continue
            self._incoming_hooked.add(name)
            param = self._params[name]
            with torch.enable_grad():
                node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self._accumulators.append(node)
            self._removers.append(node.register_prehook(self._guarded(self._on_incoming)).remove)

    def _hook_optimizer(self) -> None:
        before = self.optimizer.register_step_pre_hook(self._guarded(self._before_step))
        after = self.optimizer.register_step_post_hook(lambda *_: self.strategy.after_step(self.step))
        self._removers += [before.remove, after.remove]

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that runs alone, and that leaves the engine marked if it fails: collectives may be half done."""

        def run(*args: Any) -> Any:
            with self._lock:
                try:
                    return hook(*args)
                except BaseException as error:
                    self._failure = self._failure or error
                    raise

        return run

    def _on_incoming(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        factor = self._current_backward().incoming
        if factor == 1.0:
            return None
        # Out of place: autograd may have handed the same tensor to another parameter. See [Note: weight zero].
        return tuple(torch.zeros_like(grad) if factor == 0.0 else grad * factor for grad in grads)

    def _on_gradient(self, name: str) -> None:
        backward = self._current_backward()
        slot = self._slots.get(name)
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
        if slot.ready:
            raise GradSyncError(f"parameter {name} got a second gradient in one backward, after the first was sent.")
        if backward.factor is None and self.window.num_backwards == 1:
            self._learn_factor(block=False)
        slot.collect(backward.factor if self.window.num_backwards == 1 else None)
        slot.ready = True
        slot.bucket.missing -= 1
        if self._ready_order is not None:
            self._ready_order.append(name)
        self._launch(final=False)
        self.strategy.advance()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._failure is None and self.window.num_backwards and any(s.param.grad is not None for s in self._all()):
            raise ValueError(
                f"optimizer.step() would apply gradients of {self.window.num_backwards} backward(s) under no_sync() "
                "that were never synchronized, and the replicas would drift apart. Run the last backward before step() "
                "outside of no_sync(), or drop the gradients with zero_grad()."
            )
        if sum(len(group["params"]) for group in optimizer.param_groups) != self._num_optimized:
            raise ValueError(
                "parameters were added to the optimizer after synchronize(): nobody averages their gradients. "
                "Close this synchronizer and call synchronize() again."
            )
        if self.strategy.before_step(self.step) is Verdict.APPLY:
            return None
        self._drop_gradients()
        return self._without_closure_gradients(args, kwargs)

    def _without_closure_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            return None

        def run() -> Any:
            loss = closure()
            self._drop_gradients()  # the closure's backward has refilled them
            return loss

        return (args[0], run, *args[2:]) if len(args) > 1 else args, kwargs if len(args) > 1 else {"closure": run}

    # -- one backward ---------------------------------------------------------------------------------------------

    def _current_backward(self) -> _Backward:
        task = torch._C._current_graph_task_id()
        if self._backward is not None and self._backward.task == task:
            return self._backward
        if self._failure is not None:
            raise GradSyncError(f"this synchronizer has failed and can't go on: {self._failure}") from self._failure
        if self._backward is not None and self._backward.synchronizing and self.comm.world_size > 1:
            raise GradSyncError(
                "the last backward did not come to its end on this rank (an exception in it?), so the ranks are out of "
                "step. Restart from a checkpoint."
            )
        self._backward = self._begin(task)
        queue_callback(self._guarded(self._finish))
        return self._backward

    def _begin(self, task: int) -> _Backward:
        self._follow_frozen()
        if self.window.num_backwards and not any(slot.has_gradient for slot in self._all()):
            # The user has dropped what was gathered (zero_grad): its weight, and what was set aside, go with it.
            self.window = Window()
            for slot in self._all():
                slot.carried = None
        weight = self.comm.feed.weight if self._said_weight is None else self._said_weight
        in_window = self.window.num_backwards + 1
        synchronizing = self._no_sync_depth == 0 and in_window >= self.settings.accumulate
        if in_window == 1 and not synchronizing:
            for slot in self._all():
                slot.set_aside()
        incoming = self.window.add(weight)
        if synchronizing:
            self._open(has_data=True)
        return _Backward(task=task, synchronizing=synchronizing, incoming=incoming)

    def _open(self, *, has_data: bool) -> None:
        self.comm.note(f"step {self.step}" if has_data else f"join, at step {self.step}", step=self.step)
        for bucket in self.plan.buckets:
            bucket.open()
        self.strategy.open(
            Header(
                step=self.step,
                weight=self.window.weight,
                num_backwards=self.window.num_backwards,
                fingerprint=self.plan.fingerprint,
                has_data=has_data,
                buffers_changed=has_data and self._buffers.changed(),
                loss_scale=float(self.scaler.get_scale()) if self.scaler is not None else 1.0,
                checksum=self._checksum,
            )
        )
        self._checksum = 0.0

    def _learn_factor(self, *, block: bool) -> None:
        """Set what this rank's gradients are multiplied by, once all ranks' weights are known."""
        assert self._backward is not None
        round = self.strategy.round(block=block)
        if round is not None:
            self._backward.factor = self.window.unit * self._per_weight(round)

    def _per_weight(self, round: Round) -> float:
        total = round.total_weight
        return 0.0 if total == 0.0 else (round.num_backwards if self.settings.accumulation == "sum" else 1) / total

    def _launch(self, *, final: bool) -> None:
        """Seal full buckets (``final``: all) and hand them over in plan order."""
        backward = self._backward
        assert backward is not None
        while backward.next_bucket < len(self.plan.buckets):
            bucket = self.plan.buckets[backward.next_bucket]
            if bucket.missing and not final:
                return
            if backward.factor is None:
                self._learn_factor(block=final)
                if backward.factor is None:
                    return
            bucket.seal(backward.factor)
            if self.step < WATCHED_ROUNDS:
                self._checksum += float(bucket.buffer.double().sum())
            self.strategy.on_bucket_ready(bucket)
            backward.next_bucket += 1

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
        if backward.synchronizing:
            self._complete()
        elif self._no_sync_depth == 0:  # see [Note: who may see a gradient]
            for slot in self._all():
                slot.hold()
        self._backward = None

    def _complete(self) -> Round:
        """Send what is left, wait, and leave every ``.grad`` the mean."""
        start_s = time.perf_counter()
        self._launch(final=True)
        backward, round = self._backward, self.strategy.round(block=True)
        assert backward is not None and round is not None
        if backward.factor is None:
            self._learn_factor(block=True)
        if self.plan.sparse:
            self.strategy.on_sparse(self.plan.sparse, backward.factor or 0.0)
        self.strategy.after_backward()
        for bucket in self.plan.buckets:
            bucket.unseal()
        leader = (round.with_data or [0])[0]
        if round.buffers_changed:
            self._buffers.synchronize(self.window.weight * self._per_weight(round), leader)
        self.exposed_s = time.perf_counter() - start_s
        self.step += 1
        self.window = Window()
        if len(round.with_data) < self.comm.world_size:
            self._uneven_leader = leader
        self._watch_same_data(round)
        if self._ready_order is not None:
            self._follow_ready_order(leader)
        return round

    # -- ranks without data ---------------------------------------------------------------------------------------

    def join(self) -> None:
        """Keep the others company until no rank has data; then all have the same state again. Blocks."""
        with self._lock:
            while self._keep_company():
                pass
            leader, self._uneven_leader = self._uneven_leader, None
            if leader is not None:
                copy_training_state(self.comm, self.model, self.optimizer, self.scaler, leader)
                if self.comm.rank != leader:
                    self._drop_gradients()

    def _keep_company(self) -> bool:
        """Take part in one round with what this rank has left, most often nothing; False when nobody has data."""
        if self._failure is not None:
            raise GradSyncError(f"this synchronizer has failed and can't go on: {self._failure}") from self._failure
        self._backward = _Backward(task=-1, synchronizing=True, incoming=1.0)
        if not self.window.num_backwards:
            self._drop_gradients()  # the last mean must not pass for gradients that this rank has
        try:
            self._open(has_data=False)
            round = self.strategy.round(block=True)
            assert round is not None
            if round.with_data:
                self._complete()
            return bool(round.with_data)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._backward = None

    # -- the plan -------------------------------------------------------------------------------------------------

    def _trainable_now(self) -> dict[str, bool]:
        return {name: param.requires_grad for name, param in self._params.items()}

    def _layout(self, ready_order: Sequence[str]) -> list[list[str]]:
        params = [(name, self._params[name]) for name in ready_order if name not in self._sparse_names]
        return plan_buckets(
            params, cap_bytes=self.settings.bucket_bytes, first_cap_bytes=self.settings.first_bucket_bytes
        )

    def _install(self, layout: Sequence[Sequence[str]]) -> None:
        """Make the plan's buckets, and move into them what the old ones hold."""
        sparse = [name for name in self._params if name in self._sparse_names and self._params[name].requires_grad]
        old = dict(self._slots)
        self.plan = BucketPlan(layout, sparse, self._params, self.comm)
        self._slots = {slot.name: slot for slot in self.plan.slots()}
        for name, slot in self._slots.items():
            before = old.get(name)
            if isinstance(slot, Slot):
                if isinstance(before, Slot):
                    if before.held:
                        slot.view.data.copy_(before.view)
                    slot.held, slot.carried = before.held, before.carried
                slot.collect()
            elif isinstance(before, SparseSlot):
                slot.held, slot.carried = before.held, before.carried
        self._num_optimized = sum(len(group["params"]) for group in self.optimizer.param_groups)
        self._hook_parameters()
        self.strategy.attach(self.plan, self.comm)

    def _follow_frozen(self) -> None:
        """Plan anew when parameters were frozen or unfrozen. (The header finds ranks that disagree.)"""
        now = self._trainable_now()
        if now != self._trainable:
            self._trainable = now
            known = [name for names in self.plan.layout for name in names if now[name]]
            fresh = [name for name, on in reversed(now.items()) if on and name not in known]
            self._install(self._layout([*fresh, *known]))

    def _follow_ready_order(self, leader: int) -> None:
        """After the first round: lay the buckets out in the order in which gradients really became ready."""
        names = [name for names in self.plan.layout for name in names]
        seen = dict.fromkeys(name for name in self._ready_order or () if name in names)
        order = [*seen, *(name for name in names if name not in seen)]
        index = {name: number for number, name in enumerate(names)}
        wire = torch.tensor([index[name] for name in order], dtype=torch.int64)
        self.comm.broadcast(wire, leader).wait()
        self._ready_order = None
        layout = self._layout([names[number] for number in wire.tolist()])
        if layout != self.plan.layout:
            self._install(layout)

    # -- small things ---------------------------------------------------------------------------------------------

    def _all(self) -> list[Slot | SparseSlot]:
        return list(self._slots.values())

    def _drop_gradients(self) -> None:
        for slot in self._all():
            slot.param.grad = None

    def _watch_same_data(self, round: Round) -> None:
        if self.step > WATCHED_ROUNDS + 1:
            return
        self._alike = self._alike + 1 if round.same_gradients() else 0
        if self._alike == SUSPICIOUS_ROUNDS and self.comm.rank == 0:
            warnings.warn(
                f"all {self.comm.world_size} ranks computed the same gradients {SUSPICIOUS_ROUNDS} times in a row: do they "
                "read the same data? Give each its own part: loader = gradsync.shard(dataset, batch_size=...), or "
                "torch's DistributedSampler.",
                SameDataWarning,
                stacklevel=2,
            )

    def set_weight(self, weight: float) -> None:
        """Say what the next backward's mean loss stands for."""
        self._said_weight = self.comm.feed.said_weight = weight

    def enter_no_sync(self) -> None:
        self.watch_incoming()
        self._no_sync_depth += 1

    def leave_no_sync(self) -> None:
        self._no_sync_depth -= 1

    def state_dict(self) -> dict[str, Any]:
        """The clock, the plan and the open window; tensors are copies."""
        gathered = {slot.name: _gathered(slot) for slot in self._all()} if self.window.num_backwards else {}
        return {
            "step": self.step,
            "layout": [list(names) for names in self.plan.layout],
            "planned": self._ready_order is None,
            "window": {
                "weight": self.window.weight,
                "num_backwards": self.window.num_backwards,
                "unit": self.window.unit,
                "gathered": {name: grad for name, grad in gathered.items() if grad is not None},
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave: the same sums, in the same places, from the same clock."""
        expected = {name for names in self.plan.layout for name in names}
        got = {name for names in state["layout"] for name in names}
        if expected != got:
            odd = sorted(expected ^ got)[0]
            where = "the saved state" if odd in got else "this model's trainable parameters"
            raise ValueError(f"the state is of another model: {odd!r} is only in {where}. Load it into the same model.")
        self.step = int(state["step"])
        if state["planned"]:
            self._ready_order = None
        self._install(state["layout"])
        saved = state["window"]
        self.window = Window(saved["weight"], saved["num_backwards"], saved["unit"])
        for name, grad in saved["gathered"].items():
            self._params[name].grad = grad.clone()
            self._slots[name].hold()
        if self.window.num_backwards:
            self.watch_incoming()

    def close(self) -> None:
        """Remove every hook, and give each parameter a gradient of its own again."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        for slot in self._all():
            if isinstance(slot, Slot) and slot.has_gradient:
                slot.param.grad = slot.view.clone()
            elif isinstance(slot, SparseSlot):
                slot.collect()
        self._slots = {}
        self._accumulators.clear()


def _gathered(slot: Slot | SparseSlot) -> Tensor | None:
    if isinstance(slot, Slot):
        return slot.view.clone() if slot.has_gradient else None
    held = slot.held if slot.held is not None else slot.param.grad
    return None if held is None else held.clone()
