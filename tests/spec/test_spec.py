"""Specs: which texts are parsed, which are refused and with what error, and that text and object mean the same."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync import spec
from gradsync.spec import Registry, SpecError
from gradsync.spec import parser as spec_reader

registry = Registry()


@registry.register("codec", "int8")
@dataclass(frozen=True, kw_only=True)
class Int8:
    block: int = 256
    signed: bool = True


@registry.register("codec", "topk")
@dataclass(frozen=True, kw_only=True)
class TopK:
    density: float

    def __post_init__(self) -> None:
        if not isinstance(self.density, float) or not 0 < self.density <= 1:
            raise ValueError(f"density must be above 0 and at most 1; got density={self.density}.")


@registry.register("codec", "chain")
class Chain:
    """Takes positional arguments, and is not a dataclass."""

    def __init__(self, *codecs: Any, name: str = "") -> None:
        self.codecs = codecs
        self.name = name

    def spec_arguments(self) -> dict[str, Any]:
        return {"codecs": self.codecs, "name": self.name}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and (self.codecs, self.name) == (other.codecs, other.name)

    __hash__ = None  # type: ignore[assignment]


@registry.register("reducer", "allreduce")
@dataclass(frozen=True)
class PlainReducer:
    op: str = "sum"


@registry.register("strategy", "allreduce")
@dataclass(frozen=True, kw_only=True)
class AllReduce:
    codec: Any = None
    reducer: Any = None
    extra: Any = None
    options: dict[str, Any] = field(default_factory=dict)


@registry.register("strategy", "diloco")
@dataclass(frozen=True)
class DiLoCo:
    every: int
    fragments: int = 1
    codec: Any = None


@registry.register("codec", "half")
def half() -> TopK:
    return TopK(density=0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("allreduce", AllReduce()),
        ("  allreduce ( )  ", AllReduce()),
        ("allreduce(codec=int8)", AllReduce(codec=Int8())),
        ("allreduce(codec=topk(density=0.01))", AllReduce(codec=TopK(density=0.01))),
        (
            "allreduce(codec=chain(topk(density=0.01), int8))",
            AllReduce(codec=Chain(TopK(density=0.01), Int8())),
        ),
        ("diloco(every=50, fragments=4, codec=int8)", DiLoCo(50, 4, Int8())),
        ("diloco(50, 4)", DiLoCo(50, 4)),
        ("allreduce(reducer=allreduce)", AllReduce(reducer=PlainReducer())),
        ("allreduce(codec=half)", AllReduce(codec=TopK(density=0.5))),
        ("allreduce(extra=[1, -2.5, 'x', None, True, (), (inf,), {'a': -inf, 2: [int8]}])",
         AllReduce(extra=[1, -2.5, "x", None, True, (), (math.inf,), {"a": -math.inf, 2: [Int8()]}])),
        ("allreduce(\n  codec=int8,\n)", AllReduce(codec=Int8())),
    ],
)  # fmt: skip
def test_parse_reads(text: str, expected: object) -> None:
    assert registry.parse(text) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (AllReduce(), "allreduce"),
        (AllReduce(codec=Int8(signed=False)), "allreduce(codec=int8(signed=False))"),
        (AllReduce(codec=Chain(TopK(density=0.01), Int8())), "allreduce(codec=chain(topk(density=0.01), int8))"),
        (AllReduce(codec=Chain(Int8(), name="a")), "allreduce(codec=chain(int8, name='a'))"),
        (AllReduce(reducer=PlainReducer("max")), "allreduce(reducer=allreduce(op='max'))"),
        (AllReduce(options={"a": 1}), "allreduce(options={'a': 1})"),
        (AllReduce(extra=(1,)), "allreduce(extra=(1,))"),
        (DiLoCo(50), "diloco(every=50)"),
        (DiLoCo(1, fragments=True), "diloco(every=1, fragments=True)"),  # True is not the default 1
    ],
)
def test_renders_canonical_text(value: object, text: str) -> None:
    assert registry.render(value) == text
    assert registry.parse(text) == value


@pytest.mark.parametrize(
    ("text", "said", "column"),
    [
        ("", "got an empty text", None),
        ("alreduce", "unknown strategy 'alreduce'; expected one of: allreduce, diloco. Did you mean 'allreduce'?", 1),
        ("gossip", "unknown strategy 'gossip'; expected one of: allreduce, diloco.", 1),
        ("int8", "expected a strategy (allreduce, diloco); 'int8' is a codec", 1),
        ("allreduce(codec=int9)", "unknown codec 'int9'; expected one of: chain, half, int8, topk. Did you mean", 17),
        ("allreduce(codec=chain(int9))", "unknown codec 'int9'", 23),
        ("allreduce(extra=mean)", "unknown name 'mean'", 17),
        ("allreduce(extra=mean)", "A text is written in quotes: 'mean'.", 17),
        ("allreduce(extra=[é, x])", "unknown name 'é'", 18),
        ("allreduce(codec=int8(blocks=1))", "int8 takes (block=256, signed=True)", 17),
        ("allreduce(codec=int8(blocks=1))", "'blocks'. Did you mean 'block'?", 17),
        ("diloco", "diloco takes (every, fragments=1, codec=None); missing a required argument: 'every'", 1),
        ("diloco(1, 2, 3, 4)", "too many positional arguments", 1),
        ("diloco(1, every=2)", "multiple values for argument 'every'", 1),
        ("diloco(every=1, every=2)", "got 'every' twice", 17),
        ("allreduce(codec=topk(density=2.0))", "topk: density must be above 0 and at most 1; got density=2.0.", 17),
        ("allreduce(codec", "'(' was never closed", 10),
        ("allreduce)", "unmatched ')'", 10),
        ("allreduce(\ncodec=)", "line 2, column 7", None),
        ("allreduce(**options)", "got **", 11),
        ("allreduce(*[1])", "got Starred", 11),
        ("allreduce(extra=-'a')", "expected a number", 17),
        ("allreduce(extra=-True)", "expected a number", 17),
        ("allreduce(extra=b'a')", "got \"b'a'\"", 17),
        ("allreduce(extra=1+1)", "got BinOp", 17),
        ("allreduce(extra={int8: 1})", "expected a text in quotes or a whole number as the key", 18),
        ("allreduce(extra={**{}})", "as the key", 17),
        ("allreduce(extra=[x for x in ()])", "got ListComp", 17),
        ("os.system('true')", "got 'os.system'", 1),
        ("__import__('os')", "unknown strategy '__import__'", 1),
        ("allreduce()()", "got Call", 1),
        ("'allreduce'", "expected a strategy by its name", 1),
        ("(lambda: 0)()", "got Lambda", 2),
        ("a" * 5000, "at most 4096 characters; got 5000", None),
        ("\x00", "null bytes", None),
    ],
)  # fmt: skip
def test_parse_refuses_and_says_why_and_where(text: str, said: str, column: int | None) -> None:
    with pytest.raises(SpecError) as caught:
        registry.parse(text)
    assert said in str(caught.value)
    if column is not None:
        assert f"^ column {column}" in str(caught.value)
        pointer = str(caught.value).splitlines()[-1]
        assert pointer.index("^") == column + 1  # under the text, which is indented by two


@pytest.mark.parametrize(
    "text",
    [
        "-" * 4000 + "1",
        "(" * 4000,
        "[" * 190 + "]" * 190,
        "allreduce(extra=" + "-" * 2000 + "1)",
        "a" + ".b" * 2000,
    ],
)
def test_parse_refuses_hostile_nesting(text: str) -> None:
    with pytest.raises(SpecError):
        registry.parse(text)


def test_parse_resolves_a_name_of_two_kinds_by_its_place() -> None:
    assert registry.parse("allreduce(reducer=allreduce, extra=allreduce)") == AllReduce(
        reducer=PlainReducer(), extra=AllReduce()
    )
    with pytest.raises(SpecError, match="expected a name of one kind only; 'allreduce' is a reducer and a strategy"):
        registry.parse("chain(allreduce)", kind="codec")


def test_render_refuses_what_could_not_be_read_back() -> None:
    for value, said in [
        (object(), "no name is registered for builtins.object"),
        (AllReduce(extra=math.nan), "nan has no text"),
        (AllReduce(extra={0.5: 1}), "the keys of a dict"),
        (AllReduce(extra={1, 2}), "no name is registered for builtins.set"),
        (Chain(AllReduce()), "would not be read back as a"),
    ]:
        with pytest.raises(SpecError, match=said):
            registry.render(value)


def test_render_asks_for_the_arguments_of_a_plain_class() -> None:
    own = Registry()

    @own.register("codec", "opaque")
    class Opaque:
        def __init__(self, level: int = 1) -> None:
            pass

    @own.register("codec", "empty")
    class Empty:
        pass

    @own.register("codec", "terse")
    class Terse(Opaque):
        def spec_arguments(self) -> dict[str, int]:
            return {}  # what is not named is at its default

    with pytest.raises(SpecError, match=r"must be a dataclass or have spec_arguments\(\)"):
        own.render(Opaque())
    assert own.render(Terse()) == "terse"
    assert own.render(Empty()) == "empty"


def test_resolve_takes_text_or_the_object() -> None:
    value = AllReduce(codec=Int8())
    assert registry.resolve(value) is value
    assert registry.resolve("allreduce(codec=int8)") == value
    for wrong in (None, 3, Int8(), half):
        with pytest.raises(SpecError, match="expected a strategy, or its text"):
            registry.resolve(wrong)
    with pytest.raises(SpecError, match=r"Write AllReduce\(\), with brackets"):
        registry.resolve(AllReduce)


def test_resolve_lets_an_unregistered_object_of_the_declared_base_through() -> None:
    own = Registry()
    own.declare("codec", TopK)
    value = TopK(density=0.1)
    assert own.resolve(value, kind="codec") is value
    with pytest.raises(SpecError):
        own.resolve(Int8(), kind="codec")


def test_register_takes_a_name_once() -> None:
    own = Registry()
    own.register("codec", "int8")(Int8)
    own.register("codec", "int8")(Int8)  # a module that is loaded again
    with pytest.raises(ValueError, match="already"):
        own.register("codec", "int8")(TopK)
    for name in ("local-sgd", "lambda", "inf", "None", ""):
        with pytest.raises(ValueError, match="must be a Python name"):
            own.register("codec", name)


def test_spec_error_is_a_value_error() -> None:
    assert issubclass(SpecError, ValueError)
    with pytest.raises(SpecError, match="unknown nothing 'x'; expected one of:"):
        spec.parse("x", kind="nothing")
    assert spec.names("nothing") == ()


constants = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False)
    | st.text(max_size=10)
)  # fmt: skip
codecs: st.SearchStrategy[Any] = st.recursive(
    st.builds(Int8, block=st.integers(), signed=st.booleans())
    | st.builds(TopK, density=st.floats(min_value=1e-9, max_value=1.0)),
    lambda inner: st.builds(lambda parts, name: Chain(*parts, name=name), st.lists(inner, max_size=3), st.text()),
    max_leaves=6,
)
values = st.recursive(
    constants | codecs,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
strategies = st.builds(
    AllReduce,
    codec=st.none() | codecs,
    reducer=st.none() | st.builds(PlainReducer, st.text(max_size=5)),
    extra=values,
    options=st.dictionaries(st.text(max_size=5), constants, max_size=3),
) | st.builds(DiLoCo, st.integers(), st.integers(), st.none() | codecs)


@given(strategies)
@settings(deadline=None)
def test_render_and_parse_are_inverse(value: Any) -> None:
    text = registry.render(value)
    if len(text) > spec_reader.MAX_TEXT_CHARS:
        return
    back = registry.parse(text)
    assert back == value
    assert registry.render(back) == text


words = (
    """allreduce int8 topk chain diloco codec lambda inf None f é j 1 0.5 1e999 0x = ( ) , [ ] { } : - . * ** := ' " """
)
alphabet = st.sampled_from([*words.split(), " ", "\n", "\\", "\ud800"])


@given(st.text() | st.lists(alphabet, max_size=25).map("".join) | st.lists(alphabet, max_size=25).map(" ".join))
@settings(deadline=None, max_examples=500)
def test_parse_gives_an_object_or_a_spec_error_for_any_text(text: str) -> None:
    with contextlib.suppress(SpecError):
        registry.parse(text)
