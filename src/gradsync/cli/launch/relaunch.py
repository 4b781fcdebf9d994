"""For commands that measure between workers (``doctor``, ``tune-comm``): they run themselves again in workers.

Started by a user, such a command calls :func:`relaunch`. Started by a launcher (:func:`is_worker`), it is one of the
workers, and calls :func:`connect_worker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import click

from gradsync.cli.run import run
from gradsync.comm import connect
from gradsync.comm.base import Communicator
from gradsync.comm.rendezvous import find_launch_info


def relaunch(ctx: click.Context, command: Sequence[str], *, workers: int, rendezvous: Sequence[str] = ()) -> NoReturn:
    """Run ``gradsync`` with these arguments in workers, by ``gradsync run``, and exit with its code.

    ``rendezvous``: options of ``gradsync run`` by which several machines find each other.
    """
    start = [*rendezvous, "-n", str(workers), "-m", "gradsync.cli.main"]
    ctx.exit(run.main([*start, *command], standalone_mode=False))


def is_worker() -> bool:
    """Whether a launcher has started this process as one of several."""
    try:
        return find_launch_info().world_size > 1
    except ValueError as error:  # incomplete environment variables: the error names what is missing
        raise click.UsageError(str(error)) from error


def connect_worker(transport: str) -> Communicator:
    """Connect to the other workers that a launcher has started. Blocks until all are connected."""
    try:
        return connect(transport)
    except ValueError as error:  # a transport that is not available here
        raise click.ClickException(str(error)) from error
