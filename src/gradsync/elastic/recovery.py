"""How a run goes on with other members: agree, connect, bring everybody to the newest committed step, go on.

[Note: no vote per step] While nothing fails a step costs nothing extra. When a member is lost, some survivors may have
completed the step and others not, but never two steps apart: the next header needs everybody. If a survivor has
completed it, its state is the truth, and those behind take it over. If none has, all roll back and do the step again.

Between two epochs of the data all ranks wait for each other. If that wait is interrupted, some ranks may have passed
it: they have applied the same steps, and are at the beginning of the next epoch of the data. The others follow them.

Every part of this may fail again, because another member dies. Then the next epoch begins. A worker whose state is half
copied says so in its ballot.

[Note: merging] When the sides of a partition meet, each heals its own members first. Then all go on from the place of
the member that has come furthest: the batches before it were trained by one side at least, and no loop goes back. Last
the states are merged, each with the share of its side. A merge that fails is undone, and done again by those who are
left; if one of them has completed it, its state is the truth.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from gradsync.comm.base import Communicator, Work
from gradsync.comm.forwarding import Forwarding
from gradsync.comm.objects import all_gather_object, broadcast_object
from gradsync.elastic.membership import APART, NO_STATE, Epoch, Member, Samples
from gradsync.elastic.run_folder import SavedState
from gradsync.elastic.session import Cost, Session
from gradsync.errors import CollectiveFailed, PeerLost, StoreUnreachable
from gradsync.profiling.record import Merge
from gradsync.replicas.agreement import check_agreement, copy_hyperparameters, copy_training_state
from gradsync.replicas.training import Training

log = logging.getLogger("gradsync")

LOST = (PeerLost, CollectiveFailed)  # errors of a collective after which the members may be others


class Replica(Protocol):
    """What recovery needs of the model that it brings in step: an engine, or a worker that is about to make one."""

    training: Training

    @property
    def step(self) -> int:
        """The steps that it has applied; NO_STATE if it has nothing."""
        ...

    @property
    def samples(self) -> Samples:
        """What it has trained in the present epoch."""
        ...

    def begin_to_count(self) -> None:
        """The next epoch was agreed on: count samples from 0 again."""
        ...

    def merge(self, comm: Communicator, share: float) -> float:
        """Make all members' states the weighted mean; returns how far this one's weights moved. Blocks.

        A lost member's error leaves the state as it was.
        """
        ...

    def roll_back(self) -> None:
        """Undo the step that was not completed."""
        ...

    @property
    def clock(self) -> int:
        """The steps that it has taken: more than others', where members train apart."""
        ...

    @property
    def steps_at_risk(self) -> int:
        """Its last steps that are lost with it: those since an exchange, where members train apart."""
        ...

    def shared(self) -> dict[str, Any]:
        """What all members that train apart have in common, for ``catch_up``."""
        ...

    def catch_up(self, shared: dict[str, Any]) -> list[str]:
        """Take over the result of an exchange that others have committed. Returns names, as ``accept`` does."""
        ...

    def accept(self, progress: dict[str, Any]) -> list[str]:
        """Others have completed the step that was interrupted here: commit this rank's part of it.

        ``progress``: that of one of them. Returns the parameters whose residual could not be kept.
        """
        ...

    def describe(self, *, structure_only: bool) -> dict[str, str]:
        """What all members must agree on, one line each."""
        ...

    def progress(self) -> dict[str, Any]:
        """All that a worker with nothing needs beside the training state: clock, plan, strategy, loader's place."""
        ...

    def adopt(self, progress: dict[str, Any], *, newcomer: bool) -> None:
        """Take over another's progress."""
        ...

    def find_saved(self, comm: Communicator) -> SavedState | None:
        """The state of an earlier run to go on from, the same on all members; None if there is none. Blocks."""
        ...

    def resume(self, comm: Communicator, state: SavedState) -> None:
        """Nobody has made a step yet: take over the state of an earlier run, all alike. Blocks."""
        ...

    @property
    def place(self) -> dict[str, Any] | None:
        """Where its loader goes on; None if no loader of :func:`gradsync.shard` is known."""
        ...

    def go_to(self, place: dict[str, Any]) -> None:
        """Have the loader go on from another place."""
        ...

    def begin(self, comm: Communicator) -> None:
        """Nobody has made a step yet: make all replicas equal, as without elasticity."""
        ...

    def attach(self, comm: Communicator) -> None:
        """Go on with these ranks: new buckets, and everything else that depends on them. Blocks."""
        ...


