"""Commands that measure between workers: they start workers that run them again, or, under a launcher, are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import click

from gradsync.cli.run import run
from gradsync.comm import connect
from gradsync.comm.base import Communicator


def start_again(ctx: click.Context, command: Sequence[str], *, workers: int, meeting: Sequence[str] = ()) -> NoReturn:
    """Run ``gradsync`` with these arguments in workers, as ``gradsync run`` does, and exit with its code.

    meeting: options of ``gradsync run`` by which several machines meet.
    """
    start = [*meeting, "-n", str(workers), "-m", "gradsync.cli.main"]
    ctx.exit(run.main([*start, *command], standalone_mode=False))


def join(transport: str) -> Communicator:
    """Be one of the workers that a launcher has started. Blocks until all are there."""
    try:
        return connect(transport)
    except ValueError as error:  # a transport that can't be had here
        raise click.ClickException(str(error)) from error
