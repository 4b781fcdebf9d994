"""An engine in an elastic run: how its step is rolled back, and how it goes on with other members.

The training loop stays as it is. When a peer is lost, the interrupted backward comes to its end without an exception,
and leaves every ``.grad`` None: so clipping and ``optimizer.step()`` pass over it. The schedules and the scaler that
the synchronizer was given do nothing in that iteration. The loader then deals the same batch again, to those who are
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.comm.connect import disconnect
from gradsync.elastic.commit import RestorePoint
from gradsync.elastic.leave import leave_requested
from gradsync.elastic.membership import NO_STATE
from gradsync.elastic.recovery import Recovery
from gradsync.elastic.session import Change, Session
from gradsync.replicas.agreement import copy_tensors
from gradsync.replicas.batch_context import Rewindable, batch_source
from gradsync.replicas.batchnorm import move_batchnorms
from gradsync.replicas.training import Training

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine

MakeEngine = Callable[[Communicator, dict[str, Any] | None], "Engine"]
Describe = Callable[[bool], dict[str, str]]


class Survival:
    """Brings one synchronizer's engine through changes of the membership: a ``Replica`` and a ``StepBoundary``."""

    def __init__(self, session: Session, training: Training, make_engine: MakeEngine, describe: Describe) -> None:
        self.session = session
        self.training = training
        self.engine: Engine | None = None
        self._make_engine = make_engine
        self._describe = describe
        self._progress: dict[str, Any] | None = None  # of another, to go on from
        self._point = RestorePoint(training)
        self._has_loader = False  # batches come from a loader of gradsync.shard
        self._source = batch_source(session.comm)
        self._recovery = Recovery(session, self)
        self._callbacks: list[Callable[[Change], None]] = []

    def start(self) -> Engine:
        """Join the run; returns the engine. Blocks until this worker is in step with the others."""
        self._recovery.start()
        assert self.engine is not None, "it was attached"
        for change in self.session.changes:  # it has joined, or others were lost meanwhile
            self.engine.recorder.members_changed(change)
        self._source.boundary = self
        self._guard_schedules(self.engine)
        return self.engine

    def close(self) -> None:
        if self._source.boundary is self:
            self._source.boundary = None
        for schedule in self.training.schedules:
            vars(schedule).pop("step", None)
        self.session.has_synchronizer = False

    # -- events of the engine -------------------------------------------------------------------------------------

    def survive(self, error: BaseException, *, begun: bool) -> None:
        """A peer was lost: go on with the others. Blocks until all are in step again.

        ``begun``: in the middle of a step, and not between two.
        """
        self._recovery.survive(str(error), begun=begun)
        self._tell()

    def before_backward(self) -> None:
        """The first gradient of a step is here. Without a loader of ours, members change here."""
        engine = self.engine
        assert engine is not None
        if engine.change_agreed and engine.block_began_at is None:
            self._point.take(None)  # what this forward has done to the buffers stays
            self._change()

    def before_block(self) -> None:
        """``with sync.step():`` begins. Without a loader of ours the step begins here, and members change here."""
        engine = self.engine
        assert engine is not None
        if not engine.is_between_steps:
            return  # an accumulation goes on
        if engine.change_agreed:  # no batch was handed out since the last step
            self._point.take(self._point.loader)
            self._change()
        elif not self._has_loader:
            self._point.take(None)

    def after_step(self) -> None:
        """The optimizer has stepped: without a loader of ours, the next step begins here."""
        if not self._has_loader:
            self._point.take(None)

    # -- StepBoundary: events of the loader -----------------------------------------------------------------------

    def before_batch(self, loader: Rewindable) -> None:
        engine = self.engine
        if engine is None or not engine.is_between_steps:
            return
        self._has_loader = True
        self._point.take(loader)
        if engine.change_agreed:
            self._change()

    def batches_restart(self) -> None:
        self._point.restore_random_numbers()  # making a new iterator of the data has drawn from them

    def before_end(self) -> None:
        engine = self.engine
        if engine is not None and engine.is_between_steps:
            engine.attempt(engine.comm.barrier)

    def _change(self) -> None:
        assert self.engine is not None
        self.engine.change_agreed = False
        reason = leave_requested()
        cause = self.session.why_change()
        if self._recovery.change(cause, leaving=reason is not None):
            self._tell()
            return
        self.session.membership.write_left(reason or "")
        disconnect()
        raise SystemExit(0)

    # -- Replica: what recovery asks for --------------------------------------------------------------------------

    @property
    def step(self) -> int:
        if self.engine is None:
            return 0 if self.session.membership.epoch.number <= 1 or self._is_fresh() else NO_STATE
        return self.engine.step

    def _is_fresh(self) -> bool:
        """Whether nobody in this worker's epoch has made a step: then what the script has loaded is the state."""
        return self.session.membership.epoch.newest_step == 0 and not self.session.membership.epoch.needs_healing

    def roll_back(self) -> None:
        if self.engine is not None:
            self.engine.strategy.discard_step()
            self.engine.drop_step()
            self._point.restore()

    def accept(self, progress: dict[str, Any]) -> list[str]:
        assert self.engine is not None, "it has begun the step that others have completed"
        lost = self.engine.strategy.accept_step(progress["shared"])
        self.engine.drop_step()
        return lost

    def describe(self, *, structure_only: bool) -> dict[str, str]:
        return self._describe(structure_only)

    def progress(self) -> dict[str, Any]:
        engine = self.engine
        if engine is None:
            return {"step": 0, "plan": None, "strategy": None, "shared": {}, "place": None}
        return {
            "step": engine.step,
            "plan": engine.plan_state(),
            "strategy": engine.strategy.state_dict(),
            "shared": engine.strategy.shared_state(),
            "place": self._point.place,
        }

    def adopt(self, progress: dict[str, Any], *, newcomer: bool) -> None:
        self._progress = {**progress, "newcomer": newcomer}
        if newcomer and self.engine is not None:  # the others had given it up: what it had begun is void
            self.engine.strategy.discard_step()
            self.engine.drop_step()
        self.training.buffers.num_overwritten += 1
        place, loader = progress["place"], self._point.loader
        self._point.take(None)  # the buffers are another's now
        if place is None:
            return
        if loader is None:
            self._source.healed_place = place
        else:
            loader.go_to(place)
            self._point.loader, self._point.place = loader, place

    def begin(self, comm: Communicator) -> None:
        copy_tensors(comm, [*self.training.model.parameters(), *self.training.model.buffers()], src=0)
        self.training.buffers.num_overwritten += 1
        self._point.take(self._point.loader)

    def attach(self, comm: Communicator) -> None:
        progress, self._progress = self._progress, None
        engine = self.engine
        if engine is None:
            engine = self.engine = self._make_engine(comm, None if progress is None else progress["plan"])
            engine.survival = self
        else:
            engine.move_to(comm, None if progress is None else progress["plan"])
        if progress is not None:
            engine.step = progress["step"]
            if progress["newcomer"] and progress["strategy"] is not None:
                # As rank 1 of 2, of which rank 0 has all: a newcomer has no residual of its own.
                own = engine.strategy.redistribute([progress["strategy"]], 1, 2)
                engine.strategy.load_state_dict(own)
        move_batchnorms(self.training.model, comm)
        self._source.split_again(comm.rank, comm.world_size)

    # -- what the user sees ---------------------------------------------------------------------------------------

    def on_new_epoch(self, callback: Callable[[Change], None]) -> None:
        """Call ``callback`` after every change of the members."""
        self._callbacks.append(callback)

    def _tell(self) -> None:
        change = self.session.changes[-1]
        assert self.engine is not None
        self.engine.recorder.members_changed(change)
        for callback in list(self._callbacks):
            callback(change)

    def _guard_schedules(self, engine: Engine) -> None:
        """A schedule's step does nothing in an iteration whose step was discarded."""
        for schedule in self.training.schedules:
            unguarded: Callable[..., Any] = schedule.step  # type: ignore[attr-defined]

            def step(*args: Any, _unguarded: Callable[..., Any] = unguarded, **kwargs: Any) -> Any:
                return None if engine.discarded else _unguarded(*args, **kwargs)

            vars(schedule)["step"] = step
