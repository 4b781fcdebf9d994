"""The base of strategies that exchange weights every so many steps: when, in which thread, and with whom.

[Note: the same step everywhere] An exchange that overlaps with steps begins after step t and lands after step
t + overlap on every rank, however long it took: a rank that is there earlier waits. So a run depends on no clock, and
the same run gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradsync import spec
from gradsync.bucket import BucketPlan
from gradsync.comm.base import Communicator
from gradsync.reducers.allreduce import Plain
from gradsync.reducers.base import Reducer
from gradsync.reducers.compressed import Compressed
from gradsync.reducers.rules import CodecRule
from gradsync.replicas import hyperparameter_checksum
from gradsync.strategies.attendance import FOLLOW, SETTLE, Attendance, Word
from gradsync.strategies.base import Verdict
from gradsync.strategies.exchange import Exchange, OuterRates
from gradsync.strategies.flight import Flight
from gradsync.strategies.inner_rate import InnerRate, Rate
from gradsync.strategies.local import Local
from gradsync.training import Training

CLOSE_S = 2.0  # what an exchange under way gets to end by itself when the synchronizer is closed

STATE = {"clock", "next", "samples", "counted", "exchange", "flight"}


class Periodic(Local):
    """Every rank steps on its own, and every ``every`` steps each fragment of the weights is exchanged.

    ``acts_alone``: an exchange means something in a world of one too.
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
        keeps_unsent: bool = False,
        rate: Rate | None = "same",
        inner_warmup: int = 0,
    ) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"every is a number of steps, 1 or more; got {every=}.")
        if not 1 <= fragments <= every:
            raise ValueError(
                f"fragments must be from 1 to every: at most one begins at a step; got {fragments=} {every=}."
            )
        if not 0 <= overlap <= every // fragments:
            raise ValueError(
                f"overlap must be from 0 to every // fragments = {every // fragments} steps: an exchange must land "
                f"before the next one begins; got {overlap=}."
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
        assert not (keeps_unsent and overlap), "what is unsent is known when an exchange is over, and weights then move"
        self._codec = codec
        self._keeps_unsent = keeps_unsent
        self._reducer: Reducer = Plain() if codec is None else Compressed(codec)
        if reducer is not None:
            self._reducer = spec.resolve(reducer, "reducer")
        self._inner = InnerRate(rate, inner_warmup)
        self._training: Training
        self._exchange: Exchange | None = None
        self._flight: Flight | None = None
        self._clock = 0
        self._next = [(number + 1) * every // fragments for number in range(fragments)]  # the step of each one's next
        self._waited_s = 0.0  # how long the last exchange has kept this rank from its steps
        self._samples = 0.0  # this rank's so far
        self._counted = [0.0] * fragments  # of them, for each fragment, how many have been exchanged

    # -- the seam -------------------------------------------------------------------------------------------------

    def meet(self, training: Training) -> None:
        self._training = training
        self._inner.meet(training.optimizer)

    def attach(self, plan: BucketPlan, comm: Communicator) -> None:
        super().attach(plan, comm)
        if comm.world_size == 1 and not self.acts_alone:
            return
        if self._exchange is None:
            # A group of its own: an exchange may be under way while others use theirs.
            self._exchange = Exchange(
                comm.clone(),
                self._reducer,
                num_fragments=self.fragments,
                rates=self._rates,
                keeps_unsent=self._keeps_unsent,
            )
        names = [slot.name for slot in plan.slots()]  # sparse ones too: their weights are as dense as others'
        if not self._exchange.covers(names):
            self._land()  # parameters were unfrozen, on all ranks: fragments are cut anew
            self._cover(names)

    def _cover(self, names: Iterable[str]) -> None:
        assert self._exchange is not None
        wanted = {*names, *self._exchange.anchors}
        self._exchange.cover({name: param for name, param in self._training.params.items() if name in wanted})

    def before_step(self, step: int) -> Verdict:
        self._inner.scale_for(self.comm.world_size, self._clock)
        return Verdict.APPLY

    def after_step(self, step: int) -> None:
        self._inner.restore()
        assert self.header is not None, "a backward came before"
        self._tick(self.header.weight)

    def skipped_step(self, step: int) -> None:
        self._tick(0.0)  # its samples have moved nothing

    def _tick(self, samples: float) -> None:
        self._clock += 1
        self._samples += samples
        if self._exchange is None:
            return
        if self._flight is not None:
            self._flight.raise_failure()
            if self._flight.lands_at <= self._clock:
                self._land()
        for fragment, due in enumerate(self._next):
            if due <= self._clock:
                self._launch(fragment)

    # -- one exchange ---------------------------------------------------------------------------------------------

    def _launch(self, fragment: int) -> None:
        exchange = self._exchange
        assert exchange is not None and self._flight is None, "one exchange at a time"
        word = self._word(fragment, has_data=True)
        exchange.prepare(fragment)
        self._counted[fragment] = self._samples
        self._next[fragment] = self._clock + word.every
        self._flight = Flight(fragment, self._clock + self._overlap)

        def work() -> Attendance:
            attendance = Attendance.take(word, exchange.comm)
            exchange.run(fragment, attendance)
            return attendance

        start_s = time.perf_counter()
        if self._overlap and exchange.comm.world_size > 1:
            self._flight.start(work)
        else:
            self._flight.attendance = work()
        self._waited_s = time.perf_counter() - start_s
        if not self._overlap:
            self._land()

    def _land(self) -> None:
        """Bring the weights what the exchange under way has made, if there is one. Blocks until it is done."""
        flight, exchange = self._flight, self._exchange
        if flight is None:
            return
        assert exchange is not None
        start_s = time.perf_counter()
        attendance = flight.wait()
        self._waited_s += time.perf_counter() - start_s
        self._flight = None
        exchange.land(flight.fragment, stepped_since=self._overlap > 0)
        self._landed(flight.fragment, attendance)

    def _landed(self, fragment: int, attendance: Attendance) -> None:
        """Agree on the next exchange. Once in a round of all fragments bring the buffers in step too. May block."""
        self._next[fragment] = attendance.leader.clock + attendance.leader.every
        if fragment == self.fragments - 1:
            self._synchronize_buffers(attendance, fragment)

    def _synchronize_buffers(self, attendance: Attendance, fragment: int) -> None:
        if attendance.buffers_changed:
            share = attendance.share(self.comm.rank, fragment)
            self._training.buffers.synchronize(share, attendance.leading_rank)

    def _word(self, fragment: int, *, has_data: bool) -> Word:
        assert self._exchange is not None
        return Word(
            clock=self._clock,
            fragment=fragment,
            has_data=has_data,
            fingerprint=self._exchange.fingerprint,
            hyperparameters=hyperparameter_checksum(self._training.optimizer),
            buffers_changed=self._training.buffers.changed(),
            every=self.every_now(),
            samples=tuple(self._samples - counted for counted in self._counted),
        )

    def every_now(self) -> int:
        """How many steps shall pass until the next exchange of a fragment that is exchanged now."""
        return self.every

    # -- all ranks together ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        exchange = self._exchange
        if exchange is not None:
            self._land()
            self._settle(Attendance.take(self._word(SETTLE, has_data=True), exchange.comm))

    def _settle(self, attendance: Attendance) -> None:
        assert self._exchange is not None
        self._exchange.settle(attendance)
        self._synchronize_buffers(attendance, self.fragments - 1)

    def join(self) -> int | None:
        """Give what this rank has left to the others' next exchanges, then nothing, until no rank has data."""
        exchange = self._exchange
        if exchange is None:
            return None
        if self._flight is not None:
            self._flight.wait()
        while True:
            attendance = Attendance.take(self._word(FOLLOW, has_data=False), exchange.comm)
            if attendance.with_data or attendance.uneven:
                self._land()
            if not attendance.with_data:
                break
            self._follow(attendance)
        if not attendance.uneven:
            return None  # the end of an epoch that was as long for all: nothing has happened
        self._settle(attendance)
        self._clock = attendance.leader.clock
        return attendance.leading_rank

    def _follow(self, attendance: Attendance) -> None:
        """Take part in what the others came for."""
        exchange, leader = self._exchange, attendance.leader
        assert exchange is not None
        if leader.fragment == SETTLE:
            self._settle(attendance)
            return
        exchange.prepare(leader.fragment)
        self._counted[leader.fragment] = self._samples
        exchange.run(leader.fragment, attendance)
        exchange.land(leader.fragment, stepped_since=False)
        self._landed(leader.fragment, attendance)

    # -- what it tells and keeps ----------------------------------------------------------------------------------

    def bytes_per_step(self) -> int:
        """The mean over the steps from one exchange to the next."""
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
            "next_exchange": None if exchange is None else min(self._next),
            "waited_s": self._waited_s,
            "consensus_distance": 0.0 if exchange is None else exchange.consensus_distance,
        }

    def state_dict(self) -> dict[str, Any]:
        """Blocks until an exchange that is under way has come back; it is saved, and lands when it is due."""
        flight, exchange = self._flight, self._exchange
        saved = None
        if flight is not None and exchange is not None:
            words = [word.pack().tolist() for word in flight.wait().words]
            moves = exchange.moves(flight.fragment)
            saved = {"fragment": flight.fragment, "lands_at": flight.lands_at, "words": words, "moves": moves}
        return {
            "clock": self._clock,
            "next": list(self._next),
            "samples": self._samples,
            "counted": list(self._counted),
            "exchange": None if exchange is None else exchange.state_dict(),
            "flight": saved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_state(state)
        if len(state["next"]) != self.fragments:
            raise ValueError(f"the state has {len(state['next'])} fragments; here are {self.fragments}.")
        if self._flight is not None:
            self._flight.abandon(None)  # of another past, and its peers may still need this rank
            self._flight = None
        self._clock = int(state["clock"])
        self._next = [int(due) for due in state["next"]]
        self._samples = float(state["samples"])
        self._counted = [float(counted) for counted in state["counted"]]
        if self._exchange is None:
            return
        if state["exchange"] is None:
            self._exchange.capture()  # saved by a world of one, which had nothing to exchange
            return
        if not self._exchange.covers(list(state["exchange"]["anchors"])):
            self._cover(state["exchange"]["anchors"])  # they were frozen after they had been trained
        self._exchange.load_state_dict(state["exchange"])
        flight = state["flight"]
        if flight is not None:
            self._flight = Flight(int(flight["fragment"]), int(flight["lands_at"]))
            self._flight.attendance = Attendance(tuple(Word.unpack(values) for values in flight["words"]))
            self._exchange.load_moves(flight["moves"])

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

    def is_own(self, state: dict[str, Any]) -> bool:
        return state.get("exchange") is not None

    def close(self) -> None:
        self._inner.restore()
        if self._flight is not None:
            self._flight.abandon(CLOSE_S)
        if self._exchange is not None:
            self._exchange.comm.close()
