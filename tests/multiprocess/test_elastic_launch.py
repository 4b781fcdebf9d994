"""``gradsync run --elastic`` with real launchers and workers, whose scripts train nothing.

What the workers make of the store is tested elsewhere: here it is what the launcher does, and what it writes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess.test_run import ORPHANS_END_S, Launch, finish, wait_for_files, wait_until_gone

Write = Callable[[str, str], str]

# What the scripts below begin with.
PRELUDE = """
import json, os, pathlib, signal, sys, time
from gradsync.elastic.leave import leave_requested
from gradsync.elastic.store import BoundedStore

run = json.loads(os.environ["GRADSYNC_ELASTIC"])
uid, slot = run["uid"], run["slot"]
host, _, port = run["store"].rpartition(":")
store = BoundedStore(host, int(port))

def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece: print would write the end of the line apart

def leave(reason):
    store.set(f"left/{uid}", reason)
    sys.exit(0)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

pathlib.Path(f"up{uid}").write_text(str(os.getpid()))
"""


@pytest.fixture
def elastic(launch: Launch, write: Write) -> Launch:
    """Start ``gradsync run --elastic`` with a script."""

    def elastic(script: str, *options: str, name: str = "train.py") -> subprocess.Popen[str]:
        return launch("--elastic", *options, write(name, PRELUDE + script))

    return elastic


def lines_of(err: str) -> list[str]:
    """What the launcher said, without the times and without warnings about the machine."""
    return [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in err.splitlines() if not line.startswith("warning:")]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


# -- one node -----------------------------------------------------------------------------------------------------


def test_elastic_workers_have_torchruns_environment_and_their_place_in_the_run(elastic: Launch) -> None:
    names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT"
    script = f"""
say(json.dumps([run, {{name: os.environ[name] for name in {names.split()} + ["TORCHELASTIC_RUN_ID"]}}]))
print("leads its group:", os.getpgrp() == os.getpid(), file=sys.stderr)
"""
    code, out, err = finish(elastic(script, "-n", "2", "--min", "1", "--max", "3", "--rdzv-id", "job7", "--prefix"))
    assert code == 0
    assert sorted(lines_of(err)) == ["[0] leads its group: True", "[1] leads its group: True"]
    for slot, line in enumerate(sorted(out.splitlines())):
        assert line.startswith(f"[{slot}] ")
        run, environment = json.loads(line[len("[0] ") :])
        port = environment["MASTER_PORT"]
        assert run == {
            "store": f"127.0.0.1:{port}",
            "run": "job7",
            "uid": f"{slot}.0",
            "slot": slot,
            "founders": ["0.0", "1.0"],
            "min": 1,
            "max": 3,
            "nodes": 1,
            "on_partition": None,
            "partition_timeout_s": 1800.0,
            "resume": None,
            "save_every_s": None,
        }
        assert environment == {
            "RANK": str(slot),
            "LOCAL_RANK": str(slot),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "job7",
        }


def test_elastic_store_of_one_node_listens_on_the_loopback_only(elastic: Launch) -> None:
    script = """
wanted = f":{int(port):04X}"
for name in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if local.endswith(wanted) and state == "0A":  # listening
            say(local)
"""
    code, out, _ = finish(elastic(script, "-n", "1"))
    assert code == 0
    address, _, _ = out.strip().partition(":")
    assert address == "0100007F", "127.0.0.1, and nothing else"


def test_elastic_killed_worker_is_reported_at_once_and_started_again(elastic: Launch) -> None:
    script = """
if uid == "1.0":
    store.set("died_at", str(time.time()))
    die()
if slot == 0:
    wait_until(lambda: store.has("dead/1.0"))
    late = time.time() - float(store.get("died_at"))
    say("found", json.dumps([store.get("dead/1.0"), late]))
    wait_until(lambda: store.has("again"))
else:
    store.set("again", uid)
    say("again", uid)
    wait_until(lambda: store.has("finished/0.0"))
    say("ended", json.dumps([store.get("dead/0.0"), store.has("left/0.0")]))
