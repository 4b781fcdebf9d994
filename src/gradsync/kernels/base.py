"""The imports of Numba and llvmlite that all kernels share, a memory fence, and calls that skip Numba's dispatcher.

Numba takes a second to import: import this file, and every kernel, within the function that needs it.
"""

from __future__ import annotations

import importlib
from typing import Any

# Numba gives the compiled Python another meaning, so a type checker has nothing to check here.
numba: Any = importlib.import_module("numba")
types: Any = numba.types
ir: Any = importlib.import_module("llvmlite.ir")
cgutils: Any = importlib.import_module("numba.core.cgutils")
intrinsic: Any = importlib.import_module("numba.extending").intrinsic

VECTOR_BYTES = 32


@intrinsic
def fence(typing_context: Any) -> Any:
    """Order all later stores after the streaming (non-temporal) ones."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def without_dispatch(kernel: Any) -> Any:
    """The entry point of a compiled function with one signature. Skipping the dispatcher saves a microsecond."""
    (signature,) = kernel.signatures
    return kernel.overloads[signature].entry_point
