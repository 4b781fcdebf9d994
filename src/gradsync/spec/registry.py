"""Text like ``diloco(every=50, codec=int8)`` to objects and back: the same words in Python, ``--sync`` and reports.

The text is a call, as Python would write it, and nothing else: it is parsed into a tree and the tree is walked (see
spec/parser.py). No part of it is ever evaluated, so a spec may come from an untrusted configuration file.

A nested name is looked up by its place: ``codec=int8`` asks for a codec, because the argument is called so; an
element of ``chain(...)`` asks for what ``chain`` itself is; anywhere else the name must be known in one kind only.
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gradsync.spec.parser import Entry, SpecError, SpecReader, listed

__all__ = ["Registry", "SpecError", "declare", "names", "parse", "register", "render", "resolve"]

RESERVED = ("inf", "nan")  # `inf` is a number here; nan is not equal to itself, so it could not be read back

Factory = TypeVar("Factory", bound=Callable[..., Any])


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
        self._entries: dict[tuple[str, str], Entry] = {}
        self._bases: dict[str, type] = {}

    def declare(self, kind: str, base: type) -> None:
        """Set the base class of a kind, so that ``resolve`` accepts unregistered objects of it.

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
            self._entries[kind, name] = Entry(kind, name, factory)
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
        return SpecReader(self, text).read(kind)

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
            f"expected a {kind}, or its text (one of: {listed(self.names(kind))}); "
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
        if hint + inside and self.candidates(entry.name, hint, inside) != [entry]:
            raise SpecError(f"{entry.name!r} would not be read back as a {entry.kind} here; got {value!r} in {hint!r}.")
        shown = [
            (f"{name}=" if by_name else "") + self._write(part, hint=name, inside=entry.kind)
            for name, part, by_name in _without_defaults(value)
        ]
        return f"{entry.name}({', '.join(shown)})" if shown else entry.name

    # -- looking up ----------------------------------------------------------------------------------------------

    def candidates(self, name: str, hint: str, inside: str) -> list[Entry]:
        """The entries that a nested name may stand for; only the one that its place asks for, if there is one."""
        for kind in (hint, inside):
            if (kind, name) in self._entries:
                return [self._entries[kind, name]]
        return [entry for entry in self._entries.values() if entry.name == name]

    def all_names(self) -> list[str]:
        """Every name of every kind."""
        return sorted({entry.name for entry in self._entries.values()})


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
    # Arguments before a filled *args can only be passed by position.
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


def _full_name(factory: object) -> str:
    return f"{getattr(factory, '__module__', '?')}.{getattr(factory, '__qualname__', factory)}"


_library = Registry()
declare = _library.declare
names = _library.names
parse = _library.parse
register = _library.register
render = _library.render
resolve = _library.resolve