"""
    code, out, err = finish(elastic(script, "-n", "2", "--max-restarts", "7"))
    said = dict(line.split(" ", 1) for line in out.splitlines())
    reason, late_s = json.loads(said["found"])
    assert (code, reason, said["again"], json.loads(said["ended"])) == (
        0,
        "killed by SIGKILL",
        "1.1",
        ["finished", False],
    )
    assert late_s < 1.0, "the others need not wait for a timeout"
    assert lines_of(err) == ["worker 1 was killed by SIGKILL; a new one starts in 0.1 s (1 of 7)"]
    assert re.match(r"\d\d:\d\d:\d\d worker 1", err.splitlines()[-1])


def test_elastic_failed_worker_is_shown_with_its_traceback(elastic: Launch, tmp_path: Path) -> None:
    script = """
if uid == "1.0":
    raise ValueError("boom")
wait_until(lambda: store.has("dead/1.0"))
store.set(f"seen/{uid}", store.get("dead/1.0"))
wait_until(lambda: store.has("seen/1.1") and store.has("seen/0.0"))
assert store.get("seen/0.0") == "failed: ValueError: boom", store.get("seen/0.0")
"""
    code, _, err = finish(elastic(script, "-n", "2"))
    lines = lines_of(err)
    assert code == 0
    assert lines[0] == "worker 1 failed: ValueError: boom; a new one starts in 0.1 s (1 of 100)"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].startswith(f'  File "{tmp_path}/train.py", line ')
    assert lines[-1] == "ValueError: boom"


def test_elastic_children_of_a_dead_worker_are_killed(elastic: Launch, tmp_path: Path) -> None:
    script = """
import subprocess
if uid == "0.0":
    child = subprocess.Popen(["sleep", "120"])
    pathlib.Path("child").write_text(str(child.pid))
    die()
"""
    code, _, _ = finish(elastic(script, "-n", "1"))
    assert code == 0
    wait_until_gone([int((tmp_path / "child").read_text())], within_s=1.0)


def test_elastic_delay_doubles_while_workers_die_soon(elastic: Launch) -> None:
    script = """
say(uid, time.time())
if int(uid.partition(".")[2]) < 4:
    die()
"""
    code, out, err = finish(elastic(script, "-n", "1", "--restart-delay-s", "0.3"))
    assert code == 0
    delays = [float(found) for found in re.findall(r"starts in ([\d.]+) s", err)]
    assert delays == [0.3, 0.6, 1.2, 2.4]
    uids, times = zip(*(line.split() for line in out.splitlines()), strict=True)
    assert list(uids) == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    gaps = [float(after) - float(before) for before, after in itertools.pairwise(times)]
    assert all(gap >= delay for gap, delay in zip(gaps, delays, strict=True)), gaps


def test_elastic_run_that_ends_starts_no_worker(elastic: Launch) -> None:
    script = """
if slot == 1:
    die()
wait_until(lambda: store.has("dead/1.0"))
"""
    started_s = time.monotonic()
    code, _, err = finish(elastic(script, "-n", "2", "--restart-delay-s", "100"))
    assert (code, lines_of(err)) == (0, ["worker 1 was killed by SIGKILL; a new one starts in 100 s (1 of 100)"])
    assert time.monotonic() - started_s < 90


@pytest.mark.parametrize(("how", "expected"), [("raise OSError('disk full')", 1), ("die()", 137), ("sys.exit(4)", 4)])
def test_elastic_failure_at_the_end_of_the_run_is_its_exit_code(elastic: Launch, how: str, expected: int) -> None:
    script = f"""
if slot == 1:
    wait_until(lambda: store.has("finished/0.0"))
    time.sleep(0.2)
    {how}
"""
    code, _, err = finish(elastic(script, "-n", "2"))
    assert code == expected
    assert lines_of(err)[0].endswith("; it is not started again, as other workers have finished")


def test_elastic_worker_that_left_is_not_started_again(elastic: Launch) -> None:
    script = """
if slot == 1:
    leave("its machine is taken back")
