"""What ``gradsync run`` starts in each process: the user's script, as ``python script.py`` would run it.

``python -m gradsync.cli.worker -- train.py --lr 0.1`` or ``python -m gradsync.cli.worker -m package.train --lr 0.1``

Around the script it does four things: it applies what the launcher's options override, it keeps the script's traceback
for the launcher (which shows the one that matters first), it ends in order when it is told to, and it does not outlive
the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from gradsync.cli.failures import Attempt, describe, is_ours
from gradsync.cli.signals import SignalWatch
from gradsync.comm import disconnect, override_timeout
from gradsync.profiling.start import StepsDone, set_recording
from gradsync.strategies import override_strategy

PR_SET_PDEATHSIG = 1  # Linux: the signal that this process gets when its parent ends


def main(arguments: list[str]) -> int:
    """Run the script that ``arguments`` name; returns the process's exit code."""
    rank = int(os.environ.get("RANK", "0"))
    errors_dir = os.environ.get("GRADSYNC_ERROR_DIR")
    attempt = Attempt(errors_dir, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))) if errors_dir else None
    if attempt is not None:
        end_with_launcher(int(os.environ["GRADSYNC_LAUNCHER_PID"]))
        # A crash in C leaves Python's stack for the launcher. The file stays open for as long as the process lives.
        faulthandler.enable(open(attempt.crash_path(rank), "w"), all_threads=False)  # noqa: SIM115
    if attempt is not None and "GRADSYNC_KEEP_STDERR" not in os.environ:
        sys.excepthook = _leave_it_to_the_launcher  # the lowest hook: torch.distributed and the script may add theirs
    watch = SignalWatch(rank, attempt)
    watch.start()
    pid = os.getpid()
    try:
        _apply_overrides()
        with contextlib.suppress(StepsDone):  # gradsync profile has seen enough
            _run_script(arguments)
        _look_around()
    except SystemExit as request:
        if os.getpid() != pid:  # a child that the script has forked, and let run out of its own code
            raise
        code = _exit_code(request)
        if code != 0:
            watch.failed = True
            _leave_word(request, rank, attempt, watch)
            disconnect(failure=f"it exited with code {code}")
        return code
    except BaseException as error:
        if os.getpid() != pid:
            raise
        watch.failed = True
        error.__traceback__ = _without_our_frames(error.__traceback__)
        _leave_word(error, rank, attempt, watch)
        # Those who wait for this rank are told at once, and why: the interpreter may take its time to end.
        disconnect(failure=f"it failed with {type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # a hook of the script's may fail: the word is given already
            sys.excepthook(type(error), error, error.__traceback__)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _apply_overrides() -> None:
    if text := os.environ.get("GRADSYNC_SYNC"):
        override_strategy(text)
    if seconds := os.environ.get("GRADSYNC_TIMEOUT_S"):
        override_timeout(float(seconds))
    if folder := os.environ.get("GRADSYNC_RECORD_DIR"):
        steps = os.environ.get("GRADSYNC_RECORD_STEPS")
        set_recording(folder=folder, stop_after_steps=int(steps) if steps else None)
    if servers := os.environ.get("GRADSYNC_SERVERS"):
        from gradsync.strategies.parameter_server import override_servers

        override_servers(**json.loads(servers))
    if "GRADSYNC_CURVE_DIR" in os.environ:
        from gradsync.compare.curve import CurveWriter

        CurveWriter.from_environment(os.environ)


def _look_around() -> None:
    """The script is over, and the ranks are still here: measure what the adviser needs, if it is wanted."""
    folder = os.environ.get("GRADSYNC_RECORD_DIR")
    if folder and os.environ.get("GRADSYNC_RECORD_NETWORK"):
        from gradsync.cli.surroundings import measure_surroundings  # the adviser is not small

        measure_surroundings(Path(folder), seconds=float(os.environ["GRADSYNC_RECORD_NETWORK"]))


def _run_script(arguments: list[str]) -> None:
    """Run a script or a module as Python would, with its own ``sys.argv``, ``sys.path[0]`` and ``__main__``.

    While it runs, ``sys.modules["__main__"]`` is the script: what it defines can be pickled, and processes that it
    spawns import it and not this file.
    """
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]  # runpy puts the module's file in the first place
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["--", script, *rest]:
            sys.argv = [script, *rest]
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(os.path.abspath(script), run_name="__main__")  # as Python does: it survives a chdir
        case _:
            raise SystemExit(f"expected `-- script.py args` or `-m module args`; got {arguments}.")


def _exit_code(request: SystemExit) -> int:
    """What the interpreter would make of it: nothing is 0, a number is itself, anything else is said and is 1."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first line on; what stands before is this file and runpy."""
    while trace is not None and is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _leave_word(error: BaseException, rank: int, attempt: Attempt | None, watch: SignalWatch) -> None:
    word = describe(error, error.__traceback__, rank=rank, was_told_to_end=watch.told_to_end)
    if attempt is not None:
        attempt.write_failure(rank, word)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(file).write_text(word)


def _leave_it_to_the_launcher(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback: the launcher shows the one that matters, first."""


def end_with_launcher(launcher_pid: int) -> None:
    """Have the kernel end this process when the launcher ends, however that happens: no orphans. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        os.kill(launcher_pid, 0)
    except ProcessLookupError:  # it was quicker than we
        os._exit(128 + signal.SIGTERM)


def _end_without_teardown(code: int) -> NoReturn:
    """End as the interpreter does, but for what comes after the script's own threads and exit functions.

    After a failure there are collectives under way that will never finish. torch's threads hold them, and now and then
    abort the process while it is taken down: an abort is no news, and would hide the exit code.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    if exit_code != 0:
        _end_without_teardown(exit_code)
