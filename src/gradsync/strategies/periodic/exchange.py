"""The exchange of weights between ranks, as differences from an anchor that all ranks hold bit for bit.

A rank's difference is ``anchor - weights``: what its steps since the last exchange have done, with the sign of a
gradient. An outer step subtracts the mean difference from the anchor. Differences are small and centred, so every codec
works on them; what a codec leaves out is fed back into the next exchange.

An exchange of a fragment is ``prepare``, ``reduce``, ``commit`` and ``apply``. Only ``reduce`` communicates.

[Note: which thread touches what] ``prepare`` and ``apply`` touch the weights and belong to the training thread.
``reduce`` and ``commit`` touch only anchors, momenta and the exchange's buckets, so they may run in a thread of their
own beside the steps.

[Note: an exchange is undone or kept] A lost peer may interrupt ``reduce``. Until ``commit`` nothing has changed but the
second copies of the reducer's state, so ``discard`` undoes all of it; this rank's differences stay, to be sent again.
If another rank has committed the exchange, ``accept`` keeps it here: the anchors are that rank's, and this rank's
residual is that of what it has sent. A rank that was not part of the exchange ``catch_up``s instead: its weights keep
their difference, on top of the new anchors.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.buckets.bucket import Bucket, BucketPlan, plan_buckets
from gradsync.buckets.slot import Slot
from gradsync.codecs.base import compute_dtype
from gradsync.comm.base import Communicator, Work
from gradsync.comm.objects import broadcast_object
from gradsync.errors import NonFiniteGradient
from gradsync.reducers.base import Reducer
from gradsync.reducers.plain import Plain
from gradsync.strategies.periodic.headers import ExchangeHeaders

OuterRates = Callable[[int], tuple[float, float]]  # of a fragment's k-th outer step: learning rate and momentum


def plain_averaging(step: int) -> tuple[float, float]:
    """The outer step that makes the anchor the mean of the ranks' weights."""
    return 1.0, 0.0