wait_until(lambda: store.has("dead/1.0"))
time.sleep(0.5)
say(store.get("dead/1.0"), store.has("finished/1.0"))
"""
    assert finish(elastic(script, "-n", "2"))[:2] == (0, "left: its machine is taken back False\n")


def test_elastic_leaving_does_not_end_the_run(elastic: Launch) -> None:
    script = """
if slot == 1:
    leave("enough")
wait_until(lambda: store.has("dead/1.0"))
if uid == "0.0":
    die()
say(uid)
"""
    code, out, err = finish(elastic(script, "-n", "2"))
    assert (code, out) == (0, "0.1\n")
    assert lines_of(err) == [
        "worker 1 has left: enough",
        "worker 0 was killed by SIGKILL; a new one starts in 0.1 s (1 of 100)",
    ]


def test_elastic_run_in_which_all_leave_succeeds(elastic: Launch) -> None:
    assert finish(elastic('leave("enough")', "-n", "2"))[0] == 0


def test_elastic_run_goes_on_without_restarts(elastic: Launch) -> None:
    script = """
if slot == 1:
    die()
wait_until(lambda: store.has("dead/1.1"))
time.sleep(1)
assert not store.has("dead/1.2")
"""
    code, _, err = finish(elastic(script, "-n", "2", "--max-restarts", "1"))
    assert code == 0
    assert lines_of(err) == [
        "worker 1 was killed by SIGKILL; a new one starts in 0.1 s (1 of 1)",
        "worker 1 was killed by SIGKILL; it is not started again, as 1 workers have been (--max-restarts)",
    ]


def test_elastic_exit_code_is_that_of_the_last_failure(elastic: Launch) -> None:
    script = """
if slot == 1:
    die()
wait_until(lambda: store.has("dead/1.0"))
sys.exit(5)
"""
    code, _, err = finish(elastic(script, "-n", "2", "--max-restarts", "0"))
    assert code == 5
    assert [line.partition(";")[0] for line in lines_of(err)] == [
        "worker 1 was killed by SIGKILL",
        "worker 0 exited with code 5",
    ]


def test_elastic_run_with_too_few_workers_is_given_up(elastic: Launch) -> None:
    script = """
if slot == 1:
    die()
time.sleep(120)
"""
    code, _, err = finish(elastic(script, "-n", "2", "--min", "2", "--max-restarts", "0"))
    assert code == 128 + signal.SIGKILL
    assert lines_of(err)[-1] == "the run is given up: 1 workers are left, and --min 2 are needed"


def test_elastic_run_of_a_wrong_script_is_given_up(elastic: Launch) -> None:
    script = """
if slot == 1:
    raise ValueError("a wrong script")
time.sleep(120)
"""
    code, _, err = finish(elastic(script, "-n", "2"))
    lines = lines_of(err)
    assert code == 1
    assert [line for line in lines if line.startswith("worker")] == [
        "worker 1 failed: ValueError: a wrong script; a new one starts in 0.1 s (1 of 100)",
        "worker 1 failed: ValueError: a wrong script; a new one starts in 0.2 s (2 of 100)",
        "worker 1 failed: ValueError: a wrong script; the run is given up, as it has failed 3 times within 10 s of its "
        "start",
    ]
    assert lines[-1] == "ValueError: a wrong script"


def test_elastic_worker_that_is_killed_over_and_over_is_no_wrong_script(elastic: Launch) -> None:
    script = """
if int(uid.partition(".")[2]) < 4:
    die()
"""
    assert finish(elastic(script, "-n", "1", "--restart-delay-s", "0"))[0] == 0


# -- signals ------------------------------------------------------------------------------------------------------

LEAVES = """
def save_and_leave():
    time.sleep(0.5)  # the rest of the step, and a checkpoint
    pathlib.Path(f"saved{slot}").write_text(leave_requested())
    leave(leave_requested())

