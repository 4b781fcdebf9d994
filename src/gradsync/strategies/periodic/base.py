"""The base of strategies that exchange weights every n-th step: it decides when, in which thread, and with whom.

What an exchange does is in exchange.py, what the ranks check before it in headers.py.

[Note: the same step on all ranks] An exchange that overlaps with steps begins after step t and is applied after step
t + overlap on every rank, however long it took: a rank that gets there earlier waits. So a run does not depend on
timing, and the same run gives the same bits.

[Note: the transaction is the exchange] In an elastic run a lost peer is noticed at the next exchange, or within a step
after another rank has noticed it. No local step is undone: weights, optimizer state, loader and clock stay. An exchange
that was interrupted is undone (``discard_step``) and repeated with those who are there (``retry_exchange``), each in
its own time: a survivor that has not come to it yet comes when its clock says so. If a survivor has committed the
exchange, the others keep it too (``accept_step``): they have sent their part of it. So members are compared by the
exchanges that they have committed, and never differ by more than the one that was interrupted. Their clocks may differ,
until they meet at the next exchange. What is averaged beside the weights, buffers and the optimizer's state, is
averaged before the commit, so it belongs to the same transaction; a rank that accepts an exchange keeps its own.

[Note: late ranks] With ``quorum=`` an exchange begins without those that do not come within ``grace_s``. A late rank
trains on, and comes to the next exchange as soon as that is announced, at whatever clock it has. There it receives the
newest anchors, and its weights keep their difference on top of them. So all its samples are in its difference, once.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.comm.objects import broadcast_object
from gradsync.elastic.membership import APART
from gradsync.reducers.base import Reducer
from gradsync.reducers.codec_rules import CodecRule
from gradsync.reducers.compressed.reducer import Compressed
from gradsync.reducers.plain import Plain
from gradsync.replicas.agreement import hyperparameter_checksum
from gradsync.replicas.training import Training
from gradsync.strategies.base import Placement, Verdict, reducer_placement
from gradsync.strategies.local import Local
from gradsync.strategies.periodic.exchange import OuterRates, WeightExchange
from gradsync.strategies.periodic.headers import FOLLOW, SETTLE, ExchangeHeader, ExchangeHeaders
from gradsync.strategies.periodic.inner_rate import InnerRate, Rate
from gradsync.strategies.periodic.pending import Counters, PendingExchange
from gradsync.strategies.weight_loads import LoadWatcher

CLOSE_S = 2.0  # how long close() waits for a pending exchange

STATE = {"clock", "next", "samples", "counted", "exchange", "flight"}


class Periodic(Local):
    """Every rank steps on its own, and every ``every`` steps each fragment of the weights is exchanged.

    ``acts_alone``: exchanges take place in a world of one too, because the outer step has an effect there.
    """

    acts_alone = False

    def __init__(
        self,
        *,
        every: int,
        codec: CodecRule | None,
        reducer: Reducer | str | None = None,
        fragments: int = 1,
        overlap: int = 0,
        rates: OuterRates | None = None,
        keeps_residual: bool = False,
        rate: Rate | None = "same",
        inner_warmup: int = 0,
        quorum: int | None = None,
        grace_s: float = 0.0,
    ) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every is a number of steps, 1 or more; got {every=}.")
        if not 1 <= fragments <= every:
            raise ValueError(
                f"fragments must be from 1 to every: at most one exchange begins at a step; got {fragments=} {every=}."
            )
        if not 0 <= overlap <= every // fragments:
            raise ValueError(
                f"overlap must be from 0 to every // fragments = {every // fragments} steps: an exchange must be "
                f"applied before the next one begins; got {overlap=}."
            )
        _check_quorum(quorum, grace_s, fragments, overlap)
        self.quorum = quorum
        self.grace_s = grace_s
        self.every = every
        self.fragments = fragments
        self._overlap = overlap
        self._rates = rates
        if codec is not None and reducer is not None:
            raise ValueError(
                "codec= and reducer= both say how differences become their mean; got both. "
                "Give the codec to the reducer: reducer=compressed(codec=...)."
            )
        assert not (keeps_residual and overlap), (
            "the residual is known only when the exchange ends; weights have moved then"
        )
        self._codec = codec
        self._keeps_residual = keeps_residual
        self._reducer: Reducer = Plain() if codec is None else Compressed(codec)
        if reducer is not None:
            self._reducer = spec.resolve(reducer, "reducer")
        if keeps_residual and isinstance(self._reducer, Compressed):
            self._reducer.may_sum_hosts = False  # see [Note: the residual stays in the weights] in exchange.py
        self._inner_rate = InnerRate(rate, inner_warmup)
        self._training: Training
        self._load_watcher: LoadWatcher
        self._loaded = 0  # digest of the weights that were loaded since the last exchange; 0: none were
        self._exchange: WeightExchange | None = None
        self._pending: PendingExchange | None = None
        self._clock = 0
        # By fragment: the step of its next exchange.
        self._next_exchange = [(number + 1) * every // fragments for number in range(fragments)]
        self._waited_s = 0.0  # how long the last exchange kept this rank from its steps
        self._samples = 0.0  # that this rank has trained on so far
        self._samples_exchanged = [0.0] * fragments  # by fragment: self._samples at its last exchange
        # In an elastic run:
        self._interrupted: PendingExchange | None = None  # undone by discard_step(), to be repeated or accepted
        self._last_headers: ExchangeHeaders | None = None  # of the last exchange that was committed here
        self._exchanged_at = [0] * fragments  # by fragment: the step of its last exchange
        self._num_settled = 0
        self._is_settling = False  # settle() was interrupted
        self._has_settled = False  # ... after this rank has set its weights
        self._clock_to_join: int | None = None  # the clock of the rank whose state all take over at the end of join()
        self._is_late = False  # see [Note: late ranks]
        self._num_late = 0  # exchanges that began without this rank
        self._met = 0  # the last meeting of this epoch that this rank came to
        self._group: Communicator | None = None  # of an exchange without those that are late
        self._attached_to: Communicator | None = None

    # -- called by the engine -------------------------------------------------------------------------------------

    def setup(self, training: Training) -> None:
        if self.quorum is not None and self.elastic_session is None:
            raise ValueError(
                f"quorum={self.quorum} lets ranks be late, which needs a run with a membership: start it by "
                "`gradsync run --elastic`, or leave quorum and grace_s out."
            )
        super().setup(training)
        self._training = training
        self._inner_rate.attach(training.optimizer)
        self._load_watcher = LoadWatcher(training.model, training.params)

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        if comm.world_size == 1 and not self.acts_alone and not self.undoable:
            return
        moved, self._attached_to = comm is not self._attached_to, comm
        if self._exchange is not None and moved:
            self._move_to(comm)
        if self._exchange is None:
            # A communicator of its own: an exchange may be under way while other code communicates.
            self._exchange = WeightExchange(
                comm.unchecked().clone(),
                self._reducer,
                num_fragments=self.fragments,
                rates=self._rates,
                keeps_residual=self._keeps_residual,
            )
            self._exchange.undoable = self.undoable
        names = [slot.name for slot in plan.slots()]  # with sparse gradients too: their weights are dense
        if not self._exchange.tracks(names):
            self._apply_pending()  # parameters were unfrozen, on all ranks: the fragments change
            self._track(names)

    def _move_to(self, comm: Communicator) -> None:
        assert self._exchange is not None
        self._exchange.move_to(comm.unchecked().clone())
        self._met = 0
        if self._pending is not None:
            self._pending.is_carried = True

    def _track(self, names: Iterable[str]) -> None:
        assert self._exchange is not None
        wanted = {*names, *self._exchange.anchors}
        self._exchange.track({name: param for name, param in self._training.params.items() if name in wanted})

    def _follow_loaded(self) -> None:
        """Make loaded weights the anchors: see [Note: loaded weights] in weight_loads.py. May block."""
        pending, exchange = self._pending, self._exchange
        if self._load_watcher.was_loaded and pending is not None:
            pending.wait()  # it may raise: before anything is taken
        loaded = self._load_watcher.take_changes()
        if loaded is None or exchange is None:
            return
        if pending is not None:
            self._pending = None
            self._end_exchange(pending, pending.wait())  # not applied: its updates belong to the old weights
        exchange.restart(loaded.names)
        self._loaded = loaded.digest

    def before_step(self, step: int) -> Verdict:
        self._follow_loaded()
        self._inner_rate.scale(self.comm.world_size, self._clock)
        return Verdict.APPLY

    def after_step(self, step: int) -> None:
        self._inner_rate.restore()
        assert self.header is not None, "a backward came before"
        self._count_step(self.header.weight)

    def skipped_step(self, step: int) -> None:
        self._follow_loaded()
        self._count_step(0.0)  # its samples have changed no weight

    def _count_step(self, samples: float) -> None:
        self._clock += 1
        self._samples += samples
        self._exchange_due()

    def _exchange_due(self) -> None:
        """Do what is due at this step. After a lost peer it is called again, and does what is left."""
        if self._exchange is None:
            return
        if self._pending is not None:
            self._pending.raise_failure()
            if self._pending.apply_at <= self._clock:
                self._apply_pending()
        for fragment, due in enumerate(self._next_exchange):
            if due <= self._clock or self._is_summoned():
                self._start_exchange(fragment)

    # -- one exchange ---------------------------------------------------------------------------------------------

    def _start_exchange(self, fragment: int) -> None:
        exchange = self._exchange
        assert exchange is not None and self._pending is None, "one exchange at a time"
        if self.quorum is not None and not self._meet():
            return
        header = self._make_header(fragment, has_data=True)
        exchange.prepare(fragment)
        self._begin(self._make_pending(header, fragment, self._clock + self._overlap))

    def _make_pending(self, header: ExchangeHeader, fragment: int, apply_at: int, *, is_led: bool = False) -> Any:
        counters = Counters(
            due_before=self._next_exchange[fragment],
            due_after=header.clock + header.every,
            samples_before=self._samples_exchanged[fragment],
            samples_after=self._samples,
        )
        return PendingExchange(fragment, apply_at, header, counters, is_led=is_led)

    def _begin(self, pending: PendingExchange) -> None:
        """Begin an exchange whose differences are prepared; without overlap, also end it. May block."""
        exchange, header, counters = self._exchange, pending.header, pending.counters
        assert exchange is not None and header is not None and counters is not None
        self._samples_exchanged[pending.fragment] = counters.samples_after
        self._next_exchange[pending.fragment] = counters.due_after
        self._pending = pending
        start_s = time.perf_counter()
        if self._overlap and exchange.comm.world_size > 1:

            def work() -> ExchangeHeaders:
                headers = ExchangeHeaders.gather(header, exchange.comm)
                exchange.reduce(pending.fragment, headers)
                exchange.commit(pending.fragment)
                return headers

            pending.start(work)
        else:
            self._run(pending, ExchangeHeaders.gather(header, exchange.comm, decoupled=self.quorum is not None))
        self._waited_s = time.perf_counter() - start_s
        if not self._overlap:
            self._apply_pending()

    def _run(self, pending: PendingExchange, headers: ExchangeHeaders) -> None:
        """Exchange in this thread, and commit: until then a lost peer leaves everything as it was. Blocks."""
        exchange, fragment = self._exchange, pending.fragment
        assert exchange is not None
        if headers.someone_is_late:
            self._bring_late_ranks_up(headers)
            exchange.prepare(fragment)
        exchange.reduce(fragment, headers)
        commit = self._average_beside(headers, fragment) if not self._overlap else _nothing
        exchange.commit(fragment)
        commit()
        pending.headers = headers

    def _average_beside(self, headers: ExchangeHeaders, fragment: int) -> Callable[[], None]:
        """Average what belongs to an exchange beside the weights; returns a function that commits it. Blocks."""
        if fragment == self.fragments - 1 and self._group is None:
            self._synchronize_buffers(headers, fragment)
        return _nothing

    def _apply_pending(self) -> None:
        """Apply the pending exchange to the weights, if there is one. Blocks until it is done."""
        pending = self._pending
        if pending is None:
            return
        start_s = time.perf_counter()
        headers = pending.wait()
        self._waited_s += time.perf_counter() - start_s
        self._apply(pending, headers, stepped_since=self._overlap > 0)
        # Other ranks may have come since: then there are no shares by which to average.
        if self._overlap and pending.fragment == self.fragments - 1 and not pending.is_carried:
            self._synchronize_buffers(headers, pending.fragment)

    def _apply(self, pending: PendingExchange, headers: ExchangeHeaders, *, stepped_since: bool) -> None:
        assert self._exchange is not None
        self._pending = None
        self._exchange.apply(pending.fragment, stepped_since=stepped_since)
        self._end_exchange(pending, headers)

    def _end_exchange(self, pending: PendingExchange, headers: ExchangeHeaders) -> None:
        """Count an exchange that has ended: set the step of the fragment's next one."""
        clock = self._clock if self.quorum is not None else headers.leader.clock
        self._next_exchange[pending.fragment] = clock + headers.leader.every
        self._exchanged_at[pending.fragment] = clock
        self._last_headers = headers
        self._is_late = False
        self.change_agreed = self.change_agreed or (
            headers.change_wanted and not pending.is_carried and self._group is None
        )
        self._leave_group()

    def _synchronize_buffers(self, headers: ExchangeHeaders, fragment: int) -> None:
        if not headers.buffers_changed:
            return
        buffers, share = self._training.buffers, headers.share(self.comm.rank, fragment)
        if not self.undoable:
            buffers.synchronize(share, headers.leading_rank)
            return
        with buffers.unchanged_on_error():
            buffers.synchronize(share, headers.leading_rank)

    def _make_header(self, fragment: int, *, has_data: bool) -> ExchangeHeader:
        assert self._exchange is not None
        loaded, self._loaded = self._loaded, 0
        return ExchangeHeader(
            clock=self._clock,
            fragment=fragment,
            has_data=has_data,
            fingerprint=self._exchange.fingerprint,
            hyperparameters=hyperparameter_checksum(self._training.optimizer),
            buffers_changed=self._training.buffers.changed(),
            every=self.every_now(),
            loaded=loaded,
            exchanges=sum(self._exchange.rounds),
            wants_change=self.elastic_session is not None and self.elastic_session.wants_change(),
            has_settled=self._has_settled,
            samples=tuple(self._samples - counted for counted in self._samples_exchanged),
        )

    def every_now(self) -> int:
        """How many steps after an exchange now the fragment's next exchange shall be."""
        return self.every

    # -- ranks that are late: see [Note: late ranks] ---------------------------------------------------------------

    def _is_summoned(self) -> bool:
        """Whether this rank has missed an exchange, and the others begin another one."""
        return self._is_late and self.elastic_session is not None and self.elastic_session.meetings.newest > self._met

    def _meet(self) -> bool:
        """Come to the next exchange; False if it begins without this rank. Blocks."""
        session, exchange = self.elastic_session, self._exchange
        assert session is not None and exchange is not None and self.quorum is not None
        number = max(self._met + 1, session.meetings.newest)
        ranks = session.meetings.come(
            number,
            self.comm,
            quorum=min(self.quorum, self.comm.world_size),
            grace_s=self.grace_s,
            unless=f"settle/{self._num_settled}",
        )
        self._met = number
        if self.comm.rank not in ranks:
            self._is_late = True
            self._num_late += 1
            self._next_exchange[0] = self._clock + self.every_now()
            return False
        if len(ranks) < self.comm.world_size:
            self._group = session.meetings.connect(number, ranks, self.comm)
            exchange.visit(self._group)
        return True

    def _leave_group(self) -> None:
        """Go back to the communicator of all ranks, after an exchange without those that were late."""
        group, self._group = self._group, None
        if group is not None:
            assert self._exchange is not None
            self._exchange.leave()
            group.abandon()

    def _abandon_group(self) -> None:
        """As ``_leave_group``, after a lost peer."""
        group, self._group = self._group, None
        if group is not None:
            assert self._exchange is not None
            self._exchange.forget_group()
            group.abandon()

    def _bring_late_ranks_up(self, headers: ExchangeHeaders) -> None:
        """Give the newest anchors to ranks that have missed an exchange. Blocks."""
        exchange = self._exchange
        assert exchange is not None
        newest, comm = headers.newest_rank, exchange.comm
        state = broadcast_object(comm, exchange.shared_state() if comm.rank == newest else None, newest)
        if sum(exchange.rounds) < sum(state["rounds"]):
            exchange.catch_up(state)

    # -- settle and join ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._follow_loaded()
        exchange = self._exchange
        if exchange is None:
            return
        self._apply_pending()
        self._is_settling = self.undoable
        headers = self._gather(SETTLE, has_data=True)
        if not all(header.has_settled for header in headers.headers):
            self._settle(headers)
        if self.undoable:  # a rank that has passed the barrier knows that all have settled
            self._has_settled = True
            exchange.comm.barrier()
        self._end_settle()

    def _end_settle(self) -> None:
        self._num_settled += 1
        self._is_settling = self._has_settled = False

    def _gather(self, fragment: int, *, has_data: bool) -> ExchangeHeaders:
        """The headers for what all ranks do together, the late ones too. Blocks."""
        exchange, loaded = self._exchange, self._loaded
        assert exchange is not None
        if self.quorum is not None and self.elastic_session is not None:
            self.elastic_session.meetings.announce(
                f"settle/{self._num_settled}"
            )  # late ranks need not wait for a quorum
        try:
            header = self._make_header(fragment, has_data=has_data)
            headers = ExchangeHeaders.gather(header, exchange.comm, decoupled=self.quorum is not None)
            if headers.someone_is_late:
                self._bring_late_ranks_up(headers)
        except BaseException:
            self._loaded = loaded
            raise
        return headers

    def _settle(self, headers: ExchangeHeaders) -> None:
        assert self._exchange is not None
        self._exchange.settle(headers)
        self._synchronize_buffers(headers, self.fragments - 1)

    def join(self) -> int | None:
        """Take part in the others' exchanges until no rank has data: with this rank's last steps, then with nothing."""
        self._follow_loaded()
        exchange = self._exchange
        if exchange is None:
            return None
        if self._pending is not None:
            self._pending.wait()
        while True:
            headers = self._gather(FOLLOW, has_data=False)
            if headers.with_data or headers.steps_differ:
                self._apply_pending()
            if not headers.with_data:
                break
            self._follow(headers)
        if not headers.steps_differ and self.quorum is None:
            return None  # all ranks ended at the same step: nothing to do
        self._settle(headers)
        self._clock_to_join = headers.leader.clock
        return headers.leading_rank

    def joined(self) -> None:
        """All have the state of the rank that has taken the most steps, if their numbers differed."""
        clock, self._clock_to_join = self._clock_to_join, None
        if clock is not None:
            self._clock = clock
            self._end_settle()

    def _follow(self, headers: ExchangeHeaders) -> None:
        """Take part in the exchange, or the settling, that the ranks with data have started."""
        exchange, leader = self._exchange, headers.leader
        assert exchange is not None
        if leader.fragment == SETTLE:
            self._settle(headers)
            if self.undoable:
                exchange.comm.barrier()
            self._end_settle()
            return
        exchange.prepare(leader.fragment)
        own = headers.headers[exchange.comm.rank]
        self._pending = pending = self._make_pending(own, leader.fragment, self._clock, is_led=True)
        self._samples_exchanged[leader.fragment] = self._samples
        self._run(pending, headers)
        self._apply(pending, headers, stepped_since=False)
        if self._overlap and leader.fragment == self.fragments - 1:
            self._synchronize_buffers(headers, leader.fragment)

    # -- a lost peer: see [Note: the transaction is the exchange] --------------------------------------------------

    def elastic_obstacle(self) -> str:
        return ""

    def commit_number(self, step: int) -> int:
        """Blocks until a pending exchange has ended, one way or the other."""
        if self._pending is not None:
            self._pending.stop(self.comm.timeout_s)
        return APART + self._num_settled + (0 if self._exchange is None else sum(self._exchange.rounds))

    def discard_step(self) -> None:
        pending, exchange = self._pending, self._exchange
        if exchange is None:
            return
        is_done = pending is not None and pending.stop(self.comm.timeout_s)
        exchange.discard()
        self._abandon_group()
        if pending is None or is_done:
            return
        counters, header = pending.counters, pending.header
        assert counters is not None and header is not None, "one that was loaded is done"
        self._loaded = self._loaded or header.loaded
        self._next_exchange[pending.fragment] = counters.due_before
        self._samples_exchanged[pending.fragment] = counters.samples_before
        self._pending, self._interrupted = None, pending.renew()

    def retry_exchange(self) -> None:
        interrupted, self._interrupted = self._interrupted, None
        if interrupted is not None and self._overlap and not interrupted.is_led:
            self._begin(interrupted)  # with the same differences: the weights have moved on since
        self._exchange_due()
        if self._is_settling:
            self.settle()

    def accept_step(self, shared: dict[str, Any]) -> list[str]:
        exchange, pending, lost = self._exchange, self._pending, []
        assert exchange is not None
        is_open = pending is not None and not pending.stop(self.comm.timeout_s)
        missed = sum(shared["exchange"]["rounds"]) - sum(exchange.rounds)
        if missed == 1 and is_open and pending is not None and shared["headers"] is not None:
            self._abandon_group()
            lost = self._accept(pending.renew(), shared)
        else:
            self.discard_step()
            if missed > 0:
                self._interrupted = None
                exchange.catch_up(shared["exchange"])
        if self._num_settled < shared["num_settled"]:
            self._num_settled = shared["num_settled"] - 1
            self._end_settle()
        return lost

    def _accept(self, pending: PendingExchange, shared: dict[str, Any]) -> list[str]:
        """Keep the exchange that was interrupted here: what is left is to apply it."""
        exchange, counters = self._exchange, pending.counters
        assert exchange is not None and counters is not None
        headers = self._unpack_headers(shared["headers"])
        share = headers.share(exchange.rank_then, pending.fragment)
        lost = exchange.accept(pending.fragment, share, shared["exchange"])
        self._samples_exchanged[pending.fragment] = counters.samples_after
        self._next_exchange[pending.fragment] = counters.due_after
        pending.headers, pending.is_carried = headers, True
        self._pending = pending
        if pending.is_led or not self._overlap:
            self._apply(pending, headers, stepped_since=False)
        return lost

    def steps_since_exchange(self) -> int:
        return self._clock - min(self._exchanged_at)

    def shared_state(self) -> dict[str, Any]:
        headers, exchange = self._last_headers, self._exchange
        if self._pending is not None and self._pending.headers is not None:
            headers = self._pending.headers
        return {
            "exchange": None if exchange is None else exchange.shared_state(),
            "headers": None if headers is None else self._pack_headers(headers),
            "num_settled": self._num_settled,
        }

    def state_for_newcomer(self) -> dict[str, Any]:
        state = self.state_dict()
        if state["exchange"] is not None:
            state["exchange"]["weights"] = {}
        begun = self._interrupted
        if begun is not None and begun.header is not None and self._overlap and not begun.is_led:
            state["begun"] = {"header": begun.header.pack().tolist(), "lands_at": begun.apply_at}
        return {**state, "shared": self.shared_state()}

    def join_run(self, state: dict[str, Any]) -> None:
        """A newcomer begins at the anchors, with no samples of its own: its differences are what it trains itself."""
        self.discard_step()
        self._interrupted = self._last_headers = None
        self._is_late = self._is_settling = self._has_settled = False
        shared, exchange = state["shared"], dict(state["exchange"])
        mine = {key: value for key, value in state.items() if key not in ("shared", "begun")}
        kept = self._reducer.redistribute([exchange["reducer"]], 1, 2)  # as if rank 0 had all residuals
        exchange |= {
            "weights": exchange["anchors"],
            "reducer": kept,
            "worth": [0.0] * self.fragments,
            "square_distances": [0.0] * self.fragments,
        }
        mine |= {"exchange": exchange, "samples": 0.0, "counted": [0.0] * self.fragments}
        if mine["flight"] is not None:  # the anchors have moved already, so its weights have it
            moves = {name: torch.zeros_like(move) for name, move in mine["flight"]["moves"].items()}
            mine["flight"] = {**mine["flight"], "moves": moves}
        self.load_state_dict(mine)
        if self._pending is not None:
            self._pending.is_carried = True
        self._num_settled = shared["num_settled"]
        if "begun" in state:
            self._take_part_in(
                ExchangeHeader.unpack(state["begun"]["header"], self.fragments), state["begun"]["lands_at"]
            )

    def _take_part_in(self, theirs: ExchangeHeader, apply_at: int) -> None:
        """Repeat an exchange with the others that they began some steps ago: with nothing of its own, as a newcomer."""
        assert self._exchange is not None
        self._exchange.prepare(theirs.fragment)
        header = dataclasses.replace(theirs, loaded=0, wants_change=False, samples=(0.0,) * self.fragments)
        self._interrupted = self._make_pending(header, theirs.fragment, apply_at)

    # -- two sides of a partition ---------------------------------------------------------------------------------

    def diverge_obstacle(self) -> str:
        return ""

    def merge_sides(self, comm: Communicator, share: float) -> float:
        exchange = self._exchange
        assert exchange is not None, "an elastic run has one"
        self.discard_step()
        self._pending = self._interrupted = self._last_headers = None
        self._is_late = self._is_settling = self._has_settled = False
        distance = exchange.merge(comm, share)
        self._merge_buffers(comm, share)
        own = [self._clock, self._num_settled, *self._next_exchange]
        numbers = torch.tensor(own)
        comm.all_reduce(numbers, op="max").wait()
        self._clock, self._num_settled, *self._next_exchange = (int(number) for number in numbers.tolist())
        return distance

    def _merge_buffers(self, comm: Communicator, share: float) -> None:
        buffers = self._training.buffers
        if buffers.mode != "none":
            buffers.move_to(comm)
            buffers.merge(share)
            buffers.move_to(self.comm)

    # -- statistics and state -------------------------------------------------------------------------------------

    def bytes_per_step(self) -> int:
        """The bytes of an exchange, divided by the steps from one exchange to the next."""
        if self._exchange is None or self._exchange.comm.world_size == 1:
            return 0
        return round(self._exchange.num_bytes / self.every_now())

    def codecs(self) -> dict[str, str]:
        return self._reducer.codecs()

    def stats(self) -> dict[str, Any]:
        exchange = self._exchange
        return {
            "exchanges": 0 if exchange is None else sum(exchange.rounds),
            "every": self.every_now(),
            "next_exchange": None if exchange is None else min(self._next_exchange),
            "waited_s": self._waited_s,
            "consensus_distance": 0.0 if exchange is None else exchange.consensus_distance,
            **({} if self.quorum is None else {"late": self._num_late}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Blocks until a pending exchange has ended. Its result is saved too, and is applied when it is due.

        The keys are those of states on disk, and older than the names here: ``flight`` is the pending exchange,
        ``lands_at`` the step at which it is applied, ``words`` its headers, ``moves`` its updates.
        """
        self._follow_loaded()
        pending, exchange = self._pending, self._exchange
        saved = None
        if pending is not None and exchange is not None:
            headers = self._pack_headers(pending.wait())
            updates = exchange.pending_updates(pending.fragment)
            saved = {"fragment": pending.fragment, "lands_at": pending.apply_at, "words": headers, "moves": updates}
        return {
            "clock": self._clock,
            "next": list(self._next_exchange),
            "samples": self._samples,
            "counted": list(self._samples_exchanged),
            "exchange": None if exchange is None else exchange.state_dict(),
            "flight": saved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        if len(state["next"]) != self.fragments:
            raise ValueError(f"the state has {len(state['next'])} fragments; here are {self.fragments}.")
        if self._pending is not None:
            self._pending.abandon(None)  # it belongs to the old state, but its peers may still need this rank
            self._pending = None
        self._load_watcher.reset()  # the state replaces whatever was loaded
        self._loaded = 0
        self._clock = int(state["clock"])
        self._exchanged_at = [self._clock] * self.fragments
        self._next_exchange = [int(due) for due in state["next"]]
        self._samples = float(state["samples"])
        self._samples_exchanged = [float(counted) for counted in state["counted"]]
        if self._exchange is None:
            return
        if state["exchange"] is None:
            self._exchange.reset_anchors()  # saved in a world of one, where nothing is exchanged
            return
        if not self._exchange.tracks(list(state["exchange"]["anchors"])):
            self._track(state["exchange"]["anchors"])  # they were frozen after they had been trained
        self._exchange.load_state_dict(state["exchange"])
        pending = state["flight"]
        if pending is not None:
            self._pending = PendingExchange(int(pending["fragment"]), int(pending["lands_at"]))
            self._pending.headers = self._unpack_headers(pending["words"])
            self._exchange.load_pending_updates(pending["moves"])

    def _pack_headers(self, headers: ExchangeHeaders) -> list[list[float]]:
        return [header.pack().tolist() for header in headers.headers]

    def _unpack_headers(self, packed: Sequence[Sequence[float]]) -> ExchangeHeaders:
        return ExchangeHeaders(tuple(ExchangeHeader.unpack(values, self.fragments) for values in packed))

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if set(state) != STATE:
            raise ValueError(f"expected the state of {type(self).__name__}, with {sorted(STATE)}; got {sorted(state)}.")

    def redistribute(self, states: Sequence[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        mine = dict(states[rank % len(states)])
        exchanges = [state["exchange"] for state in states]
        if mine["exchange"] is not None and None not in exchanges:
            kept = self._reducer.redistribute([each["reducer"] for each in exchanges], rank, world_size)
            mine["exchange"] = {**mine["exchange"], "reducer": kept}
        return mine

    def placement(self, path: tuple[str, ...]) -> Placement:
        if path[:2] in (("exchange", "anchors"), ("exchange", "momenta")):
            return Placement.SHARED
        if path[:2] == ("exchange", "reducer"):
            return reducer_placement(path[2:])
        return Placement.VARYING if path == ("flight",) else Placement.OWN

    def close(self) -> None:
        self._inner_rate.restore()
        self._load_watcher.remove()
        if self._pending is not None:
            self._pending.abandon(CLOSE_S)
        if self._exchange is not None:
            self._leave_group()
            self._exchange.comm.close()


def _nothing() -> None:
    return None


def _check_quorum(quorum: int | None, grace_s: float, fragments: int, overlap: int) -> None:
    if quorum is not None and quorum < 1:
        raise ValueError(f"quorum is a number of workers, 1 or more; got {quorum=}.")
    if not (math.isfinite(grace_s) and grace_s >= 0):
        raise ValueError(f"grace_s is a time in seconds, 0 or more; got {grace_s=}.")
    if grace_s and quorum is None:
        raise ValueError(f"grace_s is how long a quorum waits for the others, so it needs quorum=; got {grace_s=}.")
    if quorum is not None and (fragments > 1 or overlap):
        raise ValueError(
            f"quorum needs fragments=1 and overlap=0: a late rank has one difference; got {fragments=} {overlap=}."
        )
