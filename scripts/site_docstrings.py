"""Docstrings as the site shows them: what Sphinx and doctest would read, in Markdown."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc):`~?([^`]+)`")
EXAMPLE = re.compile(r"(?:^ *>>> .*\n?(?:^ *\S.*\n?)*\n?)+", re.MULTILINE)
LITERAL = re.compile(r"::\n\n((?:(?: {4}.*)?\n)+)")


def as_markdown(text: str) -> str:
    """Roles become code, doctests and literal blocks become fences."""
    text = ROLE.sub(r"`\1`", text)
    text = LITERAL.sub(lambda match: f":\n\n```text\n{textwrap.dedent(match[1]).strip()}\n```\n", text + "\n")
    return EXAMPLE.sub(lambda match: f"```pycon\n{match[0].strip()}\n```\n", text).strip()


class Docstrings(griffe.Extension):
    """Rewrites each docstring when it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
