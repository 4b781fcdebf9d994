"""The main program of each worker process: it runs the user's script as ``python script.py`` would.

``python -m gradsync.cli.launch.worker -- train.py --lr 0.1``, or ``-m package.train --lr 0.1`` for a module.

It also applies the launcher's overrides, writes the script's traceback to a file for the launcher (which prints the
root cause first), handles SIGTERM and SIGINT, and does not outlive the launcher.
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

from gradsync.cli.launch.failures import Attempt, failure_report, is_launcher_frame, requested_code
from gradsync.cli.launch.worker_signals import WorkerSignals
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
        # A crash in C writes Python's stack to a file for the launcher. It stays open for the life of the process.
        faulthandler.enable(open(attempt.crash_path(rank), "w"), all_threads=False)  # noqa: SIM115
    if attempt is not None and "GRADSYNC_KEEP_STDERR" not in os.environ:
        sys.excepthook = _suppress_traceback  # the innermost hook: torch.distributed and the script may wrap it
    grace_s = float(os.environ["GRADSYNC_GRACE_S"]) if "GRADSYNC_ELASTIC" in os.environ else None
    signals = WorkerSignals(rank, attempt, leave_grace_s=grace_s)
    signals.start()
    pid = os.getpid()
    try:
        _apply_overrides()
        with contextlib.suppress(StepsDone):  # gradsync profile has recorded its steps
            _run_script(arguments)
        _measure_environment()
    except SystemExit as request:
        if os.getpid() != pid:  # a child that the script has forked, and that has run to the end of its code
            raise
        code = _exit_code(request)
        if code != 0:
            signals.failed = True
            _write_failure_report(request, rank, attempt, signals)
            disconnect(failure=f"it exited with code {code}")
        elif attempt is not None:
            attempt.write_finished(rank)
        return code
    except BaseException as error:
        if os.getpid() != pid:
            raise
        signals.failed = True
        error.__traceback__ = _without_launcher_frames(error.__traceback__)
        _write_failure_report(error, rank, attempt, signals)
        # Peers that wait for this rank learn of its failure at once: the interpreter may take long to end.
        disconnect(failure=f"it failed with {type(error).__name__}: {error}")
        with contextlib.suppress(Exception):  # a hook of the script may fail: the report is written already
            sys.excepthook(type(error), error, error.__traceback__)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if attempt is not None:
        attempt.write_finished(rank)
    return 0


def _apply_overrides() -> None:
    if text := os.environ.get("GRADSYNC_ELASTIC"):
        from gradsync.elastic.session import Session

        Session.start(json.loads(text))
    if text := os.environ.get("GRADSYNC_SYNC"):
        override_strategy(text)
    if seconds := os.environ.get("GRADSYNC_TIMEOUT_S"):
        override_timeout(float(seconds))
    if folder := os.environ.get("GRADSYNC_RECORD_DIR"):
        steps = os.environ.get("GRADSYNC_RECORD_STEPS")
        set_recording(folder=folder, stop_after_steps=int(steps) if steps else None)
    if servers := os.environ.get("GRADSYNC_SERVERS"):
        from gradsync.strategies.parameter_server.strategy import set_default_servers

        set_default_servers(**json.loads(servers))
    if "GRADSYNC_CURVE_DIR" in os.environ:
        from gradsync.compare.curve import CurveWriter

        CurveWriter.from_environment(os.environ)


def _measure_environment() -> None:
    """After the script has ended, while all ranks still run: measure what the advisor needs, if asked to."""
    folder = os.environ.get("GRADSYNC_RECORD_DIR")
    if folder and os.environ.get("GRADSYNC_RECORD_NETWORK"):
        from gradsync.cli.environment import measure_environment  # importing the advisor takes time

        measure_environment(Path(folder), seconds=float(os.environ["GRADSYNC_RECORD_NETWORK"]))


def _run_script(arguments: list[str]) -> None:
    """Run a script or a module as Python would, with its own ``sys.argv``, ``sys.path[0]`` and ``__main__``.

    While it runs, ``sys.modules["__main__"]`` is the script: its definitions can be pickled, and processes that it
    spawns import the script and not this file.
    """
    match arguments:
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]  # runpy replaces the first entry by the module's file
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["--", script, *rest]:
            sys.argv = [script, *rest]
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(os.path.abspath(script), run_name="__main__")  # absolute, so that it survives a chdir
        case _:
            raise SystemExit(f"expected `-- script.py args` or `-m module args`; got {arguments}.")


def _exit_code(request: SystemExit) -> int:
    """The exit code that the interpreter would use; like the interpreter, print a code that is not a number."""
    if request.code is not None and not isinstance(request.code, int):
        print(request.code, file=sys.stderr)
    return requested_code(request)


def _without_launcher_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on, without those of this file and runpy."""
    while trace is not None and is_launcher_frame(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _write_failure_report(error: BaseException, rank: int, attempt: Attempt | None, signals: WorkerSignals) -> None:
    report = failure_report(error, error.__traceback__, rank=rank, was_told_to_end=signals.told_to_end)
    if attempt is not None:
        attempt.write_failure(rank, report)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(file).write_text(report)


def _suppress_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print no traceback: the launcher prints the root cause."""


def end_with_launcher(launcher_pid: int) -> None:
    """Have the kernel send SIGTERM to this process when the launcher ends, however it ends. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    try:
        os.kill(launcher_pid, 0)
    except ProcessLookupError:  # it ended before the call above
        os._exit(128 + signal.SIGTERM)


def _end_without_teardown(code: int) -> NoReturn:
    """Wait for the script's threads, run its exit functions and exit, without the rest of the interpreter's shutdown.

    After a failure some collectives never finish. torch's threads hold them, and sometimes abort the process during the
    interpreter's shutdown: the abort would hide the exit code.
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