leave_requested()
pathlib.Path(f"trains{slot}").write_text(str(os.getpid()))
wait_until(leave_requested, seconds=120)
save_and_leave()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_elastic_workers_leave_in_order_on_a_signal_to_the_launcher(
    elastic: Launch, tmp_path: Path, how: signal.Signals
) -> None:
    process = elastic(LEAVES, "-n", "2")
    pids = [int(pid) for pid in wait_for_files(tmp_path, "trains*", 2)]
    os.killpg(process.pid, how)
    code, _, err = finish(process)
    assert code == 128 + how
    assert lines_of(err)[-1] == f"ended by {how.name}"
    assert [(tmp_path / f"saved{slot}").read_text() for slot in range(2)] == ["it was told to end"] * 2
    wait_until_gone(pids, within_s=0.5)


def test_elastic_scheduler_that_signals_everybody_does_not_hurry_the_workers(elastic: Launch, tmp_path: Path) -> None:
    process = elastic(LEAVES, "-n", "2")
    pids = [int(pid) for pid in wait_for_files(tmp_path, "trains*", 2)]
    for pid in (*pids, process.pid):
        os.kill(pid, signal.SIGTERM)
    assert finish(process)[0] == 128 + signal.SIGTERM
    assert [(tmp_path / f"saved{slot}").exists() for slot in range(2)] == [True, True]


def test_elastic_workers_leave_in_order_if_the_launcher_is_killed(elastic: Launch, tmp_path: Path) -> None:
    process = elastic(LEAVES.replace("    leave(leave_requested())", "    sys.exit(0)"), "-n", "2")
    pids = [int(pid) for pid in wait_for_files(tmp_path, "trains*", 2)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(ORPHANS_END_S)
    wait_until_gone(pids, within_s=ORPHANS_END_S)
    assert [(tmp_path / f"saved{slot}").read_text() for slot in range(2)] == ["it was told to end"] * 2


def test_elastic_worker_that_is_sent_sigterm_leaves_and_the_others_go_on(elastic: Launch, tmp_path: Path) -> None:
    script = """
leave_requested()
pathlib.Path(f"trains{slot}").write_text(str(os.getpid()))
if slot == 1:
    wait_until(leave_requested, seconds=120)
    leave(leave_requested())
wait_until(lambda: store.has("left/1.0"), seconds=120)
"""
    process = elastic(script, "-n", "2")
    wait_for_files(tmp_path, "trains*", 2)
    os.kill(int((tmp_path / "trains1").read_text()), signal.SIGTERM)
    code, _, err = finish(process)
    assert (code, lines_of(err)) == (0, ["worker 1 has left: it was told to end"])


STUBBORN = """
leave_requested()
pathlib.Path(f"trains{slot}").write_text(str(os.getpid()))
time.sleep(120)
"""


def test_elastic_workers_that_do_not_leave_end_after_the_grace_period(elastic: Launch, tmp_path: Path) -> None:
    process = elastic(STUBBORN, "-n", "2", "--grace-s", "1.5")
    pids = [int(pid) for pid in wait_for_files(tmp_path, "trains*", 2)]
    started_s = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process)[0] == 128 + signal.SIGTERM
    assert 1.4 < time.monotonic() - started_s < 20
    wait_until_gone(pids, within_s=0.5)


def test_elastic_second_signal_kills_at_once(elastic: Launch, tmp_path: Path) -> None:
    process = elastic(STUBBORN, "-n", "2", "--grace-s", "100")
    pids = [int(pid) for pid in wait_for_files(tmp_path, "trains*", 2)]
    started_s = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert finish(process)[0] == 128 + signal.SIGINT
    assert time.monotonic() - started_s < 20
    wait_until_gone(pids, within_s=0.5)


