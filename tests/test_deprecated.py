"""Old names still work, with a warning that gives the new name."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

import gradsync.comm
from gradsync.deprecated import MODULES, NAMES


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_old_modules_import_with_a_warning(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    assert str(caught[-1].message).startswith(f"{old} is now {new};"), "the last: its parent packages come first"
    assert caught[-1].category is DeprecationWarning
    there = importlib.import_module(new)
    assert all(getattr(module, name) is getattr(there, name) for name in getattr(there, "__all__", ()))


def test_old_names_give_the_new_object_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gradsync.lab", raising=False)
    for module, names in NAMES.items():
        for name, new in names.items():
            place, _, attribute = new.rpartition(".")
            sys.modules.pop("gradsync.lab", None)
            with pytest.warns(DeprecationWarning, match="is now gradsync.testing"):
                found = getattr(importlib.import_module(module), name)
            assert found is getattr(importlib.import_module(place), attribute)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        gradsync.comm.nothing  # noqa: B018 - looked up, not used
