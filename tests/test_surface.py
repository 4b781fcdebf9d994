"""The public surface: what is exported, that it is documented, and that every example in the docstrings runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import logging
import pkgutil
from pathlib import Path

import pytest

import gradsync

MODULES = sorted(module.name for module in pkgutil.walk_packages(gradsync.__path__, "gradsync."))


def test_all_is_sorted_and_is_exactly_what_is_imported() -> None:
    tree = ast.parse(Path(gradsync.__file__).read_text())
    imported = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == gradsync.__all__ == sorted(gradsync.__all__)


@pytest.mark.parametrize("name", gradsync.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    documentation = inspect.getdoc(getattr(gradsync, name)) or ""
    assert ">>>" in documentation, f"gradsync.{name} needs a docstring with an example"


@pytest.mark.parametrize("name", gradsync.__all__)
def test_every_public_method_is_documented(name: str) -> None:
    public = getattr(gradsync, name)
    if not inspect.isclass(public) or issubclass(public, BaseException):
        return
    for attribute, value in vars(public).items():
        if not attribute.startswith("_") and inspect.isfunction(value):
            assert inspect.getdoc(getattr(public, attribute)), f"gradsync.{name}.{attribute} needs a docstring"


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    if module.endswith("__main__"):
        return
    failures, _ = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert failures == 0


def test_import_adds_no_log_handlers() -> None:
    assert not logging.getLogger("gradsync").handlers, "a library leaves the log's handlers to the program"
