"""Membership: workers agree on epochs through a real TCPStore. Each worker is a thread with its own connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from gradsync.elastic.membership import NO_STATE, Epoch, Member, Membership, MembershipSettings, RunHasEnded
from gradsync.elastic.store import BoundedStore
from gradsync.errors import Partitioned, StoreUnreachable

SETTINGS = MembershipSettings(timeout_s=15.0, partition_timeout_s=15.0)  # nobody waits that long, even on loaded cores
IMPATIENT = MembershipSettings(timeout_s=0.6, partition_timeout_s=1.0)
FOUNDERS = ["0.0", "1.0", "2.0", "3.0"]


@pytest.fixture
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
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