class CountedBytes(Forwarding):
    """Counts the bytes that are broadcast: what a worker without the newest state receives."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.num_bytes = 0

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        self.num_bytes += tensor.nbytes
        return self.inner.broadcast(tensor, src)


class Recovery:
    """Brings one replica through changes of the membership, and counts what each costs."""

    def __init__(self, session: Session, replica: Replica) -> None:
        self._session = session
        self.replica = replica
        self._is_whole = True  # False while another's state is being copied into this one
        self._has_caught_up = False  # in this change: another's state was taken over
        self._cost = Cost()

    def start(self) -> None:
        """Attach the replica for the first time: as a founder, or as a newcomer of a run that goes on. Blocks."""
        session = self._session
        if session.world is None:
            self._is_whole = False
            epoch = session.membership.join()
            self._cost = Cost()
            self._go_on(epoch)
            self._record(epoch.cause, discarded=False)
        elif not self._try(session.membership.epoch, session.world):
            self.survive("a worker was lost at the start", begun=False)
        else:
            session.settle()

    def survive(self, cause: str, *, begun: bool) -> None:
        """A member was lost. Returns when this worker is in step with the others again.

        ``begun``: in the middle of a step of this worker, which is void now.
        """
        self._cost = Cost()
        self._session.abandon_world()
        self._go_on(self._agree(cause))
        self._record(cause, discarded=begun)

    def change(self, cause: str, *, leaving: bool = False) -> bool:
        """Between two steps, on all members alike: take newcomers in, let members leave.

        Returns whether this worker is still a member.
        """
        self._cost = Cost()
        epoch = self._agree(cause, leaving=leaving)
        if leaving and epoch.rank_of(self._session.membership.uid) is None:
            self._session.abandon_world()
            return False
        self._session.abandon_world()
        self._go_on(epoch)
        self._record(cause, discarded=False)
        return True

    def _record(self, cause: str, *, discarded: bool) -> None:
        """The change is over. A step that others had completed is not done again: its state was taken over."""
        before = self._session.settled
        discarded = discarded and not self._has_caught_up
        self._session.record(
            self._cost, cause=cause, discarded=discarded, before=before, steps_at_risk=self.replica.steps_at_risk
        )
        self._session.settle()
        self._has_caught_up = False

    def _agree(self, cause: str, *, leaving: bool = False) -> Epoch:
        replica = self.replica
        step = replica.step if self._is_whole else NO_STATE
        with self._cost.timing("agreeing"):
            epoch = self._session.membership.agree(step, cause=cause, leaving=leaving, samples=replica.samples)
        replica.begin_to_count()
        return epoch

    def _go_on(self, epoch: Epoch) -> None:
        """Connect the members of an epoch and bring them in step; with the next epoch, if one of them is lost."""
        session, started_s = self._session, time.monotonic()
        while True:
            # Two members that reach the store and not each other would agree on one epoch after the other.
            session.membership.check_patience(time.monotonic() - started_s, "the members can't reach each other")
            if epoch.returns and epoch.rank_of(session.membership.uid) is not None:
                self.replica.roll_back()
                with self._cost.timing("agreeing"):
                    epoch = session.membership.return_home(epoch, self.replica.step)
                continue
            if epoch.rank_of(session.membership.uid) is None:
                log.warning("the others have gone on without this worker (%s): it joins again", epoch.cause)
                self._is_whole = False
                with self._cost.timing("agreeing"):
                    epoch = session.membership.rejoin()
            try:
                with self._cost.timing("connecting"):
                    world = session.connect(epoch)
            except (*LOST, StoreUnreachable, ConnectionError, RuntimeError) as error:
                epoch = self._agree(str(error).partition("\n")[0])
                continue
            if self._try(epoch, world):
                return
            session.abandon_world()
            epoch = self._agree("a worker was lost while the others went on")

    def _try(self, epoch: Epoch, world: Communicator) -> bool:
        """Bring the members in step; False if one was lost meanwhile."""
        try:
            self._bring_in_step(epoch, world)
        except LOST as error:
            log.info("epoch %d ended before it began: %s", epoch.number, error)
            return False
        return True

    def _bring_in_step(self, epoch: Epoch, world: Communicator) -> None:
        replica, comm = self.replica, world.unchecked()
        own = epoch.members[world.rank]
        with self._cost.timing("restoring"):
            saved = replica.find_saved(comm) if epoch.newest_step <= 0 and not epoch.sides else None
            # Where members train apart, schedules follow each one's own clock.
            structure_only = epoch.needs_healing or epoch.trains_apart or bool(epoch.sides) or saved is not None
            check_agreement(comm, replica.describe(structure_only=structure_only))
            healed = None
            if saved is not None:
                replica.resume(comm, saved)
            elif epoch.needs_healing:
                healed = self._heal(epoch, own, comm)
            else:
                replica.roll_back()
                if epoch.newest_step <= 0 and not epoch.sides:
                    replica.begin(comm)
            if epoch.sides:
                self._meet(epoch, own, comm, healed)
            if not epoch.trains_apart:  # there each member has a place of its own
                furthest = furthest_place(all_gather_object(comm, replica.place))
                if furthest is not None and replica.place is not None and furthest != replica.place:
                    replica.go_to(furthest)
        with self._cost.timing("attaching"):
            replica.attach(comm.clone())
        if epoch.sides:
            with self._cost.timing("restoring"):
                self._merge_sides(epoch, comm)
        self._is_whole = True

    def _meet(self, epoch: Epoch, own: Member, comm: Communicator, healed: dict[str, Any] | None) -> None:
        """The sides of a partition meet: all go on from the place of the member that has come furthest.

        ``healed``: the progress with which the members of this history were healed, if any was behind.
        """
        replica, training, src = self.replica, self.replica.training, epoch.furthest
        copy_hyperparameters(comm, training.optimizer, training.copied_with_state, src)
        progress = broadcast_object(comm, replica.progress() if comm.rank == src else None, src)
        if comm.rank != src:
            is_newcomer = own.step == NO_STATE
            if is_newcomer and healed is not None:  # the strategy's state is that of its own side
                progress = {**progress, "strategy": healed["strategy"]}
            replica.adopt(progress, newcomer=is_newcomer)

    def _merge_sides(self, epoch: Epoch, comm: Communicator) -> None:
        started_s = time.monotonic()
        distance = self.replica.merge(comm, epoch.share_of(comm.rank))
        self._session.membership.merged(epoch)
        self._cost.merge = Merge(
            samples={side.history: side.samples for side in epoch.sides},
            split_s=epoch.sides[0].split_s,
            distance=distance,
            took_s=time.monotonic() - started_s,
        )

    def _heal(self, epoch: Epoch, own: Member, comm: Communicator) -> dict[str, Any]:
        """Copy the newest state of the epoch's own history to its members that do not have it; returns its progress.

        The others take no part: on one host their copies would take the time of those that need one.
        """
        replica, training = self.replica, self.replica.training
        takes = epoch.needs_everything(own)
        if takes:
            self._is_whole, self._has_caught_up = False, True
        elif own.step == epoch.newest_step:
            replica.roll_back()  # what this worker has begun since is not part of the state that it gives
        source = epoch.donor
        if epoch.trains_apart:
            self._level(epoch, own, comm)
            is_source = not takes and own.history == epoch.history
            clocks = all_gather_object(comm, replica.clock if is_source else NO_STATE)
            source = clocks.index(max(clocks))  # newcomers begin where the farthest member is
        behind = [rank for rank, member in enumerate(epoch.members) if epoch.needs_everything(member)]
        if not behind:
            return {}
        taking_part = sorted([source, *behind])
        group = comm.split(taking_part)
        progress: dict[str, Any] = {}
        num_bytes = 0
        if group is not None:
            donor, counted = taking_part.index(source), CountedBytes(group)
            try:
                copy_training_state(counted, training.model, training.optimizer, training.copied_with_state, donor)
                progress = broadcast_object(counted, replica.progress() if group.rank == donor else None, donor)
            finally:
                group.close()
            num_bytes = counted.num_bytes
        self._cost.healed_bytes += broadcast_object(comm, num_bytes, source)
        if takes:
            is_newcomer = own.step == NO_STATE or epoch.trains_apart
            if not is_newcomer:
                self._session.lost_residuals += replica.accept(progress)
            replica.adopt(progress, newcomer=is_newcomer)
        return progress

    def _level(self, epoch: Epoch, own: Member, comm: Communicator) -> None:
        """Give the last exchange to members that have not committed it: see [Note: members that train apart]."""
        replica = self.replica
        behind = [member for member in epoch.members if epoch.is_behind(member) and member.step >= APART]
        if behind:
            shared = broadcast_object(comm, replica.shared() if comm.rank == epoch.donor else None, epoch.donor)
            if own in behind:
                self._session.lost_residuals += replica.catch_up(shared)


def furthest_place(places: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The furthest place of the members' loaders; None if they are not places in the same data.

    >>> from gradsync.elastic.recovery import furthest_place
    >>> furthest_place([{"epoch": 1, "position": 60, "seed": 0}, None, {"epoch": 2, "position": 0, "seed": 0}])
    {'epoch': 2, 'position': 0, 'seed': 0}
    >>> furthest_place([{"epoch": 1, "position": 60, "seed": 0}, {"epoch": 2, "position": 0, "seed": 9}]) is None
    True
    """
    known = [place for place in places if place is not None]
    if len({json.dumps({**place, "epoch": 0, "position": 0}, sort_keys=True) for place in known}) != 1:
        return None
    return max(known, key=lambda place: (place["epoch"], place["position"]))
