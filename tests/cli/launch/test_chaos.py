"""The faults of ``--chaos``: parsed, drawn from a seed, and a node that is cut off in a network lab."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections import Counter

import pytest

from gradsync.cli.launch.chaos import Rate, Schedule, cut_unavailable_reason, parse_chaos
from gradsync.testing import Lab, lab_unavailable_reason


def test_parse_chaos_reads_rates_and_units() -> None:
    assert parse_chaos("kill 1/30s") == (Rate("kill", 30.0),)
    assert parse_chaos(" kill 2 / 1min ;stop 1/500ms; cut 0.5/1h; ") == (
        Rate("kill", 30.0),
        Rate("stop", 0.5),
        Rate("cut", 7200.0),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected at least one fault"),
        ("kill", "expected faults as in 'kill 1/30s; stop 1/60s'; got 'kill'"),
        ("kill 1/30s, stop 1/60s", "expected faults as in"),
        ("burn 1/30s", "expected one of the faults kill, stop, cut; got 'burn'"),
        ("kill 1/30", "expected a time in ms, s, m, min, h, as in 'kill 1/30s'; got 'kill 1/30'"),
        ("kill 1/30d", "expected a time in"),
        ("kill 0/30s", "expected a rate above 0"),
        ("kill 1/0s", "expected a rate above 0"),
        ("kill 1/30s; kill 1/60s", "got 'kill' twice"),
    ],
)
def test_parse_chaos_refuses(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_chaos(text)


def drawn(text: str, count: int, **options: int) -> list[tuple[float, str, float, float]]:
    schedule = Schedule(parse_chaos(text), longest_s=4.0, **({"seed": 7} | options))
    return [(fault.at_s, fault.kind, fault.draw, fault.duration_s) for fault in (schedule.pop() for _ in range(count))]


def test_schedule_follows_from_its_seed() -> None:
    text = "kill 1/30s; stop 1/60s"
    assert drawn(text, 50) == drawn(text, 50)
    assert drawn(text, 50) != drawn(text, 50, seed=8)
    assert drawn(text, 50) != drawn(text, 50, node=1), "each node has its own"
    kills = [fault for fault in drawn(text, 50) if fault[1] == "kill"]
    assert kills == drawn("kill 1/30s", len(kills)), "other faults do not move them"


def test_schedule_has_the_rates_that_were_asked_for() -> None:
    faults = drawn("kill 1/30s; stop 1/60s", 3000)
    times = [at_s for at_s, *_ in faults]
    assert times == sorted(times)
    kills = [at_s for at_s, kind, *_ in faults if kind == "kill"]
    gaps = [after - before for before, after in itertools.pairwise(kills)]
    assert statistics.mean(gaps) == pytest.approx(30, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(30, rel=0.1), "exponential: the deviation is the mean"
    assert min(fault[3] for fault in faults) >= 0
    assert 3.9 < max(fault[3] for fault in faults) <= 4.0


def test_schedule_chooses_every_worker_as_often() -> None:
    schedule = Schedule(parse_chaos("kill 1/1s"), seed=3, longest_s=1.0)
    living = [4, 6, 9]
    victims = Counter(schedule.pop().victim_among(living) for _ in range(3000))
    assert sorted(victims) == living
    assert min(victims.values()) > 900


def test_cut_is_refused_on_one_node() -> None:
    assert "this run has one node" in str(cut_unavailable_reason(1))


ECHO = """
import json, socket, sys, time
from gradsync.cli.launch.chaos import Cut

host, other = sys.argv[1], sys.argv[2]
if host == "0":
    listener = socket.create_server(("", 5000))
    listener.settimeout(30)
    peer, _ = listener.accept()
    while data := peer.recv(100):
        peer.sendall(data)
else:
    end = time.monotonic() + 30
    while True:
        try:
            peer = socket.create_connection((other, 5000), timeout=30)
            break
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
    found = {}

    def echo():
        began = time.monotonic()
        peer.sendall(b"x")
        assert peer.recv(1) == b"x"
        return time.monotonic() - began

    found["before"] = echo()
    cut = Cut([other], 1.5)
    time.sleep(0.3)
    try:
        socket.create_connection((other, 5000), timeout=1).close()
    except OSError as error:
        found["connect"] = error.strerror
    found["during"] = echo()  # comes back once the time is over
    found["after"] = echo()
    cut = Cut([other], 60.0)
    time.sleep(0.3)
    cut.heal()
    found["healed"] = echo()
    print(json.dumps(found))
"""


def test_cut_holds_up_traffic_until_it_is_over() -> None:
    if lack := lab_unavailable_reason() or cut_unavailable_reason(2):
        pytest.skip(lack)
    with Lab(hosts=2) as lab:
        commands = [[sys.executable, "-c", ECHO, str(host), lab.address(0)] for host in range(2)]
        _, said = lab.run(commands, timeout_s=120, capture=True)
    found = json.loads(said)
    assert found["connect"] == "No route to host"
    assert found["before"] < 0.5
    assert found["during"] > 0.8
    assert found["after"] < 0.5
    assert found["healed"] < 20, "and not after 60 s"
