"""An engine in an elastic run: how its step is rolled back, and how it goes on with other members.

The training loop stays as it is. When a peer is lost, the interrupted backward comes to its end without an exception,
and leaves every ``.grad`` None: so clipping and ``optimizer.step()`` pass over it. The schedules and the scaler that
the synchronizer was given do nothing in that iteration. The loader then deals the same batch again, to those who are
there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from torch import Tensor

from gradsync import spec
from gradsync.comm.base import Communicator
from gradsync.comm.connect import disconnect
from gradsync.comm.objects import all_gather_object, broadcast_object
from gradsync.elastic.commit import RestorePoint, set_random_numbers
from gradsync.elastic.leave import leave_requested
from gradsync.elastic.membership import NO_STATE, Samples
from gradsync.elastic.recovery import LOST, Recovery
from gradsync.elastic.run_folder import SavedState
from gradsync.elastic.session import Change, Session
from gradsync.engine.mirror import ResidualMirror, keeps_residuals
from gradsync.engine.resume import Resume
from gradsync.engine.saved_state import own_state
from gradsync.errors import PeerLost, StoreUnreachable
from gradsync.replicas.agreement import copy_tensors
from gradsync.replicas.batch_context import Rewindable, batch_source
from gradsync.replicas.batchnorm import move_batchnorms
from gradsync.replicas.training import Training

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine

MakeEngine = Callable[[Communicator, dict[str, Any] | None], "Engine"]
Describe = Callable[[bool], dict[str, str]]


class Wish(TypedDict):
    """What one worker wants to be done between two steps."""

    leaves: bool
    cause: str | None  # why it wants other members
    saves: str | None  # the name of the state that is to be saved now
    ends_as: str | None  # the name of the state that is saved if all leave
    store_is_lost: bool


class Survival:
    """Brings one synchronizer's engine through changes of the membership: a ``Replica`` and a ``StepBoundary``."""

    def __init__(
        self,
        session: Session,
        training: Training,
        make_engine: MakeEngine,
        describe: Describe,
        *,
        mirror_residuals: bool = False,
    ) -> None:
        self.session = session
        self.training = training
        self.engine: Engine | None = None
        self._make_engine = make_engine
        self._describe = describe
        self._progress: dict[str, Any] | None = None  # of another, to go on from
        self._point = RestorePoint(training)
        self._keeps_step = False  # what is rolled back is an exchange only: what this worker has trained stays
        self._step_to_end = False  # the state that was taken over is from before the end of a step
        self._has_loader = False  # batches come from a loader of gradsync.shard
        self._source = batch_source(session.comm)
        self._recovery = Recovery(session, self)
        self._mirror = ResidualMirror(enabled=mirror_residuals)
        self._callbacks: list[Callable[[Change], None]] = []
        self._resume: Resume | None = None
        if session.folder is not None:
            self._resume = Resume(session, training, session.folder, session.save_every_s)
        session.save_is_due = self._save_is_due
        self._is_resuming = False  # a run was resumed, and its first batch was not read yet
        self._resumed_random: list[Tensor] | None = None  # its random numbers, which that batch needs

    def start(self) -> Engine:
        """Join the run; returns the engine. Blocks until this worker is in step with the others."""
        self._recovery.start()
        assert self.engine is not None, "it was attached"
        if self._mirror.enabled and self.engine.trains_apart:
            raise ValueError(
                "mirror_residuals=True copies residuals after every step, and "
                f"{spec.render(self.engine.strategy)} communicates less often. Leave it out."
            )
        if self._mirror.enabled and not keeps_residuals(self.engine):
            raise ValueError(
                "mirror_residuals=True keeps copies of error-feedback residuals, and "
                f"{spec.render(self.engine.strategy)} has none. Leave it out, or train with a codec, as in "
                "allreduce(codec=int8)."
            )
        for change in self.session.changes:  # it has joined, or others were lost meanwhile
            self.engine.recorder.members_changed(change)
        self._source.boundary = self
        self._guard_schedules(self.engine)
        self.end_taken_step()
        if self._source.healed_place is None:  # no loader of ours will read a first batch
            self._end_resuming()
        return self.engine

    def close(self) -> None:
        if self._resume is not None:
            self._resume.close()
        if self._source.boundary is self:
            self._source.boundary = None
        for schedule in self.training.schedules:
            vars(schedule).pop("step", None)
        self.session.has_synchronizer = False

    # -- events of the engine -------------------------------------------------------------------------------------

    def survive(self, error: BaseException, *, begun: bool, keeps_step: bool) -> None:
        """A peer was lost: go on with the others. Blocks until all are in step again.

        ``begun``: in the middle of a step, and not between two. ``keeps_step``: what this worker has trained stays.
        """
        self._keeps_step = keeps_step
        if keeps_step:
            self._point.take(self._point.loader)
        try:
            self._recovery.survive(str(error), begun=begun)
        finally:
            self._keeps_step = False
        if keeps_step and self._point.loader is not None:
            self._point.loader.go_on()
        self._tell()

    def end_taken_step(self) -> None:
        """Do what the others do at the end of the step at which this worker has come to them.

        They may be in an exchange that a lost member has interrupted, and repeat it with this worker. Then schedules
        step: those that were handed over step with every batch.
        """
        assert self.engine is not None
        self.engine.run_exchange(self.engine.strategy.retry_exchange)
        is_owed, self._step_to_end = self._step_to_end, False
        if is_owed:
            for schedule in self.training.schedules:
                schedule.step()  # type: ignore[attr-defined]

    def raise_if_over(self) -> None:
        """Between two steps of members that train apart: raise ``PeerLost`` if another has ended the epoch."""
        if self.session.is_over:
            assert self.engine is not None
            reason = "another worker has noticed a loss"
            raise PeerLost(rank=self.engine.comm.rank, reason=reason, after_s=0.0, step=self.engine.step)

    def wants_change(self) -> bool:
        """Whether something is to be done together between two steps: members change, or the run is saved. Cheap."""
        return self.session.wants_change()

    def _save_is_due(self) -> bool:
        saving = self._saving
        return saving is not None and self.engine is not None and saving.is_due(self.engine.comm.rank)

    @property
    def _saving(self) -> Resume | None:
        """What saves the run. A side of a partition does not: the main history's state is in the folder."""
        return self._resume if self.session.membership.authority.is_home else None

    def before_backward(self) -> None:
        """The first gradient of a step is here. Without a loader of ours, members change here."""
        engine = self.engine
        assert engine is not None
        if engine.change_agreed and engine.block_began_at is None:
            self._point.take(None)  # what this forward has done to the buffers stays
            # So does its first gradient, although new buckets are made now, and what is in the old ones is dropped.
            found = [(p, p.grad.detach().clone()) for p in self.training.params.values() if p.grad is not None]
            self._change()
            for param, grad in found:
                param.grad = grad

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

    def backward_committed(self) -> None:
        """A synchronizing backward has ended, and is counted."""
        assert self.engine is not None
        self._mirror.step_ended(self.engine)

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
        if self._is_resuming and self._source.healed_place is not None:
            raise ValueError(
                "the run was saved while another loader dealt the batches: expected data that is shuffled with the "
                f"same seed, and as long; the saved place is {self._source.healed_place}, this loader is at "
                f"{loader.place()}. Train on the same data, or give another folder to --resume."
            )
        self._end_resuming()
        self._point.take(loader)
        if engine.change_agreed:
            self._change()

    def _end_resuming(self) -> None:
        """The first batch of a resumed run is about to be read: go on with the random numbers that were saved."""
        if self._is_resuming and self._resumed_random is not None:
            set_random_numbers(self._resumed_random)
        self._is_resuming, self._resumed_random = False, None

    def batches_restart(self) -> None:
        self._point.restore_random_numbers()  # making a new iterator of the data has drawn from them

    def before_end(self) -> None:
        engine = self.engine
        # Members that train apart need not wait for each other: none of them repeats a step.
        if engine is not None and engine.is_between_steps and not engine.trains_apart:
            engine.attempt(engine.comm.barrier)

    # -- between two steps, on all members alike ------------------------------------------------------------------

    def _change(self) -> None:
        """Do together what one of the members has asked for: save the run, let members leave and join, or end."""
        engine = self.engine
        assert engine is not None
        engine.change_agreed = False
        wishes: list[Wish] = []
        if not engine.attempt(lambda: wishes.extend(all_gather_object(engine.comm, self._wish()))):
            return  # a member was lost, and the others have agreed anew: who wants something asks again
        leaving = [rank for rank, wish in enumerate(wishes) if wish["leaves"]]
        if len(leaving) == len(wishes) or (leaving and all(wish["store_is_lost"] for wish in wishes)):
            self._end(wishes)
            return
        if (state := wishes[0]["saves"]) and (saving := self._saving) is not None:
            place, random = self._point.place, self._point.random_numbers
            saving.save_in_background(engine, state, place, random, self._about())
        causes = [wish["cause"] for wish in wishes if wish["cause"]]
        if not causes:
            return
        if leaving and not engine.attempt(lambda: self._mirror.hand_over(engine, leaving)):
            return
        self._keeps_step = engine.trains_apart
        try:
            is_member = self._recovery.change(causes[0], leaving=engine.comm.rank in leaving)
        finally:
            self._keeps_step = False
        if not is_member:
            self._leave()
        self._tell()
        self.end_taken_step()

    def _wish(self) -> Wish:
        """What this worker wants to be done between these two steps."""
        engine, session = self.engine, self.session
        assert engine is not None
        saving = self._saving
        is_due = saving is not None and saving.is_due(engine.comm.rank)
        return {
            "leaves": leave_requested() is not None,
            "cause": session.why_change(),
            "saves": saving.new_name(engine) if saving is not None and is_due else None,
            "ends_as": saving.new_name(engine) if saving is not None else None,
            "store_is_lost": session.store_is_lost,
        }

    def _end(self, wishes: Sequence[Wish]) -> None:
        """The whole run leaves: save it, if it can be resumed, and end this process. Nobody needs to agree."""
        engine, name = self.engine, wishes[0]["ends_as"]
        assert engine is not None
        if (saving := self._saving) is not None and name is not None:
            resume, place, random = saving, self._point.place, self._point.random_numbers
            if not engine.attempt(lambda: resume.save_now(engine, name, place, random, self._about())):
                return  # a member was lost meanwhile: the others save again after the next step
        self._leave()

    def _leave(self) -> NoReturn:
        with contextlib.suppress(StoreUnreachable):  # then the launcher has ended, and nobody asks
            if not self.session.store_is_lost:
                self.session.membership.write_left(leave_requested() or "the launcher has ended")
        disconnect()
        raise SystemExit(0)

    def _about(self) -> dict[str, str]:
        lines = self._describe(True)
        lines.pop("setting mirror_residuals", None)  # it may change: nothing of it is saved
        return lines

    # -- Replica: what recovery asks for --------------------------------------------------------------------------

    @property
    def step(self) -> int:
        if self.engine is None:
            return 0 if self.session.membership.epoch.number <= 1 or self._is_fresh() else NO_STATE
        return self.engine.strategy.commit_number(self.engine.applied_step)

    @property
    def clock(self) -> int:
        return 0 if self.engine is None else self.engine.step

    @property
    def steps_at_risk(self) -> int:
        return 0 if self.engine is None else self.engine.strategy.steps_since_exchange()

    def _is_fresh(self) -> bool:
        """Whether nobody in this worker's epoch has made a step: then what the script has loaded is the state."""
        return self.session.membership.epoch.newest_step == 0 and not self.session.membership.epoch.needs_healing

    @property
    def samples(self) -> Samples:
        return Samples() if self.engine is None else self.engine.samples

    def begin_to_count(self) -> None:
        if self.engine is not None:
            self.engine.samples = Samples()

    def merge(self, comm: Communicator, share: float) -> float:
        assert self.engine is not None, "it was attached"
        model, optimizer, strategy = self.training.model, self.training.optimizer, self.engine.strategy
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), strategy.state_dict()))
        try:
            distance = strategy.merge_sides(comm, share)
        except LOST:
            model.load_state_dict(before[0])
            optimizer.load_state_dict(before[1])
            strategy.load_state_dict(before[2])
            raise
        self.training.buffers.num_overwritten += 1
        self._point.take(self._point.loader)
        return distance

    def roll_back(self) -> None:
        if self.engine is not None:
            self.engine.strategy.discard_step()
            self._undo_step()

    def _undo_step(self) -> None:
        if self.engine is not None and not self._keeps_step:
            self.engine.drop_step()
            self._point.restore()

    def shared(self) -> dict[str, Any]:
        assert self.engine is not None, "it has committed an exchange"
        return self.engine.strategy.shared_state()

    def catch_up(self, shared: dict[str, Any]) -> list[str]:
        assert self.engine is not None, "it has trained"
        lost = self.engine.strategy.accept_step(shared)
        self._undo_step()
        return lost

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
            return {"step": 0, "plan": None, "strategy": None, "shared": {}, "place": None, "ends_step": False}
        return {
            "step": engine.step,
            "plan": engine.plan_state(),
            "strategy": engine.strategy.state_for_newcomer(),
            "shared": {} if engine.trains_apart else engine.strategy.shared_state(),
            "place": self._point.place,
            "ends_step": engine.gate.is_ending_step,
        }

    def adopt(self, progress: dict[str, Any], *, newcomer: bool) -> None:
        self._progress = {**progress, "newcomer": newcomer}
        if newcomer:
            self._mirror.forget()
        if newcomer and self.engine is not None:  # the others had given it up: what it had begun is void
            self.engine.strategy.discard_step()
            self.engine.drop_step()
        # The other's schedules step next; so do this worker's if it was interrupted at the same place.
        ends_step = self.engine is not None and self.engine.gate.is_ending_step
        self._step_to_end = bool(progress.get("ends_step")) and not ends_step
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

    def find_saved(self, comm: Communicator) -> SavedState | None:
        return None if self._resume is None else self._resume.find(comm, self._about())

    def resume(self, comm: Communicator, state: SavedState) -> None:
        assert self._resume is not None, "it has found the state"
        progress = self._resume.load(comm, state)
        self._is_resuming, self._resumed_random = True, progress["random"]
        self.adopt(progress, newcomer=True)

    @property
    def place(self) -> dict[str, Any] | None:
        return self._source.healed_place if self._point.loader is None else self._point.place

    def go_to(self, place: dict[str, Any]) -> None:
        if self._point.loader is None:
            self._source.healed_place = place
        else:
            self._point.loader.go_to(place)
            self._point.place = place

    def begin(self, comm: Communicator) -> None:
        copy_tensors(comm, [*self.training.model.parameters(), *self.training.model.buffers()], src=0)
        self.training.buffers.num_overwritten += 1
        self._point.take(self._point.loader)

    def attach(self, comm: Communicator) -> None:
        progress, self._progress = self._progress, None
        engine = self.engine
        plan = progress["plan"] if progress is not None else None if engine is None else engine.plan_state()
        # A peer may have been lost while the buckets were laid out anew: only some have the new plan then.
        plan = broadcast_object(comm, plan, self.session.membership.epoch.donor)
        if engine is None:
            engine = self.engine = self._make_engine(comm, plan)
            engine.survival = self
        else:
            engine.move_to(comm, plan)
        if progress is not None:
            engine.step = progress["step"]
            if "saved" in progress:
                tree = own_state(progress["saved"], engine.strategy, rank=comm.rank, world_size=comm.world_size)
                engine.strategy.load_state_dict(tree["strategy_state"])
            elif progress["newcomer"] and progress["strategy"] is not None:
                engine.strategy.join_run(progress["strategy"])
        engine.strategy.agree_again()
        move_batchnorms(self.training.model, comm)
        self.session.lost_residuals += self._mirror.members_changed(engine, comm, self.session.membership.epoch)
        self._split_again(comm)

    def _split_again(self, comm: Communicator) -> None:
        """Split the data among these ranks. Blocks: all ranks call it."""
        loader, begin = self._point.loader, None
        assert self.engine is not None, "it was attached"
        if self.engine.trains_apart:  # see [Note: members that train apart]
            place = None if loader is None else loader.place()
            own = None if place is None else [place["epoch"], place["position"]]
            places = [tuple(each) for each in all_gather_object(comm, own) if each is not None]
            begin = max(places, default=None)
        self._source.split_again(comm.rank, comm.world_size, trained=loader, begin=begin)

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