def test_elastic_worker_ends_on_a_second_sigterm(elastic: Launch, tmp_path: Path) -> None:
    script = "if uid == '0.1': sys.exit(0)\n" + STUBBORN
    process = elastic(script, "-n", "1", "--grace-s", "100")
    (pid,) = (int(pid) for pid in wait_for_files(tmp_path, "trains*", 1))
    os.kill(pid, signal.SIGTERM)
    time.sleep(1.3)
    os.kill(pid, signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0
    assert lines_of(err)[0].startswith("worker 0 exited with code 143; a new one starts")


def test_elastic_script_that_does_not_train_ends_at_once(elastic: Launch, tmp_path: Path) -> None:
    process = elastic("time.sleep(120)", "-n", "2", "--grace-s", "100")
    wait_for_files(tmp_path, "up*", 2)
    started_s = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process)[0] == 128 + signal.SIGTERM
    assert time.monotonic() - started_s < 20


# -- faults -------------------------------------------------------------------------------------------------------


def test_elastic_chaos_kills_and_stops_workers(elastic: Launch) -> None:
    script = """
longest_s = 0.0
while longest_s < 0.3:  # until it was stopped for so long
    began_s = time.monotonic()
    time.sleep(0.01)
    longest_s = time.monotonic() - began_s
"""
    code, _, err = finish(elastic(script, "-n", "1", "--chaos", "stop 1/1s", "--chaos-seed", "3", "--timeout-s", "1.5"))
    first, *faults = lines_of(err)
    assert code == 0
    assert first == "chaos: stop every 1 s, on average (--chaos-seed 3)"
    assert faults
    assert all(re.fullmatch(r"chaos: worker 0 is stopped for \d\.\d s", line) for line in faults)

    script = """
if int(uid.partition(".")[2]) < 2:
    time.sleep(120)
"""
    code, _, err = finish(elastic(script, "-n", "1", "--chaos", "kill 1/0.5s", "--chaos-seed", "1", name="other.py"))
    killed = [line for line in lines_of(err) if line == "chaos: worker 0 is killed"]
    assert code == 0
    assert len(killed) >= 2
    assert err.count("worker 0 was killed by SIGKILL; a new one starts") >= 2


# -- several nodes ------------------------------------------------------------------------------------------------


def node(port: str, rank: int | None, *more: str, nodes: str = "2") -> tuple[str, ...]:
    ranks = () if rank is None else ("--node-rank", str(rank))
    return ("--nnodes", nodes, *ranks, "--master-addr", "127.0.0.1", "--master-port", port, *more)


TWO_NODES = """
say(json.dumps([uid, os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], os.environ["WORLD_SIZE"],
                  run["founders"], run["max"]]))
if uid == "3.0":
    wait_until(lambda: store.has("here/0.0"))
    die()
store.set(f"here/{uid}", "yes")
wait_until(lambda: not store.missing(["dead/3.0", "here/0.0", "here/1.0", "here/2.0", "here/3.1"]))
if slot >= 2:
    time.sleep(1.5)  # node 0 waits for node 1, which needs the store
    store.set(f"late/{uid}", "yes")
"""


def test_elastic_two_nodes_share_a_store_and_report_their_own_workers(elastic: Launch) -> None:
    port = free_port()
    other = elastic(TWO_NODES, "-n", "2", *node(port, 1))  # it waits for node 0
    time.sleep(0.5)
    host = elastic(TWO_NODES, "-n", "2", *node(port, 0))
    (code_0, out_0, err_0), (code_1, out_1, err_1) = finish(host), finish(other)
    assert (code_0, code_1) == (0, 0), err_0 + err_1
    founders = ["0.0", "1.0", "2.0", "3.0"]
    assert sorted(json.loads(line) for line in out_0.splitlines()) == [
        ["0.0", "0", "0", "0", "4", founders, 4],
        ["1.0", "1", "1", "0", "4", founders, 4],
    ]
    assert sorted(json.loads(line) for line in out_1.splitlines()) == [
        ["2.0", "2", "0", "1", "4", founders, 4],
        ["3.0", "3", "1", "1", "4", founders, 4],
        ["3.1", "3", "1", "1", "4", founders, 4],
    ]
    assert lines_of(err_1) == ["worker 3 was killed by SIGKILL; a new one starts in 0.1 s (1 of 100)"]
    assert lines_of(err_0) == ["waiting for launcher 1 of other nodes to end (Ctrl-C ends it)"]


