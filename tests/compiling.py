"""What Numba compiles is compiled once in a test run: processes that need the same function wait for the first one's.

Numba keeps compiled functions in files, but does not lock them: in a fresh clone all ranks of a test, and the test
workers beside them, would each compile the same functions at the same time, which takes more than a minute.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def compile_once() -> None:
    """From now on, let this process and those forked from it take turns with others; without Numba, do nothing."""
    try:
        from numba.core.ccallback import CFunc
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
    for kind, function in ((Dispatcher, "py_func"), (CFunc, "__wrapped__")):
        kind.compile = _in_turn(kind.compile, function)


def _in_turn(compile_now: Callable[..., Any], function: str) -> Callable[..., Any]:
    from numba.core.caching import NullCache
    from numba.core.compiler_lock import global_compiler_lock

    @functools.wraps(compile_now)
    def compile_in_turn(self: Any, *signature: Any) -> Any:
        if isinstance(self._cache, NullCache):
            return compile_now(self, *signature)
        # Numba's own lock first: it is held where a function that another one calls is compiled, too, and two threads
        # must not each have what the other waits for.
        with global_compiler_lock, _turn(Path(self._cache.cache_path), getattr(self, function)):
            return compile_now(self, *signature)  # it looks at the files first

    return compile_in_turn


@contextlib.contextmanager
def _turn(folder: Path, function: Any) -> Iterator[None]:
    """Hold the function's own lock. It is let go with the process, however that ends."""
    with (folder / f"{function.__module__}.{function.__qualname__}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
