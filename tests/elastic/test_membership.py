"""Membership: workers agree on epochs through a real TCPStore. Each worker is a thread with its own connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from gradsync.elastic.membership import NO_STATE, Epoch, Member, Membership, MembershipSettings, RunHasEnded, Samples
from gradsync.elastic.store import BoundedStore
from gradsync.errors import Partitioned, StoreUnreachable

SETTINGS = MembershipSettings(timeout_s=15.0, partition_timeout_s=15.0)  # nobody waits that long, even on loaded cores
IMPATIENT = MembershipSettings(timeout_s=0.6, partition_timeout_s=1.0)
FOUNDERS = ["0.0", "1.0", "2.0", "3.0"]


@pytest.fixture
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield store.port
    del store  # it serves until here


def worker(port: int, uid: str, settings: MembershipSettings = SETTINGS) -> Membership:
    return Membership(BoundedStore("127.0.0.1", port), uid, int(uid.partition(".")[0]), FOUNDERS, settings)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, or raise, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except Exception as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def start(port: int, settings: MembershipSettings = SETTINGS) -> list[Membership]:
    workers = [worker(port, uid, settings) for uid in FOUNDERS]
    epochs = together(*(lambda w=w: w.agree(0, cause="the start") for w in workers))
    assert [getattr(epoch, "number", epoch) for epoch in epochs] == [1] * 4
    return workers


def start_impatient(port: int) -> list[Membership]:
    """Workers that give up soon, though not at the start, when loaded cores may keep some of them."""
    workers = start(port)
    for member in workers:
        member.settings = IMPATIENT
    return workers


def uids(epoch: Epoch) -> list[str]:
    return [member.uid for member in epoch.members]


def test_founders_begin_with_epoch_1(port: int) -> None:
    workers = start(port)
    assert uids(workers[0].epoch) == FOUNDERS
    assert [w.epoch.rank_of(w.uid) for w in workers] == [0, 1, 2, 3]
    assert not workers[0].epoch.needs_healing


def test_survivors_agree_without_the_dead_at_once(port: int) -> None:
    workers = start(port)
    BoundedStore("127.0.0.1", port).set("dead/0.0", "killed")
    begin = time.monotonic()
    epochs = together(*(lambda w=w: w.agree(5, cause="worker 0 was lost") for w in workers[1:]))
    assert time.monotonic() - begin < SETTINGS.timeout_s  # nobody waited for the dead
    assert {epoch.to_json() for epoch in epochs} == {epochs[0].to_json()}
    assert uids(epochs[0]) == ["1.0", "2.0", "3.0"]


def test_epoch_names_the_member_that_is_a_step_ahead(port: int) -> None:
    workers = start(port)
    BoundedStore("127.0.0.1", port).set("dead/0.0", "killed")
    steps = {"1.0": 5, "2.0": 6, "3.0": 5}
    epochs = together(*(lambda w=w: w.agree(steps[w.uid], cause="lost") for w in workers[1:]))
    assert (epochs[0].newest_step, epochs[0].donor, epochs[0].needs_healing) == (6, 1, True)


def test_frozen_member_is_given_up_by_a_majority_and_rejoins(port: int) -> None:
    workers = start_impatient(port)
    epochs = together(*(lambda w=w: w.agree(3, cause="timeout") for w in workers[:3]))
    assert uids(epochs[0]) == FOUNDERS[:3]
    late = workers[3].agree(2, cause="timeout")  # it wakes up
    assert late.rank_of("3.0") is None
    waiting = threading.Thread(target=workers[3].rejoin)
    waiting.start()
    while workers[0].change_wanted() is None:
        time.sleep(0.01)
    after = together(*(lambda w=w: w.agree(3, cause="a newcomer") for w in workers[:3]))[0]
    waiting.join(5)
    assert uids(after) == [*FOUNDERS[:3], "3.0r1"]
    assert [member.step for member in after.members] == [3, 3, 3, NO_STATE]
    assert workers[3].epoch == after


def test_minority_waits_and_then_raises(port: int) -> None:
    workers = start_impatient(port)
    (error,) = together(lambda: workers[3].agree(3, cause="cut off"))
    assert isinstance(error, Partitioned)
    assert "workers 0, 1, 2 are silent" in str(error)


def test_half_without_the_first_member_waits(port: int) -> None:
    workers = start_impatient(port)
    side_b = together(*(lambda w=w: w.agree(3, cause="cut") for w in workers[2:]))
    assert all(isinstance(error, Partitioned) for error in side_b)


def test_half_with_the_first_member_goes_on(port: int) -> None:
    workers = start_impatient(port)
    side_a = together(*(lambda w=w: w.agree(3, cause="cut") for w in workers[:2]))
    assert uids(side_a[0]) == FOUNDERS[:2]


def test_newcomer_takes_the_slot_of_the_dead(port: int) -> None:
    workers = start(port)
    BoundedStore("127.0.0.1", port).set("dead/1.0", "killed")
    newcomer = worker(port, "1.1")
    results = together(
        newcomer.join,
        *(lambda w=w: time.sleep(0.2) or w.agree(4, cause="lost") for w in (workers[0], workers[2], workers[3])),
    )
    assert uids(results[0]) == ["0.0", "1.1", "2.0", "3.0"]
    assert results[0] == results[1]
    assert results[0].donor == 0


def test_leaving_member_is_left_out(port: int) -> None:
    workers = start(port)
    epochs = together(*(lambda w=w: w.agree(4, cause="leaves", leaving=w.slot == 2) for w in workers))
    assert [epoch.rank_of(w.uid) for epoch, w in zip(epochs, workers, strict=True)] == [0, 1, None, 2]
    assert uids(epochs[0]) == ["0.0", "1.0", "3.0"]


def test_all_may_leave(port: int) -> None:
    workers = start(port)
    epochs = together(*(lambda w=w: w.agree(4, cause="the launcher ends", leaving=True) for w in workers))
    assert [epoch.rank_of(w.uid) for epoch, w in zip(epochs, workers, strict=True)] == [None] * 4


def test_fewer_than_min_wait_for_newcomers(port: int) -> None:
    settings = MembershipSettings(min_members=4, timeout_s=10.0, partition_timeout_s=10.0)
    workers = start(port, settings)
    BoundedStore("127.0.0.1", port).set("dead/3.0", "killed")
    newcomer = worker(port, "3.1", settings)
    epochs = together(
        lambda: time.sleep(0.4) or newcomer.join(),
        *(lambda w=w: w.agree(4, cause="lost") for w in workers[:3]),
    )
    assert uids(epochs[1]) == ["0.0", "1.0", "2.0", "3.1"]


def test_newcomers_beyond_max_wait(port: int) -> None:
    settings = MembershipSettings(max_members=4, timeout_s=10.0, partition_timeout_s=10.0)
    workers = start(port, settings)
    extra = worker(port, "4.0", MembershipSettings(max_members=4, timeout_s=0.5, partition_timeout_s=0.5))
    results = together(extra.join, *(lambda w=w: time.sleep(0.2) or w.agree(1, cause="asked") for w in workers))
    assert isinstance(results[0], Partitioned)
    assert uids(results[1]) == FOUNDERS


def test_newcomers_begin_anew_when_all_are_dead(port: int) -> None:
    start(port)
    store = BoundedStore("127.0.0.1", port)
    for uid in FOUNDERS:
        store.set(f"dead/{uid}", "killed")
    settings = MembershipSettings(min_members=2, timeout_s=10.0, partition_timeout_s=10.0)
    newcomers = [worker(port, uid, settings) for uid in ("0.1", "2.1")]
    epochs = together(*(newcomer.join for newcomer in newcomers))
    assert uids(epochs[0]) == ["0.1", "2.1"]
    assert epochs[0].newest_step == 0
    assert "every worker was lost" in epochs[0].cause


def test_rejoined_member_that_leaves_is_known_to_the_launcher_and_the_others(port: int) -> None:
    workers = start(port)
    workers[3].uid = "3.0r1"  # as after rejoin()
    workers[3].write_left("SIGTERM")
    assert BoundedStore("127.0.0.1", port).get("left/3.0") == "SIGTERM"
    assert workers[0].find_end(workers[0].epoch) == "worker 3 was lost"


def test_newcomer_ends_in_order_when_a_rejoined_member_has_finished(port: int) -> None:
    start(port)
    store = BoundedStore("127.0.0.1", port)
    rejoined = Epoch(2, (Member("0.0", 0, 7), Member("3.0r1", 3, 7)), "worker 3 waits to join")
    store.set("epoch/2", rejoined.to_json())
    store.set("finished/3.0", "yes")
    with pytest.raises(RunHasEnded):
        worker(port, "1.1").join()


def test_end_of_an_epoch_is_seen_by_those_that_still_connect(port: int) -> None:
    workers = start(port)
    epoch = workers[0].epoch
    assert workers[0].find_end(epoch) is None
    BoundedStore("127.0.0.1", port).set("dead/2.0", "killed")
    assert workers[0].find_end(epoch) == "worker 2 was lost"


def test_store_that_does_not_answer_raises_in_time(port: int) -> None:
    store = BoundedStore("127.0.0.1", 1, timeout_s=0.3)
    begin = time.monotonic()
    with pytest.raises(StoreUnreachable, match="can't be reached"):
        store.get("key")
    assert time.monotonic() - begin < 5
    assert BoundedStore("127.0.0.1", port).get("nothing") is None


# -- sides of a partition, with two stores. A worker that is cut off has the address of a port where nobody listens ---


@pytest.fixture
def standby() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    yield store.port
    del store


DIVERGING = MembershipSettings(timeout_s=0.5, partition_timeout_s=20.0, on_partition="diverge")
NOWHERE = 1


def begin_to_diverge(port: int, standby: int) -> list[Membership]:
    """Four members of epoch 1; then workers 2 and 3 lose node 0's store."""
    store = BoundedStore("127.0.0.1", port)
    store.add("launchers/started", 2)
    for number in range(2):
        store.set(f"launchers/{number}/node", f'{{"number": {number}, "address": "127.0.0.1"}}')
    workers = start(port)
    assert workers[0].authority.read_standbys() == 1, "node 1 has not published its own yet"
    store.set("launchers/standby/1", f'["127.0.0.1", {standby}]')
    for member in workers:
        assert member.authority.read_standbys() == 0
        member.settings = DIVERGING
    for member in workers[2:]:
        set_home(member, NOWHERE)
    return workers


