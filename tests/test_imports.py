"""Imports point one way: a package imports only packages below it. The order is that of docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradsync

ROOT = Path(gradsync.__file__).parent
# From the bottom up. Packages on one line do not import each other.
LAYERS = (
    ("errors", "spec", "kernels", "deprecated"),
    ("comm",),
    ("buckets",),
    ("replicas", "codecs", "messaging"),
    ("profiling",),
    ("elastic",),
    ("reducers",),
    ("strategies",),
    ("engine",),
    ("synchronize", "data"),
    ("", "testing"),  # "": the public names of gradsync/__init__.py
    ("advisor", "integrations"),
    ("doctor", "compare"),
    ("cli",),
)
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}
# `auto` is a strategy that asks the advisor, which predicts strategies. It imports it when it is first used.
EXCEPTIONS = {("strategies/auto.py", "advisor")}


def imports_of(source: str) -> Iterator[str]:
    """The gradsync packages that a module imports, also within functions, but for those that only annotate."""
    tree = ast.parse(source)
    annotating = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in annotating:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "gradsync":
            names = [f"gradsync.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "gradsync":
                package = rest.partition(".")[0]
                yield package if (ROOT / package).is_dir() or (ROOT / f"{package}.py").exists() else ""


def package_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def wrong_imports(path: Path, source: str) -> list[str]:
    """Imports of this module that point upwards or sideways."""
    name, package = path.relative_to(ROOT).as_posix(), package_of(path)
    return [
        f"{name} imports {other or 'gradsync'}"
        for other in imports_of(source)
        if other != package and LEVEL[other] >= LEVEL[package] and (name, other) not in EXCEPTIONS
    ]


def test_imports_point_downwards() -> None:
    assert [wrong for path in sorted(ROOT.rglob("*.py")) for wrong in wrong_imports(path, path.read_text())] == []


@pytest.mark.parametrize(
    ("module", "line", "found"),
    [
        ("codecs/sign.py", "from gradsync.reducers.base import Reducer", ["codecs/sign.py imports reducers"]),
        ("comm/base.py", "def f():\n    import gradsync.engine.engine", ["comm/base.py imports engine"]),
        ("engine/hooks.py", "from gradsync import spec", []),
        ("codecs/sign.py", "from gradsync import SyncBatchNorm", ["codecs/sign.py imports gradsync"]),
    ],
)
def test_imports_that_point_upwards_are_found(module: str, line: str, found: list[str]) -> None:
    assert wrong_imports(ROOT / module, line) == found


def test_tree_has_few_modules_at_its_root_and_no_crowded_folder() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 6
    folders = [path for path in ROOT.rglob("*") if path.is_dir() and path.name != "__pycache__"]
    sizes = {folder.relative_to(ROOT).as_posix(): sum(p.is_file() for p in folder.iterdir()) for folder in folders}
    assert {name: size for name, size in sizes.items() if size > 15} == {}
