"""Options that several commands have, said once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gradsync.comm.connect import TRANSPORTS

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def file_option(name: str, *, default: str, help: str) -> Option:
    """A file that the command writes, in the folder where it is called unless said."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(name, type=kind, default=Path(default), show_default=True, help=help)


transport_option: Option = click.option(
    "--transport",
    type=click.Choice([name for name in TRANSPORTS if name != "solo"]),
    default="auto",
    show_default=True,
    help="What moves the tensors, as in gradsync.connect().",
)
