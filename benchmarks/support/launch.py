"""Running a benchmark's own workers: one command for every rank, on this host or on the hosts of a lab."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.reporting import PROJECT
from gradsync.testing import Lab, run_commands


def environment() -> dict[str, str]:
    """The environment variables of every worker: one thread, and the path on which ``benchmarks`` is found."""
    paths = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    # torch warns that it can't look up a name for each address; a lab has no name server.
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def is_checkout(folder: Path) -> bool:
    """Whether workers can import gradsync from this folder."""
    return (folder / "src" / "gradsync").is_dir()


def python_path(checkout: Path) -> str:
    """The PYTHONPATH on which workers find gradsync in a checkout, and ``benchmarks`` in this one."""
    return os.pathsep.join([str(checkout / "src"), str(PROJECT)])


def rank_environments(workers: int) -> list[dict[str, str]]:
    """The environment variables of each of this many workers, when all of them run on this host."""
    place = {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"LOCAL_WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": "lo"}
    return [{**environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


def run_on_this_host(command: Sequence[str], *, workers: int, timeout_s: float) -> None:
    """Run all ranks side by side; block until they have ended. Raises LabError."""
    run_commands([command] * workers, envs=rank_environments(workers), timeout_s=timeout_s)


def run_in_lab(
    command: Sequence[str], *, workers: int, timeout_s: float, rate: str | None, ranks_per_host: int = 1
) -> None:
    """Run the ranks on hosts of a lab, on links of a rate (None: unlimited); block until all have ended.

    Raises LabError.
    """
    with Lab(hosts=workers // ranks_per_host, rate=rate) as lab:
        commands, envs = [], []
        for rank in range(workers):
            host, local_rank = divmod(rank, ranks_per_host)
            place = {"RANK": str(rank), "WORLD_SIZE": str(workers)}
            place |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(ranks_per_host)}
            commands.append(["ip", "netns", "exec", lab.namespace(host), *command])
            envs.append({**environment(), **lab.environment(host), **place})
        run_commands(commands, envs=envs, timeout_s=timeout_s)


def free_port() -> int:
    """Find a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
