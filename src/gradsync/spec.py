"""Text like ``diloco(every=50, codec=int8)`` to objects and back: the same words in Python, ``--sync`` and reports.

The text is a call, as Python would write it, and nothing else: it is parsed into a tree and the tree is walked. No part
of it is ever evaluated, so a spec may come from a stranger's configuration file.

A nested name is looked up by where it stands: ``codec=int8`` asks for a codec, because the argument is called so; an
element of ``chain(...)`` asks for what ``chain`` itself is; anywhere else the name must be known in one kind only.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import keyword
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

MAX_TEXT_CHARS = 4096  # no honest spec is longer, and Python's parser recurses
RESERVED = ("inf", "nan")  # `inf` is a number here; nan is not equal to itself, so it could not be read back

Factory = TypeVar("Factory", bound=Callable[..., Any])


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
class _Entry:
    """One registered name: what makes the object, and the kind of thing it is."""

    kind: str
    name: str
    factory: Callable[..., Any]


class Registry:
    """The names that a spec may use, by kind; ``gradsync.spec`` has one for the whole library.

    >>> from dataclasses import dataclass
    >>> from gradsync.spec import Registry
    >>> registry = Registry()
    >>> @registry.register("codec", "topk")
    ... @dataclass(frozen=True, kw_only=True)
    ... class TopK:
    ...     density: float = 0.01
    >>> registry.parse("topk(density=0.5)", kind="codec")
    TopK(density=0.5)
    >>> registry.render(TopK(density=0.5)), registry.render(TopK())
    ('topk(density=0.5)', 'topk')
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._bases: dict[str, type] = {}

    def declare(self, kind: str, base: type) -> None:
        """Say what every object of a kind is an instance of, so that ``resolve`` lets unregistered ones through.

        >>> from gradsync.spec import Registry
        >>> registry = Registry()
        >>> registry.declare("codec", dict)
        >>> registry.resolve({"a": 1}, kind="codec")
        {'a': 1}
        """
        self._bases[kind] = base

    def register(self, kind: str, name: str) -> Callable[[Factory], Factory]:
        """Give a class, or a function that makes an object, a name in specs; for use as a decorator.

        ``render`` needs a class: a dataclass, or one with ``spec_arguments() -> dict`` that gives back its arguments.
        A function is a short name for an object of some registered class, and is rendered as that.

        >>> from gradsync.spec import Registry
        >>> registry = Registry()
        >>> @registry.register("number", "half")
        ... def half() -> float:
        ...     return 0.5
        >>> registry.parse("half", kind="number"), registry.names("number")
        (0.5, ('half',))
        """
        if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED:
            raise ValueError(f"a spec name must be a Python name that is not taken; got {name!r}. Try 'local_sgd'.")

        def remember(factory: Factory) -> Factory:
            before = self._entries.get((kind, name))
            if before is not None and _full_name(before.factory) != _full_name(factory):
                raise ValueError(
                    f"{kind} {name!r} is already {_full_name(before.factory)}; got {_full_name(factory)}. "
                    "Choose another name."
                )
            self._entries[kind, name] = _Entry(kind, name, factory)
            return factory

        return remember

    def names(self, kind: str) -> tuple[str, ...]:
        """The known names of a kind, sorted.

        >>> from gradsync.spec import Registry
        >>> Registry().names("codec")
        ()
        """
        return tuple(sorted(entry.name for entry in self._entries.values() if entry.kind == kind))

    def parse(self, text: str, kind: str = "strategy") -> Any:
        """Read a spec into the object that it describes; raise ``SpecError`` for anything else.

        >>> from gradsync.spec import Registry
        >>> registry = Registry()
        >>> _ = registry.register("pair", "complex")(complex)
        >>> registry.parse("complex(1, imag=-2.5)", kind="pair")
        (1-2.5j)
        """
        return _Reader(self, text).read(kind)

    def render(self, value: object) -> str:
        """Write the text that ``parse`` reads back to an equal object; arguments at their default are left out.

        >>> from dataclasses import dataclass
        >>> from gradsync.spec import Registry
        >>> registry = Registry()
        >>> @registry.register("strategy", "diloco")
        ... @dataclass(frozen=True)
        ... class DiLoCo:
        ...     every: int = 500
        ...     momentum: float = 0.9
        >>> registry.render(DiLoCo(every=50))
        'diloco(every=50)'
        """
        return self._write(value, hint="", inside="")

    def resolve(self, value: object, kind: str = "strategy") -> Any:
        """Take text or an object: text is parsed, an object of the kind is handed back as it is.

        >>> from gradsync.spec import Registry
        >>> registry = Registry()
        >>> _ = registry.register("pair", "complex")(complex)
        >>> registry.resolve("complex(1)", kind="pair"), registry.resolve(2j, kind="pair")
        ((1+0j), 2j)
        """
        if isinstance(value, str):
            return self.parse(value, kind)
        known = [entry.factory for entry in self._entries.values() if entry.kind == kind]
        classes = tuple(factory for factory in known if inspect.isclass(factory))
        if isinstance(value, (*classes, self._bases.get(kind, classes))):
            return value
        hint = f" Write {value.__name__}(), with brackets." if inspect.isclass(value) else ""
        raise SpecError(
            f"expected a {kind}, or its text (one of: {_listed(self.names(kind))}); "
            f"got {value!r} of type {type(value).__name__}.{hint}"
        )

    # -- writing -------------------------------------------------------------------------------------------------

    def _write(self, value: object, *, hint: str, inside: str) -> str:
        match value:
            case float() if math.isnan(value):
                raise SpecError("nan has no text in a spec: it would not be equal to itself when read back.")
            case None | bool() | int() | float() | str():
                return repr(value)
            case list():
                return f"[{', '.join(self._write(part, hint=hint, inside=inside) for part in value)}]"
            case tuple():
                comma = "," if len(value) == 1 else ""
                return f"({', '.join(self._write(part, hint=hint, inside=inside) for part in value)}{comma})"
            case dict():
                if not all(isinstance(key, str | int) for key in value):
                    raise SpecError(f"the keys of a dict in a spec are texts or whole numbers; got {value!r}.")
                pairs = (f"{key!r}: {self._write(part, hint='', inside='')}" for key, part in value.items())
                return f"{{{', '.join(pairs)}}}"
        return self._write_object(value, hint=hint, inside=inside)

    def _write_object(self, value: object, *, hint: str, inside: str) -> str:
        entries = [entry for entry in self._entries.values() if entry.factory is type(value)]
        if not entries:
            raise SpecError(
                f"no name is registered for {_full_name(type(value))}; got {value!r}. "
                'Register its class: @spec.register("codec", "its_name").'
            )
        # A class may be known in two kinds, and a name in two; the text must lead back to it from where it stands.
        entry = next((entry for entry in entries if entry.kind in (hint, inside)), entries[0])
        if hint + inside and self._candidates(entry.name, hint, inside) != [entry]:
            raise SpecError(f"{entry.name!r} would not be read back as a {entry.kind} here; got {value!r} in {hint!r}.")
        shown = [
            (f"{name}=" if by_name else "") + self._write(part, hint=name, inside=entry.kind)
            for name, part, by_name in _without_defaults(value)
        ]
        return f"{entry.name}({', '.join(shown)})" if shown else entry.name

    # -- looking up ----------------------------------------------------------------------------------------------

    def _candidates(self, name: str, hint: str, inside: str) -> list[_Entry]:
        """What a nested name may stand for, the meaning that its place asks for alone if there is one."""
        for kind in (hint, inside):
            if (kind, name) in self._entries:
                return [self._entries[kind, name]]
        return [entry for entry in self._entries.values() if entry.name == name]