class WeightExchange:
    """Anchors, outer momenta and the buckets for the differences, in ``num_fragments`` parts of about equal size.

    16-bit weights have anchors, momenta and differences of 32 bits: an outer step may be too small for 16.
    """

    def __init__(
        self,
        comm: Communicator,
        reducer: Reducer,
        *,
        num_fragments: int = 1,
        rates: OuterRates | None = None,
        keeps_residual: bool = False,
    ) -> None:
        self.comm = comm
        self.reducer = reducer
        self.num_fragments = num_fragments
        self.rounds = [0] * num_fragments  # by fragment: outer steps so far
        self.num_bytes = 0  # that this rank sends when every fragment is exchanged once
        self.anchors: dict[str, Parameter] = {}
        self.momenta: dict[str, Tensor] = {}
        self.square_distances = [0.0] * num_fragments  # by fragment: of the weights from the mean, at the last exchange
        self.undoable = False  # a lost peer may interrupt it: see [Note: an exchange is undone or kept]
        self._reduced: tuple[float, float] = (0.0, 0.0)  # after `reduce`: this rank's share, and its square distance
        self.rank_then = 0  # this rank in the last `reduce`
        # While this rank visits a group of some: what it has for exchanges of all.
        self._of_all_ranks: tuple[Communicator, BucketPlan, list[list[Bucket]], dict[int, Tensor]] | None = None
        self._sent: set[int] = set()  # the buckets of which this rank has started all collectives
        self._rates = rates or plain_averaging
        self._keeps_residual = keeps_residual
        self._residual_scale = [0.0] * num_fragments  # by fragment: from the reducer's residual to this rank's weights
        self._params: dict[str, Parameter] = {}
        self._plain = Plain()
        self._plan: BucketPlan
        self._buckets: list[list[Bucket]]
        self._differences: dict[str, Tensor]  # this rank's differences; after `run` the updates of the weights
        self._flat_differences: dict[int, Tensor]  # the same memory, by bucket

    # -- what is exchanged ----------------------------------------------------------------------------------------

    def tracks(self, names: Sequence[str]) -> bool:
        return set(names) <= set(self.anchors)

    def track(self, params: Mapping[str, Parameter]) -> None:
        """Exchange these from now on. Those tracked so far must be among them: they may differ even if frozen now."""
        before, self.anchors, self._params = self.anchors, {}, dict(params)
        for name, param in params.items():  # always in the model's order: the split into fragments depends on it
            if name not in before:
                anchor = param.detach().to(compute_dtype(param.dtype), copy=True)
                before[name] = Parameter(anchor, requires_grad=False)
            self.anchors[name] = before[name]
        parts = split_into_fragments(self.anchors, self.num_fragments)
        layouts = [
            plan_buckets([(name, self.anchors[name]) for name in part], cap_bytes=self.reducer.bucket_bytes)
            for part in parts
        ]
        self._plan = BucketPlan([names for layout in layouts for names in layout], [], self.anchors, self.comm)
        buckets = iter(self._plan.buckets)
        self._buckets = [[next(buckets) for _ in layout] for layout in layouts]
        digest = hashlib.sha256(json.dumps(layouts).encode()).digest()
        self.fingerprint = int.from_bytes(digest[:6], "big")  # 48 bits: a float64 holds it exactly
        self.reducer.attach(self._plan, self.comm)
        self._plain.attach(self._plan, self.comm)
        self._allocate_differences()
        self.num_bytes = self._count_bytes()

    def _allocate_differences(self) -> None:
        """Allocate memory for the largest fragment; all share it, as never more than one is exchanged at a time."""
        shared: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for kind in {(bucket.buffer.dtype, bucket.device) for bucket in self._plan.buckets}:
            sizes = [
                sum(bucket.buffer.numel() for bucket in part if (bucket.buffer.dtype, bucket.device) == kind)
                for part in self._buckets
            ]
            shared[kind] = torch.zeros(max(sizes), dtype=kind[0], device=kind[1])
        self._differences, self._flat_differences = {}, {}
        for part in self._buckets:
            ends = dict.fromkeys(shared, 0)
            for bucket in part:
                kind = (bucket.buffer.dtype, bucket.device)
                flat = shared[kind][ends[kind] : ends[kind] + bucket.buffer.numel()]
                ends[kind] += bucket.buffer.numel()
                self._flat_differences[bucket.index] = flat
                for slot in bucket.slots:
                    self._differences[slot.name] = slot.shaped(flat[_slice_of(slot)])

    def move_to(self, comm: Communicator) -> None:
        """Go on with other ranks, in new buckets: a slow peer may still write into the old ones."""
        before = self.comm
        self._change_ranks(comm)
        before.abandon()

    def visit(self, group: Communicator) -> None:
        """Exchange with some of the ranks only, until ``leave``. Blocks: those ranks call it."""
        self._of_all_ranks = self.comm, self._plan, self._buckets, self._flat_differences
        self._change_ranks(group)

    def leave(self) -> None:
        """Exchange with all ranks again, in the buckets of before: new ones would have to be made by all ranks."""
        self.forget_group()
        self.reducer.attach(self._plan, self.comm)
        self._plain.attach(self._plan, self.comm)
        self._differences = {
            slot.name: slot.shaped(self._flat_differences[bucket.index][_slice_of(slot)])
            for bucket in self._plan.buckets
            for slot in bucket.slots
        }

    def forget_group(self) -> None:
        """As ``leave``, after a lost peer: ``move_to`` comes next."""
        if self._of_all_ranks is not None:
            self.comm, self._plan, self._buckets, self._flat_differences = self._of_all_ranks
            self._of_all_ranks = None

    def _change_ranks(self, comm: Communicator) -> None:
        self.comm = comm
        differences = [(part, flat.clone()) for part, flat in self._flat_differences.items()]
        self.track(self._params)
        for index, flat in differences:
            self._flat_differences[index].copy_(flat)

    def reset_anchors(self) -> None:
        """Set the anchors to the current weights, which must be the same on all ranks."""
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                anchor.copy_(self._params[name])

    def restart(self, names: Container[str]) -> None:
        """Set the anchors of these parameters to their current weights, and drop their momenta and residuals."""
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                if name in names:
                    anchor.copy_(self._params[name])
        self.momenta = {name: momentum for name, momentum in self.momenta.items() if name not in names}
        kept = self.reducer.state_dict()
        if "own" not in kept:
            return

        def without(memories: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
            return {kind: {n: v for n, v in values.items() if n not in names} for kind, values in memories.items()}

        kept["own"] = without(kept["own"])
        if "results" in kept["shared"]:  # EF21's: the sum of all ranks' own estimates, so dropped with them
            kept["shared"] = without(kept["shared"])
        if "kept" in kept:
            kept["kept"] = [name for name in kept["kept"] if name not in names]
        self.reducer.load_state_dict(kept)

    # -- one fragment's exchange ----------------------------------------------------------------------------------

    def prepare(self, fragment: int, *, whole: bool = False) -> None:
        """Compute this rank's differences from the anchors; ``whole``: including the residual of earlier exchanges."""
        with torch.no_grad():
            for bucket in self._buckets[fragment]:
                # All of it: the padding between parameters may hold another fragment's values.
                self._flat_differences[bucket.index].zero_()
                for slot in bucket.slots:
                    torch.sub(self.anchors[slot.name], self._params[slot.name], out=self._differences[slot.name])
            if not whole:
                self._subtract_residual(fragment, self._differences)

    def _subtract_residual(self, fragment: int, values: Mapping[str, Tensor]) -> None:
        """[Note: the residual stays in the weights] What a codec has left out is in this rank's weights only.

        The reducer adds its residual to the next differences by itself, so it must not be counted twice. If the
        residual were taken out of the weights instead (as it is with gradients), a rank would train on without what it
        has learnt itself.
        """
        if self._keeps_residual and self._residual_scale[fragment]:
            unsent = self.reducer.unsent()
            for slot in _slots_of(self._buckets[fragment]):
                if slot.name in unsent:
                    values[slot.name].add_(unsent[slot.name], alpha=-self._residual_scale[fragment])

    def reduce(self, fragment: int, headers: ExchangeHeaders) -> None:
        """Average the differences. Blocks."""
        self.rank_then = self.comm.rank
        share = headers.share(self.comm.rank, fragment)
        self._average(fragment, share, self.reducer)
        buckets = self._buckets[fragment]
        with torch.no_grad():
            square = sum(float(torch.dist(self._flat_differences[b.index], b.buffer)) ** 2 for b in buckets)
        if not math.isfinite(square):
            self.reducer.end_step(finite=not self.reducer.nonfinite)
            self._refuse_nonfinite(buckets)
        self._reduced = share, square

    def commit(self, fragment: int) -> None:
        """Take the outer step with the mean that ``reduce`` made: the anchors move, the weights do not yet."""
        share, square = self._reduced
        self.reducer.end_step(finite=not self.reducer.nonfinite)
        self._residual_scale[fragment] = 1 / share if share else 0.0
        buckets = self._buckets[fragment]
        with torch.no_grad():
            lr, momentum = self._rates(self.rounds[fragment])
            for slot in _slots_of(buckets):
                self._outer_step(slot, lr, momentum)
        self.square_distances[fragment] = square
        self.rounds[fragment] += 1
        self.num_bytes = self._count_bytes()  # a codec may change with time; only this thread uses the reducer now

    def discard(self) -> None:
        """Undo a ``reduce`` that did not end, or was not committed. No thread may run it any more."""
        self.reducer.discard()
        self._plain.discard()

    def accept(self, fragment: int, share: float, shared: Mapping[str, Any]) -> list[str]:
        """Keep an exchange that another rank has committed, and ``reduce`` has not ended here; before ``move_to``.

        ``share``: this rank's in it. ``shared``: the ``shared_state`` of the other rank. What is left to do here is to
        ``apply`` it. Returns the parameters whose residual could not be kept.
        """
        buckets = self._buckets[fragment]
        unsent = {slot.name for bucket in buckets if bucket.index not in self._sent for slot in bucket.slots}
        lost = self.reducer.accept(dict(shared["reducer"]), unsent)
        self._residual_scale[fragment] = 1 / share if share else 0.0
        with torch.no_grad():
            for slot in _slots_of(buckets):
                update = torch.sub(shared["anchors"][slot.name], self.anchors[slot.name])
                self._differences[slot.name].add_(update)
        self._take_over(shared)
        return lost

    def catch_up(self, shared: Mapping[str, Any]) -> None:
        """Take over newer anchors: the weights keep their difference, on top of them."""
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                param = self._params[name]
                param.add_(torch.sub(shared["anchors"][name], anchor).to(param.dtype))
        self._take_over(shared)
        self._share_reducer(shared["reducer"])

    def _take_over(self, shared: Mapping[str, Any]) -> None:
        self.rounds = [int(count) for count in shared["rounds"]]
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                anchor.copy_(shared["anchors"][name])
        self.momenta = {
            name: torch.empty_like(self.anchors[name]).copy_(saved) for name, saved in shared["momenta"].items()
        }

    def _share_reducer(self, shared: Mapping[str, Any]) -> None:
        """Give the reducer the state that another rank shares; this rank's residual stays its own."""
        mine = self.reducer.state_dict()
        if not mine:
            return
        own = dict(mine.get("own", {}))
        if "estimates" in own:  # EF21's belong to the sum that all ranks share, which begins anew
            own["estimates"] = {}
        self.reducer.load_state_dict({**shared, "own": own} if "own" in mine else dict(shared))

    def shared_state(self) -> dict[str, Any]:
        """What is the same on all ranks: anchors, momenta, outer steps, and the reducer's part of it."""
        return {
            "rounds": list(self.rounds),
            "anchors": {name: anchor.detach() for name, anchor in self.anchors.items()},
            "momenta": dict(self.momenta),
            "reducer": {key: value for key, value in self.reducer.state_dict().items() if key != "own"},
        }

    def merge(self, comm: Communicator, share: float) -> float:
        """Make anchors and momenta their mean over ranks that hold different ones; the weights keep their differences.

        ``share``: this rank's part of the mean; they sum to 1. Returns how far this rank's anchors have moved. Blocks.
        """
        square = 0.0
        reducer = broadcast_object(comm, self.shared_state()["reducer"] if comm.rank == 0 else None, 0)
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                mean = (anchor * share).contiguous()
                comm.all_reduce(mean).wait()
                move, param = mean - anchor, self._params[name]
                square += float(torch.linalg.vector_norm(move)) ** 2
                param.add_(move.to(param.dtype))
                anchor.copy_(mean)
            for name, momentum in self._saved_momenta().items():
                momentum.mul_(share)
                comm.all_reduce(momentum).wait()
                self.momenta[name] = momentum
        rounds = torch.tensor(self.rounds)
        comm.all_reduce(rounds, op="max").wait()
        self.rounds = [int(count) for count in rounds.tolist()]
        self._share_reducer(reducer)
        return math.sqrt(square)

    def _outer_step(self, slot: Slot, lr: float, momentum: float) -> None:
        """Nesterov's momentum on the mean difference: ``m = µm + d; anchor -= lr (d + µm)``."""
        move, anchor = slot.view, self.anchors[slot.name]
        if self._rates is not plain_averaging:
            velocity = self.momenta.get(slot.name)
            if velocity is None:
                velocity = self.momenta[slot.name] = torch.zeros_like(anchor)
            velocity.mul_(momentum).add_(move)
            move.add_(velocity, alpha=momentum)
        anchor.add_(move, alpha=-lr)
        self._differences[slot.name].add_(move, alpha=-lr)

    def apply(self, fragment: int, *, stepped_since: bool) -> None:
        """Set the weights to the anchors; ``stepped_since``: add the update to weights that have moved since."""
        with torch.no_grad():
            for slot in _slots_of(self._buckets[fragment]):
                if stepped_since:
                    self._params[slot.name].add_(self._differences[slot.name])
                else:
                    self._params[slot.name].copy_(self.anchors[slot.name])
            if not stepped_since:
                self._subtract_residual(fragment, self._params)

    def settle(self, headers: ExchangeHeaders) -> None:
        """Set the weights on all ranks to their uncompressed mean; anchors and momenta stay. Blocks."""
        means: dict[str, Tensor] = {}  # where a lost peer may interrupt it: no weight is set before all are known
        for fragment in range(self.num_fragments):
            has_samples = any(header.samples[fragment] for header in headers.headers)
            share = headers.share(self.comm.rank, fragment) if has_samples else 1 / self.comm.world_size
            self.prepare(fragment, whole=True)
            self._average(fragment, share, self._plain)
            self._plain.end_step(finite=not self._plain.nonfinite)
            with torch.no_grad():
                for slot in _slots_of(self._buckets[fragment]):
                    mean = torch.sub(self.anchors[slot.name], slot.view, out=slot.view)
                    if self.undoable:
                        means[slot.name] = mean.clone()
                    else:
                        self._params[slot.name].copy_(mean)
        with torch.no_grad():
            for name, mean in means.items():
                self._params[name].copy_(mean)

    def _average(self, fragment: int, share: float, reducer: Reducer) -> None:
        buckets = self._buckets[fragment]
        with torch.no_grad():
            for bucket in buckets:
                bucket.factor = share
                bucket.may_roll_back = self.undoable
                bucket.flags.fill_(1.0)
                if share:
                    torch.mul(self._flat_differences[bucket.index], share, out=bucket.buffer)
                else:
                    bucket.buffer.zero_()  # not multiplied by 0: a NaN of a rank without a share must not spoil the sum
        self._sent = set()
        reduce_buckets(reducer, buckets, self.comm, self._sent)

    def _refuse_nonfinite(self, buckets: Sequence[Bucket]) -> None:
        odd = next(slot.name for slot in _slots_of(buckets) if not bool(torch.isfinite(slot.view).all()))
        raise NonFiniteGradient(
            f"the weights of {odd} have NaN or inf on some rank. The anchors that all ranks share are as they were: go "
            "back to a checkpoint, with a lower learning rate, or clip the gradients."
        )

    # -- statistics and state -------------------------------------------------------------------------------------

    @property
    def consensus_distance(self) -> float:
        return math.sqrt(sum(self.square_distances))

    def _count_bytes(self) -> int:
        """Bytes that this rank sends when every fragment is exchanged once."""
        return sum(self.reducer.bytes_sent_on(bucket, self.comm) for bucket in self._plan.buckets)

    def pending_updates(self, fragment: int) -> dict[str, Tensor]:
        """Copies of the updates that ``run`` has left for ``apply``."""
        return {slot.name: self._differences[slot.name].clone() for slot in _slots_of(self._buckets[fragment])}

    def state_dict(self) -> dict[str, Any]:
        """Copies, by parameter name. With this rank's weights: on resuming, ``synchronize`` gives all rank 0's."""
        return {
            "rounds": list(self.rounds),
            "square_distances": list(self.square_distances),
            "worth": list(self._residual_scale),
            "weights": {name: param.detach().clone() for name, param in self._params.items()},
            "anchors": {name: anchor.detach().clone() for name, anchor in self.anchors.items()},
            "momenta": self._saved_momenta(),
            "reducer": self.reducer.state_dict(),
        }

    def _saved_momenta(self) -> dict[str, Tensor]:
        if self._rates is plain_averaging:
            return {}
        return {
            name: self.momenta[name].clone() if name in self.momenta else torch.zeros_like(anchor)
            for name, anchor in self.anchors.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        odd = sorted(set(state["anchors"]) ^ set(self.anchors))
        if odd:
            where = "the saved state" if odd[0] in state["anchors"] else "this model's trained parameters"
            raise ValueError(f"the state is of another model: {odd[0]!r} is only in {where}. Load the same model's.")
        if len(state["rounds"]) != self.num_fragments:
            raise ValueError(f"the state has {len(state['rounds'])} fragments; here are {self.num_fragments}.")
        self.rounds = [int(count) for count in state["rounds"]]
        self.square_distances = [float(value) for value in state["square_distances"]]
        self._residual_scale = [float(value) for value in state["worth"]]
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                anchor.copy_(state["anchors"][name])
                self._params[name].copy_(state["weights"][name])
        self.momenta = {
            name: torch.empty_like(self.anchors[name]).copy_(saved) for name, saved in state["momenta"].items()
        }
        self.reducer.load_state_dict(state["reducer"])

    def load_pending_updates(self, updates: Mapping[str, Tensor]) -> None:
        for name, update in updates.items():
            self._differences[name].copy_(update)


def split_into_fragments(params: Mapping[str, Parameter], num_fragments: int) -> list[list[str]]:
    """Split a model into parts of about equal size: the largest parameters first, each into the smallest part so far.

    Layers of equal size thus go to the parts in turn, and no part lies at one end of the model.

    >>> import torch
    >>> from gradsync.strategies.periodic.exchange import split_into_fragments
    >>> sizes = {"a": 4, "b": 9, "c": 4, "d": 1}
    >>> split_into_fragments({name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}, 2)
    [['b'], ['a', 'c', 'd']]
    """
    if num_fragments > len(params):
        raise ValueError(
            f"fragments must be at most the number of trained parameters, {len(params)}; got fragments={num_fragments}."
        )
    sizes = {name: param.numel() * param.element_size() for name, param in params.items()}
    filled = [0] * num_fragments
    fragment_of = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # sorting keeps the order among equals
        smallest = filled.index(min(filled))
        fragment_of[name] = smallest
        filled[smallest] += max(1, sizes[name])
    return [[name for name in params if fragment_of[name] == part] for part in range(num_fragments)]


def reduce_buckets(reducer: Reducer, buckets: Sequence[Bucket], comm: Communicator, sent: set[int]) -> None:
    """Reduce buckets that are all ready, stage by stage, in the same order on all ranks. Blocks.

    ``sent`` gets the indices of the buckets of which all collectives were started.
    """
    running: list[tuple[Iterator[Work], Work]] = []
    last = reducer.stages_on(comm) - 1
    for stage in range(last + 1):
        for place, bucket in enumerate(buckets):
            if stage == 0:
                generator = reducer.reduce(bucket, comm)
                running.append((generator, next(generator)))
            else:
                generator, work = running[place]
                running[place] = generator, _next_stage(generator, work)
            if stage == last:
                sent.add(bucket.index)
    for generator, work in running:
        work.wait()
        rest = next(generator, None)
        assert rest is None, "a reducer yields as many collectives as it has stages"


def _next_stage(generator: Iterator[Work], work: Work) -> Work:
    work.wait()
    return next(generator)


def _slots_of(buckets: Sequence[Bucket]) -> Iterator[Slot]:
    for bucket in buckets:
        yield from bucket.slots


def _slice_of(slot: Slot) -> slice:
    first = slot.start
    return slice(first, first + slot.flat.numel())