def test_elastic_node_joins_later_and_is_given_its_number(elastic: Launch) -> None:
    script = """
say(uid, run["founders"], run["max"])
store.set(f"here/{uid}", "yes")
wait_until(lambda: store.has("here/0.0") and store.has("here/1.0"))
"""
    port = free_port()
    first = elastic(script, "-n", "1", *node(port, None, nodes="1:3"))
    time.sleep(1.0)
    second = elastic(script, "-n", "1", "--nnodes", "1:3", "--store", f"127.0.0.1:{port}")
    (code_0, out_0, _), (code_1, out_1, _) = finish(first), finish(second)
    assert (code_0, code_1) == (0, 0)
    assert {out_0, out_1} == {"0.0 ['0.0'] 3\n", "1.0 ['0.0'] 3\n"}


def test_elastic_run_ends_on_all_nodes(elastic: Launch) -> None:
    script = """
if slot == 1:
    die()  # and would be started again in 100 s
wait_until(lambda: store.has("dead/1.0"))
"""
    port, started_s = free_port(), time.monotonic()
    nodes = [elastic(script, "-n", "1", *node(port, rank), "--restart-delay-s", "100") for rank in range(2)]
    assert [finish(process)[0] for process in nodes] == [0, 0]
    assert time.monotonic() - started_s < 90


def test_elastic_run_is_given_up_on_all_nodes(elastic: Launch) -> None:
    script = """
if slot == 1:
    raise ValueError("a wrong script")
time.sleep(120)
"""
    port = free_port()
    nodes = [elastic(script, "-n", "1", *node(port, rank)) for rank in range(2)]
    (code_0, _, err_0), (code_1, _, _) = (finish(process) for process in nodes)
    assert (code_0, code_1) == (1, 1)
    assert "the run was given up on another node: worker 1 failed: ValueError: a wrong script" in lines_of(err_0)


def test_elastic_launcher_that_loses_the_store_ends_after_its_workers(elastic: Launch, tmp_path: Path) -> None:
    script = """
if slot == 1:
    wait_until(lambda: pathlib.Path("go").exists(), seconds=120)
    sys.exit(3)
time.sleep(120)
"""
    port = free_port()
    host, other = (elastic(script, "-n", "1", *node(port, rank)) for rank in range(2))
    wait_for_files(tmp_path, "up*", 2)
    os.kill(host.pid, signal.SIGKILL)
    assert other.stderr is not None
    said = next(line for line in other.stderr if "node 0" in line)
    assert lines_of(said) == [
        f"the store of node 0 is lost (127.0.0.1:{port} does not answer); the workers end by themselves"
    ]
    assert other.poll() is None
    (tmp_path / "go").touch()
    code, _, err = finish(other)
    assert code == 3
    assert lines_of(err)[-1] == "worker 1 exited with code 3; it is not started again, as the store is lost"


def test_elastic_nodes_with_other_options_or_the_same_rank_are_refused(elastic: Launch, tmp_path: Path) -> None:
    port = free_port()
    host = elastic(STUBBORN, "-n", "1", *node(port, 0, nodes="1:2"))
    wait_for_files(tmp_path, "trains*", 1)
    code, _, err = finish(elastic(STUBBORN, "-n", "2", "--max", "2", *node(port, 1, nodes="1:2")))
    assert code == 1
    assert "expected the same options as on node 0; got -n 1 there and 2 here" in err
    code, _, err = finish(elastic(STUBBORN, "-n", "1", *node(port, 0, nodes="1:2")))
    assert code == 1
    assert f"the store can't listen at 127.0.0.1:{port}" in err
    second = elastic(STUBBORN, "-n", "1", *node(port, 1, nodes="1:2"))
    wait_for_files(tmp_path, "trains*", 2)
    code, _, err = finish(elastic(STUBBORN, "-n", "1", *node(port, 1, nodes="1:2")))
    assert code == 1
    assert "--node-rank 1 is in the run already" in err
    for process in (second, host):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        assert finish(process)[0] == 128 + signal.SIGINT
