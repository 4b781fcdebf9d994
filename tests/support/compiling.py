"""Compile each Numba function once in a test run: processes that need the same function wait for the first one.

Numba caches compiled functions in files, but does not lock them: in a fresh clone all ranks of a test, and the test
workers beside them, would each compile the same functions at the same time, which takes more than a minute.

``python -m tests.support.compiling`` compiles what most tests need, before they begin: none should spend its own
time limit, or that of the ranks that wait for it, on compiling.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def compile_once() -> None:
    """Make this process, and those forked from it, lock a function while compiling it. Without Numba, do nothing."""
    try:
        from numba.core.ccallback import CFunc
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
    for kind, function in ((Dispatcher, "py_func"), (CFunc, "__wrapped__")):
        kind.compile = _locked(kind.compile, function)


def _locked(compile_now: Callable[..., Any], function: str) -> Callable[..., Any]:
    from numba.core.caching import NullCache
    from numba.core.compiler_lock import global_compiler_lock

    @functools.wraps(compile_now)
    def compile_locked(self: Any, *signature: Any) -> Any:
        if isinstance(self._cache, NullCache):
            return compile_now(self, *signature)
        # Numba's own lock first: it is also held while a function that another one calls is compiled. Taking the locks
        # in the other order could deadlock two threads.
        with global_compiler_lock, _function_lock(Path(self._cache.cache_path), getattr(self, function)):
            return compile_now(self, *signature)  # Numba looks at the cached files first

    return compile_locked


@contextlib.contextmanager
def _function_lock(folder: Path, function: Any) -> Iterator[None]:
    """Hold a function's file lock. The kernel releases it when the process ends, however that happens."""
    with (folder / f"{function.__module__}.{function.__qualname__}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- ahead of the tests -----------------------------------------------------------------------------------------------


def _import(name: str) -> None:
    importlib.import_module(name)


def _compile_sum(dtype: Any) -> None:
    from gradsync.kernels.shm import sums as shm_sums

    for op in ("sum", "max", "min"):
        shm_sums.sum_address(dtype, op)
    if dtype in shm_sums.SOURCE_DTYPES:
        for to_all in (True, False):
            shm_sums.source_sum(dtype, to_all=to_all)


def _compile_reducer(text: str, dtype: Any) -> None:
    """Let two ranks reduce a matrix twice: the second step has a residual."""
    import torch

    from gradsync import spec, synchronize
    from gradsync.testing import run_ranks

    def train(comm: Any) -> None:
        model = torch.nn.Linear(48, 64, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = synchronize(model, optimizer, spec.parse(f"allreduce(reducer={text})", kind="strategy"), comm=comm)
        for _ in range(2):
            model(torch.ones(1, 48, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.close()

    run_ranks(2, train)


def _tasks() -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    import torch

    from gradsync.kernels.shm.sums import _DTYPES
    from tests.contracts.test_codec_contract import ALL_CODECS

    reducers = ["powersgd", *(f"compressed(codec={codec}, min_numel=1)" for codec in ALL_CODECS)]
    reductions = [(_compile_reducer, (text, dtype)) for text in reducers for dtype in (torch.float32, torch.float64)]
    sums = [(_compile_sum, (dtype,)) for dtype in (*_DTYPES, torch.float16, torch.bfloat16)]
    yield _import, ("gradsync.kernels.shm.collectives",)
    # Alternating: functions made by the same factory share a lock, so two of them would not compile in parallel.
    for pair in itertools.zip_longest(reductions, sums):
        yield from filter(None, pair)
    yield _import, ("gradsync.kernels.onebit_adam",)


def compile_ahead() -> None:
    """Compile in as many processes as there are cores; blocks until all have ended."""
    compile_once()
    tasks = list(_tasks())
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for result in [pool.apply_async(function, args) for function, args in tasks]:
            result.get(timeout=600)


if __name__ == "__main__":
    compile_ahead()