def set_home(member: Membership, port: int) -> None:
    home = BoundedStore("127.0.0.1", port, timeout_s=0.2)
    if member.authority.store is member.authority.home:
        member.authority.store = home
    member.authority.home = home


def diverge(workers: list[Membership]) -> None:
    calls = [lambda w=w: w.agree(5, cause="cut", samples=Samples(together=60.0)) for w in workers]
    a, _, b, _ = epochs = together(*calls)
    assert [uids(epoch) for epoch in epochs] == [FOUNDERS[:2]] * 2 + [FOUNDERS[2:]] * 2
    assert (a.history, b.history) == ("0", "1@node1")
    assert a.samples == b.samples == 60.0
    assert workers[3].authority.generation(2) == "1@node1/2"


def agree_to_return(side: list[Membership], port: int) -> list[Epoch]:
    for member in side:
        member.look_home()
        assert not member.sees_home
        set_home(member, port)
    side[0].look_home()
    assert side[0].change_wanted() is None, "the other one has not seen it"
    side[1].look_home()
    assert side[0].change_wanted() == "node 0's store can be reached again"
    lasts = together(*(lambda w=w: w.agree(9, cause="home", samples=Samples(own=15.0)) for w in side))
    assert all(last.returns for last in lasts)
    return lasts


def test_sides_go_on_and_meet_with_shares_by_samples(port: int, standby: int) -> None:
    workers = begin_to_diverge(port, standby)
    diverge(workers)
    last, _ = agree_to_return(workers[2:], port)

    def main(member: Membership) -> Epoch:
        while member.change_wanted() is None:
            time.sleep(0.01)
        return member.agree(7, cause="they return", samples=Samples(together=10.0))

    epochs = together(
        *(lambda w=w: main(w) for w in workers[:2]), *(lambda w=w: w.return_home(last, 9) for w in workers[2:])
    )
    assert len({epoch.to_json() for epoch in epochs}) == 1, epochs
    epoch = epochs[0]
    assert [(m.slot, m.step, m.history) for m in epoch.members] == [
        (0, 7, "0"),
        (1, 7, "0"),
        (2, 9, "1@node1"),
        (3, 9, "1@node1"),
    ]
    assert [(side.history, side.samples) for side in epoch.sides] == [("0", 10.0), ("1@node1", 30.0)]
    assert [epoch.share_of(rank) for rank in range(4)] == [0.125, 0.125, 0.375, 0.375]
    assert (epoch.donor, epoch.furthest, epoch.newest_step, epoch.needs_healing) == (0, 2, 7, False)

    # Nobody has merged before the epoch ends: the next one lists the sides again. One has: its state is the truth.
    again = together(*(lambda w=w: w.agree(9, cause="lost") for w in workers))[0]
    assert again.sides == epoch.sides
    assert [m.history for m in again.members] == ["0", "0", "1@node1", "1@node1"]
    workers[1].merged(again)
    after = together(*(lambda w=w: w.agree(9, cause="lost") for w in workers))[0]
    assert after.sides == ()
    assert [(m.step, m.history) for m in after.members] == [(NO_STATE, "0"), (9, "0"), (NO_STATE, "0"), (NO_STATE, "0")]


