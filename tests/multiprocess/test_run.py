"""``gradsync run`` with real launchers, real workers and real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

START_S = 180.0  # importing torch, in the launcher and then in each worker, on a busy machine
ORPHANS_END_S = 60.0  # a guard against processes that stay: beside other tests a launcher has taken 6 s to end

Launch = Callable[..., subprocess.Popen[str]]  # see conftest.py


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=START_S)
    return process.returncode, out, err


def wait_for_files(folder: Path, pattern: str, count: int) -> list[str]:
    end = time.monotonic() + START_S
    while len(found := [path for path in folder.glob(pattern) if path.read_text()]) < count:
        assert time.monotonic() < end, f"only {found} of {count} files {pattern}"
        time.sleep(0.05)
    return [path.read_text() for path in found]


def wait_until_gone(pids: list[int], within_s: float) -> None:
    end = time.monotonic() + within_s
    for pid in pids:
        while _is_running(pid):
            assert time.monotonic() < end, f"process {pid} was left behind"
            time.sleep(0.05)


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("from_scratch", [True, False])  # what is forked must be like what is started
def test_run_executes_a_script_like_python(
    launch: Launch, write: Callable[[str, str], str], tmp_path: Path, from_scratch: bool
) -> None:
    (tmp_path / "sub").mkdir()
    write("sub/beside.py", "ANSWER = 42")
    script = write(
        "sub/train.py",
        """
        import json, multiprocessing, os, sys, time
        import torch
        from torch.utils.data import DataLoader, Dataset
        import beside

        class Squares(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return i * i

        if __name__ == "__main__":
            os.chdir("/")
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.start()
            child.terminate()
            child.join()
            loader = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
            main = sys.modules["__main__"]
            said = {
                "args": sys.argv[1:], "path": sys.path[0], "file": main.__file__, "spec": main.__spec__,
                "beside": beside.ANSWER, "batches": [batch.tolist() for batch in loader], "child": child.exitcode,
                "threads": torch.get_num_threads(), "local_world_size": os.environ["LOCAL_WORLD_SIZE"],
                "leads_group": os.getpgrp() == os.getpid(),
                "is_child": os.getppid() == int(os.environ["GRADSYNC_LAUNCHER_PID"]),
                "unbuffered": sys.stdout.write_through and not hasattr(sys.stdout.buffer, "raw"),
            }
            print(json.dumps(said), flush=True)
            sys.exit(0)
        """,
    )
    arguments = ("-n", "1", script, "--lr", "0.1", "-n", "7", "--", "--sync", "x y")
    code, out, err = finish(launch(*arguments, from_scratch=from_scratch))
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "args": ["--lr", "0.1", "-n", "7", "--", "--sync", "x y"],
        "path": str(tmp_path / "sub"),
        "file": str(tmp_path / "sub" / "train.py"),
        "spec": None,
        "beside": 42,
        "batches": [[0, 1], [4, 9]],
        "child": -signal.SIGTERM,
        "threads": len(os.sched_getaffinity(0)),
        "local_world_size": "1",
        "leads_group": True,
        "is_child": True,
        "unbuffered": True,
    }


def test_run_supports_concurrent_runs_modules_and_overrides(launch: Launch, write: Callable[[str, str], str]) -> None:
    write(
        "trainer.py",
        """
        import sys
        import torch
        import gradsync
        from gradsync.comm import current_timeout_s

        model = torch.nn.Linear(2, 1)
        sync = gradsync.synchronize(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy="no_such_strategy")
        model(torch.ones(1, 2)).sum().backward()
        comm = gradsync.connect()
        sys.stdout.write(f"{sys.argv[1:]} {__spec__.name} {comm.rank} of {comm.world_size}, {current_timeout_s()} s\\n")
        """,
    )
    options = ("-m", "--sync", "allreduce", "--timeout-s", "20.5")
    first = launch("-n", "2", *options, "trainer", "--a=1")
    second = launch("-n", "1", *options, "--prefix", "trainer")
    code, out, err = finish(first)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["['--a=1'] trainer 0 of 2, 20.5 s", "['--a=1'] trainer 1 of 2, 20.5 s"]
    assert finish(second) == (0, "[0] [] trainer 0 of 1, 20.5 s\n", "")


FAIL_OR_DIE = """
    import os, signal, sys
    import torch
    import gradsync

    comm = gradsync.connect()

    def step(number):
        if comm.rank == 1 and number == 3:
            if sys.argv[1] == "raise":
                raise ValueError("boom")
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        comm.all_reduce(torch.ones(4)).wait()

    for number in range(1_000_000):
        step(number)
"""


def test_run_shows_the_failed_ranks_traceback_first(
    launch: Launch, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    code, out, err = finish(launch("-n", "3", write("train.py", FAIL_OR_DIE), "raise"))
    lines = [line for line in err.splitlines() if not line.startswith("warning: 3 workers share")]
    assert (code, out) == (1, "")
    assert lines[:3] == [
        "rank 1 failed: ValueError: boom",
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 16, in <module>',
    ]
    last = lines.index("ValueError: boom")
    followers = [line.partition(": PeerLost: rank 1 was lost") for line in lines[last + 1 :]]
    assert [who for who, _, _ in followers] in (["ranks 0, 2"], ["rank 0", "rank 2"]), (
        "a line for those that said the same"
    )
    assert all(said.endswith("it failed with ValueError: boom") for _, _, said in followers)


def test_run_names_a_killed_rank_and_what_the_survivors_raised(
    launch: Launch, write: Callable[[str, str], str]
) -> None:
    code, out, err = finish(launch("-n", "2", write("train.py", FAIL_OR_DIE), "SIGKILL"))
    first, *others = err.splitlines()
    assert (code, out) == (128 + signal.SIGKILL, "")
    assert first.startswith("rank 1 was killed by SIGKILL")
    assert [line[: len("rank 0: PeerLost: rank 1 was lost")] for line in others] == [
        "rank 0: PeerLost: rank 1 was lost",
    ]


def test_run_shows_the_python_stack_of_a_crash_in_c_and_restarts_workers(
    launch: Launch, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    script = write(
        "train.py",
        """
        import ctypes, os, time

        def crash():
            ctypes.string_at(0)

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if attempt == 0:
            if os.environ["RANK"] == "1":
                while not os.path.exists("up"):
                    time.sleep(0.01)
                crash()
            open("up", "w").close()
            time.sleep(120)
        print(f"done in attempt {attempt}", flush=True)
        """,
    )
    code, out, err = finish(launch("--nproc_per_node=2", "--max-restarts", "1", script))
    assert (code, out) == (0, "done in attempt 1\n" * 2)
    assert err.startswith("rank 1 was killed by SIGSEGV\nFatal Python error: Segmentation fault\n")
    assert f'File "{tmp_path}/train.py", line 5 in crash' in err
    assert "runpy" not in err
    assert err.endswith("rank 0: ended by the launcher\nstarting all workers again (1 more times at most)\n")


@pytest.mark.parametrize("connects_by", ["shm", "c10d"])
def test_run_succeeds_if_a_later_attempt_does(
    launch: Launch, write: Callable[[str, str], str], connects_by: str
) -> None:
    script = write(
        "train.py",
        """
        import os, sys
        import torch
        import gradsync

        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        comm = gradsync.connect(sys.argv[1], timeout_s=20)
        total, rows = torch.ones(1), torch.full((comm.world_size, 1), float(comm.rank))
        comm.all_reduce(total).wait()
        comm.clone().all_to_all(rows, out=torch.empty_like(rows)).wait()
        if attempt < 2 and comm.rank == attempt % 2:
            raise ValueError(f"attempt {attempt} fails")
        comm.barrier()
        if comm.rank == 0:
            print(f"attempt {attempt}: {total.item()}")
        """,
    )
    code, out, err = finish(launch("-n", "2", "--max-restarts", "2", script, connects_by))
    assert (code, out) == (0, "attempt 2: 2.0\n"), err
    assert err.count("starting all workers again") == 2


def test_run_shows_the_stack_of_a_late_rank(launch: Launch, write: Callable[[str, str], str], tmp_path: Path) -> None:
    script = write(
        "train.py",
        """
        import time
        import gradsync

        comm = gradsync.connect()

        def read_a_slow_disk():
            time.sleep(120)

        if comm.rank == 0:
            read_a_slow_disk()
        comm.barrier()
        """,
    )
    code, _, err = finish(launch("-n", "2", "--timeout-s", "2", script))
    lines = err.splitlines()
    assert code == 1
    assert lines[0].startswith("rank 0 was given up by the others, while it was here: it did not come to barrier")
    assert lines[1] == "Stack (most recent call last):"
    assert f'  File "{tmp_path}/train.py", line 8, in read_a_slow_disk' in lines
    assert lines[-1].startswith("rank 1: PeerLost: rank 0 was lost in barrier")


WAIT = """
    import os, subprocess, sys, time
    import gradsync
    import torch.distributed as dist

    comm = gradsync.connect()
    child = subprocess.Popen(["sleep", "120"])
    with open(f"up{comm.rank}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    if comm.rank == 0:
        dist.barrier()  # blocks in C, where Python's signal handlers do not run
    try:
        time.sleep(120)
    except KeyboardInterrupt:
        time.sleep(4)  # a checkpoint takes longer than a main thread that ignores signals is given
        with open("saved", "w") as file:
            file.write("a checkpoint")
        raise
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_workers_end_with_the_launcher(
    launch: Launch, write: Callable[[str, str], str], tmp_path: Path, how: signal.Signals, code: int
) -> None:
    process = launch("-n", "2", write("train.py", WAIT))
    pids = [int(pid) for text in wait_for_files(tmp_path, "up*", 2) for pid in text.split()]
    time.sleep(0.3)
    started = time.monotonic()
    os.killpg(process.pid, how)
    returned, out, err = finish(process)
    assert time.monotonic() - started < ORPHANS_END_S, "the scripts would sleep for 120 s"
    assert (tmp_path / "saved").exists() == (how == signal.SIGINT)
    assert (returned, out) == (code, "")
    assert err == ("" if how == signal.SIGKILL else f"ended by {how.name}\n")
    wait_until_gone(pids, within_s=ORPHANS_END_S if how == signal.SIGKILL else 0.5)


def test_run_returns_the_workers_exit_code(launch: Launch, write: Callable[[str, str], str]) -> None:
    script = write(
        "train.py",
        """
        import sys
        import gradsync

        comm = gradsync.connect()
        if comm.rank == 1:
            sys.exit(3)
        comm.barrier()
        """,
    )
    code, _, err = finish(launch("-n", "2", script))
    assert code == 3
    assert err.startswith("rank 1 exited with code 3\nrank 0: PeerLost: rank 1 was lost")


def test_run_does_not_report_a_finished_rank_as_ended_by_the_launcher(
    launch: Launch, write: Callable[[str, str], str]
) -> None:
    script = write(
        "train.py",
        """
        import atexit, os, time
        import gradsync

        if os.environ["RANK"] == "0":
            atexit.register(time.sleep, 60)  # runs after gradsync has disconnected: the process ends late
        comm = gradsync.connect()
        if comm.rank == 1:
            comm.barrier()
        """,
    )
    code, _, err = finish(launch("-n", "2", script))
    assert code == 1
    assert "it has finished and left" in err
    assert err.splitlines()[-1] == "rank 0: had finished"


def test_run_on_two_nodes_shows_the_cause_and_the_lost_peer(launch: Launch, write: Callable[[str, str], str]) -> None:
    """The node of the failed rank shows the cause; the other node shows which rank was lost, and why."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = write("train.py", FAIL_OR_DIE)
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    nodes = [launch(*where, "--node-rank", str(node), "-n", "1", script, "raise") for node in range(2)]
    (code_0, _, err_0), (code_1, _, err_1) = (finish(node) for node in nodes)
    assert (code_0, code_1) == (1, 1)
    assert err_1.startswith("rank 1 failed: ValueError: boom\nTraceback")
    first, *rest = err_0.splitlines()
    assert first.startswith("rank 0 failed: PeerLost: rank 1 was lost")
    assert first.endswith("it failed with ValueError: boom")
    assert rest[0] == "Traceback (most recent call last):"


def test_run_keep_going_reports_a_failure_and_lets_the_others_finish(
    launch: Launch, write: Callable[[str, str], str], tmp_path: Path
) -> None:
    script = write(
        "train.py",
        """
        import os, pathlib, time

        ended = pathlib.Path(os.environ["GRADSYNC_ERROR_DIR"]) / "attempt0" / "rank1.failure"
        if os.environ["RANK"] == "1":
            raise ValueError("a planted failure")
        end_s = time.monotonic() + 30
        while not ended.exists():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        time.sleep(1.5)  # long enough to be ended by the launcher, if it did that
        print("finished", flush=True)
        """,
    )
    code, out, err = finish(launch("-n", "2", "--keep-going", script))
    assert (code, out) == (1, "finished\n")
    assert err.startswith("rank 1 failed: ValueError: a planted failure; the others go on\nTraceback")
    assert err.endswith("1 of 2 workers failed: rank 1\n")
