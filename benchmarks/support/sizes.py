"""Reading and writing sizes such as "64 KB", in units of 1024."""

from __future__ import annotations

import argparse
import re

KB, MB = 2**10, 2**20


def parse_size(text: str) -> int:
    """Read "64 KB", "100MB" or "4096": bytes, in units of 1024.

    >>> parse_size("64 KB"), parse_size("100mb"), parse_size("4096")
    (65536, 104857600, 4096)
    """
    found = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    num_bytes = int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ") if found else 0
    if num_bytes == 0 or num_bytes % 4:
        raise argparse.ArgumentTypeError(f"a size is like 64KB or 100MB, of whole 4-byte values; got {text!r}.")
    return num_bytes


def show_size(num_bytes: int) -> str:
    """A size in the largest unit that divides it.

    >>> show_size(4096), show_size(100 * 2**20), show_size(1500)
    ('4 KB', '100 MB', '1500 B')
    """
    for unit, worth in (("GB", 2**30), ("MB", MB), ("KB", KB)):
        if num_bytes % worth == 0:
            return f"{num_bytes // worth} {unit}"
    return f"{num_bytes} B"
