"""Reading a spec: a text, as Python would write a call, into the object that it describes. Nothing is evaluated."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import math
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

MAX_TEXT_CHARS = 4096  # no honest spec is longer, and Python's parser recurses

_PARSING = threading.Lock()  # Python 3.11 counts the depth of two threads that parse at once as one, and gives up


class SpecError(ValueError):
    """A spec that can't be read or written; it says what was expected, what was got, and shows where.

    >>> from gradsync.spec import Registry, SpecError
    >>> registry = Registry()
    >>> registry.register("codec", "int8")(type("Int8", (), {})).__name__
    'Int8'
    >>> try:
    ...     registry.parse("int9", kind="codec")
    ... except SpecError as error:
    ...     print(error)
    unknown codec 'int9'; expected one of: int8. Did you mean 'int8'?
      int9
      ^ column 1
    """


@dataclasses.dataclass(frozen=True)
class Entry:
    """One registered name: what makes the object, and the kind of thing it is."""

    kind: str
    name: str
    factory: Callable[..., Any]


class Names(Protocol):
    """The part of a registry that a reader uses."""

    def names(self, kind: str) -> tuple[str, ...]: ...
    def all_names(self) -> list[str]: ...
    def candidates(self, name: str, hint: str, inside: str) -> list[Entry]: ...


class SpecReader:
    """One text on its way to an object; it knows where in the text each error is."""

    def __init__(self, registry: Names, text: str) -> None:
        self._registry = registry
        self._text = text.strip()
        self._lines = self._text.split("\n")

    def read(self, kind: str) -> Any:
        expected = f"expected a {kind}, like {next(iter(self._registry.names(kind)), 'a_name')}"
        if not self._text:
            raise SpecError(f"{expected}; got an empty text.")
        if len(self._text) > MAX_TEXT_CHARS:
            raise SpecError(f"{expected}, of at most {MAX_TEXT_CHARS} characters; got {len(self._text)}.")
        try:
            with _PARSING, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of some literals; errors are raised below
                tree = ast.parse(self._text, mode="eval").body
            return self._read_object(tree, kind=kind, hint=kind, inside="")
        except SyntaxError as error:
            column = len(self._text) + 1 if error.offset is None else error.offset
            raise self._error(f"{expected}; {error.msg}", error.lineno or 1, column) from error
        except SpecError:
            raise
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            raise SpecError(f"{expected}; the text can't be read: {error}.") from error

    def _read_object(self, node: ast.expr, *, kind: str, hint: str, inside: str) -> Any:
        """Make the object that a name or a call stands for; ``kind`` is what it must be, if anything."""
        call = node if isinstance(node, ast.Call) else None
        named = call.func if call is not None else node
        if not isinstance(named, ast.Name):
            raise self._error_at(named, f"expected a {kind or 'thing'} by its name; got {_describe(named)}")
        entry = self._find(named, kind, hint, inside)
        positional: list[Any] = []
        by_name: dict[str, Any] = {}
        for part in call.args if call is not None else ():
            positional.append(self._read_value(part, hint="", inside=entry.kind))
        for argument in call.keywords if call is not None else ():
            if argument.arg is None or argument.arg in by_name:
                what = "**" if argument.arg is None else f"{argument.arg!r} twice"
                raise self._error_at(argument, f"expected each argument once, as name=value; got {what}")
            by_name[argument.arg] = self._read_value(argument.value, hint=argument.arg, inside=entry.kind)
        return self._make(node, entry, positional, by_name)

    def _make(self, node: ast.expr, entry: Entry, positional: list[Any], by_name: dict[str, Any]) -> Any:
        signature = inspect.signature(entry.factory)
        try:
            signature.bind(*positional, **by_name)
        except TypeError as error:
            near = "".join(
                close_match(name, signature.parameters) for name in by_name if name not in signature.parameters
            )
            message = f"{entry.name} takes ({_accepted(signature)}); {error}.{near}"
            raise self._error_at(node, message) from error
        try:
            return entry.factory(*positional, **by_name)
        except Exception as error:  # whatever a constructor raises is an error in the text
            raise self._error_at(node, f"{entry.name}: {error}") from error

    def _find(self, node: ast.Name, kind: str, hint: str, inside: str) -> Entry:
        registry, name = self._registry, node.id
        candidates = registry.candidates(name, hint, inside)
        if len(candidates) == 1 and kind in ("", candidates[0].kind):
            return candidates[0]
        if candidates:
            is_a = f"{name!r} is a {' and a '.join(entry.kind for entry in candidates)}"
            expected = f"a {kind} ({listed(registry.names(kind))})" if kind else "a name of one kind only"
            raise self._error_at(node, f"expected {expected}; {is_a}")
        asked = hint or inside
        known = registry.names(asked) or registry.all_names()
        what = asked if registry.names(asked) or kind else "name"
        fix = close_match(name, known) or ("" if kind else f" A text is written in quotes: {name!r}.")
        raise self._error_at(node, f"unknown {what} {name!r}; expected one of: {listed(known)}.{fix}")

    def _read_value(self, node: ast.expr, *, hint: str, inside: str) -> Any:
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return value
            case ast.Name(id="inf"):
                return math.inf
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._read_value(operand, hint=hint, inside=inside)
                if isinstance(value, int | float) and not isinstance(value, bool):
                    return -value
            case ast.List(elts=parts):
                return [self._read_value(part, hint=hint, inside=inside) for part in parts]
            case ast.Tuple(elts=parts):
                return tuple(self._read_value(part, hint=hint, inside=inside) for part in parts)
            case ast.Dict(keys=keys, values=values):
                read = [self._read_value(value, hint="", inside="") for value in values]
                return dict(zip((self._read_key(key, node) for key in keys), read, strict=True))
            case ast.Name() | ast.Call():
                return self._read_object(node, kind="", hint=hint, inside=inside)
        raise self._error_at(node, f"expected a number, a text in quotes, a list or a name; got {_describe(node)}")

    def _read_key(self, key: ast.expr | None, node: ast.expr) -> str | int:
        value = (
            None if key is None or isinstance(key, ast.Name | ast.Call) else self._read_value(key, hint="", inside="")
        )
        if isinstance(value, str | int):
            return value
        raise self._error_at(key or node, "expected a text in quotes or a whole number as the key")

    def _error_at(self, node: ast.expr | ast.keyword, message: str) -> SpecError:
        line = self._lines[min(node.lineno, len(self._lines)) - 1]
        column = len(line.encode()[: node.col_offset].decode(errors="replace")) + 1  # ast counts bytes
        return self._error(message, node.lineno, column)

    def _error(self, message: str, line_number: int, column: int) -> SpecError:
        line = self._lines[min(line_number, len(self._lines)) - 1]
        column = max(1, min(column, len(line) + 1))
        where = f"column {column}" if len(self._lines) == 1 else f"line {line_number}, column {column}"
        return SpecError(f"{message}\n  {line}\n  {' ' * (column - 1)}^ {where}")


def _accepted(signature: inspect.Signature) -> str:
    """The parameters as a person would type them, without annotations."""
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in signature.parameters.values())


def close_match(name: str, known: Iterable[str]) -> str:
    """A suggestion of the closest known name; empty if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Names for an error message."""
    return ", ".join(names) or "none is registered"


def _describe(node: ast.expr) -> str:
    return f"{ast.unparse(node)[:40]!r}" if isinstance(node, ast.Constant | ast.Attribute) else type(node).__name__
