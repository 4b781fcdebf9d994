"""Schemas of message fields: ``validation_error`` checks a message before any of its fields is used.

A *check* is a function that says whether a JSON value is allowed. A *schema* maps each field of a message kind to a
check; a message must have exactly these fields. So the code that handles a message can rely on the types of its fields
and on every number being finite and bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Json = Any  # None, bool, int, float, str, and lists and dicts of them

MAX_INTEGER = 1 << 62  # fits a signed 64-bit integer, with room to add
MAX_DEPTH = 16  # of nested lists and objects
MAX_TEXT = 4096  # characters
MAX_ADDRESS = 512

Check = Callable[[Json], bool]
Schema = Mapping[str, Check]


class NotRequired:
    """Marks the check of a field that a message may leave out.

    >>> from gradsync.messaging.schema import NotRequired, integer, validation_error
    >>> validation_error({}, {"step": NotRequired(integer())})
    ''
    """

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, value: Json) -> bool:
        return self._check(value)


def validation_error(fields: Mapping[str, Json], schema: Schema | None) -> str:
    """What is wrong with the fields of a message; empty if nothing is. Without a schema, any bounded JSON is valid.

    >>> from gradsync.messaging.schema import integer, validation_error
    >>> validation_error({"step": 3}, {"step": integer()})
    ''
    >>> validation_error({"step": float("inf")}, {"step": integer()})
    "field 'step' can't be inf"
    >>> validation_error({}, {"step": integer()})
    "field 'step' is missing"
    """
    if schema is None:
        return "" if finite_json(fields) else "its fields are nested too deep, or a number is not finite or too large"
    for name, check in schema.items():
        if name not in fields:
            if isinstance(check, NotRequired):
                continue
            return f"field {name!r} is missing"
        if not check(fields[name]):
            return f"field {name!r} can't be {fields[name]!r:.60}"
    if len(fields) > len(schema) or not fields.keys() <= schema.keys():
        return f"field {next(name for name in fields if name not in schema)!r:.60} is unknown"
    return ""


def integer(low: int = 0, high: int = MAX_INTEGER) -> Check:
    """A whole number from low to high."""
    return lambda value: type(value) is int and low <= value <= high


def number(low: float = -math.inf, high: float = math.inf, *, finite: bool = True) -> Check:
    """A number from low to high; ``finite=False`` lets NaN and the infinities through as well."""

    def check(value: Json) -> bool:
        if type(value) is int:
            return -MAX_INTEGER <= value <= MAX_INTEGER and low <= value <= high
        if type(value) is not float:
            return False
        return low <= value <= high if math.isfinite(value) else not finite

    return check


def text(max_length: int = MAX_TEXT) -> Check:
    """A string that is not too long, and can be encoded."""
    return lambda value: type(value) is str and len(value) <= max_length and _is_encodable(value)


def address(value: Json) -> bool:
    """The address of a listener: printable ASCII."""
    return type(value) is str and len(value) <= MAX_ADDRESS and value.isascii() and value.isprintable()


def boolean(value: Json) -> bool:
    """True or false."""
    return type(value) is bool


def optional(check: Check) -> Check:
    """None, or what the check allows."""
    return lambda value: value is None or check(value)


def list_of(check: Check, max_length: int = 1 << 20) -> Check:
    """A list of values that all pass the check."""
    return lambda value: type(value) is list and len(value) <= max_length and all(map(check, value))


def tuple_of(*checks: Check) -> Check:
    """A list of fixed length, with a check for each value."""

    def check_all(value: Json) -> bool:
        if type(value) is not list or len(value) != len(checks):
            return False
        return all(check(part) for check, part in zip(checks, value, strict=True))

    return check_all


def json_object(value: Json) -> bool:
    """An object of bounded JSON, with finite numbers."""
    return type(value) is dict and finite_json(value)


def finite_json(value: Json) -> bool:
    """Bounded JSON: not nested too deep, and every number finite and not too large."""
    return _is_bounded(value, finite=True)


def any_json(value: Json) -> bool:
    """Bounded JSON whose numbers may be NaN or infinite: what a user's own settings may hold."""
    return _is_bounded(value, finite=False)


def _is_bounded(value: Json, *, finite: bool) -> bool:
    level: list[Json] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Json] = []
        for each in level:
            kind = type(each)
            if kind is int:
                if not -MAX_INTEGER <= each <= MAX_INTEGER:
                    return False
            elif kind is float:
                if finite and not math.isfinite(each):
                    return False
            elif kind is str:
                if not _is_encodable(each):
                    return False
            elif kind is list:
                deeper += each
            elif kind is dict:
                if not all(_is_encodable(key) for key in each):
                    return False
                deeper += each.values()
        if not deeper:
            return True
        level = deeper
    return False


def _is_encodable(value: str) -> bool:
    """Whether it can be UTF-8: JSON can hold half a surrogate pair, which UTF-8 can not."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
