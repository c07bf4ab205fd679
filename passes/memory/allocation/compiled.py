"""The compiler of inner loops. Importing this module imports numba: do it late, and only where it pays.

Compiled loops are cached on disk, by `ratrain.ratrain_ir.loops`. The cache notices a change of the file a loop stands in, but not of a function it takes from
another file: after editing one of those, delete the `__pycache__` folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba.extending import register_jitable

from ratrain.ratrain_ir.loops import compiled

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """A function over numbers and arrays, compiled when it is first called."""
    return cast("F", compiled(function))


def part(function: F) -> F:
    """A function that kernels call: compiled into them, without an entry from Python of its own. Called from Python it is Python."""
    kept: Any = register_jitable(error_model="numpy", no_cfunc_wrapper=True)(function)
    return cast("F", kept)