class _Reader:
    """One text on its way to an object; it knows where in the text each error is."""

    def __init__(self, registry: Registry, text: str) -> None:
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python has opinions about some literals; ours come below
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

    def _make(self, node: ast.expr, entry: _Entry, positional: list[Any], by_name: dict[str, Any]) -> Any:
        signature = inspect.signature(entry.factory)
        try:
            signature.bind(*positional, **by_name)
        except TypeError as error:
            near = "".join(_hint(name, signature.parameters) for name in by_name if name not in signature.parameters)
            message = f"{entry.name} takes ({_accepted(signature)}); {error}.{near}"
            raise self._error_at(node, message) from error
        try:
            return entry.factory(*positional, **by_name)
        except Exception as error:  # whatever it dislikes, it is the text's doing
            raise self._error_at(node, f"{entry.name}: {error}") from error

    def _find(self, node: ast.Name, kind: str, hint: str, inside: str) -> _Entry:
        registry, name = self._registry, node.id
        candidates = registry._candidates(name, hint, inside)
        if len(candidates) == 1 and kind in ("", candidates[0].kind):
            return candidates[0]
        if candidates:
            is_a = f"{name!r} is a {' and a '.join(entry.kind for entry in candidates)}"
            expected = f"a {kind} ({_listed(registry.names(kind))})" if kind else "a name of one kind only"
            raise self._error_at(node, f"expected {expected}; {is_a}")
        asked = hint or inside
        known = registry.names(asked) or sorted({entry.name for entry in registry._entries.values()})
        what = asked if registry.names(asked) or kind else "name"
        fix = _hint(name, known) or ("" if kind else f" A text is written in quotes: {name!r}.")
        raise self._error_at(node, f"unknown {what} {name!r}; expected one of: {_listed(known)}.{fix}")

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


