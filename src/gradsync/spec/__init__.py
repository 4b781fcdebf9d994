"""Text like ``diloco(every=50, codec=int8)`` to objects and back: the same words in Python, ``--sync`` and reports."""

from gradsync.spec.parser import SpecError
from gradsync.spec.registry import Registry, declare, names, parse, register, render, resolve

__all__ = ["Registry", "SpecError", "declare", "names", "parse", "register", "render", "resolve"]
