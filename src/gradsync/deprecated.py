"""Names of earlier versions. They keep working in this one, with a DeprecationWarning that gives the new name."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# Modules that users may have imported, and where their contents are now.
MODULES = {
    "gradsync.lab": "gradsync.testing",
    "gradsync.compat": "gradsync.integrations",
    "gradsync.compat.ddp": "gradsync.integrations.ddp",
    "gradsync.profiling.adapters": "gradsync.integrations",
    "gradsync.profiling.adapters.mlflow": "gradsync.integrations.mlflow",
    "gradsync.profiling.adapters.prometheus": "gradsync.integrations.prometheus",
    "gradsync.profiling.adapters.tensorboard": "gradsync.integrations.tensorboard",
    "gradsync.comm.faulty": "gradsync.testing.faults",
    "gradsync.comm.threads": "gradsync.testing.threads",
    "gradsync.gossip": "gradsync.strategies.gossip",
}
# Single names: module -> name -> where it is now.
NAMES = {
    "gradsync.comm": {"run_ranks": "gradsync.testing.run_ranks"},
    "gradsync.lab": {
        "run_together": "gradsync.testing.run_commands",
        "why_unavailable": "gradsync.testing.lab_unavailable_reason",
        "INTERFACE": "gradsync.testing.network.INTERFACE",
        "MASTER_PORT": "gradsync.testing.network.MASTER_PORT",
    },
}


def renamed(module: str, name: str) -> Any:
    """What ``module.name`` is called now, with a warning; for the ``__getattr__`` of a module.

    >>> import warnings
    >>> from gradsync.deprecated import renamed
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = renamed("gradsync.comm", "run_ranks")
    >>> print(caught[0].message)
    gradsync.comm.run_ranks is now gradsync.testing.run_ranks; the next version removes the old name.
    """
    new = NAMES.get(module, {}).get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", new, stacklevel=4)
    return _look_up(new)


def _look_up(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class _RenamedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its old name, and loads the one that replaces it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = MODULES[spec.name]
        _warn(spec.name, new, stacklevel=6)
        module = ModuleType(spec.name, f"The old name of {new}.")
        module.__dict__.update({k: v for k, v in vars(importlib.import_module(new)).items() if not k.startswith("__")})
        module.__dict__.update({name: _look_up(path) for name, path in NAMES.get(spec.name, {}).items()})
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module has its contents already."""


def _warn(old: str, new: str, *, stacklevel: int) -> None:
    text = f"{old} is now {new}; the next version removes the old name."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def keep_old_names() -> None:
    """Let imports of renamed modules work from now on."""
    if not any(isinstance(finder, _RenamedModules) for finder in sys.meta_path):
        sys.meta_path.append(_RenamedModules())
