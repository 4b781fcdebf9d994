"""What the commands share: the console, options that several have, and checks of the files that they write.

- Printing: :func:`make_console` and :func:`show_size`.
- Options: :func:`file_option` and ``transport_option``.
- Output files: :func:`check_outputs` refuses them before a run, :func:`report_write_errors` turns a failed write after
  it into a one-line error.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from gradsync.comm.connect import TRANSPORTS


def make_console(*, log_width: int = 120) -> Console:
    """The console of a command. ``log_width``: the columns of output that is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console.width = log_width
    return console


def show_size(num_bytes: int) -> str:
    """A number of bytes in the largest binary unit that it fills.

    >>> from gradsync.cli.terminal import show_size
    >>> show_size(4096), show_size(3 << 19), show_size(100)
    ('4 KiB', '1.5 MiB', '100 B')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"


Option = Callable[[Callable[..., Any]], Callable[..., Any]]


def file_option(name: str, *, default: str, help: str) -> Option:
    """An option for a file that the command writes; default: ``default`` in the current folder."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(name, type=kind, default=Path(default), show_default=True, help=help)


transport_option: Option = click.option(
    "--transport",
    type=click.Choice([name for name in TRANSPORTS if name != "solo"]),
    default="auto",
    show_default=True,
    help="What moves the tensors, as in gradsync.connect().",
)


def check_outputs(*paths: Path) -> None:
    """Refuse files that can't be written, by trying: permissions alone don't show a read-only file system."""
    for path in paths:
        if problem := why_unwritable(path):
            raise click.UsageError(problem)


def why_unwritable(path: Path) -> str:
    """Why a file can't be written; empty if it can. Leaves no file behind."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"{path} can't be written: there is no folder {folder}. Make it first, or name another file."
    try:
        if path.exists():
            path.open("ab").close()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{path} can't be written: {error.strerror}. Name a file in a folder that you may write to."
    return ""


@contextlib.contextmanager
def report_write_errors() -> Iterator[None]:
    """Turn a failed write (a full disk) into a one-line error instead of a traceback."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'a file'} can't be written: {error.strerror}.") from error
