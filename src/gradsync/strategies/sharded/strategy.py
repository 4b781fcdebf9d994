"""A sharded optimizer (ZeRO stage 1): each rank steps its own slice of every bucket, then the weights are gathered.

A step of exact data-parallel training in other words: the all-reduce of the gradients is cut in two halves, and the
optimizer steps between them. The bytes are those of an all-reduce; the time and the state of the optimizer are 1/n.

[Note: weights that arrive late] ``optimizer.step()`` starts the gathers, in the order in which forward needs them, and
returns. What reads a parameter waits for its bucket first (see reads.py); reads only wait, and start nothing. The next
backward and the next step wait for all. Where a transport makes progress only while ranks are in its calls (shared
memory), one rank that evaluates alone would wait for ranks that are elsewhere: there ``step()`` waits, and so it does
once ``torch.compile`` is in use, because compiled code does not run the watchers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import Parameter

from gradsync import spec
from gradsync.buckets.bucket import Bucket, BucketPlan
from gradsync.codecs.base import Codec
from gradsync.codecs.cast import Bf16, Fp16
from gradsync.comm.base import Communicator, Work
from gradsync.errors import GradSyncError
from gradsync.reducers.base import Reducer
from gradsync.reducers.codec_rules import CodecRule
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.replicas.header import Header
from gradsync.replicas.training import Training
from gradsync.replicas.validation import is_compiled_whole
from gradsync.strategies.allreduce import AllReduce
from gradsync.strategies.base import OwnStep, Verdict
from gradsync.strategies.gradient_sync import ReducerSync
from gradsync.strategies.sharded.optimizer_state import ShardedState, check_elementwise, num_bytes
from gradsync.strategies.sharded.reads import ReadWatcher, compiled_code_is_in_use
from gradsync.strategies.sharded.shards import Shards
from gradsync.strategies.sharded.sliced import Sliced, SlicedCodes, SlicedReducer

EVERYONE = ""  # marks the residuals of all ranks together: no parameter has this name


@spec.register("strategy", "sharded")
class Sharded(AllReduce):
    """N workers equal one process on the whole batch, and each keeps 1/N of the optimizer's state.

    Takes the user's own elementwise optimizer: SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam, Adamax, Adadelta,
    Rprop or ASGD. Until ``optimizer.step()`` returns, a rank's gradients are the mean in its own slice of every bucket
    only, so ``.grad`` refuses to be read: clip by ``sync.clip_grad_norm_``. Save the optimizer by
    ``sync.optimizer_state_dict()``; load it by ``optimizer.load_state_dict``, with any number of ranks.

    [Note: when gradients are whole] They are reduced as a whole, as under ``allreduce``, in the first backward (the
    buckets are laid out anew after it), and while some rank has no data left (``join``): that rank steps no slice any
    more, so meanwhile every rank has the whole state and steps everything.

    Args:
        codec: compresses the gradients.
        weights: ``fp16`` or ``bf16``: send in 16 bits by how much weights have changed, and what that leaves out with a
            later step. None: send the weights exactly.
        overlap: gather the weights while the next forward runs, where the transport can. Parameters that a script has
            kept (``params = list(model.parameters())``) may be read only after ``sync.settle()`` then. False:
            ``optimizer.step()`` waits for the weights.

    >>> import gradsync, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> sync = gradsync.synchronize(model, optimizer, "sharded")
    >>> sync.close()
    """

    slices_buckets = True

    def __init__(
        self, *, codec: CodecRule | None = None, weights: Codec | str | None = None, overlap: bool = True
    ) -> None:
        super().__init__(codec=codec)
        self.weights = None if weights is None else spec.resolve(weights, "codec")
        if not isinstance(self.weights, Fp16 | Bf16 | None):
            raise ValueError(f"weights must be fp16, bf16 or None (exact); got {spec.render(self.weights)}.")
        self._sent_as = None if self.weights is None else self.weights.sums_as
        self._unsent_to_load: dict[str, Tensor] | None = None  # loaded before the shards were made
        self.overlap = overlap
        if codec is None:
            self.reducer = Sliced()
        elif isinstance(self.reducer, Compressed) and self.reducer.can_be_sliced:
            self.reducer = SlicedCodes(codec)
        self.sync = _ShardedSync(self.reducer, self)
        self._optimizer: optim.Optimizer
        self._shards: Shards | None = None  # None: the buckets' layout is not final, or this is a world of one
        self._state: ShardedState | None = None  # None: the optimizer itself has its whole state
        self._stepped: list[Any] = []  # slots whose gradients the last step has applied
        self._removers: list[Any] = []
        self._packing = False  # the optimizer's state is read by this strategy
        self._watches_reads = False
        self._gathers: dict[int, Work] = {}  # by shard: gathers of weights under way
        self._shard_of: dict[Parameter, int] = {}
        self._gathers_lock = threading.RLock()  # a module may be called from any thread

    def spec_arguments(self) -> dict[str, Any]:
        codec = self.reducer.rules.as_argument() if isinstance(self.reducer, Compressed) else None
        return {"codec": codec, "weights": self.weights, "overlap": self.overlap}

    def setup(self, training: Training) -> None:
        training.check_all_optimized(spec.render(self))
        check_elementwise(training.optimizer)
        self._optimizer = optimizer = training.optimizer
        self._removers = [
            optimizer.register_state_dict_pre_hook(self._check_state_dict).remove,
            optimizer.register_load_state_dict_post_hook(self._on_load).remove,
        ]
        # A hook would break the graphs of compiled modules.
        self._watches_reads = self.overlap and not any(map(is_compiled_whole, training.model.modules()))
        if self._watches_reads:
            self._removers.append(ReadWatcher(training.model, self._before_read).remove)

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        self.settle()
        super().attach(plan, comm)
        if self._shards is not None and self._shards.layout == plan.layout and not plan.is_provisional:
            self._shards.rebind(plan)  # without the other ranks: see Planner.follow
            return
        if self._shards is not None:
            self._unshard()
            self._shards.release()
            self._shards = None
        if not plan.is_provisional and comm.world_size > 1:
            self._shards = Shards(plan, comm, self._sent_as)
            if self._unsent_to_load is not None:
                self._load_unsent(self._unsent_to_load)
            self._shard_of = {slot.param: at for at, shard in enumerate(self._shards.shards) for slot in shard.slots}
            self._shard()

    def close(self) -> None:
        """Wait for weights under way, which all ranks have sent; else the model would keep a part of the old ones."""
        super().close()
        self.settle()
        for remove in self._removers:
            remove()
        if self._shards is not None:
            self._shards.release()

    # -- sharding the optimizer's state ---------------------------------------------------------------------------

    def _shard(self) -> None:
        """Keep only this rank's slices of the optimizer's state."""
        if self._shards is not None and self._state is None:
            self._state = ShardedState(self._optimizer, self._shards)

    def _unshard(self) -> None:
        """Give every rank the whole state. Blocks: all ranks call it."""
        if self._state is not None:
            assert self._shards is not None, "a sharded state has shards"
            self._shards.complete(self.comm)
            self._state.give_back(self.comm)
            self._state = None

    def _check_state_dict(self, optimizer: optim.Optimizer) -> None:
        if self._state is not None and not self._packing:
            raise ValueError(
                "under sharded() a rank has only its slices of the optimizer's state. Call "
                "sync.optimizer_state_dict() on all ranks: it returns the whole, as optimizer.state_dict() would."
            )

    def _on_load(self, optimizer: optim.Optimizer) -> None:
        """A whole state was loaded, the same on every rank: keep this rank's slices."""
        if self._state is not None:
            self._state.take()

    def optimizer_state_dict(self, optimizer: optim.Optimizer, dst: int | None) -> dict[str, Any]:
        if self._state is None:
            return optimizer.state_dict()
        gathered = self._state.gather(self.comm, dst)
        if dst is not None and self.comm.rank != dst:
            return {}
        before = dict(optimizer.state)
        whole = {**before, **gathered}
        optimizer.state.clear()
        optimizer.state.update(
            {param: whole[param] for group in optimizer.param_groups for param in group["params"] if param in whole}
        )
        self._packing = True
        try:
            return optimizer.state_dict()
        finally:
            self._packing = False
            optimizer.state.clear()
            optimizer.state.update(before)

    # -- a step ---------------------------------------------------------------------------------------------------

    def own_step(self) -> OwnStep:
        return self._step

    def _step(self, step: int) -> Verdict:
        if self._state is None or self._shards is None:
            return Verdict.APPLY
        self.settle()
        self._shards.begin_step()
        self._state.step()
        entered = self.recorder.now()
        self._gather_weights()
        self.recorder.strategy_communicated(entered)
        self._stepped = [(slot, slot.param.grad) for slot in self._shards.slots() if slot.param.grad is not None]
        return Verdict.DONE_ELSEWHERE

    def _gather_weights(self) -> None:
        assert self._shards is not None
        shards = self._shards.shards
        for at in reversed(range(len(shards))):
            self._gathers[at] = shards[at].weights.start_gather(self.comm)
        if not (self._watches_reads and self.comm.runs_in_background) or compiled_code_is_in_use():
            self.settle()
        torch.autograd.graph.increment_version([slot.param for slot in self._shards.slots()])

    def _before_read(self, params: Iterable[Parameter | None]) -> None:
        """Wait for the weights of these parameters."""
        if self._gathers:
            if compiled_code_is_in_use():  # for the first time: it reads the rest without a watcher
                self.settle()
            with self._gathers_lock:
                for at in {self._shard_of.get(param, -1) for param in params if param is not None}:
                    self._wait_for(at)

    def _wait_for(self, at: int) -> None:
        if at in self._gathers:
            self._gathers[at].wait()
            del self._gathers[at]

    def settle(self) -> None:
        """Wait for all weights that are under way."""
        with self._gathers_lock:
            for at in list(self._gathers):
                self._wait_for(at)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        if self._sent_as is None:
            return super().state_dict()
        return {**super().state_dict(), "unsent": self._unsent()}

    def _unsent(self) -> dict[str, Tensor]:
        if self._shards is not None:
            return self._shards.unsent()
        slots = [slot for bucket in self.plan.buckets for slot in bucket.slots]
        return {slot.name: slot.shaped(torch.zeros_like(slot.flat)) for slot in slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "unsent" in state:
            self._load_unsent(state["unsent"])

    def _load_unsent(self, unsent: dict[str, Tensor]) -> None:
        """Load the residuals of weights; those of all ranks together, from another number of ranks, are added."""
        if EVERYONE in unsent:
            with torch.no_grad():
                for slot in (slot for bucket in self.plan.buckets for slot in bucket.slots):
                    slot.param.add_(unsent[slot.name])
        elif self._shards is None:
            self._unsent_to_load = unsent
        else:
            self._unsent_to_load = None
            self._shards.load_unsent(unsent)

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        merged = super().redistribute(states, rank, world_size)
        if self._sent_as is not None:
            parts = [state["unsent"] for state in states]
            merged["unsent"] = {name: sum(part[name] for part in parts) for name in parts[0]} | {EVERYONE: True}
        return merged

    def after_step(self, step: int) -> None:
        """Show the gradients again, as any optimizer leaves them: the next backward adds to what is not zeroed."""
        for slot, grad in self._stepped:
            slot.param.grad = grad
        self._stepped = []

    def joined(self) -> None:
        self._shard()

    def elastic_obstacle(self) -> str:
        return "a lost worker's slice of the optimizer's state is gone with it"

    # -- between backward and step --------------------------------------------------------------------------------

    def begin_reduction(self, *, all_have_data: bool) -> None:
        """All headers are here, and no bucket is reduced yet. See [Note: when gradients are whole]."""
        if isinstance(self.reducer, SlicedReducer):
            self.reducer.whole = self._shards is None or not all_have_data or self.reducer.must_be_whole(self.comm)
            if self.reducer.whole and any(slot.stashed is not None for slot in self.reducer.slots.values()):
                raise GradSyncError(
                    "a rank ran out of data between two backwards of one step, and sharded() can't add the second to "
                    "slices of the first. Let every rank have the same number of backwards for a step."
                )

    def end_reduction(self, *, all_have_data: bool) -> None:
        """Every bucket is reduced: exchange the flags, which lie in one rank's slice; let whole gradients be read."""
        if not all_have_data:
            self._unshard()
        if not isinstance(self.reducer, SlicedReducer) or self.reducer.whole:
            for slot in self.reducer.slots.values():
                slot.partial = None
            return
        if isinstance(self.reducer, SlicedCodes):
            self._agree_on_outcome()
        flags = torch.cat([bucket.flags for bucket in self.plan.buckets])
        self.comm.all_reduce(flags, op="max").wait()
        for bucket, reduced in zip(
            self.plan.buckets, flags.split([len(b.slots) for b in self.plan.buckets]), strict=True
        ):
            bucket.flags.copy_(reduced)
            for slot in bucket.slots:
                slot.show_slice_only()

    def _agree_on_outcome(self) -> None:
        """Tell all ranks what each knows of its slices: whether the sums are finite, and how large the codes were."""
        names, outcome = list(self.reducer.slots), self.reducer.outcome
        bad = set(outcome.nonfinite)
        known = torch.tensor([outcome.peak, *(name in bad for name in names)], dtype=torch.float64)
        self.comm.all_reduce(known, op="max").wait()
        peak, *are_bad = known.tolist()
        outcome.add_peak(peak)
        outcome.add([name for name, is_bad in zip(names, are_bad, strict=True) if is_bad], False)

    def agree_on_inf(self, found: Tensor) -> None:
        if self._shards is not None and any(slot.is_partial for slot in self._shards.slots()):
            self.comm.all_reduce(found, op="max").wait()

    def clip_grad_norm(
        self, params: Sequence[nn.Parameter], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
    ) -> Tensor:
        if self._shards is None or not any(slot.is_partial for slot in self._shards.slots()):
            return super().clip_grad_norm(params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if any(param.grad is not None for param in self._shards.sparse):
            raise ValueError("clip_grad_norm_ takes dense gradients, as torch's does; got sparse ones.")
        parts = [part.gradient for part in self._shards.parts() if part.slot.param.grad is not None]
        own = [torch.linalg.vector_norm(part, norm_type).double() for part in parts]
        norm = torch.linalg.vector_norm(torch.stack(own), norm_type) if own else torch.zeros((), dtype=torch.float64)
        norms = torch.empty(self.comm.world_size, dtype=torch.float64, device=norm.device)
        self.comm.all_gather(norm, out=norms).wait()
        total: Tensor = torch.linalg.vector_norm(norms, norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(f"the norm of the gradients is {float(total)}, and error_if_nonfinite=True.")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for part in parts:
            part.mul_(factor)
        return total.to(self.plan.buckets[0].dtype.to_real())

    # -- what it costs --------------------------------------------------------------------------------------------

    def bytes_per_step(self) -> int:
        size = self.comm.world_size
        gathered = sum((size - 1) * bucket.num_bytes // size for bucket in self.plan.buckets)
        if self._sent_as is not None:
            gathered = sum(
                (size - 1) * bucket.storage.numel() // size * min(bucket.storage.itemsize, self._sent_as.itemsize)
                for bucket in self.plan.buckets
            )
        return super().bytes_per_step() + gathered

    def stats(self) -> dict[str, Any]:
        """``optimizer_state_bytes``: of what this rank has of the optimizer's state."""
        return {"optimizer_state_bytes": num_bytes(self._optimizer) + (self._state.num_bytes() if self._state else 0)}


class _ShardedSync(ReducerSync):
    """Tells the strategy when a backward begins, who has data before a bucket is reduced, and when the last one is."""

    def __init__(self, reducer: Reducer, strategy: Sharded) -> None:
        super().__init__(reducer)
        self._strategy = strategy
        self._begun = False

    def begin_step(self, header: Header) -> None:
        self._strategy.settle()
        super().begin_step(header)

    def launch(self, bucket: Bucket) -> None:
        if not self._begun:
            self._begun = True
            self._strategy.begin_reduction(all_have_data=self._all_have_data())
        super().launch(bucket)

    def finish(self) -> None:
        self._begun = False
        all_have_data = self._all_have_data()
        self.drain()
        self._strategy.end_reduction(all_have_data=all_have_data)  # before the reducer learns whether the step counts
        super().finish()

    def _all_have_data(self) -> bool:
        headers = self.headers(block=True)
        assert headers is not None, "it has waited for them"
        return headers.all_have_data
