"""What all compiled code begins with: Numba and LLVM's language, vectors, a fence, and calls without a dispatch.

Numba takes a second to import: whoever needs this file imports it late.
"""

from __future__ import annotations

import importlib
from typing import Any

# What Numba compiles means other things than the Python it is written in: there is nothing here for a type checker.
numba: Any = importlib.import_module("numba")
types: Any = numba.types
ir: Any = importlib.import_module("llvmlite.ir")
cgutils: Any = importlib.import_module("numba.core.cgutils")
intrinsic: Any = importlib.import_module("numba.extending").intrinsic

VECTOR_BYTES = 32


@intrinsic
def fence(typing_context: Any) -> Any:
    """Let no later store be seen before the streamed ones."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def quick(kernel: Any) -> Any:
    """A compiled function without Numba's choice among its signatures: it has but one. Saves a microsecond or more."""
    (signature,) = kernel.signatures
    return kernel.overloads[signature].entry_point
