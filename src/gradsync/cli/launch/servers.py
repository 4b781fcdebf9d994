"""The parameter servers of ``gradsync run --servers N``: started before the workers, restarted if killed, ended after.

``python -m gradsync.cli.launch.servers N FOLDER [KEYS]``

The launcher starts this module as one process (:class:`LocalServers`). That process (:class:`ServerSupervisor`) imports
torch, forks one child for each shard, and waits. A child that is killed is forked again, at the same port, from its
last snapshot: within milliseconds, since nothing has to be imported again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import click

from gradsync.cli.launch.worker import end_with_launcher
from gradsync.cli.serve import serve_shard

START_S = 60.0  # to import torch on a busy machine
END_S = 5.0  # to write the last snapshots
MAX_RESTARTS = 20  # of one shard: a shard that keeps failing is not restarted for ever
LOOPBACK = "127.0.0.1"


class LocalServers:
    """The launcher's handle on the servers: starts the supervisor process, reads the addresses, and ends it.

    Args:
        count: how many shards.
        folder: where their snapshots go.
        keys: a folder made by ``gradsync keys``, or None.
    """

    def __init__(self, count: int, folder: Path, keys: str | None = None) -> None:
        command = [
            sys.executable,
            "-m",
            "gradsync.cli.launch.servers",
            str(count),
            str(folder),
            *([keys] if keys else []),
        ]
        env = {**os.environ, "GRADSYNC_LAUNCHER_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
        assert self._process.stdout is not None, "stdout is a pipe"
        try:
            self.addresses = [_read_line(self._process.stdout, START_S) for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers; kill those that take longer than END_S."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                break
        if self._process.stdout is not None:
            self._process.stdout.close()


def _read_line(stream: IO[str], timeout_s: float) -> str:
    ready, _, _ = select.select([stream], [], [], timeout_s)
    line = stream.readline().strip() if ready else ""
    if not line:
        raise click.ClickException("the parameter servers did not start; their output is above.")
    return line


class ServerSupervisor:
    """Forks a process for each shard and restarts those that die: the main program of the supervisor process."""

    def __init__(self, count: int, folder: Path, keys: str | None) -> None:
        self._folder, self._keys = folder, keys
        self._ports = [0] * count
        self._restarts = [0] * count
        self._running: dict[int, int] = {}  # process -> shard
        self._ending = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        for shard in range(len(self._ports)):
            print(self._start(shard), flush=True)
        while self._running:
            pid, status = os.wait()
            shard = self._running.pop(pid)
            if self._ending or os.waitstatus_to_exitcode(status) == 0:
                continue
            if self._restarts[shard] == MAX_RESTARTS:
                return self._give_up(shard)
            self._restarts[shard] += 1
            sys.stderr.write(f"shard {shard} of the parameter server {_outcome(status)}; it is started again\n")
            self._start(shard)
        return 0

    def _start(self, shard: int) -> str:
        """Fork the process of a shard; returns its address."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os._exit(self._serve(shard, writing))
        os.close(writing)
        self._running[pid] = shard
        with os.fdopen(reading) as pipe:
            address = pipe.readline().strip()
        if address:
            self._ports[shard] = int(address.split()[0].rpartition(":")[2])
        return address

    def _serve(self, shard: int, writing: int) -> int:
        """Runs in the child: its standard output goes to the parent."""
        end_with_launcher(os.getppid())
        os.dup2(writing, 1)
        os.close(writing)
        try:
            serve_shard(shard, host=LOOPBACK, port=self._ports[shard], snapshots=self._folder, keys=self._keys)
        except click.ClickException as error:
            sys.stderr.write(f"shard {shard} of the parameter server can't start: {error.message}\n")
            time.sleep(0.2)  # the port of one that was killed may be free again a moment later
            return 1
        finally:
            sys.stderr.flush()
        return 0

    def _give_up(self, shard: int) -> int:
        sys.stderr.write(f"shard {shard} of the parameter server was restarted {MAX_RESTARTS} times and is given up\n")
        self._end()
        return 1

    def _end(self, *_: object) -> None:
        self._ending = True
        for pid in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _outcome(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def _import_all() -> None:
    """Import before forking, so that the children need not: torch's first optimizer step imports for seconds."""
    import torch

    import gradsync.strategies.parameter_server.server.server  # noqa: F401

    param = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([param], lr=0.0).step()


def main(arguments: list[str]) -> int:
    """Run the supervisor with the launcher's arguments; returns the exit code."""
    _import_all()
    end_with_launcher(int(os.environ["GRADSYNC_LAUNCHER_PID"]))
    count, folder, *keys = arguments
    return ServerSupervisor(int(count), Path(folder), keys[0] if keys else None).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
