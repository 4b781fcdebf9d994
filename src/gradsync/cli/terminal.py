"""How commands print: as wide as the terminal is, or as a log may be; and sizes as people read them."""

from __future__ import annotations

from rich.console import Console


def make_console(*, log_width: int = 120) -> Console:
    """Where a command prints. ``log_width``: the columns of output that is no terminal's."""
    console = Console()
    if not console.is_terminal:
        console.width = log_width
    return console


def show_size(num_bytes: int) -> str:
    """Bytes in the largest unit of 1024 that there is a whole one of.

    >>> from gradsync.cli.terminal import show_size
    >>> show_size(4096), show_size(3 << 19), show_size(100)
    ('4 KiB', '1.5 MiB', '100 B')
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"