def test_side_goes_on_in_the_main_history_if_nobody_is_left_there(port: int, standby: int) -> None:
    workers = begin_to_diverge(port, standby)
    diverge(workers)
    store = BoundedStore("127.0.0.1", port)
    last, _ = agree_to_return(workers[2:], port)
    for uid in FOUNDERS[:2]:
        store.set(f"dead/{uid}", "killed")
    epochs = together(*(lambda w=w: w.return_home(last, 9) for w in workers[2:]))
    assert epochs[0].to_json() == epochs[1].to_json()
    assert [(m.slot, m.step, m.history) for m in epochs[0].members] == [(2, 9, "0"), (3, 9, "0")]
    assert epochs[0].sides == ()


def test_members_of_a_side_join_again_with_nothing_if_its_store_is_lost(port: int, standby: int) -> None:
    workers = begin_to_diverge(port, standby)
    diverge(workers)
    lost = workers[3]
    lost.authority.store = BoundedStore("127.0.0.1", NOWHERE, timeout_s=0.2)
    set_home(lost, port)
    assert lost.agree(9, cause="lost").rank_of(lost.uid) is None
    assert lost.authority.is_home


def test_side_without_a_standby_store_waits(port: int) -> None:
    workers = start(port)
    workers[3].settings = MembershipSettings(timeout_s=0.3, partition_timeout_s=0.5, on_partition="diverge")
    set_home(workers[3], NOWHERE)
    with pytest.raises(Partitioned):
        workers[3].agree(3, cause="cut")


def test_request_to_join_whose_answer_was_lost_is_made_once(port: int) -> None:
    workers = start(port)
    newcomer = worker(port, "4.0")
    BoundedStore("127.0.0.1", port).set(
        "join/1", '{"members": [{"uid": "4.0", "slot": 4, "step": -1, "history": "0"}], "side": null, "split": 0}'
    )
    joined, *_ = together(newcomer.join, *(lambda w=w: time.sleep(0.2) or w.agree(1, cause="asked") for w in workers))
    assert uids(joined) == [*FOUNDERS, "4.0"]
    assert joined.read_joins == 1
    assert BoundedStore("127.0.0.1", port).get("join/2") is None
