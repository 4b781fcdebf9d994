"""How a run goes on with other members: agree, connect, bring everybody to the newest committed step, go on.

[Note: no vote per step] While nothing fails a step costs nothing extra. When a member is lost, some survivors may have
completed the step and others not, but never two steps apart: the next header needs everybody. If a survivor has
completed it, its state is the truth, and those behind take it over. If none has, all roll back and do the step again.

Every part of this may fail again, because another member dies. Then the next epoch begins. A worker whose state is half
copied says so in its ballot.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from torch import Tensor

from gradsync.comm.base import Communicator, Work
from gradsync.comm.forwarding import Forwarding
from gradsync.comm.objects import broadcast_object
from gradsync.elastic.membership import NO_STATE, Epoch
from gradsync.elastic.run_folder import SavedState
from gradsync.elastic.session import Cost, Session
from gradsync.errors import CollectiveFailed, PeerLost, StoreUnreachable
from gradsync.replicas.agreement import check_agreement, copy_training_state
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

    def roll_back(self) -> None:
        """Undo the step that was not completed."""
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
        self._session.record(self._cost, cause=cause, discarded=discarded, before=before)
        self._session.settle()
        self._has_caught_up = False

    def _agree(self, cause: str, *, leaving: bool = False) -> Epoch:
        step = self.replica.step if self._is_whole else NO_STATE
        with self._cost.timing("agreeing"):
            return self._session.membership.agree(step, cause=cause, leaving=leaving)

    def _go_on(self, epoch: Epoch) -> None:
        """Connect the members of an epoch and bring them in step; with the next epoch, if one of them is lost."""
        session = self._session
        while True:
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
            saved = replica.find_saved(comm) if epoch.newest_step <= 0 else None
            check_agreement(comm, replica.describe(structure_only=epoch.needs_healing or saved is not None))
            if saved is not None:
                replica.resume(comm, saved)
            elif epoch.needs_healing:
                self._heal(epoch, own.step, comm)
            else:
                replica.roll_back()
                if epoch.newest_step <= 0:
                    replica.begin(comm)
        with self._cost.timing("attaching"):
            replica.attach(comm.clone())
        self._is_whole = True

    def _heal(self, epoch: Epoch, own_step: int, comm: Communicator) -> None:
        """Copy the newest state to the members that do not have it.

        The others take no part: on one host their copies would take the time of those that need one.
        """
        replica, training = self.replica, self.replica.training
        is_behind = own_step != epoch.newest_step
        if is_behind:
            self._is_whole, self._has_caught_up = False, True
        else:
            replica.roll_back()  # what this worker has begun since is not part of the state that it gives
        behind = [rank for rank, member in enumerate(epoch.members) if member.step != epoch.newest_step]
        taking_part = sorted([epoch.donor, *behind])
        group = comm.split(taking_part)
        progress: dict[str, Any] = {}
        num_bytes = 0
        if group is not None:
            donor, counted = taking_part.index(epoch.donor), CountedBytes(group)
            try:
                copy_training_state(counted, training.model, training.optimizer, training.copied_with_state, donor)
                progress = broadcast_object(counted, replica.progress() if group.rank == donor else None, donor)
            finally:
                group.close()
            num_bytes = counted.num_bytes
        self._cost.healed_bytes += broadcast_object(comm, num_bytes, epoch.donor)
        if is_behind:
            is_newcomer = own_step == NO_STATE
            if not is_newcomer:
                self._session.lost_residuals += replica.accept(progress)
            replica.adopt(progress, newcomer=is_newcomer)
