"""The exchange of weights between ranks, as differences from an anchor that all ranks hold bit for bit.

A rank's difference is ``anchor - weights``: what its steps since the last exchange have done, with the sign of a
gradient. An outer step subtracts the mean difference from the anchor. Differences are small and centred, so every codec
works on them; what a codec leaves out is fed back into the next exchange.

An exchange of a fragment is ``prepare``, ``run`` and ``apply``.

[Note: which thread touches what] ``prepare`` and ``apply`` touch the weights and belong to the training thread. ``run``
touches only anchors, momenta and the exchange's buckets, so it may run in a thread of its own beside the steps.
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

    def run(self, fragment: int, headers: ExchangeHeaders) -> None:
        """Average the differences and take the outer step: the anchors move, the weights do not yet. Blocks."""
        share = headers.share(self.comm.rank, fragment)
        self._average(fragment, share, self.reducer)
        self._residual_scale[fragment] = 1 / share if share else 0.0
        buckets = self._buckets[fragment]
        with torch.no_grad():
            square = sum(float(torch.dist(self._flat_differences[b.index], b.buffer)) ** 2 for b in buckets)
            if not math.isfinite(square):
                self._refuse_nonfinite(buckets)
            lr, momentum = self._rates(self.rounds[fragment])
            for slot in _slots_of(buckets):
                self._outer_step(slot, lr, momentum)
        self.square_distances[fragment] = square
        self.rounds[fragment] += 1
        self.num_bytes = self._count_bytes()  # a codec may change with time; only this thread uses the reducer now

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
        for fragment in range(self.num_fragments):
            has_samples = any(header.samples[fragment] for header in headers.headers)
            share = headers.share(self.comm.rank, fragment) if has_samples else 1 / self.comm.world_size
            self.prepare(fragment, whole=True)
            self._average(fragment, share, self._plain)
            with torch.no_grad():
                for slot in _slots_of(self._buckets[fragment]):
                    mean = torch.sub(self.anchors[slot.name], slot.view, out=slot.view)
                    self._params[slot.name].copy_(mean)

    def _average(self, fragment: int, share: float, reducer: Reducer) -> None:
        buckets = self._buckets[fragment]
        with torch.no_grad():
            for bucket in buckets:
                bucket.factor = share
                bucket.flags.fill_(1.0)
                if share:
                    torch.mul(self._flat_differences[bucket.index], share, out=bucket.buffer)
                else:
                    bucket.buffer.zero_()  # not multiplied by 0: a NaN of a rank without a share must not spoil the sum
        reduce_buckets(reducer, buckets, self.comm)
        reducer.end_step(finite=not reducer.nonfinite)

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


def reduce_buckets(reducer: Reducer, buckets: Sequence[Bucket], comm: Communicator) -> None:
    """Reduce buckets that are all ready, stage by stage, in the same order on all ranks. Blocks."""
    running = [(generator := reducer.reduce(bucket, comm), next(generator)) for bucket in buckets]
    for _ in range(1, reducer.stages_on(comm)):
        running = [(generator, _next_stage(generator, work)) for generator, work in running]
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
