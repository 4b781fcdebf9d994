"""What becomes of a member's error-feedback residuals when it leaves an elastic run, or dies.

One that leaves in order hands them to a member that stays. Those of one that dies are lost with it, unless members
keep copies: with ``mirror_residuals=True`` each gives its own to the next rank after every step. A survivor then adds
those of the dead to its own, by the rule of ``Strategy.redistribute``: residuals are parts of the mean that nobody has
received yet, so they may be added up.

[Note: a copy of the same step] A copy counts only if it is of the step that the survivors go on from. A rank that dies
in the moment between the end of a backward and the end of its copy has left an older one: it is dropped, as parts of it
have been sent since, and the loss is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsync.comm.base import Communicator
from gradsync.comm.objects import all_gather_object, recv_object, send_object
from gradsync.elastic.membership import Epoch, Member
from gradsync.elastic.recovery import LOST
from gradsync.engine import saved_state

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine

Own = dict[str, Any]


@dataclass(frozen=True)
class _Copy:
    """Another member's own part of the strategy's state."""

    uid: str
    step: int
    own: Own


class ResidualMirror:
    """One member's part in keeping the residuals of those that go.

    ``enabled``: copies are kept for the case that a member dies. Those that leave in order hand theirs over anyway.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._members: tuple[Member, ...] = ()  # of the last epoch that came about
        self._settled: set[str] = set()  # uids of members that are gone, and whose residuals another one has
        self._copy: _Copy | None = None

    # -- in every step --------------------------------------------------------------------------------------------

    def step_ended(self, engine: Engine) -> None:
        """Give this rank's residuals to the next rank, and take those of the rank before. Blocks for the transfer.

        Raises nothing if a peer is lost meanwhile: the step is committed, and the next collective will find the loss.
        """
        if self.enabled:
            try:
                self._exchange(engine)
            except LOST:
                return

    def _exchange(self, engine: Engine) -> None:
        comm, own = engine.comm, _own_part(engine)
        if comm.world_size == 1 or not _holds_residuals(own):
            self._copy = None
            return
        after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        # Both block. Some rank is odd, so the ring always moves.
        if comm.rank % 2 == 0:
            send_object(comm, own, after)
            received = recv_object(comm, before)
        else:
            received = recv_object(comm, before)
            send_object(comm, own, after)
        self._copy = _Copy(self._members[before].uid, engine.step, received)

    # -- when the members change ----------------------------------------------------------------------------------

    def hand_over(self, engine: Engine, leaving: Sequence[int]) -> None:
        """Give the residuals of the ranks that leave to others that stay. Blocks: all ranks call it, between steps."""
        comm = engine.comm
        if not keeps_residuals(engine) or engine.trains_apart:  # there they belong to differences of the leaver
            return
        staying = [rank for rank in range(comm.world_size) if rank not in leaving]
        received: list[Own] = []
        for place, leaver in enumerate(leaving):
            heir = staying[place % len(staying)]
            if comm.rank == leaver:
                send_object(comm, _own_part(engine), heir)
            elif comm.rank == heir:
                received.append(recv_object(comm, leaver))
        comm.barrier()  # nobody takes anything before all have it: if a member dies until here, they hand over again
        self._settled |= {self._members[rank].uid for rank in leaving}
        _add(engine, received)

    def forget(self) -> None:
        """This member begins as a newcomer: what it knew of others is out of date, and they have dealt with it."""
        self._members, self._copy = (), None

    def members_changed(self, engine: Engine, comm: Communicator, epoch: Epoch) -> list[str]:
        """Take over the residuals of members that have died. Returns what is lost. Blocks: all members call it."""
        has_them = keeps_residuals(engine)
        present = {member.uid for member in epoch.members}
        gone = [member for member in self._members if member.uid not in present]
        copy = self._copy
        is_of_dead = copy is not None and copy.uid not in present and copy.uid not in self._settled
        if copy is not None and is_of_dead and copy.step == engine.step and has_them:
            _add(engine, [copy.own])
            self._settled.add(copy.uid)
        self._copy = None
        lost: list[str] = []
        if has_them:
            everyone = all_gather_object(comm, [sorted(self._settled), [[m.uid, m.slot] for m in gone]])
            self._settled |= {uid for settled, _ in everyone for uid in settled}
            dead = {uid: slot for _, each in everyone for uid, slot in each if uid not in self._settled}
            lost = [f"all of worker {slot}, after step {engine.step}" for slot in dead.values()]
        self._members = epoch.members
        if self.enabled:
            self._exchange(engine)
        return lost


def keeps_residuals(engine: Engine) -> bool:
    """Whether the strategy keeps anything of this rank alone that may be added to another's."""
    return _holds_residuals(_own_part(engine))


def _holds_residuals(own: Own) -> bool:
    state = own.get("strategy_state", {})
    if "exchange" in state:  # of a strategy that exchanges weights
        state = (state["exchange"] or {}).get("reducer", {})
        return bool(state.get("own")) and "estimates" not in state["own"]
    kinds = state.get("reducer", state).get("own", {})
    return bool(state) and "estimates" not in kinds  # EF21's estimates start again at zero


def _own_part(engine: Engine) -> Own:
    """What is this rank's alone of the strategy's state, as it is saved."""
    return _packed(engine)["own"][_LABEL]  # type: ignore[no-any-return]


def _packed(engine: Engine) -> dict[str, Any]:
    tree = {"strategy_state": engine.strategy.state_dict()}
    return saved_state.pack(tree, engine.strategy, rank=0, world_size=1)


_LABEL = "rank0"


def _add(engine: Engine, others: Sequence[Own]) -> None:
    """Add other members' residuals to this rank's."""
    if not others:
        return
    packed = _packed(engine)
    trees = [saved_state.unpack({**packed, "own": {_LABEL: own}}, 0) for own in (packed["own"][_LABEL], *others)]
    merged = engine.strategy.redistribute([tree["strategy_state"] for tree in trees], 0, 1)
    engine.strategy.load_state_dict(merged)