def _arguments_of(value: object) -> dict[str, Any]:
    given = getattr(value, "spec_arguments", None)
    if given is not None:
        return dict(given())
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if not inspect.signature(type(value)).parameters:
        return {}
    raise SpecError(
        f"{_full_name(type(value))} must be a dataclass or have spec_arguments() -> dict to be written as a spec; "
        "it has neither."
    )


def _without_defaults(value: object) -> Iterator[tuple[str, Any, bool]]:
    """The arguments that must be written, in the order of the signature: (name, value, whether by name)."""
    arguments = _arguments_of(value)
    parameters = inspect.signature(type(value)).parameters
    # What stands before a filled *args can only be given by place.
    before_star = any(p.kind is p.VAR_POSITIONAL and arguments.get(p.name) for p in parameters.values())
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD or parameter.name not in arguments:
            continue
        argument = arguments[parameter.name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from ((parameter.name, part, False) for part in argument)
            before_star = False
        elif before_star or parameter.kind is parameter.POSITIONAL_ONLY:
            yield parameter.name, argument, False
        elif not _same(argument, _default_of(value, parameter)):
            yield parameter.name, argument, True
    yield from ((name, argument, True) for name, argument in arguments.items() if name not in parameters)


def _default_of(value: object, parameter: inspect.Parameter) -> object:
    """What the argument is when it is left out; a dataclass may make it anew each time."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name == parameter.name and field.default_factory is not dataclasses.MISSING:
                return field.default_factory()
    return parameter.default


def _same(one: object, other: object) -> bool:
    """Equal and of the same type: True is not 1, nor 0.0 -0.0."""
    return type(one) is type(other) and one == other and (not isinstance(one, float) or repr(one) == repr(other))


def _accepted(signature: inspect.Signature) -> str:
    """The parameters as a person would type them, without annotations."""
    return ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in signature.parameters.values())


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none is registered"


def _describe(node: ast.expr) -> str:
    return f"{ast.unparse(node)[:40]!r}" if isinstance(node, ast.Constant | ast.Attribute) else type(node).__name__


def _full_name(factory: object) -> str:
    return f"{getattr(factory, '__module__', '?')}.{getattr(factory, '__qualname__', factory)}"


_library = Registry()
declare = _library.declare
names = _library.names
parse = _library.parse
register = _library.register
render = _library.render
resolve = _library.resolve
