"""The base of strategies that exchange weights every n-th step: it decides when, in which thread, and with whom.

What an exchange does is in exchange.py, what the ranks check before it in headers.py.

[Note: the same step on all ranks] An exchange that overlaps with steps begins after step t and is applied after step
t + overlap on every rank, however long it took: a rank that gets there earlier waits. So a run does not depend on
timing, and the same run gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradsync import spec
from gradsync.buckets.bucket import BucketPlan
from gradsync.comm.base import Communicator
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
from gradsync.strategies.periodic.pending import PendingExchange
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

    # -- called by the engine -------------------------------------------------------------------------------------

    def setup(self, training: Training) -> None:
        super().setup(training)
        self._training = training
        self._inner_rate.attach(training.optimizer)
        self._load_watcher = LoadWatcher(training.model, training.params)

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        if comm.world_size == 1 and not self.acts_alone:
            return
        if self._exchange is None:
            # A communicator of its own: an exchange may be under way while other code communicates.
            self._exchange = WeightExchange(
                comm.unchecked().clone(),
                self._reducer,
                num_fragments=self.fragments,
                rates=self._rates,
                keeps_residual=self._keeps_residual,
            )
        names = [slot.name for slot in plan.slots()]  # with sparse gradients too: their weights are dense
        if not self._exchange.tracks(names):
            self._apply_pending()  # parameters were unfrozen, on all ranks: the fragments change
            self._track(names)

    def _track(self, names: Iterable[str]) -> None:
        assert self._exchange is not None
        wanted = {*names, *self._exchange.anchors}
        self._exchange.track({name: param for name, param in self._training.params.items() if name in wanted})

    def _follow_loaded(self) -> None:
        """Make loaded weights the anchors: see [Note: loaded weights] in weight_loads.py. May block."""
        loaded = self._load_watcher.take_changes()
        exchange = self._exchange
        if loaded is None or exchange is None:
            return
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._end_exchange(pending.fragment, pending.wait())  # not applied: its updates belong to the old weights
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
        if self._exchange is None:
            return
        if self._pending is not None:
            self._pending.raise_failure()
            if self._pending.apply_at <= self._clock:
                self._apply_pending()
        for fragment, due in enumerate(self._next_exchange):
            if due <= self._clock:
                self._start_exchange(fragment)

    # -- one exchange ---------------------------------------------------------------------------------------------

    def _start_exchange(self, fragment: int) -> None:
        exchange = self._exchange
        assert exchange is not None and self._pending is None, "one exchange at a time"
        header = self._make_header(fragment, has_data=True)
        exchange.prepare(fragment)
        self._samples_exchanged[fragment] = self._samples
        self._next_exchange[fragment] = self._clock + header.every
        self._pending = PendingExchange(fragment, self._clock + self._overlap)

        def work() -> ExchangeHeaders:
            headers = ExchangeHeaders.gather(header, exchange.comm)
            exchange.run(fragment, headers)
            return headers

        start_s = time.perf_counter()
        if self._overlap and exchange.comm.world_size > 1:
            self._pending.start(work)
        else:
            self._pending.headers = work()
        self._waited_s = time.perf_counter() - start_s
        if not self._overlap:
            self._apply_pending()

    def _apply_pending(self) -> None:
        """Apply the pending exchange to the weights, if there is one. Blocks until it is done."""
        pending, exchange = self._pending, self._exchange
        if pending is None:
            return
        assert exchange is not None
        start_s = time.perf_counter()
        headers = pending.wait()
        self._waited_s += time.perf_counter() - start_s
        self._pending = None
        exchange.apply(pending.fragment, stepped_since=self._overlap > 0)
        self._end_exchange(pending.fragment, headers)

    def _end_exchange(self, fragment: int, headers: ExchangeHeaders) -> None:
        """Set the step of the fragment's next exchange; after the last fragment also synchronize buffers. May block."""
        self._next_exchange[fragment] = headers.leader.clock + headers.leader.every
        if fragment == self.fragments - 1:
            self._synchronize_buffers(headers, fragment)

    def _synchronize_buffers(self, headers: ExchangeHeaders, fragment: int) -> None:
        if headers.buffers_changed:
            share = headers.share(self.comm.rank, fragment)
            self._training.buffers.synchronize(share, headers.leading_rank)

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
            samples=tuple(self._samples - counted for counted in self._samples_exchanged),
        )

    def every_now(self) -> int:
        """How many steps after an exchange now the fragment's next exchange shall be."""
        return self.every

    # -- settle and join ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self._follow_loaded()
        exchange = self._exchange
        if exchange is not None:
            self._apply_pending()
            self._settle(ExchangeHeaders.gather(self._make_header(SETTLE, has_data=True), exchange.comm))

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
            headers = ExchangeHeaders.gather(self._make_header(FOLLOW, has_data=False), exchange.comm)
            if headers.with_data or headers.steps_differ:
                self._apply_pending()
            if not headers.with_data:
                break
            self._follow(headers)
        if not headers.steps_differ:
            return None  # all ranks ended at the same step: nothing to do
        self._settle(headers)
        self._clock = headers.leader.clock
        return headers.leading_rank

    def _follow(self, headers: ExchangeHeaders) -> None:
        """Take part in the exchange, or the settling, that the ranks with data have started."""
        exchange, leader = self._exchange, headers.leader
        assert exchange is not None
        if leader.fragment == SETTLE:
            self._settle(headers)
            return
        exchange.prepare(leader.fragment)
        self._samples_exchanged[leader.fragment] = self._samples
        exchange.run(leader.fragment, headers)
        exchange.apply(leader.fragment, stepped_since=False)
        self._end_exchange(leader.fragment, headers)

    # -- statistics and state -------------------------------------------------------------------------------------

    def elastic_obstacle(self) -> str:
        return (
            "an exchange that a lost worker has interrupted can't be repeated with the others. Use allreduce, or run "
            "without --elastic, from checkpoints"
        )

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
            headers = [header.pack().tolist() for header in pending.wait().headers]
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
            self._pending.headers = ExchangeHeaders(tuple(ExchangeHeader.unpack(values) for values in pending["words"]))
            self._exchange.load_pending_updates(pending["moves"])

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
            self._exchange.comm.close()
