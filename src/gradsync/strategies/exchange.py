"""Weights over the ranks, as differences from an anchor that all of them hold bit for bit.

A rank's difference is ``anchor - weights``: what its steps since the last exchange have done, with the sign of a
gradient. Their mean is taken off the anchor by an outer step. Differences are small and centred, so every codec works
on them; what a codec leaves out is fed back into the next exchange.

[Note: who moves what] ``prepare`` and ``land`` touch the weights and belong to the training's own thread. ``run``
touches only anchors, momenta and the exchange's buckets: it may go on in a thread of its own beside the steps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gradsync.bucket import Bucket, BucketPlan, plan_buckets
from gradsync.comm.base import Communicator, Work
from gradsync.errors import NonFiniteGradient
from gradsync.reducers.allreduce import Plain
from gradsync.reducers.base import Reducer
from gradsync.reducers.shards import worked_in
from gradsync.slot import Slot
from gradsync.strategies.attendance import Attendance

OuterRates = Callable[[int], tuple[float, float]]  # of a fragment's k-th outer step: learning rate and momentum


def averaging(step: int) -> tuple[float, float]:
    """The outer step that makes the anchor the mean of the ranks' weights."""
    return 1.0, 0.0


class Exchange:
    """Anchors, outer momenta and the buckets in which differences travel, in ``num_fragments`` parts of equal size.

    16-bit weights have anchors, momenta and differences of 32 bits: an outer step may change too little for 16.
    """

    def __init__(
        self,
        comm: Communicator,
        reducer: Reducer,
        *,
        num_fragments: int = 1,
        rates: OuterRates | None = None,
        keeps_unsent: bool = False,
    ) -> None:
        self.comm = comm
        self.reducer = reducer
        self.num_fragments = num_fragments
        self.rounds = [0] * num_fragments  # outer steps of each so far
        self.num_bytes = 0  # that this rank sends when every fragment has gone once
        self.anchors: dict[str, Parameter] = {}
        self.momenta: dict[str, Tensor] = {}
        self.square_distances = [0.0] * num_fragments  # of this rank's weights from the mean, at the last exchange
        self._rates = rates or averaging
        self._keeps_unsent = keeps_unsent
        self._worth = [0.0] * num_fragments  # what a unit of what is unsent is worth in this rank's weights
        self._params: dict[str, Parameter] = {}
        self._plain = Plain()
        self._plan: BucketPlan
        self._buckets: list[list[Bucket]]
        self._gaps: dict[str, Tensor]  # this rank's own difference, and after `run` what the weights must move by
        self._flat_gaps: dict[int, Tensor]

    # -- what is exchanged ----------------------------------------------------------------------------------------

    def covers(self, names: Sequence[str]) -> bool:
        return set(names) <= set(self.anchors)

    def cover(self, params: Mapping[str, Parameter]) -> None:
        """Exchange these from now on. Those that it has must be among them: frozen, they may still differ."""
        before, self.anchors, self._params = self.anchors, {}, dict(params)
        for name, param in params.items():  # in the model's order, whichever came first: fragments are cut by it
            if name not in before:
                fresh = param.detach().to(worked_in(param.dtype), copy=True)
                before[name] = Parameter(fresh, requires_grad=False)
            self.anchors[name] = before[name]
        parts = partition(self.anchors, self.num_fragments)
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
        self._make_gaps()
        self.num_bytes = self._count_bytes()

    def _make_gaps(self) -> None:
        """Room for one fragment: there is never more than one under way."""
        rooms: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for kind in {(bucket.buffer.dtype, bucket.device) for bucket in self._plan.buckets}:
            sizes = [
                sum(bucket.buffer.numel() for bucket in part if (bucket.buffer.dtype, bucket.device) == kind)
                for part in self._buckets
            ]
            rooms[kind] = torch.zeros(max(sizes), dtype=kind[0], device=kind[1])
        self._gaps, self._flat_gaps = {}, {}
        for part in self._buckets:
            ends = dict.fromkeys(rooms, 0)
            for bucket in part:
                kind = (bucket.buffer.dtype, bucket.device)
                flat = rooms[kind][ends[kind] : ends[kind] + bucket.buffer.numel()]
                ends[kind] += bucket.buffer.numel()
                self._flat_gaps[bucket.index] = flat
                for slot in bucket.slots:
                    self._gaps[slot.name] = slot.shaped(flat[_place(slot)])

    def capture(self) -> None:
        """Make the anchors what the weights are now, which must be the same on all ranks."""
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                anchor.copy_(self._params[name])

    # -- one fragment's exchange ----------------------------------------------------------------------------------

    def prepare(self, fragment: int, *, whole: bool = False) -> None:
        """Note by how much this rank's weights differ from the anchors; not ``whole``: since it has last told."""
        with torch.no_grad():
            for bucket in self._buckets[fragment]:
                self._flat_gaps[bucket.index].zero_()  # between parameters too, where another fragment's values were
                for slot in bucket.slots:
                    torch.sub(self.anchors[slot.name], self._params[slot.name], out=self._gaps[slot.name])
            if not whole:
                self._take_unsent_off(fragment, self._gaps)

    def _take_unsent_off(self, fragment: int, values: Mapping[str, Tensor]) -> None:
        """[Note: unsent] What a codec has left out so far is no part of the anchors, but this rank's weights have it.

        The reducer still owes it: it goes with the next differences, and is not to be counted twice. Kept out of the
        weights (as it is with gradients), a rank would train on without what it has learnt itself.
        """
        if self._keeps_unsent and self._worth[fragment]:
            unsent = self.reducer.unsent()
            for slot in _slots(self._buckets[fragment]):
                if slot.name in unsent:
                    values[slot.name].add_(unsent[slot.name], alpha=-self._worth[fragment])

    def run(self, fragment: int, attendance: Attendance) -> None:
        """Average the differences and take the outer step: the anchors move, the weights do not yet. Blocks."""
        share = attendance.share(self.comm.rank, fragment)
        self._average(fragment, share, self.reducer)
        self._worth[fragment] = 1 / share if share else 0.0
        buckets = self._buckets[fragment]
        with torch.no_grad():
            square = sum(float(torch.dist(self._flat_gaps[b.index], b.buffer)) ** 2 for b in buckets)
            if not math.isfinite(square):
                self._refuse_nonfinite(buckets)
            lr, momentum = self._rates(self.rounds[fragment])
            for slot in _slots(buckets):
                self._outer_step(slot, lr, momentum)
        self.square_distances[fragment] = square
        self.rounds[fragment] += 1
        self.num_bytes = self._count_bytes()  # here, where nobody else is at the reducer: a codec may change with time

    def _outer_step(self, slot: Slot, lr: float, momentum: float) -> None:
        """Nesterov's momentum on the mean difference: ``m = µm + d; anchor -= lr (d + µm)``."""
        move, anchor = slot.view, self.anchors[slot.name]
        if self._rates is not averaging:
            velocity = self.momenta.get(slot.name)
            if velocity is None:
                velocity = self.momenta[slot.name] = torch.zeros_like(anchor)
            velocity.mul_(momentum).add_(move)
            move.add_(velocity, alpha=momentum)
        anchor.add_(move, alpha=-lr)
        self._gaps[slot.name].add_(move, alpha=-lr)

    def land(self, fragment: int, *, stepped_since: bool) -> None:
        """Move the weights: to the anchors, or where they would be had they been there before the steps since."""
        with torch.no_grad():
            for slot in _slots(self._buckets[fragment]):
                if stepped_since:
                    self._params[slot.name].add_(self._gaps[slot.name])
                else:
                    self._params[slot.name].copy_(self.anchors[slot.name])
            if not stepped_since:
                self._take_unsent_off(fragment, self._params)

    def settle(self, attendance: Attendance) -> None:
        """Make the weights on all ranks their mean, whole; anchors and momenta know nothing of it. Blocks."""
        for fragment in range(self.num_fragments):
            nobody = not any(word.samples[fragment] for word in attendance.words)
            share = 1 / self.comm.world_size if nobody else attendance.share(self.comm.rank, fragment)
            self.prepare(fragment, whole=True)
            self._average(fragment, share, self._plain)
            with torch.no_grad():
                for slot in _slots(self._buckets[fragment]):
                    mean = torch.sub(self.anchors[slot.name], slot.view, out=slot.view)
                    self._params[slot.name].copy_(mean)

    def _average(self, fragment: int, share: float, reducer: Reducer) -> None:
        buckets = self._buckets[fragment]
        with torch.no_grad():
            for bucket in buckets:
                bucket.factor = share
                bucket.flags.fill_(1.0)
                if share:
                    torch.mul(self._flat_gaps[bucket.index], share, out=bucket.buffer)
                else:
                    bucket.buffer.zero_()  # not multiplied: what gives nothing must not spoil the sum with its NaN
        reduce_all(reducer, buckets, self.comm)
        reducer.end_step(finite=not reducer.nonfinite)

    def _refuse_nonfinite(self, buckets: Sequence[Bucket]) -> None:
        odd = next(slot.name for slot in _slots(buckets) if not bool(torch.isfinite(slot.view).all()))
        raise NonFiniteGradient(
            f"the weights of {odd} have NaN or inf on some rank. The anchors that all ranks share are as they were: go "
            "back to a checkpoint, with a lower learning rate, or clip the gradients."
        )

    # -- what others want to know ---------------------------------------------------------------------------------

    @property
    def consensus_distance(self) -> float:
        return math.sqrt(sum(self.square_distances))

    def _count_bytes(self) -> int:
        """What this rank sends when every fragment has gone once."""
        return sum(self.reducer.bytes_sent(bucket, self.comm.world_size) for bucket in self._plan.buckets)

    def moves(self, fragment: int) -> dict[str, Tensor]:
        """Copies of what ``run`` has left for ``land``."""
        return {slot.name: self._gaps[slot.name].clone() for slot in _slots(self._buckets[fragment])}

    def state_dict(self) -> dict[str, Any]:
        """Copies, by parameter name. This rank's weights too: ``synchronize`` has given all ranks those of rank 0."""
        return {
            "rounds": list(self.rounds),
            "square_distances": list(self.square_distances),
            "worth": list(self._worth),
            "weights": {name: param.detach().clone() for name, param in self._params.items()},
            "anchors": {name: anchor.detach().clone() for name, anchor in self.anchors.items()},
            "momenta": {name: momentum.clone() for name, momentum in self.momenta.items()},
            "reducer": self.reducer.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        odd = sorted(set(state["anchors"]) ^ set(self.anchors))
        if odd:
            where = "the saved state" if odd[0] in state["anchors"] else "this model's trained parameters"
            raise ValueError(f"the state is of another model: {odd[0]!r} is only in {where}. Load it into the same.")
        if len(state["rounds"]) != self.num_fragments:
            raise ValueError(f"the state has {len(state['rounds'])} fragments; here are {self.num_fragments}.")
        self.rounds = [int(count) for count in state["rounds"]]
        self.square_distances = [float(value) for value in state["square_distances"]]
        self._worth = [float(value) for value in state["worth"]]
        with torch.no_grad():
            for name, anchor in self.anchors.items():
                anchor.copy_(state["anchors"][name])
                self._params[name].copy_(state["weights"][name])
        self.momenta = {
            name: torch.empty_like(self.anchors[name]).copy_(saved) for name, saved in state["momenta"].items()
        }
        self.reducer.load_state_dict(state["reducer"])

    def load_moves(self, moves: Mapping[str, Tensor]) -> None:
        for name, move in moves.items():
            self._gaps[name].copy_(move)


def partition(params: Mapping[str, Parameter], num_fragments: int) -> list[list[str]]:
    """Cut a model into parts of about the same size: the largest first, each to the part that has the least so far.

    Layers of one size so go to the parts in turn: no part is all at one end of the model.

    >>> import torch
    >>> from gradsync.strategies.exchange import partition
    >>> partition({name: torch.nn.Parameter(torch.zeros(size)) for name, size in zip("abcd", (4, 9, 4, 1))}, 2)
    [['b'], ['a', 'c', 'd']]
    """
    if num_fragments > len(params):
        raise ValueError(
            f"the model has {len(params)} trained parameters; got fragments={num_fragments}, more of them."
        )
    sizes = {name: param.numel() * param.element_size() for name, param in params.items()}
    filled = [0] * num_fragments
    home = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # sorting keeps the order among equals
        least = filled.index(min(filled))
        home[name] = least
        filled[least] += max(1, sizes[name])
    return [[name for name in params if home[name] == part] for part in range(num_fragments)]


def reduce_all(reducer: Reducer, buckets: Sequence[Bucket], comm: Communicator) -> None:
    """Reduce buckets that are all ready, stage by stage: one order on all ranks. Blocks."""
    running = [(generator := reducer.reduce(bucket, comm), next(generator)) for bucket in buckets]
    for _ in range(1, reducer.stages(comm.world_size)):
        running = [(generator, _next_stage(generator, work)) for generator, work in running]
    for generator, work in running:
        work.wait()
        rest = next(generator, None)
        assert rest is None, "a reducer yields as many collectives as it has stages"


def _next_stage(generator: Iterator[Work], work: Work) -> Work:
    work.wait()
    return next(generator)


def _slots(buckets: Sequence[Bucket]) -> Iterator[Slot]:
    for bucket in buckets:
        yield from bucket.slots


def _place(slot: Slot) -> slice:
    first = slot.start
    return slice(first, first + slot.flat.numel())
